"""Objects on their way into a bucket: cut into equal parts, sent by threads, settled by checksum.

All that a session sends goes through a few buffers of one part each, so memory is bounded by their
number: who writes waits until one is free. An object becomes visible by its last request alone,
`finish`. Until then it can be dropped, and nothing was ever there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import md5, sha256
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ntt_backup.client.throttle import Pace
from ntt_backup.errors import RemoteUnreachable
from ntt_backup.objects.bucket import (
    MD5,
    Bucket,
    Buffer,
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
)
from ntt_backup.process.memory import new_buffer

if TYPE_CHECKING:
    from mmap import mmap

_BUFFERS: Final = 2
# Beside the parts, the ends of objects: each waits for its own parts, which were begun before it.
_THREADS: Final = 4
_MOST_PARTS: Final = 10_000
_MEGA: Final = 1024**2
_READ_BACK: Final = 4 * _MEGA
_ABORT_SECONDS: Final = 2.0

T = TypeVar("T")


class KeyTaken(Exception):
    """Another content lies under the key. older: it was there before."""

    def __init__(self, key: str, *, older: bool) -> None:
        super().__init__(key)
        self.older = older


class _Dropped(Exception):
    """The object is not wanted any more."""


class Meter:
    """Counts what is sent, under a limit where there is one: see `throttle.Pace`. throttled:
    when the limit last gave nothing.
    """

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        self.sent = 0
        self.throttled = 0.0

    def allowance(self, *, begun: bool = False) -> int:
        allowed = _READ_BACK if self._pace is None else self._pace.allowance(begun=begun)
        if not allowed:
            self.throttled = time.monotonic()
        return allowed

    def delay(self) -> float:
        return 0.0 if self._pace is None else self._pace.delay()

    def spend(self, sent: int) -> None:
        self.sent += sent
        if self._pace is not None:
            self._pace.spend(sent)


@dataclass(slots=True)
class Outgoing:
    """An object that is being made. Sizes are in bytes; size is what was written so far.

    known: what the bucket has under the key already. Then nothing is sent: the content is only
    compared. done: gives the object as it is in the bucket; raises KeyTaken.
    """

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

    @property
    def settled(self) -> bool:
        """Whether it is known what became of it."""
        done = self.done
        if done is None or not done.done() or done.cancelled():
            return False
        return isinstance(done.exception(), KeyTaken | None)

    @property
    def info(self) -> ObjectInfo | None:
        """The object as it is in the bucket; None where another has its key."""
        assert self.done is not None
        return None if self.done.exception() is not None else self.done.result()


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


class Outbox:
    """The objects that a session sends. hear is called while it waits, and may raise.

    Its methods are for one thread. waiting counts requests, answers what has come back, handed_over
    the bytes of content that the requests carry. written are all bytes that were added to objects.
    trouble is the first error that no single object is to blame for.
    """

    def __init__(self, bucket: Bucket, part_size: int, hear: Callable[[], None]) -> None:
        self._bucket = bucket
        self._part_size = part_size
        self._hear = hear
        self._free = [new_buffer(part_size) for _ in range(_BUFFERS)]
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._threads = ThreadPoolExecutor(_THREADS, "upload")
        self._begun: list[Outgoing] = []
        self._lock = Lock()
        self.waiting = 0
        self.answers = 0
        self.handed_over = 0
        self.written = 0
        self._held = 0
        # How many requests had been answered at the last look, and the bytes sent when that rose.
        self._answered_then = 0
        self._sent_then = 0
        self.trouble: Exception | None = None

    def begin(self, key: str, size: int = 0, *, look: bool = False) -> Outgoing:
        """Begins an object. size: about how large it will be, where that may be too large for parts
        of the usual size. look: it may be in the bucket already.
        """
        least = -(-size // _MOST_PARTS)
        part_size = max(self._part_size, -(-least // _MEGA) * _MEGA)
        known = None
        if look:
            asked = self._submit(self._bucket.head, key)
            while not asked.done():
                self.wait(0.2)
            known = asked.result()
        out = Outgoing(key, part_size, known)
        self._begun.append(out)
        return out

    def unsent(self, sent: int) -> int:
        """Returns how many of the bytes that were added are still in buffers.

        Args:
            sent: The bytes that were ever sent. Those since the last answer belong to parts that
                are still in buffers; the earlier ones of these parts count as not sent.
        """
        if self.answers != self._answered_then:
            self._answered_then, self._sent_then = self.answers, sent
        return max(0, self._held - (sent - self._sent_then))

    def _space(self, out: Outgoing) -> memoryview:
        """Returns the space for the next bytes of the object."""
        if out.used == out.part_size:
            self._send_part(out)
        while out.buffer is None:
            if self._free:
                buffer = self._free.pop()
                fits = len(buffer) >= out.part_size
                out.buffer = buffer if fits else new_buffer(out.part_size)
            else:
                self.wait(0.2)
        return memoryview(out.buffer)[out.used : out.part_size]

    def write(self, out: Outgoing, data: Buffer) -> None:
        """Adds bytes to the object."""
        rest = memoryview(data)
        while rest:
            space = self._space(out)
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            out.used += count
            out.size += count
            self.written += count
            with self._lock:
                self._held += count

    def flush(self, out: Outgoing) -> None:
        """Waits until all of the object is in the bucket, where nobody sees it yet. Nothing may be
        added to it then.
        """
        if out.buffer is None and not out.parts:
            self._space(out)
        if out.buffer is not None:
            self._send_part(out)
        while not all(part.done() for part in out.parts):
            self.wait(0.2)

    def finish(self, out: Outgoing) -> None:
        """Makes the object visible, once its last part has arrived; `done` gives the outcome."""
        self._begun.remove(out)
        if out.parts:
            if out.buffer is not None:
                self._send_part(out)
            out.done = self._submit(self._complete, out)
        else:
            if out.buffer is None:
                self._space(out)
            buffer, out.buffer = out.buffer, None
            assert buffer is not None
            self.handed_over += out.used if out.known is None else 0
            out.done = self._submit(self._put, out, buffer)

    def drop(self, out: Outgoing) -> None:
        """Forgets an object that was not finished, and has the bucket forget it."""
        if out not in self._begun:  # `abort` has done that.
            return
        self._begun.remove(out)
        out.dropped = True
        if out.buffer is not None:
            self._release(out.buffer, out.used)
            out.buffer = None
        if out.upload_id is not None:
            self._submit(self._abort, out)

    def wait(self, timeout: float) -> None:
        """Waits for an answer, at most for timeout seconds."""
        self._hear()
        with suppress(Empty):
            self._bell.get(timeout=timeout)
        self._hear()

    def abort(self) -> None:
        """Ends everything now; what was begun is taken back as far as the bucket can be reached in
        a moment.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        left = [out for out in self._begun if out.upload_id is not None]
        for out in self._begun:
            out.dropped = True
        self._begun.clear()
        if left:
            sweeper = Thread(target=lambda: list(map(self._abort, left)), daemon=True)
            sweeper.start()
            sweeper.join(_ABORT_SECONDS)

    def end(self) -> None:
        """Ends everything in good order: no thread is left where no request is under way."""
        self.abort()
        if not self.waiting:
            self._threads.shutdown()

    # --- what the threads do ----------------------------------------------------------------------

    def _submit(self, work: Callable[..., T], *values: object) -> Future[T]:
        with self._lock:
            self.waiting += 1
        future = self._threads.submit(work, *values)
        future.add_done_callback(self._answered)
        return future

    def _answered(self, future: Future[T]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            self.waiting -= 1
            self.answers += 1
            if isinstance(error, Exception) and not isinstance(error, KeyTaken | _Dropped):
                self.trouble = self.trouble or error
        self._bell.put(None)

    def _release(self, buffer: mmap, used: int) -> None:
        with self._lock:
            self._held -= used
        fits = len(buffer) == self._part_size
        self._free.append(buffer if fits else new_buffer(self._part_size))

    def _send_part(self, out: Outgoing) -> None:
        if out.upload_id is None and out.known is None:
            out.upload_id = self._submit(self._bucket.create_upload, out.key)
        buffer, count, number = out.buffer, out.used, len(out.parts) + 1
        out.buffer, out.used = None, 0
        assert buffer is not None
        self.handed_over += count if out.known is None else 0
        out.parts.append(self._submit(self._put_part, out, number, buffer, count))

    def _put_part(self, out: Outgoing, number: int, buffer: mmap, count: int) -> Part:
        try:
            data = memoryview(buffer)[:count]
            digest = sha256(data).digest()
            if out.upload_id is None:
                return Part(number, "", digest, count)
            upload_id = out.upload_id.result()
            if out.dropped:
                raise _Dropped
            return self._bucket.put_part(out.key, upload_id, number, data, digest)
        except UploadGone as error:
            raise RemoteUnreachable(
                "an upload was aborted before its end",
                detail=out.key,
                hint="does a lifecycle rule of the bucket remove uploads too early?",
            ) from error
        finally:
            self._release(buffer, count)

    def _put(self, out: Outgoing, buffer: mmap) -> ObjectInfo:
        try:
            data = memoryview(buffer)[: out.used]
            digest = sha256(data).digest()
            parts = [Part(1, "", digest, out.used)]
            ours = _Sums(checksum(digest), "")
            if out.known is not None:
                return self._settle(out, out.known, parts, ours, older=True)
            try:
                info = self._bucket.put(out.key, data, digest)
            except (ObjectExists, RemoteUnreachable) as error:
                older = isinstance(error, ObjectExists)
                info = self._found(out, error)
                return self._settle(out, info, parts, ours, older=older)
            if not info.checksum:
                ours = ours._replace(etag=md5(data, usedforsecurity=False).hexdigest())
            return self._settle(out, info, parts, ours)
        finally:
            self._release(buffer, out.used)

    def _complete(self, out: Outgoing) -> ObjectInfo:
        parts = [part.result() for part in out.parts]
        ours = _Sums(composite(parts), composite_etag(parts))
        if out.upload_id is None:
            assert out.known is not None
            return self._settle(out, out.known, parts, ours, older=True)
        older = False
        try:
            info = self._bucket.complete(out.key, out.upload_id.result(), parts)
        except (ObjectExists, UploadGone, RemoteUnreachable) as error:
            info = self._found(out, error)
            if older := isinstance(error, ObjectExists):
                self._abort(out)
        return self._settle(out, info, parts, ours, older=older)

    def _found(self, out: Outgoing, error: Exception) -> ObjectInfo:
        """Returns the object that the bucket has although it did not say so just now. Raises
        KeyTaken where the bucket refuses the key, and has no object of it.
        """
        info = self._bucket.head(out.key)
        if info is None and isinstance(error, ObjectExists):
            self._abort(out)
            raise KeyTaken(out.key, older=True) from error
        if info is None and isinstance(error, RemoteUnreachable):
            raise error
        if info is None:
            raise RemoteUnreachable(
                "an upload is gone", detail=out.key, hint="it is sent again"
            ) from error
        return info

    def _settle(
        self,
        out: Outgoing,
        info: ObjectInfo,
        parts: list[Part],
        ours: _Sums,
        *,
        older: bool = False,
    ) -> ObjectInfo:
        """Returns the object once it is sure to be ours. Its checksum is what the ledger records of
        it. Raises KeyTaken.

        Where the server keeps no SHA-256, or one of another form, its ETag is compared, which most
        servers make of MD5 sums. Where neither says anything the content is read back. So is what
        is older than this sending: it may be what a check has found to be damaged, and its checksum
        is that of the day when it was stored.
        """
        proof = ours.proved_by(info)
        if not info.checksum:  # Some servers tell it where they are asked, and not before.
            info = self._bucket.head(out.key) or info
            proof = "" if ours.contradicted_by(info) else ours.proved_by(info) or proof
        if (older or not proof) and not self._has_it(out, info, parts, same=bool(proof)):
            raise KeyTaken(out.key, older=older)
        return ObjectInfo(out.key, out.size, proof or proof_of(info) or ours.sha256)

    def _has_it(self, out: Outgoing, info: ObjectInfo, parts: list[Part], *, same: bool) -> bool:
        """Reads the object back. same: its checksum is ours, which counts where it is archived."""
        if info.size != out.size:
            return False
        start = 0
        for part in parts:
            found, end = sha256(), start + part.size
            while start < end:
                try:
                    piece = self._bucket.get_range(out.key, start, min(_READ_BACK, end - start))
                except ObjectArchived:
                    return same
                except ObjectMissing:
                    piece = b""
                if not piece:
                    return False
                found.update(piece)
                start += len(piece)
                self.answers += 1
            if found.digest() != part.sha256:
                return False
        return True

    def _abort(self, out: Outgoing) -> None:
        """Has the bucket forget an upload, when none of its parts is on the way any more."""
        wait_for_all(part for part in out.parts if not part.cancelled())
        with suppress(Exception):  # It is swept up later.
            if out.upload_id is not None:
                self._bucket.abort(out.key, out.upload_id.result())
