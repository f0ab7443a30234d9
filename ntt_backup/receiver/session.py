"""The receiving end of a session: one loop that reads frames, and never waits for a disk.

Frames come in on one descriptor and answers go out on another, both without blocking; what takes
long is a sync, and that runs in a thread of its own (`barrier`), which ends with a byte on a pipe.
So the link is kept busy while earlier batches settle. All that can grow is bounded: the inbox, the
batches without a receipt, the answers nobody reads. `docs/protocol.md` is the contract.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.blobdir.syscalls import can_syncfs
from ntt_backup.receiver.b3sum import HOW_TO_GET, B3sum
from ntt_backup.receiver.group_commit import Settling
from ntt_backup.receiver.name_check import Naming
from ntt_backup.receiver.publish import Places
from ntt_backup.receiver.read_session import Answering
from ntt_backup.receiver.sync_thread import Barrier
from ntt_backup.receiver.workspace import Ground, Refusal, gone
from ntt_backup.receiver.write_session import Intake
from ntt_backup.wire import framing, read_messages, write_messages
from ntt_backup.wire.framing import Inbox, ProtocolError
from ntt_backup.wire.write_messages import NAME_ALPHABET

if TYPE_CHECKING:
    from ntt_backup.receiver.codec import Decompress
    from ntt_backup.receiver.hashing import NewHasher

ALLOWED = ("put", "list", "verify", "get", "replace")
REQUIRED = ("blake3",)

_BUSY_SECONDS = 5.0
# How long it sleeps at most before it looks whether it is still wanted.
_LOOK_SECONDS = 1.0
_LAST_WORDS_SECONDS = 10.0
# Answers that the client does not read; beyond this nothing more is read from it either.
_UNREAD_ANSWERS = 1 << 20
_OWNER_ALPHABET = frozenset("0123456789abcdefghijklmnopqrstuvwxyz")
_FAMILIES = {"hash": ("sha256", "blake3"), "sync": ("syncfs", "fsync")}


class Terms(NamedTuple):
    """What a receiver may do, and has. root: the only one that may be asked for; None for any.
    b3sum: what checks names where no hasher of BLAKE3 does. require: the words of `--require`.
    """

    root: str | None
    allow: frozenset[str]
    idle_timeout: float
    hashes: dict[int, NewHasher]
    codecs: dict[int, Decompress]
    b3sum: B3sum | None = None
    require: frozenset[str] = frozenset()

    @property
    def checks_names(self) -> bool:
        """Whether BLAKE3 can be computed."""
        return write_messages.BLAKE3 in self.hashes or self.b3sum is not None

    @property
    def lacking(self) -> str:
        """What is required and not there, and how to get it; nothing where all is there."""
        if "blake3" not in self.require or self.checks_names:
            return ""
        return f"--require blake3 is given, but this machine has no BLAKE3: {HOW_TO_GET}"


class Receiver:
    """One session between the banner and the end of the connection."""

    def __init__(self, terms: Terms, reading: int, writing: int) -> None:
        self._terms = terms
        self._reading = reading
        self._writing = writing
        self._inbox = Inbox(read_messages.TO_RECEIVER)
        self._outbox = bytearray()
        self._deaf = False  # Nobody takes our answers any more.
        self._ended = False
        self._dismissed = False  # The client has said BYE.
        self._moved = time.monotonic()
        self._spoke = self._moved
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        self._ground: Ground | None = None
        self._by_file = False
        self._barrier: Barrier | None = None
        self._answering: Answering | None = None
        self._intake: Intake
        self._settling: Settling
        self._handlers: dict[int, Callable[[memoryview], None]] = {framing.HELLO: self._hello}

    def run(self) -> int:
        """The session; the exit status. Nothing of it stays in the stage, however it ends."""
        refusal: Refusal | None = None
        try:
            try:
                self._loop()
            except Refusal as found:
                refusal = found
            except ProtocolError as found:
                refusal = Refusal("protocol", str(found))
            try:
                self._finish()
            except Refusal as found:
                refusal = refusal or found
        finally:
            if self._answering is not None:
                self._answering.close()
            if self._ground is not None:
                self._ground.leave()
        if refusal is not None:
            self._say(write_messages.error(refusal.code, refusal.text))
        elif self._dismissed:
            self._say(framing.frame(framing.LEFT))
        self._last_words()
        os.close(self._wake)
        os.close(self._wake_end)
        return 0 if refusal is None else 1

    def _loop(self) -> None:
        while not self._ended:
            if self._barrier is not None:
                self._settling.advance()
                if self._settling.full:
                    self._wait(reading=False)
                    continue
            if len(self._outbox) > _UNREAD_ANSWERS:
                self._wait(reading=False)
                continue
            if self._answering is not None and self._answering.busy:
                self._go_on(self._answering)
                continue
            found = self._inbox.next()
            if found is not None:
                self._take(*found)
            elif not self._read():
                self._wait(reading=True)

    def _go_on(self, answering: Answering) -> None:
        """The next frame of an answer, once it is there. What nobody hears needs no answer."""
        frame = answering.next()
        if frame is not None:
            self._say(frame)
        elif answering.busy:
            self._wait(reading=False)
        self._ended = self._deaf

    def _finish(self) -> None:
        """What is committed is settled, whether or not anyone still listens."""
        self._ended = True
        if self._barrier is None:
            return
        try:
            self._intake.close()
            self._settling.advance()
            while self._settling.unsettled:
                self._wait(reading=False)
                self._settling.advance()
        finally:
            self._barrier.stop()

    def _take(self, kind: int, payload: memoryview) -> None:
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a frame of type {kind} is not expected here")
        handler(payload)

    # --- the frames

    def _hello(self, payload: memoryview) -> None:
        asked = write_messages.read_fields(payload)
        protocol = asked.get("protocol")
        if protocol != framing.PROTOCOL:
            raise Refusal("protocol", f"protocol {protocol} is not spoken here")
        root, owner, run, slot = (_text(asked, name) for name in ("root", "owner", "run", "slot"))
        for name, value, most, alphabet in (
            ("owner", owner, 32, _OWNER_ALPHABET),
            ("run", run, 64, NAME_ALPHABET),
            ("slot", slot, 32, NAME_ALPHABET),
        ):
            if not 1 <= len(value) <= most or not alphabet.issuperset(value):
                raise ProtocolError(f"{name} is not a name")
        for name, choices in _FAMILIES.items():
            if asked.get(name) not in choices:
                raise ProtocolError(f"{name} is none of {', '.join(choices)}")
        if self._terms.lacking:
            raise Refusal("refused", self._terms.lacking)
        kind = write_messages.HASHES[_text(asked, "hash")]
        if kind not in self._terms.hashes:
            raise ProtocolError("a hash that was not offered")
        if self._terms.root is not None and not _same_path(root, self._terms.root):
            raise Refusal("refused", f"this receiver is for {self._terms.root} only")
        reading = bool(asked.get("reading"))
        if not reading and "put" not in self._terms.allow:
            raise Refusal("refused", "this receiver takes no blobs (--allow)")
        # Two spellings of one path may lead to two places, where a symlink stands before a `..`.
        ground = Ground(self._terms.root or root, owner, run, slot, self._alive, reading)
        self._ground = ground
        self._by_file = by_file = asked["sync"] == "fsync" or not can_syncfs(ground.device)
        self._handlers = {framing.PING: self._ping, framing.BYE: self._bye}
        if reading:
            terms = self._terms
            self._answering = Answering(
                ground, terms.allow, terms.hashes, terms.b3sum, self._wake_end, self._alive
            )
            self._handlers.update(self._answering.handlers())
        else:
            self._begin(ground, kind, by_file)
        self._ready(ground)

    def _begin(self, ground: Ground, kind: int, by_file: bool) -> None:
        terms = self._terms
        may_replace = terms.checks_names or "replace" in terms.allow
        naming = Naming(terms.b3sum, ground.stage, self._alive) if terms.b3sum else None
        barrier = Barrier(ground, by_file, self._wake_end)
        self._settling = Settling(
            barrier,
            Places(ground, may_replace, by_file),
            ground.stage,
            kind,
            self._answer,
            self._sync_failed,
        )
        self._intake = Intake(
            ground,
            kind,
            terms.hashes,
            naming,
            terms.codecs,
            by_file,
            self._alive,
            self._settling.fail,
        )
        self._barrier = barrier
        self._handlers.update(
            {
                framing.BATCH: self._intake.begin,
                framing.PACK: self._intake.pack,
                framing.LARGE: self._intake.large,
                framing.DATA: self._intake.data,
                framing.END: self._intake.end,
                framing.COMMIT: self._commit,
                framing.ABORT: self._abort,
                framing.ASK_OFFSET: self._ask_offset,
                framing.PLACE: self._place,
            }
        )

    def _ready(self, ground: Ground) -> None:
        free, total = ground.free()
        system = os.uname()
        self._say(
            write_messages.fields(
                framing.READY,
                {
                    "free_bytes": free,
                    "total_bytes": total,
                    "clock_us": int(time.time() * 1e6),
                    "system": f"{system.sysname} {system.release}",
                    "sync": "fsync" if self._by_file else "syncfs",
                    "placed": int(ground.placed),
                },
            )
        )

    def _commit(self, payload: memoryview) -> None:
        if self._ground is None or not self._ground.placed:
            raise gone()
        batch = self._intake.commit(payload)
        if batch is not None:
            self._settling.commit(batch)

    def _abort(self, payload: memoryview) -> None:
        number = self._intake.abort(payload)
        if number is not None:
            self._say(write_messages.numbered(framing.ABORTED, number))

    def _ask_offset(self, payload: memoryview) -> None:
        self._say(write_messages.offset(*self._intake.offer(payload)))

    def _place(self, payload: memoryview) -> None:
        if self._ground is not None:
            self._ground.place()
            self._ready(self._ground)

    def _ping(self, payload: memoryview) -> None:
        self._say(framing.frame(framing.PONG, payload))

    def _bye(self, payload: memoryview) -> None:
        if self._barrier is not None and not self._intake.between_batches:
            raise ProtocolError("a BYE within a batch")
        if self._inbox.waiting:
            raise ProtocolError("more after a BYE")
        self._ended = self._dismissed = True

    def _answer(self, receipt: write_messages.Receipt) -> None:
        if receipt.outcome == write_messages.SETTLED and self._ground and not self._ground.in_place:
            raise gone()
        self._say(write_messages.receipt(receipt))

    def _sync_failed(self, problem: OSError) -> None:
        self._intake.fail(problem)

    # --- the descriptors

    def _alive(self) -> None:
        """Called while one frame takes long: others' receipts go out, and a sign of life."""
        if self._barrier is not None:
            self._settling.advance()
        if time.monotonic() - self._spoke >= _BUSY_SECONDS:
            self._say(framing.frame(framing.BUSY))

    def _say(self, frame: bytes) -> None:
        self._outbox += frame
        self._spoke = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        while self._outbox and not self._deaf:
            try:
                sent = os.write(self._writing, self._outbox)
            except BlockingIOError:
                return
            except OSError:
                self._deaf = True
                break
            del self._outbox[:sent]
            self._moved = time.monotonic()
        if self._deaf:
            self._outbox.clear()

    def _read(self) -> bool:
        """Take what is there; False where nothing is."""
        try:
            count = os.readv(self._reading, [self._inbox.space()])
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if count == 0:
            self._ended = True
            return True
        self._inbox.filled(count)
        return True

    def _wait(self, reading: bool) -> None:
        """Until a descriptor can go on. Raises Refusal when nothing has moved for too long."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if reading:
            poll.register(self._reading, select.POLLIN)
        if self._outbox:
            poll.register(self._writing, select.POLLOUT)
        ready = poll.poll(min(_LOOK_SECONDS, self._terms.idle_timeout) * 1000)
        now = time.monotonic()
        for fd, _ in ready:
            if fd == self._wake:
                os.read(self._wake, 64)
            elif fd == self._writing:
                self._flush()
        if any(fd != self._wake for fd, _ in ready):
            self._moved = now
        answering = self._answering is not None and self._answering.busy and not self._outbox
        if answering or (self._barrier is not None and self._settling.unsettled):
            self._moved = now
            if now - self._spoke >= _BUSY_SECONDS and not self._outbox:
                self._say(framing.frame(framing.BUSY))
        if not self._ended and self._ground is not None and self._ground.superseded:
            raise Refusal("superseded", "a newer session of this worker has begun")
        if now - self._moved > self._terms.idle_timeout:
            raise Refusal("idle", f"nothing was heard for {self._terms.idle_timeout:.0f} s")

    def _last_words(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._outbox and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self._writing, select.POLLOUT)
            poll.poll(_LAST_WORDS_SECONDS * 1000)
            self._flush()


def _text(asked: dict[str, write_messages.Field], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is missing")
    return value


def _same_path(asked: str, allowed: str) -> bool:
    return os.path.normpath(asked) == os.path.normpath(allowed)
