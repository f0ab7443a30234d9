"""A session that reads asks the remote for names, verdicts of hashes, and contents.

The session uses the same ssh and the same receiver as a session that sends. The caller may ask
several questions ahead, and takes the answers in the order of asking. Contents are passed on with
the digest that was asked for, and the caller compares them. An answer that was not asked for ends
the session.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from ntt_backup.client.receiver_connection import SLOW, ReceiverConnection
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.model import Failure, Reason
from ntt_backup.wire import messages
from ntt_backup.wire.framing import ProtocolError

T = TypeVar("T")

_POLL_SECONDS: Final = 0.5
_NO_REASON: Final = "no reason given"
_REASONS: Final = {
    messages.MISSING: Reason.REMOTE_MISSING,
    messages.WRONG: Reason.REMOTE_CORRUPT,
    messages.UNREADABLE: Reason.REMOTE_UNREADABLE,
}


class Page(NamedTuple):
    """A part of a listing.

    Attributes:
        names: Digests with sizes in bytes, in order.
        strays: Kind and path of each entry that is no blob.
        more: Whether there are further names.
    """

    names: list[tuple[bytes, int]]
    strays: list[tuple[int, str]]
    more: bool


class ContentSink(Protocol):
    """Receives the answer for a GET: for each digest `whole`, `begin` to `end`, or `not_given`.

    A view is valid only during the call.
    """

    def whole(self, digest: bytes, content: memoryview) -> None: ...
    def begin(self, large: messages.Large) -> None: ...
    def piece(self, data: memoryview) -> None: ...
    def end(self, problem: str) -> None:
        """Ends a large blob. problem: why the blob is incomplete; "" for a complete one."""
        ...

    def not_given(self, digest: bytes, verdict: int, text: str) -> None: ...


class ReadSession(ReceiverConnection):
    """A session for questions about blobs. A method that raises BackupError has ended the session.

    Attributes:
        settled: The pieces of work that the user of the session has finished.
    """

    def __init__(self, spec: SessionSpec) -> None:
        super().__init__(spec, messages.to_client(messages.READING))
        self._unread: deque[bytes] = deque()
        self._frames: Iterator[tuple[int, memoryview]] = iter(())
        # Of each question the digests, the offset of the first blob, and the listed sizes.
        self._asked: deque[tuple[tuple[bytes, ...], int, Mapping[bytes, int]]] = deque()
        # The names that were asked for ahead.
        self._listing: tuple[bytes, bytes, int] | None = None
        self.settled = 0
        self.open(reading=1)

    # --- the questions ----------------------------------------------------------------------------

    def names(self, low: bytes, high: bytes, most: int) -> Page:
        """Returns the first names from low to high, both included; at most `most` names."""
        if self._listing != (low, high, most):
            self.ask_names(low, high, most)
        self._listing = None
        names: list[tuple[bytes, int]] = []
        strays: list[tuple[int, str]] = []
        last = b""
        with self.checked():
            while True:
                kind, payload = self._next()
                if kind == messages.NAMES:
                    for digest, size in messages.NAMES.read(payload):
                        if (digest <= last and last) or not low <= digest <= high:
                            raise ProtocolError("names out of order")
                        last = digest
                        names.append((digest, size))
                    if len(names) > most:
                        raise ProtocolError("more names than were asked for")
                elif kind == messages.STRAY:
                    strays.append(messages.STRAY.read(payload))
                    if len(strays) > messages.MAX_STRAYS + messages.MAX_DIRECTORIES:
                        raise ProtocolError("strays without end")
                elif kind == messages.LISTED:
                    return Page(names, strays, messages.LISTED.read(payload).more)
                else:
                    raise ProtocolError(f"a frame of type {kind} within a listing")

    def ask_names(self, low: bytes, high: bytes, most: int) -> None:
        """Asks for names. The next question must be `names`, for the same."""
        with self.checked():
            self._send(messages.LIST.frame(low, high, most))
        self._listing = low, high, most

    def is_empty(self) -> bool:
        """Returns whether the remote has no blob at all."""
        return not self.names(bytes(32), b"\xff" * 32, most=1).names

    def ask_sums(self, hashed: int, key: bytes, digests: Sequence[bytes]) -> None:
        """Asks the remote for a sum of each blob; `sums` returns them in the order of asking.

        Args:
            hashed: BLAKE3 for keyed BLAKE3, SHA256 for HMAC-SHA-256.
            key: The key of KEY_BYTES.
            digests: The digests of the blobs.
        """
        self._ask(messages.VERIFY.frame(hashed, key, digests), digests)

    def sums(self, size: int = 0) -> Sequence[tuple[int, bytes]]:
        """Returns the answer to one `ask_sums`: state and sum of each blob, in order.

        Args:
            size: The bytes of all blobs, if they are known.
        """
        return self._one_for_each(messages.SUMS, size)

    def ask_hashes(self, hashed: int, digests: Sequence[bytes]) -> None:
        """Asks the remote for the hash of each blob; `hashes` returns them in the order of asking.

        Args:
            hashed: BLAKE3 or SHA256.
            digests: The digests of the blobs.
        """
        self._ask(messages.HASH.frame(hashed, digests), digests)

    def hashes(self, size: int = 0) -> Sequence[messages.BlobHash]:
        """Returns the answer to one `ask_hashes`, in order.

        Args:
            size: The bytes of all blobs, if they are known.
        """
        return self._one_for_each(messages.HASHED, size)

    def _ask(self, question: bytes, digests: Sequence[bytes]) -> None:
        with self.checked():
            self._send(question)
        self._asked.append((tuple(digests), 0, {}))

    def _one_for_each(self, answer: messages.Message[list[T]], size: int) -> list[T]:
        """Returns the answer to a question, which has an entry for each digest."""
        with self.checked():
            kind, payload = self._next(size / SLOW)
            if kind != answer:
                raise ProtocolError(f"a frame of type {kind} for an answer of type {answer}")
            found = answer.read(payload)
            if len(found) != len(self._asked.popleft()[0]):
                raise ProtocolError("sums of another number of blobs")
            return found

    def ask_contents(
        self, digests: Sequence[bytes], offset: int = 0, listed: Mapping[bytes, int] | None = None
    ) -> None:
        """Asks the remote to send blobs, each once; `contents` passes on the answers in order.

        offset: in bytes, at which a single blob begins. listed: the sizes in bytes that the remote
        has listed, as far as they are known. A larger blob is refused.
        """
        once = tuple(dict.fromkeys(digests))
        with self.checked():
            self._send(messages.GET.frame(offset, once))
        self._asked.append((once, offset, listed or {}))

    def contents(self, sink: ContentSink) -> None:
        """Passes the answer to one `ask_contents` to the sink."""
        asked, offset, listed = self._asked.popleft()
        waiting = set(asked)

        def awaited(digest: bytes) -> bytes:
            if digest not in waiting:
                raise ProtocolError("a blob that was not asked for")
            waiting.remove(digest)
            return digest

        large: messages.Large | None = None
        at = 0
        with self.checked():
            while True:
                kind, payload = self._next()
                if kind == messages.PIECE and large is not None:
                    piece = messages.PIECE.read(payload)
                    at += len(piece)
                    if at > large.size:
                        raise ProtocolError("more of a blob than was announced")
                    sink.piece(piece)
                elif kind == messages.BLOB_END and large is not None:
                    problem = _problem(payload)
                    if not problem and at != large.size:
                        raise ProtocolError("less of a blob than was announced")
                    sink.end(problem)
                    large = None
                elif large is not None:
                    raise ProtocolError(f"a frame of type {kind} within a blob")
                elif kind == messages.CONTENTS:
                    for digest, content in messages.CONTENTS.read(payload):
                        if len(content) > listed.get(digest, len(content)):
                            raise ProtocolError("a blob that is larger than it was listed")
                        sink.whole(awaited(digest), content)
                elif kind == messages.BLOB:
                    large = messages.BLOB.read(payload)
                    awaited(large.digest)
                    if large.offset > offset:
                        raise ProtocolError("a blob without its beginning")
                    if large.size > listed.get(large.digest, large.size):
                        raise ProtocolError("a blob that is larger than it was listed")
                    at = large.offset
                    sink.begin(large)
                elif kind == messages.NOT_GIVEN:
                    digest, verdict, text = messages.NOT_GIVEN.read(payload)
                    sink.not_given(awaited(digest), verdict, text)
                elif kind == messages.GIVEN and not waiting:
                    return
                else:
                    raise ProtocolError(f"a frame of type {kind} among contents")

    def show_life(self) -> None:
        """Sends a sign of life, if nothing was sent for a while."""
        if self.channel.quiet:
            with self.checked():
                self._send(messages.PING.frame(bytes(8)))

    def close(self) -> None:
        """Ends the connection in good order, or immediately while the remote lists names."""
        if self._listing is not None:
            self.abort()
        super().close()

    def _send(self, frame: bytes) -> None:
        self.send(frame, self._unread.append)

    def _next(self, more_patience: float = 0.0) -> tuple[int, memoryview]:
        """Returns the next frame. Its payload is valid until the next call.

        more_patience: see `require_life`.
        """
        asked = time.monotonic()
        while (frame := next(self._frames, None)) is None:
            self.spec.cancelled()
            if not self._unread:
                self.channel.hear(self._unread.append, _POLL_SECONDS)
            if self._unread:
                self._frames = self.frames(self._unread.popleft())
            self.require_life(asked, more_patience)
        return frame


def _problem(payload: memoryview) -> str:
    """Returns why a BLOB_END ends a blob early; "" for a complete blob."""
    status, text = messages.BLOB_END.read(payload)
    return (text or _NO_REASON) if status == messages.BROKEN else ""


def remote_failure(blobid: str, verdict: int, text: str) -> Failure:
    """Returns the failure for a verdict of the receiver about its copy of a blob."""
    return Failure(blobid, _REASONS[verdict], text)


def hash_mismatch(size: int, found: bytes, where: str = "on the remote") -> str:
    """Returns the detail for content that hashes to `found`, which is not its name."""
    return f"{size} bytes {where} hash to {found.hex()}"
