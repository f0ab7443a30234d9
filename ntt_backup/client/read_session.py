"""A session that reads what lies on the remote: names, verdicts of hashes, and contents.

The same connection as the one that sends: the same ssh, the same receiver, which travels along or
stands behind a forced command. What it may ask is another matter, and so is who waits for whom:
here the caller asks, sometimes a few questions ahead, and takes the answers as they come.

Nothing that arrives is believed for what it is called. Contents are handed on with the digest they
were asked by, for the caller to check; an answer to what was not asked ends the session, which the
caller then opens anew.

The protocol is docs/protocol.md. Opened by `farside`, driven by `checking`, `restore` and
`mending`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from ntt_backup.client import handshake
from ntt_backup.client.bootstrap import bundle
from ntt_backup.client.channel import PATIENCE_FACTOR, Channel
from ntt_backup.client.error_text import explain_gone
from ntt_backup.client.transport import Transport
from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError, RemoteNonsense, RemoteUnreachable, Unsupported
from ntt_backup.model import Failure, Reason
from ntt_backup.wire import framing, read_messages, write_messages
from ntt_backup.wire.framing import Inbox

_POLL_SECONDS: Final = 0.5
_REASONS: Final = {
    read_messages.MISSING: Reason.REMOTE_MISSING,
    read_messages.WRONG: Reason.REMOTE_CORRUPT,
    read_messages.UNREADABLE: Reason.REMOTE_UNREADABLE,
}
# Of a blob of 1 TiB: 64 MiB of hashes. What is larger is no blob of ours.
_MAX_SUMS: Final = (1 << 40) // read_messages.BLOCK_BYTES * read_messages.BLOCK_SUM_BYTES


@dataclass(frozen=True, slots=True)
class Reach:
    """What a session is opened with; see `session.SessionPlan`. cancelled is asked now and then,
    and raises where the session shall end.
    """

    transport: Transport
    root: str
    owner: str
    run_id: str
    slot: str
    run: RunSettings
    cancelled: Callable[[], None]


class Taker(Protocol):
    """Takes the answer for a GET: one of the first, second and last for each digest. Views hold
    only during the call.
    """

    def whole(self, digest: bytes, content: memoryview) -> None: ...
    def begin(self, large: write_messages.Large) -> None: ...
    def piece(self, data: memoryview) -> None: ...
    def end(self, problem: str) -> None:
        """problem: why it broke off, nothing where it is complete."""
        ...

    def not_given(self, digest: bytes, verdict: int, text: str) -> None: ...


def failure_there(blobid: str, verdict: int, text: str) -> Failure:
    """What a verdict of the far side, or about what came from it, says of one blob."""
    return Failure(blobid, _REASONS[verdict], text)


def mismatch_there(size: int, found: bytes) -> str:
    """What is wrong with content there that does not hash to its name."""
    return f"{size} bytes there hash to {found.hex()}"


class ReadingSession:
    """One connection. Methods raise BackupError; a session that has raised is of no use any more.

    answers counts the frames that came, settled the pieces of work that its user is done with.
    """

    def __init__(self, reach: Reach) -> None:
        command, program = bundle()
        self._reach = reach
        self._inbox = Inbox(read_messages.TO_CLIENT)
        self._unread: deque[memoryview] = deque()
        self._asked: deque[tuple[bytes, ...]] = deque()
        self.answers = 0
        self.settled = 0
        self._channel = Channel(reach.transport, command)
        try:
            timeout = reach.transport.connect_timeout
            self.banner = handshake.greet(self._channel, program, timeout)
            self._hello()
        except BaseException:
            self.abort()
            raise

    def require(self, word: str) -> None:
        """Raise Unsupported where the receiver may not do this: `list`, `verify` or `get`."""
        if word not in self.banner.allowed:
            allowed = ",".join(sorted(self.banner.allowed))
            raise Unsupported(
                f"the receiver there may not {word}",
                detail=f"its --allow lists {allowed}",
                hint=f"add {word} to --allow in the line of our key in authorized_keys there, or"
                " use another key (remote.identity_file)",
            )

    # --- the questions ----------------------------------------------------------------------------

    def names(
        self,
        low: bytes,
        high: bytes,
        *,
        most: int = 0,
        on_stray: Callable[[int, str], None] = lambda kind, path: None,
    ) -> Iterator[list[tuple[bytes, int]] | read_messages.Listed]:
        """Pages of names and sizes, in order; the sum of all at the end."""
        self._send(read_messages.listing(low, high, most))
        with self._sense():
            last = b""
            count = strays = 0
            while True:
                kind, payload = self._next()
                if kind == framing.NAMES:
                    page = list(read_messages.read_names(payload))
                    previous = last
                    for digest, _ in page:
                        if (digest <= previous and previous) or not low <= digest <= high:
                            raise self._nonsense("names out of order")
                        previous = digest
                    last = previous
                    count += len(page)
                    if most and count > most:
                        raise self._nonsense("more names than were asked for")
                    yield page
                elif kind == framing.STRAY:
                    strays += 1
                    if strays > read_messages.MAX_STRAYS + read_messages.MAX_DIRECTORIES:
                        raise self._nonsense("strays without end")
                    on_stray(*read_messages.read_stray(payload))
                elif kind == framing.LISTED:
                    yield read_messages.read_listed(payload)
                    return
                else:
                    raise self._nonsense(f"a frame of type {kind} within a listing")

    def ask_verdicts(self, digests: Sequence[bytes]) -> None:
        """Have these hashed there; `verdicts` has the answers, in the order of asking."""
        self._send(read_messages.verifying(digests))
        self._asked.append(tuple(digests))

    def verdicts(self) -> read_messages.Verdicts:
        kind, payload = self._next()
        if kind != framing.VERDICTS:
            raise self._nonsense(f"a frame of type {kind} for a verdict")
        with self._sense():
            found = read_messages.read_verdicts(payload)
        if found.asked != len(self._asked.popleft()):
            raise self._nonsense("verdicts for another number of blobs")
        return found

    def ask_contents(self, digests: Sequence[bytes], offset: int = 0) -> None:
        """Have these sent, each once; `contents` takes the answers, in the order of asking."""
        once = tuple(dict.fromkeys(digests))
        self._send(read_messages.getting(once, offset))
        self._asked.append(once)

    def contents(self, taker: Taker) -> None:
        """Take all that was asked for with one `ask_contents`."""
        waiting = set(self._asked.popleft())

        def answered(digest: bytes) -> bytes:
            if digest not in waiting:
                raise self._nonsense("a blob that was not asked for")
            waiting.remove(digest)
            return digest

        large: write_messages.Large | None = None
        at = 0
        with self._sense():
            while True:
                kind, payload = self._next()
                if kind == framing.PIECE and large is not None:
                    piece = read_messages.read_piece(payload)
                    at += len(piece)
                    if at > large.size:
                        raise self._nonsense("more of a blob than was announced")
                    taker.piece(piece)
                elif kind == framing.BLOB_END and large is not None:
                    status, text = read_messages.read_blob_end(payload)
                    if status == read_messages.COMPLETE and at != large.size:
                        raise self._nonsense("less of a blob than was announced")
                    taker.end((text or "no reason given") if status == read_messages.BROKEN else "")
                    large = None
                elif large is not None:
                    raise self._nonsense(f"a frame of type {kind} within a blob")
                elif kind == framing.CONTENTS:
                    for digest, content in read_messages.read_contents(payload):
                        taker.whole(answered(digest), content)
                elif kind == framing.BLOB:
                    large = write_messages.read_large(payload)
                    answered(large.digest)
                    at = large.offset
                    taker.begin(large)
                elif kind == framing.NOT_GIVEN:
                    digest, verdict, text = read_messages.read_not_given(payload)
                    taker.not_given(answered(digest), verdict, text)
                elif kind == framing.GIVEN and not waiting:
                    return
                else:
                    raise self._nonsense(f"a frame of type {kind} among contents")

    def sums(
        self, digest: bytes, not_given: Callable[[bytes, int, str], None]
    ) -> tuple[int, bytes] | None:
        """(size, hashes of all its blocks joined) of a blob there; None once not_given was told."""
        self._send(read_messages.summing(digest))
        found = bytearray()
        size = 0
        refused = False
        with self._sense():
            while True:
                kind, payload = self._next()
                if kind == framing.BLOCK_SUMS:
                    size, some = read_messages.read_block_sums(payload)
                    found += some
                    if len(found) > _MAX_SUMS:
                        raise self._nonsense("hashes without end")
                elif kind == framing.NOT_GIVEN:
                    _, verdict, text = read_messages.read_not_given(payload)
                    not_given(digest, verdict, text)
                    refused = True
                elif kind == framing.GIVEN:
                    break
                else:
                    raise self._nonsense(f"a frame of type {kind} among hashes of blocks")
        if refused:
            return None
        if len(found) != -(-size // read_messages.BLOCK_BYTES) * read_messages.BLOCK_SUM_BYTES:
            raise self._nonsense("another number of hashes than of blocks")
        return size, bytes(found)

    def blocks(
        self, digest: bytes, size: int, numbers: Sequence[int], take: Callable[[memoryview], None]
    ) -> str:
        """Have take called for each of these blocks of a blob of that size, in order; what went
        wrong, or nothing.
        """
        self._send(read_messages.getting_blocks(digest, numbers))
        lengths = deque(
            min(read_messages.BLOCK_BYTES, size - n * read_messages.BLOCK_BYTES) for n in numbers
        )
        problem = ""
        with self._sense():
            while True:
                kind, payload = self._next()
                if kind == framing.PIECE:
                    piece = read_messages.read_piece(payload)
                    if not lengths or len(piece) != lengths.popleft():
                        raise self._nonsense("a block that was not asked for")
                    take(piece)
                elif kind == framing.BLOB_END:
                    status, text = read_messages.read_blob_end(payload)
                    problem = (text or "no reason given") if status else ""
                elif kind == framing.NOT_GIVEN:
                    problem = read_messages.read_not_given(payload)[2] or "no reason given"
                elif kind == framing.GIVEN:
                    break
                elif kind != framing.BLOB:
                    raise self._nonsense(f"a frame of type {kind} among blocks")
        if lengths and not problem:
            raise self._nonsense("fewer blocks than were asked for")
        return problem

    def close(self) -> None:
        try:
            self._send(framing.frame(framing.BYE))
        except BackupError:
            return
        self._channel.close(framing.frame(framing.LEFT))

    def abort(self) -> None:
        """End it now. Never raises."""
        self._channel.abort()

    # --- the connection ---------------------------------------------------------------------------

    def _hello(self) -> None:
        reach = self._reach
        self._send(handshake.hello(reach, self.banner, sync="syncfs", reading=1))
        kind, payload = self._next()
        if kind != framing.READY:
            raise self._nonsense("no READY")
        if not write_messages.read_fields(payload).get("placed"):
            raise explain_gone(f"{reach.root}/by-hash: no such directory")

    def _send(self, frame: bytes) -> None:
        try:
            patience = self._reach.run.stall_timeout
            self._channel.send(memoryview(frame), self._keep, patience=patience)
        except BackupError:
            self.abort()
            raise

    def _keep(self, data: bytes) -> None:
        self._unread.append(memoryview(data))

    def _next(self) -> tuple[int, memoryview]:
        """The next frame that is not a sign of life; its payload holds until the one after it."""
        asked = time.monotonic()
        while True:
            try:
                found = self._inbox.next()
                if found is None:
                    self._fill(asked)
                    continue
                self.answers += 1
                if found[0] == framing.ERROR:
                    raise handshake.refusal(*write_messages.read_error(found[1]))
                if found[0] not in (framing.BUSY, framing.PONG):
                    return found
            except framing.ProtocolError as error:
                raise self._nonsense(str(error)) from error
            except BackupError:
                self.abort()
                raise

    @contextmanager
    def _sense(self) -> Iterator[None]:
        """End the session for what cannot be understood."""
        try:
            yield
        except framing.ProtocolError as error:
            raise self._nonsense(str(error)) from error

    def _fill(self, asked: float) -> None:
        self._reach.cancelled()
        if not self._unread:
            self._channel.hear(self._keep, _POLL_SECONDS)
        self._require_hope(asked)
        if not self._unread:
            return
        data = self._unread.popleft()
        space = self._inbox.space()
        count = min(len(space), len(data))
        space[:count] = data[:count]
        self._inbox.filled(count)
        if count < len(data):
            self._unread.appendleft(data[count:])

    def _require_hope(self, asked: float) -> None:
        """Silence has an end, and so have signs of life with no answer after them."""
        run, now = self._reach.run, time.monotonic()
        if not self._unread and now - max(asked, self._channel.heard) > run.stall_timeout:
            said = f"nothing came for {run.stall_timeout:.0f} s"
        elif now - asked > PATIENCE_FACTOR * run.receipt_timeout:
            said = f"nothing but signs of life came for {now - asked:.0f} s"
        else:
            return
        raise RemoteUnreachable("the remote does not answer", detail=said)

    def _nonsense(self, said: str) -> BackupError:
        self.abort()
        return RemoteNonsense("the remote answers nonsense", detail=said[:200])
