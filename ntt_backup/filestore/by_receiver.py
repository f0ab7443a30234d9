"""A receiver keeps the files of an area, over one connection; see `contract.FileStore`.

Questions are sent before earlier ones are answered, and the answers come in the order of asking.
Whatever comes is handed to the oldest question, whoever waits for what. Of several threads that
wait, one has the connection and hears for all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from socket import socketpair
from threading import Condition, Event, Thread, current_thread
from typing import Final

from ntt_backup.client.receiver_connection import OLD, SLOW, ReceiverConnection
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import BackupError, NameTaken, RemoteDenied
from ntt_backup.filestore.contract import (
    Area,
    Buffer,
    FileMissing,
    FileUnreadable,
    Hash,
    Progress,
    Range,
    StoredFile,
    Sum,
    ask_ahead,
    checksum,
    not_what_was_sent,
)
from ntt_backup.wire import messages
from ntt_backup.wire.framing import MAX_CHUNK, ProtocolError
from ntt_backup.wire.messages import MAX_FILE_NAMES, MAX_OPEN
from ntt_backup.wire.stored_names import is_told

_REQUESTS: Final = 1024
_POLL_SECONDS: Final = 0.5
# Far below a receiver's --idle-timeout: hashing a large file takes hours.
_PING_SECONDS: Final = 60.0
# The kind of the frames that answer a question, and the kinds that end the answer.
_ANSWERS: Final = {
    messages.FILES: (messages.FILE_NAMES, (messages.DONE,)),
    messages.READ: (messages.PIECE, (messages.BLOB_END, messages.FILE_SAID)),
    messages.FILE_END: (messages.FILE_SUM, (messages.FILE_SUM,)),
    messages.PUBLISH: (messages.FILE_SAID, (messages.FILE_SAID,)),
    messages.PROVE: (messages.FILE_SUM, (messages.FILE_SUM, messages.FILE_SAID)),
    messages.REMOVE: (messages.DONE, (messages.DONE,)),
}


class _Question:
    """A question that was asked, and what has come of its answer.

    Attributes:
        pieces: Bytes of a file.
        files: A listing.
        sum: Of a file that has ended.
        end: The kind of the last frame, the number in it, and the text; None before it.
    """

    def __init__(self, kind: int, area: str, most: int) -> None:
        self._kind, self._ends = _ANSWERS[kind]
        self.area = area
        # Of the bytes, or of the names, that answer it.
        self._most = most
        self.pieces: list[bytes] = []
        self.files: list[StoredFile] = []
        self.sum = Sum(0, b"")
        self.end: tuple[int, int, str] | None = None

    def hear(self, kind: int, payload: memoryview) -> None:
        """Takes the next frame of the answer. Raises ProtocolError."""
        if kind in self._ends:
            self.end = (kind, *self._read_end(kind, payload))
        elif kind != self._kind:
            raise ProtocolError(f"a frame of type {kind} in another answer")
        elif kind == messages.PIECE:
            self.pieces.append(bytes(messages.PIECE.read(payload)))
            self._most -= len(self.pieces[-1])
        else:
            for name, size, arrived in messages.FILE_NAMES.read(payload, self.area):
                if self.files and name <= self.files[-1].name:
                    raise ProtocolError("names out of order")
                self.files.append(StoredFile(name, size, arrived))
                self._most -= 1
        if self._most < 0:
            raise ProtocolError("more than was asked for")

    def _read_end(self, kind: int, payload: memoryview) -> tuple[int, str]:
        if kind == messages.FILE_SUM:
            self.sum = Sum(*messages.FILE_SUM.read(payload))
            return 0, ""
        if kind == messages.FILE_SAID:
            return messages.FILE_SAID.read(payload)
        if kind == messages.BLOB_END:
            return messages.BLOB_END.read(payload)
        number = messages.DONE.read(payload)
        if self._kind == messages.FILE_NAMES and number != len(self.files):
            raise ProtocolError("another number of names than were told")
        return number, ""


class FileStoreByReceiver(ReceiverConnection):
    """See the module.

    Raises:
        Unsupported: The remote has no Python that can run the receiver.
        BackupError: Of the class `area.denied`: a forced command does not allow the area.
    """

    hashes = True

    def __init__(self, spec: SessionSpec, area: Area) -> None:
        super().__init__(spec, messages.to_client(messages.WITH_FILES))
        self.area = area
        self._asked: deque[_Question] = deque()
        self.slots = list(range(MAX_OPEN))
        self.commits: list[FileByReceiver] = []
        self._moved = 0.0
        self._sent = self.added = self.unsent = 0
        # Why nothing can be said any more.
        self._lost: BackupError | None = None
        # Whether a thread has the connection, and how many want to say something.
        self._turn = Condition()
        self._busy = False
        self._speakers = 0
        self._woken, self._wake = socketpair()
        self._woken.setblocking(False)
        self._closing = Event()
        with self.checked():
            if area.word not in self.banner.allowed:
                message = f"the key leads to a forced command, which takes no {area.files}"
                if area.word == "prune":
                    message = f"the key leads to a forced command, which removes no {area.files}"
                raise self.refusal(area.denied, message, area.word, OLD + area.instead)
            self.ready = self.hello(files=area.name)
            self.require_identity()
        self.placed = bool(self.ready.get("placed") or self.ready.get("packs"))
        self.on_wait: Callable[[], None] = lambda: None
        self._pinging = Thread(target=self._show_life, args=(_PING_SECONDS,), daemon=True)
        self.channel.on_bytes = self._count
        self._pinging.start()

    def close(self) -> None:
        self._closing.set()
        # A process with threads could not be copied, as a restore is into its jobs.
        self._pinging.join()
        with suppress(BackupError), self._alone():
            super().close()

    def abort(self) -> None:
        self._closing.set()
        super().abort()

    def list(self, below: str = "") -> Iterator[StoredFile]:
        return iter(self.listed(self.ask_for_files(below), below))

    def ask_for_files(self, below: str) -> _Question:
        """Has the remote list files, see `list`."""
        return self._ask(messages.FILES, messages.FILES.frame(below), self.area.most)

    def listed(self, question: _Question, below: str) -> Sequence[StoredFile]:
        """Returns the files that answer a question."""
        self._await(question)
        with self.checked():
            if not all(one.name.startswith(below) for one in question.files):
                raise ProtocolError("names that were not asked for")
        return question.files

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return ask_ahead(ranges, _REQUESTS, self._ask_for, self._content)

    def stat(self, name: str) -> StoredFile | None:
        return next(self.list(self.area.require_name(name)), None)

    def fetch(self, name: str, start: int, length: int) -> bytes:
        return self._content(self._ask_for(Range(name, start, length)))

    def prove(self, name: str, by: Hash = "sha256") -> str:
        if by not in self.banner.hashes:
            return ""
        size = 0 if (found := self.stat(name)) is None else found.size
        return checksum(self.await_sum(name, self.ask_sum(name, by), size).sha256)

    def write(self, name: str, size: int = 0, *, look: bool = False) -> FileByReceiver:
        del size
        looked = self.ask_for_files(self.area.require_name(name)) if look else None
        while not self.slots and self.commits:
            self.wait(_POLL_SECONDS)
        return FileByReceiver(self, self.area.require_name(name), self.slots.pop(), looked)

    def wait(self, timeout: float) -> None:
        self.commits = [one for one in self.commits if not one.advance()]
        if self.commits:
            with self._alone():
                self._hear_more(timeout)
                patience = max(one.size for one in self.commits) / SLOW
                self.require_life(self._moved, patience)
            self.commits = [one for one in self.commits if not one.advance()]

    @property
    def progress(self) -> Progress:
        pace = self.channel.pace
        throttled = time.monotonic() if pace is not None and pace.delay() else 0.0
        awaited, heard = len(self._asked), self.received
        return Progress(self._sent, self.added, self.unsent, awaited, heard, True, throttled)

    def try_out(self) -> None:
        trial = FileByReceiver(self, "a trial", self.slots.pop())
        trial.add(b"0")
        trial.finish()
        trial.discard()

    def remove(self, names: Sequence[str]) -> int:
        checked = [self.area.require_name(name) for name in names]
        if self.area.replace and "replace" not in self.banner.allowed:
            raise RemoteDenied(
                f"the remote is append-only: it removes no {self.area.files}",
                detail=f"its --allow lists {','.join(sorted(self.banner.allowed))}",
                hint="remove them with a key whose forced command allows replace, too",
            )
        removed = 0
        for at in range(0, len(checked), MAX_FILE_NAMES):
            frame = messages.REMOVE.frame(checked[at : at + MAX_FILE_NAMES])
            removed += self._await(self._ask(messages.REMOVE, frame))[1]
        return removed

    # --- a file on its way ------------------------------------------------------------------------

    def send_data(self, slot: int, data: Buffer) -> None:
        """Sends the next bytes of the file in a slot, at most MAX_CHUNK."""
        before, after = messages.FILE_DATA.around(data, slot)
        with self._alone():
            for part in (before, data, after):
                self.send(part, self._hear)

    def poll(self) -> None:
        """Reads what the remote has sent meanwhile. Raises where the connection has ended."""
        with self._alone():
            self._hear_more(0.0)

    def begin_end(self, slot: int) -> _Question:
        """Has the remote make the file in a slot durable, and sum what lies on its disk."""
        return self._ask(messages.FILE_END, messages.FILE_END.frame(slot))

    def ask_sum(self, name: str, by: Hash = "sha256") -> _Question:
        """Has the remote sum a file that has a name."""
        frame = messages.PROVE.frame(messages.HASHES[by], self.area.require_name(name))
        return self._ask(messages.PROVE, frame)

    def require_same(self, name: str, theirs: Sum, ours: Sum) -> None:
        """Raises RemoteCannotStore where a sum is not that of what was sent."""
        if theirs != ours:
            found = f"{theirs.size} bytes with {theirs.sha256.hex()}"
            raise not_what_was_sent(self.area, name, ours, found)

    def begin_publish(self, slot: int, name: str) -> _Question:
        """Has the remote give the file in a slot its name."""
        return self._ask(messages.PUBLISH, messages.PUBLISH.frame(slot, name))

    def is_taken(self, question: _Question) -> bool:
        """Returns whether the name is taken that a file was to be given."""
        _, status, _ = self._await(question)
        if status not in (messages.TAKEN, messages.SUCCEEDED):
            with self._alone():
                raise ProtocolError(f"the status {status} for a name")
        return status == messages.TAKEN

    def discard_file(self, slot: int) -> None:
        """Has the remote remove the file in a slot, as it does when the connection is lost."""
        self.slots.append(slot)
        if not self.channel.ended:
            self._say(messages.DISCARD.frame(slot))

    # --- frames -----------------------------------------------------------------------------------

    def _ask_for(self, one: Range) -> tuple[Range, _Question]:
        name = self.area.require_name(one.name)
        if not is_told(self.area.name, name):
            self.require("get")
        frame = messages.READ.frame(one.start, one.length, name)
        return one, self._ask(messages.READ, frame, one.length)

    def _content(self, asked: tuple[Range, _Question]) -> bytes:
        wanted, question = asked
        kind, status, text = self._await(question)
        if kind == messages.FILE_SAID or status == messages.BROKEN:
            raise self._not_told(wanted.name, status if kind == messages.FILE_SAID else 0, text)
        return question.pieces[0] if len(question.pieces) == 1 else b"".join(question.pieces)

    def await_sum(self, name: str, question: _Question, size: int) -> Sum:
        """Returns the sum that answers a question. size: of the file in bytes, for the patience."""
        kind, status, text = self._await(question, size / SLOW)
        if kind == messages.FILE_SAID:
            raise self._not_told(name, status, text)
        return question.sum

    def _not_told(self, name: str, status: int, text: str) -> Exception:
        """Returns the error for a file whose content or sum does not come."""
        if status == messages.MISSING:
            return FileMissing(name)
        return FileUnreadable(
            f"{self.area.file} cannot be read",
            detail=text or name,
            hint=f"look at the remote's disk, and at the owner of {self.area.name}/ there",
        )

    def _ask(self, kind: int, frame: bytes, most: int = 0) -> _Question:
        question = _Question(kind, self.area.name, most)
        self._moved = time.monotonic()
        with self._alone():
            self._asked.append(question)
            self.send(frame, self._hear)
        return question

    def _say(self, frame: bytes) -> None:
        with self._alone():
            self.send(frame, self._hear)

    @contextmanager
    def _alone(self, *, speaks: bool = True) -> Iterator[None]:
        """Gives this thread the connection. speaks: a thread that only hears makes room for it."""
        with self._turn:
            self._speakers += speaks
            if self._busy and speaks:
                self._wake.send(b"\0")
            self._turn.wait_for(lambda: not self._busy)
            self._speakers -= speaks
            self._busy = True
        try:
            if self._lost is not None:
                raise self._lost
            with self.checked():
                yield
        except BackupError as error:
            self._lost = self._lost or error
            raise
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _show_life(self, every: float) -> None:
        """Lets the remote know that somebody is still here, while there is nothing to say."""
        while not self._closing.wait(every):
            try:
                if not self.channel.ended:
                    self._say(messages.PING.frame(bytes(8)))
            except BackupError:
                return

    def _await(self, question: _Question, more_patience: float = 0.0) -> tuple[int, int, str]:
        """Returns the end of the answer. more_patience: see `require_life`."""
        self._moved = time.monotonic()
        while question.end is None:
            self.spec.cancelled()
            with self._turn:
                if self._busy or self._speakers:
                    self._turn.wait(_POLL_SECONDS)
                    continue
            with self._alone(speaks=False):
                if question.end is None:
                    self._hear_more(_POLL_SECONDS)
                    self.require_life(self._moved, more_patience)
        return question.end

    def _hear_more(self, timeout: float) -> None:
        """Waits for an answer, or for another thread that has something to say."""
        self.channel.hear(self._hear, timeout, beside=(self._woken.fileno(),))
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _count(self, sent: int) -> None:
        self._sent += sent
        if current_thread() is not self._pinging:
            self.on_wait()

    def _hear(self, data: bytes) -> None:
        for kind, payload in self.frames(data):
            self._moved = time.monotonic()
            if not self._asked:
                raise ProtocolError(f"a frame of type {kind} without a question")
            self._asked[0].hear(kind, payload)
            if self._asked[0].end is not None:
                self._asked.popleft()


class FileByReceiver:
    """A file on its way; see `contract.NewFile`. looked: the question whether the store has a file
    of that name; then nothing is sent.
    """

    def __init__(
        self, store: FileStoreByReceiver, name: str, slot: int, looked: _Question | None = None
    ) -> None:
        self._store = store
        self._name = name
        self._slot = slot
        self._looked = looked
        self._known = False
        self._digest = sha256()
        self.size = 0
        self._buffer = memoryview(bytearray(MAX_CHUNK))
        self._used = 0
        self._open = True
        # The kind of the question whose answer `advance` awaits, and the question.
        self._asked: tuple[int, _Question] | None = None
        self._result: StoredFile | NameTaken | None = None
        self.poll = store.poll

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        rest = memoryview(data)
        self.size += len(rest)
        self._store.added += len(rest)
        while rest and not self._known:
            count = min(len(rest), MAX_CHUNK - self._used)
            self._buffer[self._used : self._used + count] = rest[:count]
            self._used += count
            self._store.unsent += count
            rest = rest[count:]
            if self._used == MAX_CHUNK:
                self._flush()

    def finish(self) -> Sum:
        ours = self._ours
        self._flush()
        question = self._store.begin_end(self._slot)
        theirs = self._store.await_sum(self._name, question, ours.size)
        self._store.require_same(self._name, theirs, ours)
        return ours

    def publish(self) -> None:
        self._open = False
        question = self._store.begin_publish(self._slot, self._name)
        taken = self._store.is_taken(question)
        self._store.slots.append(self._slot)
        if taken:
            raise NameTaken(self._name, self._store.area.file)

    def commit(self) -> None:
        self._open = False
        self._flush()
        if self._known:
            self._asked = messages.PROVE, self._store.ask_sum(self._name)
        else:
            self._asked = messages.FILE_END, self._store.begin_end(self._slot)
        self._store.commits.append(self)

    @property
    def settled(self) -> bool:
        return self._result is not None

    def result(self) -> StoredFile:
        assert self._result is not None
        if isinstance(self._result, StoredFile):
            return self._result
        raise self._result

    def advance(self) -> bool:
        """Takes the next step of a commit whose answer has come; returns whether it was the last.
        An error comes again with the next call.

        The name may be taken by this very file: an earlier answer was lost.
        """
        assert self._asked is not None
        kind, question = self._asked
        if self.settled or question.end is None:
            return self.settled
        store, ours = self._store, self._ours
        if kind == messages.FILE_END:
            theirs = store.await_sum(self._name, question, 0)
            store.require_same(self._name, theirs, ours)
            self._asked = messages.PUBLISH, store.begin_publish(self._slot, self._name)
            return False
        if kind == messages.PUBLISH and store.is_taken(question):
            self._asked = messages.PROVE, store.ask_sum(self._name)
            return False
        same = True
        if kind == messages.PROVE:
            try:
                same = store.await_sum(self._name, question, 0) == ours
            except (FileMissing, FileUnreadable):
                same = False
        arrived = datetime.now(UTC)
        file = StoredFile(self._name, ours.size, arrived, checksum=checksum(ours.sha256))
        self._result = file if same else NameTaken(self._name, store.area.file)
        store.slots.append(self._slot)
        return True

    def discard(self) -> None:
        if self._open:
            self._open = False
            with suppress(BackupError):
                self._store.discard_file(self._slot)

    @property
    def _ours(self) -> Sum:
        return Sum(self.size, self._digest.digest())

    def _flush(self) -> None:
        if self._looked is not None:
            looked, self._looked = self._looked, None
            self._known = bool(self._store.listed(looked, self._name))
        if self._used and not self._known:
            self._store.send_data(self._slot, self._buffer[: self._used])
        self._store.unsent -= self._used
        self._used = 0
