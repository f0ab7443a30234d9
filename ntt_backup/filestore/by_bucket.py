"""A bucket keeps the files of an area, each as an object; see `contract.FileStore`.

A file is cut into equal parts, sent by threads, and compared by its checksum. It becomes an object,
under its name, only by the last request for it: until then it can be discarded, and the bucket
shows its parts to nobody. All that is sent goes through a few buffers of one part each, so memory
is bounded by their number: who adds to a file waits until one is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import md5, sha256
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ntt_backup.blobdir.layout import MAX_MARKER, read_marker
from ntt_backup.client.throttle import SharedPace
from ntt_backup.errors import (
    BackupError,
    NameTaken,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteUnreachable,
)
from ntt_backup.filestore.contract import (
    UNKNOWN_ARRIVAL,
    Area,
    Buffer,
    FileArchived,
    FileMissing,
    Hash,
    Progress,
    Range,
    SharedStore,
    StoredFile,
    Sum,
    ask_ahead,
)
from ntt_backup.objects.bucket import (
    DEAD_SECONDS,
    MD5,
    Bucket,
    ObjectArchived,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    Part,
    UploadGone,
    agree,
    checksum,
    composite,
    composite_etag,
    proof_of,
    sweep,
)
from ntt_backup.process.memory import new_buffer
from ntt_backup.wire.framing import FORMAT
from ntt_backup.wire.stored_names import PACKS

if TYPE_CHECKING:
    from mmap import mmap

_READERS: Final = 8
# Beside the parts, the ends of files: each waits for its own parts, which were begun before it.
_SENDERS: Final = 4
_BUFFERS: Final = 2
_WAIT_SECONDS: Final = 0.2
_DISCARD_SECONDS: Final = 2.0
_MEGA: Final = 1024**2
_MOST_PARTS: Final = 10_000
# Two parts of a file are in memory; one of this size is on a slow link for a second.
_LARGEST_PART: Final = 16 * _MEGA
_READ_BACK: Final = 4 * _MEGA

T = TypeVar("T")


class _KeyTaken(Exception):
    """Another content lies under the key. older: it was there before."""

    def __init__(self, key: str, *, older: bool) -> None:
        super().__init__(key)
        self.older = older


class _Dropped(Exception):
    """The file is not wanted any more."""


class _Sums(NamedTuple):
    """The sums of an object that was sent, as a server writes them. etag: of MD5 sums, "" where
    these were not made.
    """

    sha256: str
    etag: str

    def proved_by(self, info: ObjectInfo) -> str:
        """Returns what the ledger records of an object that is proved to be this one; "" where the
        server's words do not prove it.
        """
        if self.contradicted_by(info):
            return ""
        if agree(info.checksum, self.sha256):
            return self.sha256
        return MD5 + self.etag if agree(info.etag, self.etag) else ""

    def contradicted_by(self, info: ObjectInfo) -> bool:
        """Returns whether the server's words are of another content. An ETag that proves nothing
        may be no sum of the content, so it does not contradict a SHA-256.
        """
        sums = agree(info.checksum, self.sha256)
        return sums is False or (sums is None and agree(info.etag, self.etag) is False)


class FileStoreByBucket:
    """See the module. Files are written by one thread.

    Args:
        bucket: The bucket.
        part_size: The size in bytes of the parts in which files are sent; huge files have larger
            ones.
        area: The area. Names in `packs` are keys of the bucket, others lie below the area's name.
        pace: Counts the bytes that the bucket is sent.

    Attributes:
        answers: The number of requests that were answered.
        trouble: The first error that no single file is to blame for.
    """

    hashes = False

    def __init__(
        self, bucket: Bucket, part_size: int, area: Area, pace: SharedPace | None = None
    ) -> None:
        self.bucket = bucket
        self.area = area
        packs = area.name == PACKS
        self._part_size = part_size if packs else min(part_size, _LARGEST_PART)
        self._pace = pace or SharedPace(None)
        self._below = "" if packs else f"{area.name}/"
        self._readers = ThreadPoolExecutor(_READERS, "read")
        self._senders = ThreadPoolExecutor(_SENDERS, "upload")
        self._swept = False
        self.on_wait: Callable[[], None] = lambda: None
        self.begun: list[FileByBucket] = []
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._lock = Lock()
        # The bytes of content that were added, that the requests carry, and that are in buffers.
        self.added = self.handed_over = self.held = 0
        self._waiting = self.answers = 0
        # How many requests had been answered at the last look, and the bytes sent when that rose.
        self._answered_then = self._sent_then = 0
        self.trouble: Exception | None = None

    @cached_property
    def _free(self) -> list[mmap]:
        return [new_buffer(self._part_size) for _ in range(_BUFFERS)]

    @property
    def placed(self) -> bool:
        return self.bucket.head(FORMAT) is not None

    @property
    def identity(self) -> str:
        """The identity in the marker of the packs; "" where there is none that can be read."""
        with suppress(ObjectMissing, ObjectArchived, ValueError):
            return read_marker(self.bucket.get_range(FORMAT, 0, MAX_MARKER)).identity
        return ""

    def list(self, below: str = "") -> Iterator[StoredFile]:
        for count, info in enumerate(self.bucket.list(self._below + below), 1):
            if count > self.area.most:
                raise ProtocolViolation(
                    f"the bucket lists more {self.area.files} than are allowed",
                    detail=f"{self.area.most:,} below {self._below}{below}",
                    hint="another program has written there: check the bucket",
                )
            name = info.key.removeprefix(self._below)
            if below and not below.endswith("/") and name != below:
                continue
            with suppress(ValueError):
                yield _stored(self.area.require_name(name), info)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return ask_ahead(ranges, _READERS, self._ask, Future.result)

    def stat(self, name: str) -> StoredFile | None:
        info = self.bucket.head(self._key(name))
        return None if info is None else _stored(name, info)

    def fetch(self, name: str, start: int, length: int) -> bytes:
        key = self._key(name)
        try:
            return self.bucket.get_range(key, start, length)
        except ObjectMissing as error:
            raise FileMissing(name) from error
        except ObjectArchived as error:
            raise FileArchived(
                f"{self.area.file} is in an archive class",
                detail=key,
                hint="thaw it, and let the bucket's rules archive packs/ and blobs/ alone",
            ) from error

    def prove(self, name: str, by: Hash = "sha256") -> str:
        del name, by
        return ""

    def write(self, name: str, size: int = 0, *, look: bool = False) -> FileByBucket:
        key = self._key(name)
        if not self._swept and self._below:
            sweep(self.bucket, (self._below,), time.time() - DEAD_SECONDS)
            self._swept = True
        # A weak server would let a file be overwritten.
        if self._below and self.bucket.head(key) is not None:
            raise NameTaken(key, self.area.file)
        return self.begin(name, key, size, look=look)

    def begin(self, name: str, key: str, size: int = 0, *, look: bool = False) -> FileByBucket:
        """Begins a file with any key. size, look: see `PackTarget.write`."""
        self.poll()
        least = -(-size // _MOST_PARTS)
        file = FileByBucket(self, name, key, max(self._part_size, -(-least // _MEGA) * _MEGA))
        if look:
            asked = self.submit(self.bucket.head, key)
            while not asked.done():
                self.wait(_WAIT_SECONDS)
            file.known = asked.result()
        self.begun.append(file)
        return file

    def poll(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def wait(self, timeout: float) -> None:
        self.on_wait()
        self.poll()
        with suppress(Empty):
            self._bell.get(timeout=timeout)
        self.on_wait()
        self.poll()

    @property
    def progress(self) -> Progress:
        sent = self._pace.taken
        if self.answers != self._answered_then:
            self._answered_then, self._sent_then = self.answers, sent
        # Bytes sent since the last answer belong to parts that are still in buffers; the earlier
        # bytes of these parts count as not sent.
        unsent = max(0, self.held - (sent - self._sent_then))
        all_sent = sent >= self.handed_over
        throttled = self._pace.throttled
        return Progress(sent, self.added, unsent, self._waiting, self.answers, all_sent, throttled)

    def try_out(self) -> None:
        trial = self.begin("trial", f"{self._below}trial")
        try:
            trial.add(b"0")
            trial.flush()
        finally:
            trial.discard()

    def remove(self, names: Sequence[str]) -> int:
        for key in [self._key(name) for name in names]:
            self.bucket.delete(key)
        return len(names)

    def close(self) -> None:
        # A process with threads could not be copied, as a restore is into its jobs.
        self._readers.shutdown(cancel_futures=True)
        self.abort()
        if not self._waiting:
            self._senders.shutdown()

    def abort(self) -> None:
        """Ends everything now; what was begun is taken back as far as the bucket can be reached in
        a moment.
        """
        self._senders.shutdown(wait=False, cancel_futures=True)
        left = [file for file in self.begun if file.upload_id is not None]
        for file in self.begun:
            file.dropped = True
        self.begun.clear()
        if left:
            sweeper = Thread(target=lambda: list(map(FileByBucket.abort, left)), daemon=True)
            sweeper.start()
            sweeper.join(_DISCARD_SECONDS)

    def _key(self, name: str) -> str:
        return self._below + self.area.require_name(name)

    def _ask(self, one: Range) -> Future[bytes]:
        return self._readers.submit(self.fetch, *one)

    # --- for files on their way -------------------------------------------------------------------

    def submit(self, work: Callable[..., T], *values: object) -> Future[T]:
        """Has a thread do work, whose end `wait` hears."""
        with self._lock:
            self._waiting += 1
        future = self._senders.submit(work, *values)
        future.add_done_callback(self._answered)
        return future

    def _answered(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            self._waiting -= 1
            self.answers += 1
            if isinstance(error, Exception) and not isinstance(error, _KeyTaken | _Dropped):
                self.trouble = self.trouble or error
        self._bell.put(None)

    def take_buffer(self, size: int) -> mmap:
        """Waits for a buffer of at least so many bytes.

        Unfinished files may hold all buffers while no request is under way that would release one.
        Then a new buffer is made.
        """
        while not self._free:
            if not self._waiting and not self._free:
                return new_buffer(max(size, self._part_size))
            self.wait(_WAIT_SECONDS)
        buffer = self._free.pop()
        return buffer if len(buffer) >= size else new_buffer(size)

    def release(self, buffer: mmap, used: int) -> None:
        """Takes a buffer back, of which so many bytes were used."""
        self.hold(-used)
        fits = len(buffer) == self._part_size
        self._free.append(buffer if fits else new_buffer(self._part_size))

    def hold(self, count: int) -> None:
        """Counts bytes that came into buffers."""
        with self._lock:
            self.held += count


@dataclass(slots=True, eq=False)
class FileByBucket:
    """An object on its way; see `contract.CommittedFile`.

    Attributes:
        known: What the bucket has under the key already. Then nothing is sent: the content is only
            compared.
        size: The bytes that were added.
        used: Those of them that are in the buffer.
        done: Gives the object as it is in the bucket; raises _KeyTaken.
    """

    store: FileStoreByBucket
    name: str
    key: str
    part_size: int
    known: ObjectInfo | None = None
    size: int = 0
    used: int = 0
    buffer: mmap | None = None
    upload_id: Future[str] | None = None
    parts: list[Future[Part]] = field(default_factory=list)
    done: Future[ObjectInfo] | None = None
    dropped: bool = False
    digest: Any = field(default_factory=sha256)

    def add(self, data: Buffer) -> None:
        self.poll()
        if self.store.area.name != PACKS:
            self.digest.update(data)
        rest = memoryview(data)
        while rest:
            space = self._space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            self.used += count
            self.size += count
            self.store.added += count
            self.store.hold(count)

    def poll(self) -> None:
        self.store.poll()

    def finish(self) -> Sum:
        # A file of one part takes one request, which publishes it, and is compared then.
        if self.parts:
            self.flush()
        return Sum(self.size, self.digest.digest())

    def flush(self) -> None:
        """Returns when all of the file is in the bucket, which shows it to nobody yet."""
        if self.buffer is None and not self.parts:
            self._space()
        if self.buffer is not None:
            self._send_part()
        while not all(part.done() for part in self.parts):
            self.store.wait(_WAIT_SECONDS)

    def publish(self) -> None:
        self.commit()
        while not self.settled:
            self.store.wait(_WAIT_SECONDS)
        assert self.done is not None
        try:
            self.done.result()
        except _KeyTaken as error:
            if error.older:
                raise NameTaken(self.key, self.store.area.file) from error
            raise RemoteCannotStore(
                f"{self.store.area.file} in the bucket is not what was sent",
                detail=self.key,
                hint="something in the object store damages content: do not rely on it",
            ) from error

    def commit(self) -> None:
        self.store.begun.remove(self)
        if self.parts:
            if self.buffer is not None:
                self._send_part()
            self.done = self.store.submit(self._complete)
        else:
            if self.buffer is None:
                self._space()
            buffer, self.buffer = self.buffer, None
            assert buffer is not None
            self.store.handed_over += self.used if self.known is None else 0
            self.done = self.store.submit(self._put, buffer)

    @property
    def settled(self) -> bool:
        if self.done is None or not self.done.done() or self.done.cancelled():
            return False
        return isinstance(self.done.exception(), _KeyTaken | None)

    def result(self) -> StoredFile:
        assert self.done is not None
        if self.done.exception() is not None:
            raise NameTaken(self.key, self.store.area.file)
        return _stored(self.name, self.done.result())

    def discard(self) -> None:
        if self not in self.store.begun:  # It is committed, or the store was aborted.
            return
        self.store.begun.remove(self)
        self.dropped = True
        if self.buffer is not None:
            self.store.release(self.buffer, self.used)
            self.buffer = None
        # Its parts would stay until they are swept, if the store were closed now.
        deadline = time.monotonic() + _DISCARD_SECONDS
        if self.upload_id is not None:
            aborted = self.store.submit(self.abort)
            with suppress(BackupError):
                while not aborted.done() and time.monotonic() < deadline:
                    self.store.wait(_WAIT_SECONDS)

    def _space(self) -> memoryview:
        """Returns the space for the next bytes."""
        if self.used == self.part_size:
            self._send_part()
        if self.buffer is None:
            self.buffer = self.store.take_buffer(self.part_size)
        return memoryview(self.buffer)[self.used : self.part_size]

    def _send_part(self) -> None:
        if self.upload_id is None and self.known is None:
            self.upload_id = self.store.submit(self.store.bucket.create_upload, self.key)
        buffer, count, number = self.buffer, self.used, len(self.parts) + 1
        self.buffer, self.used = None, 0
        self.store.handed_over += count if self.known is None else 0
        self.parts.append(self.store.submit(self._put_part, number, buffer, count))

    # --- what the threads do ----------------------------------------------------------------------

    def _put_part(self, number: int, buffer: mmap, count: int) -> Part:
        try:
            data = memoryview(buffer)[:count]
            digest = sha256(data).digest()
            if self.upload_id is None:
                return Part(number, "", digest, count)
            upload_id = self.upload_id.result()
            if self.dropped:
                raise _Dropped
            return self.store.bucket.put_part(self.key, upload_id, number, data, digest)
        except UploadGone as error:
            raise RemoteUnreachable(
                "an upload was aborted before its end",
                detail=self.key,
                hint="does a lifecycle rule of the bucket remove uploads too early?",
            ) from error
        finally:
            self.store.release(buffer, count)

    def _put(self, buffer: mmap) -> ObjectInfo:
        try:
            data = memoryview(buffer)[: self.used]
            digest = sha256(data).digest()
            parts = [Part(1, "", digest, self.used)]
            ours = _Sums(checksum(digest), "")
            if self.known is not None:
                return self._settle(self.known, parts, ours, older=True)
            try:
                info = self.store.bucket.put(self.key, data, digest)
            except (ObjectExists, RemoteUnreachable) as error:
                older = isinstance(error, ObjectExists)
                info = self._found(error)
                return self._settle(info, parts, ours, older=older)
            if not info.checksum:
                ours = ours._replace(etag=md5(data, usedforsecurity=False).hexdigest())
            return self._settle(info, parts, ours)
        finally:
            self.store.release(buffer, self.used)

    def _complete(self) -> ObjectInfo:
        parts = [part.result() for part in self.parts]
        ours = _Sums(composite(parts), composite_etag(parts))
        if self.upload_id is None:
            assert self.known is not None
            return self._settle(self.known, parts, ours, older=True)
        older, confirmed = False, all(part.confirmed for part in parts)
        try:
            info = self.store.bucket.complete(self.key, self.upload_id.result(), parts)
        except (ObjectExists, UploadGone, RemoteUnreachable) as error:
            info, confirmed = self._found(error), False
            if older := isinstance(error, ObjectExists):
                self.abort()
        return self._settle(info, parts, ours, older=older, confirmed=confirmed)

    def _found(self, error: Exception) -> ObjectInfo:
        """Returns the object that the bucket has although it did not say so just now. Raises
        _KeyTaken where the bucket refuses the key, and has no object of it.
        """
        info = self.store.bucket.head(self.key)
        if info is None and isinstance(error, ObjectExists):
            self.abort()
            raise _KeyTaken(self.key, older=True) from error
        if info is None and isinstance(error, RemoteUnreachable):
            raise error
        if info is None:
            raise RemoteUnreachable(
                "an upload is gone", detail=self.key, hint="it is sent again"
            ) from error
        return info

    def _settle(
        self,
        info: ObjectInfo,
        parts: list[Part],
        ours: _Sums,
        *,
        older: bool = False,
        confirmed: bool = False,
    ) -> ObjectInfo:
        """Returns the object once it is sure to be ours. Its checksum is what the ledger records of
        it. Raises _KeyTaken.

        Where the server keeps no SHA-256, or one of another form, its ETag is compared, which most
        servers make of MD5 sums. Where that says nothing, the SHA-256 sums count that the server
        has said of the parts which it has just joined (confirmed), else the content is read back.
        So is what is older than this sending: it may be what a check has found to be damaged, and
        its checksum is that of the day when it was stored.
        """
        proof = ours.proved_by(info)
        if not info.checksum:  # Some servers tell it where they are asked, and not before.
            info = self.store.bucket.head(self.key) or info
            proof = "" if ours.contradicted_by(info) else ours.proved_by(info) or proof
        confirmed = confirmed and info.size == self.size and not ours.contradicted_by(info)
        known = not older and (bool(proof) or confirmed)
        if not known and not self._has_it(info, parts, same=bool(proof)):
            raise _KeyTaken(self.key, older=older)
        return ObjectInfo(self.key, self.size, proof or proof_of(info) or ours.sha256)

    def _has_it(self, info: ObjectInfo, parts: list[Part], *, same: bool) -> bool:
        """Reads the object back. same: its checksum is ours, which counts where it is archived."""
        if info.size != self.size:
            return False
        start = 0
        for part in parts:
            found, end = sha256(), start + part.size
            while start < end:
                try:
                    piece = self.store.bucket.get_range(
                        self.key, start, min(_READ_BACK, end - start)
                    )
                except ObjectArchived:
                    return same
                except ObjectMissing:
                    piece = b""
                if not piece:
                    return False
                found.update(piece)
                start += len(piece)
                self.store.answers += 1
            if found.digest() != part.sha256:
                return False
        return True

    def abort(self) -> None:
        """Has the bucket forget an upload, when none of its parts is on the way any more."""
        wait_for_all(part for part in self.parts if not part.cancelled())
        with suppress(Exception):  # It is swept up later.
            if self.upload_id is not None:
                self.store.bucket.abort(self.key, self.upload_id.result())


def thaw_file(store: SharedStore, name: str, days: int, tier: str) -> bool:
    """Asks a bucket that an archived file can be read; see `Bucket.thaw`. Raises FileArchived where
    its class does not thaw, and FileMissing.
    """
    assert isinstance(store, FileStoreByBucket)
    try:
        return store.bucket.thaw(name, days, tier)
    except ObjectMissing as error:
        raise FileMissing(name) from error
    except ObjectArchived as error:
        raise FileArchived(f"{store.area.file} cannot be thawed", detail=name) from error


def _stored(name: str, info: ObjectInfo) -> StoredFile:
    arrived = info.modified or UNKNOWN_ARRIVAL
    return StoredFile(name, info.size, arrived, checksum=info.checksum, etag=info.etag)
