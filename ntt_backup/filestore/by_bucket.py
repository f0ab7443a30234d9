"""A bucket keeps the files of an area, each as an object; see `contract.FileStore`.

A file is sent in parts. It becomes an object, under its name, only when it is published: until then
the bucket shows its parts to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from typing import Final

from ntt_backup.errors import BackupError, NameTaken, ProtocolViolation, RemoteCannotStore
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
    Bucket,
    ObjectArchived,
    ObjectInfo,
    ObjectMissing,
    sweep,
)
from ntt_backup.objects.outbox import KeyTaken, Meter, Outbox, Outgoing
from ntt_backup.wire.framing import FORMAT
from ntt_backup.wire.stored_names import PACKS

_REQUESTS: Final = 8
_WAIT_SECONDS: Final = 0.2
_DISCARD_SECONDS: Final = 2.0
# Two parts of a file are in memory; one of this size is on a slow link for a second.
_LARGEST_PART: Final = 16 << 20


class FileStoreByBucket:
    """See the module.

    Args:
        bucket: The bucket.
        part_size: The size in bytes of the parts in which files are sent; huge files have larger
            ones.
        area: The area. Names in `packs` are keys of the bucket, others lie below the area's name.
        meter: Counts the bytes that the bucket is sent.
    """

    hashes = False

    def __init__(
        self, bucket: Bucket, part_size: int, area: Area, meter: Meter | None = None
    ) -> None:
        self.bucket = bucket
        self.area = area
        packs = area.name == PACKS
        self._part_size = part_size if packs else min(part_size, _LARGEST_PART)
        self._meter = meter or Meter(None)
        self._below = "" if packs else f"{area.name}/"
        self._threads = ThreadPoolExecutor(_REQUESTS, "read")
        self._swept = False
        self._outbox: Outbox | None = None
        self.on_wait = _do_nothing

    @property
    def outbox(self) -> Outbox:
        """The files on their way, whose parts share a few buffers."""
        if self._outbox is None:
            self._outbox = Outbox(self.bucket, self._part_size, self._hear)
        return self._outbox

    @property
    def placed(self) -> bool:
        return self.bucket.head(FORMAT) is not None

    def list(self, below: str = "") -> Iterator[StoredFile]:
        for count, info in enumerate(self.bucket.list(self._below + below), 1):
            if count > self.area.most:
                raise ProtocolViolation(
                    f"the bucket lists more {self.area.files} than there can be",
                    detail=f"{self.area.most:,} below {self._below}{below}",
                    hint="somebody else has written there; look at the bucket",
                )
            name = info.key.removeprefix(self._below)
            if below and not below.endswith("/") and name != below:
                continue
            with suppress(ValueError):
                yield _stored(self.area.require_name(name), info)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return ask_ahead(ranges, _REQUESTS, self._ask, Future.result)

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
        if self._outbox is not None and self._outbox.trouble is not None:
            self._outbox.abort()
            self._outbox = None
        return FileByBucket(self, name, self.outbox.begin(key, size, look=look))

    def wait(self, timeout: float) -> None:
        self.outbox.wait(timeout)

    @property
    def progress(self) -> Progress:
        outbox, meter = self.outbox, self._meter
        unsent = outbox.unsent(meter.sent)
        return Progress(
            meter.sent,
            outbox.written,
            unsent,
            outbox.waiting,
            outbox.answers,
            meter.sent >= outbox.handed_over,
            meter.throttled,
        )

    def try_out(self) -> None:
        trial = FileByBucket(self, "trial", self.outbox.begin(f"{self._below}trial"))
        try:
            trial.add(b"0")
            trial.send_all()
        finally:
            trial.discard()

    def remove(self, names: Sequence[str]) -> int:
        for key in [self._key(name) for name in names]:
            self.bucket.delete(key)
        return len(names)

    def close(self) -> None:
        # A process with threads could not be copied, as a restore is into its jobs.
        self._threads.shutdown(cancel_futures=True)
        if self._outbox is not None:
            self._outbox.end()

    def abort(self) -> None:
        if self._outbox is not None:
            self._outbox.abort()

    def _hear(self) -> None:
        self.on_wait()
        if (trouble := self.outbox.trouble) is not None:
            raise trouble

    def _key(self, name: str) -> str:
        return self._below + self.area.require_name(name)

    def _ask(self, one: Range) -> Future[bytes]:
        return self._threads.submit(self.fetch, *one)


class FileByBucket:
    """An object on its way; see `contract.CommittedFile`."""

    def __init__(self, store: FileStoreByBucket, name: str, out: Outgoing) -> None:
        self._store = store
        self._outbox = store.outbox
        self._name = name
        self._out = out
        self._open = True
        self._digest = sha256()

    def add(self, data: Buffer) -> None:
        self.poll()
        self._outbox.write(self._out, data)
        if self._store.area.name != PACKS:
            self._digest.update(data)

    def poll(self) -> None:
        if (trouble := self._outbox.trouble) is not None:
            raise trouble

    def finish(self) -> Sum:
        # A file of one part takes one request, which publishes it, and is compared then.
        if self._out.parts:
            self.send_all()
        return Sum(self._out.size, self._digest.digest())

    def send_all(self) -> None:
        """Returns when all of the file is in the bucket, which shows it to nobody yet."""
        self._outbox.flush(self._out)

    def publish(self) -> None:
        self.commit()
        while not self.settled:
            self._outbox.wait(_WAIT_SECONDS)
        done, key = self._out.done, self._out.key
        assert done is not None
        try:
            done.result()
        except KeyTaken as error:
            if error.older:
                raise NameTaken(key, self._store.area.file) from error
            raise RemoteCannotStore(
                f"{self._store.area.file} in the bucket is not what was sent",
                detail=key,
                hint="something in the object store damages content: do not rely on it",
            ) from error

    def commit(self) -> None:
        self._open = False
        self._outbox.finish(self._out)

    @property
    def settled(self) -> bool:
        return self._out.settled

    def result(self) -> StoredFile:
        info = self._out.info
        if info is None:
            raise NameTaken(self._out.key, self._store.area.file)
        return _stored(self._name, info)

    def discard(self) -> None:
        if not self._open:
            return
        self._open = False
        self._outbox.drop(self._out)
        # Its parts would stay until they are swept, if the store were closed now.
        deadline = time.monotonic() + _DISCARD_SECONDS
        with suppress(BackupError):
            while self._outbox.waiting and time.monotonic() < deadline:
                self._outbox.wait(_WAIT_SECONDS)


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


def _do_nothing() -> None: ...


def _stored(name: str, info: ObjectInfo) -> StoredFile:
    arrived = info.modified or UNKNOWN_ARRIVAL
    return StoredFile(name, info.size, arrived, checksum=info.checksum, etag=info.etag)
