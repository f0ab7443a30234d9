"""A session that reads asks the remote for names, verdicts of hashes, and contents.

It uses the same ssh and the same receiver as a session that sends. The caller asks, sometimes a few
questions ahead, and takes the answers in the order of asking.

Contents are handed on with the digest they were asked by, for the caller to check; an answer to
what was not asked ends the session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from ntt_backup.client.connection import SessionSpec
from ntt_backup.client.question_session import SLOW, QuestionSession
from ntt_backup.wire import framing, read_messages, write_messages
from ntt_backup.wire.framing import ProtocolError

_NO_REASON: Final = "no reason given"


class Page(NamedTuple):
    """Names with sizes, in order. strays: kind and path of what is no blob. more: there are names
    that did not fit.
    """

    names: list[tuple[bytes, int]]
    strays: list[tuple[int, str]]
    more: bool


class ContentSink(Protocol):
    """Takes the answer for a GET: for each digest `whole`, `begin` to `end`, or `not_given`. Views
    hold only during the call.
    """

    def whole(self, digest: bytes, content: memoryview) -> None: ...
    def begin(self, large: write_messages.Large) -> None: ...
    def piece(self, data: memoryview) -> None: ...
    def end(self, problem: str) -> None:
        """Ends a large blob. problem: why it broke off, "" where it is complete."""
        ...

    def not_given(self, digest: bytes, verdict: int, text: str) -> None: ...


class ReadSession(QuestionSession):
    """A connection for questions about blobs. Methods raise BackupError, and end it then.

    settled counts the pieces of work that its user is done with.
    """

    def __init__(self, spec: SessionSpec) -> None:
        super().__init__(spec, read_messages.TO_CLIENT)
        # The blobs of each question, and where the first is to begin.
        self._asked: deque[tuple[tuple[bytes, ...], int, Mapping[bytes, int]]] = deque()
        self.settled = 0
        self._connection.open(reading=1)

    # --- the questions ----------------------------------------------------------------------------

    def names(self, low: bytes, high: bytes, most: int) -> Page:
        """Returns the first names from low to high, both included; at most so many."""
        names: list[tuple[bytes, int]] = []
        strays: list[tuple[int, str]] = []
        last = b""
        with self._connection.checked():
            self._send(read_messages.listing(low, high, most))
            while True:
                kind, payload = self._next()
                if kind == framing.NAMES:
                    for digest, size in read_messages.read_names(payload):
                        if (digest <= last and last) or not low <= digest <= high:
                            raise ProtocolError("names out of order")
                        last = digest
                        names.append((digest, size))
                    if len(names) > most:
                        raise ProtocolError("more names than were asked for")
                elif kind == framing.STRAY:
                    strays.append(read_messages.read_stray(payload))
                    if len(strays) > read_messages.MAX_STRAYS + read_messages.MAX_DIRECTORIES:
                        raise ProtocolError("strays without end")
                elif kind == framing.LISTED:
                    return Page(names, strays, read_messages.read_listed(payload).more)
                else:
                    raise ProtocolError(f"a frame of type {kind} within a listing")

    def ask_verdicts(self, digests: Sequence[bytes]) -> None:
        """Asks the remote to hash these; `verdicts` returns the answers, in the order of asking."""
        with self._connection.checked():
            self._send(read_messages.verifying(digests))
        self._asked.append((tuple(digests), 0, {}))

    def verdicts(self, size: int = 0) -> read_messages.Verdicts:
        """Returns the answer for one `ask_verdicts`. size: the bytes of all blobs, if known."""
        with self._connection.checked():
            kind, payload = self._next(size / SLOW)
            if kind != framing.VERDICTS:
                raise ProtocolError(f"a frame of type {kind} for a verdict")
            found = read_messages.read_verdicts(payload)
            if found.asked != len(self._asked.popleft()[0]):
                raise ProtocolError("verdicts for another number of blobs")
            return found

    def ask_contents(
        self,
        digests: Sequence[bytes],
        offset: int = 0,
        listed: Mapping[bytes, int] | None = None,
    ) -> None:
        """Asks the remote to send these, each once; `contents` takes the answers, in the order of
        asking.

        Args:
            digests: The blobs.
            offset: Where to begin, for a single blob.
            listed: The sizes in bytes that the remote has listed, as far as they are known: more
                of a blob is not taken.
        """
        once = tuple(dict.fromkeys(digests))
        with self._connection.checked():
            self._send(read_messages.getting(once, offset))
        self._asked.append((once, offset, listed or {}))

    def contents(self, sink: ContentSink) -> None:
        """Hands over all that was asked for with one `ask_contents`."""
        asked, offset, listed = self._asked.popleft()
        waiting = set(asked)

        def awaited(digest: bytes) -> bytes:
            if digest not in waiting:
                raise ProtocolError("a blob that was not asked for")
            waiting.remove(digest)
            return digest

        large: write_messages.Large | None = None
        at = 0
        with self._connection.checked():
            while True:
                kind, payload = self._next()
                if kind == framing.PIECE and large is not None:
                    piece = read_messages.read_piece(payload)
                    at += len(piece)
                    if at > large.size:
                        raise ProtocolError("more of a blob than was announced")
                    sink.piece(piece)
                elif kind == framing.BLOB_END and large is not None:
                    problem = _problem(payload)
                    if not problem and at != large.size:
                        raise ProtocolError("less of a blob than was announced")
                    sink.end(problem)
                    large = None
                elif large is not None:
                    raise ProtocolError(f"a frame of type {kind} within a blob")
                elif kind == framing.CONTENTS:
                    for digest, content in read_messages.read_contents(payload):
                        if len(content) > listed.get(digest, len(content)):
                            raise ProtocolError("a blob that is larger than it was listed")
                        sink.whole(awaited(digest), content)
                elif kind == framing.BLOB:
                    large = write_messages.read_large(payload)
                    awaited(large.digest)
                    if large.offset > offset:
                        raise ProtocolError("a blob without its beginning")
                    if large.size > listed.get(large.digest, large.size):
                        raise ProtocolError("a blob that is larger than it was listed")
                    at = large.offset
                    sink.begin(large)
                elif kind == framing.NOT_GIVEN:
                    digest, verdict, text = read_messages.read_not_given(payload)
                    sink.not_given(awaited(digest), verdict, text)
                elif kind == framing.GIVEN and not waiting:
                    return
                else:
                    raise ProtocolError(f"a frame of type {kind} among contents")


def _problem(payload: memoryview) -> str:
    """Returns why an END ends a blob early; "" where it is complete."""
    status, text = read_messages.read_blob_end(payload)
    return (text or _NO_REASON) if status == read_messages.BROKEN else ""
