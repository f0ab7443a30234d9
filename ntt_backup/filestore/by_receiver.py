"""A receiver keeps the files of an area, over one connection; see `contract.FileStore`.

Questions are sent before earlier ones are answered, and the answers come in the order of asking.
Whatever comes is handed to the oldest question, whoever waits for what.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from threading import Event, RLock, Thread
from typing import Final

from ntt_backup.client.connection import OLD, SLOW, ReceiverQuestions, SessionSpec
from ntt_backup.errors import BackupError, NameTaken, RemoteCannotStore, RemoteDenied
from ntt_backup.filestore.contract import (
    Area,
    Buffer,
    FileMissing,
    FileUnreadable,
    Range,
    StoredFile,
    Sum,
    ask_ahead,
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
        self._area = area
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
            for name, size, arrived in messages.FILE_NAMES.read(payload, self._area):
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


class FileStoreByReceiver(ReceiverQuestions):
    """See the module.

    Raises:
        Unsupported: The remote has no Python that can run the receiver.
        BackupError: Of the class `area.denied`: a forced command does not allow the area.
    """

    def __init__(self, spec: SessionSpec, area: Area) -> None:
        super().__init__(spec, messages.to_client(messages.WITH_FILES))
        self._area = area
        self._asked: deque[_Question] = deque()
        self._slots = list(range(MAX_OPEN))
        self._moved = 0.0
        # Why nothing can be said any more.
        self._lost: BackupError | None = None
        self._talking = RLock()
        self._closing = Event()
        with self._connection.checked():
            if area.word not in self.banner.allowed:
                message = f"the key leads to a forced command, which takes no {area.files}"
                raise self.refusal(area.denied, message, area.word, OLD + area.instead)
            ready = self._connection.hello(files=area.name)
        self.placed = bool(ready.get("placed"))
        self._pinging = Thread(target=self._show_life, args=(_PING_SECONDS,), daemon=True)
        self._pinging.start()

    def close(self) -> None:
        self._closing.set()
        with self._talking:
            super().close()
        # A process with threads could not be copied, as a restore is into its jobs.
        self._pinging.join()

    def list(self, below: str = "") -> Iterator[StoredFile]:
        question = self._ask(messages.FILES, messages.FILES.frame(below), self._area.most)
        self._await(question)
        with self._connection.checked():
            if not all(one.name.startswith(below) for one in question.files):
                raise ProtocolError("names that were not asked for")
        return iter(question.files)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return ask_ahead(ranges, _REQUESTS, self._ask_for, self._content)

    def write(self, name: str) -> FileByReceiver:
        return FileByReceiver(self, self._area.require_name(name), self._slots.pop())

    def try_out(self) -> None:
        trial = FileByReceiver(self, "a trial", self._slots.pop())
        trial.add(b"0")
        trial.finish()
        trial.discard()

    def remove(self, names: Sequence[str]) -> int:
        checked = [self._area.require_name(name) for name in names]
        if self._area.replace and "replace" not in self.banner.allowed:
            raise RemoteDenied(
                f"the remote is append-only: it removes no {self._area.files}",
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
        self._say(messages.FILE_DATA.frame(slot, data))

    def poll(self) -> None:
        """Reads what the remote has sent meanwhile. Raises where the connection has ended."""
        with self._talking, self._connection.checked():
            self._connection.channel.hear(self._hear, 0.0)

    def end_file(self, slot: int, name: str, ours: Sum) -> None:
        """Has the remote make the file in a slot durable, and compares what lies on its disk."""
        question = self._ask(messages.FILE_END, messages.FILE_END.frame(slot))
        self._await(question, ours.size / SLOW)
        if question.sum != ours:
            raise RemoteCannotStore(
                f"{self._area.file} on the remote's disk is not what was sent",
                detail=f"{name}: {ours.size} bytes with SHA-256 {ours.sha256.hex()} were sent, and"
                f" the remote has {question.sum.size} bytes with {question.sum.sha256.hex()}",
                hint="look at the remote's memory and disk before anything else, and at its kernel"
                " log",
            )

    def publish_file(self, slot: int, name: str) -> None:
        """Has the remote give the file in a slot its name."""
        question = self._ask(messages.PUBLISH, messages.PUBLISH.frame(slot, name))
        _, status, _ = self._await(question)
        self._slots.append(slot)
        if status == messages.TAKEN:
            raise NameTaken(name, self._area.file)
        if status != messages.SUCCEEDED:
            with self._connection.checked():
                raise ProtocolError(f"the status {status} for a name")

    def discard_file(self, slot: int) -> None:
        """Has the remote remove the file in a slot, as it does when the connection is lost."""
        self._slots.append(slot)
        if not self._connection.channel.ended:
            self._say(messages.DISCARD.frame(slot))

    # --- frames -----------------------------------------------------------------------------------

    def _ask_for(self, one: Range) -> tuple[Range, _Question]:
        name = self._area.require_name(one.name)
        if not is_told(self._area.name, name):
            self.require("get")
        frame = messages.READ.frame(one.start, one.length, name)
        return one, self._ask(messages.READ, frame, one.length)

    def _content(self, asked: tuple[Range, _Question]) -> bytes:
        wanted, question = asked
        kind, status, text = self._await(question)
        told = kind == messages.FILE_SAID
        if told and status == messages.MISSING:
            raise FileMissing(wanted.name)
        if told or status == messages.BROKEN:
            raise FileUnreadable(
                f"{self._area.file} cannot be read",
                detail=text or wanted.name,
                hint=f"look at the remote's disk, and at the owner of {self._area.name}/ there",
            )
        return question.pieces[0] if len(question.pieces) == 1 else b"".join(question.pieces)

    def _ask(self, kind: int, frame: bytes, most: int = 0) -> _Question:
        question = _Question(kind, self._area.name, most)
        self._asked.append(question)
        self._say(frame)
        return question

    def _say(self, frame: bytes) -> None:
        with self._talking, self._connection.checked():
            if self._lost is not None:
                raise self._lost
            self._connection.send(frame, self._hear)

    def _show_life(self, every: float) -> None:
        """Lets the remote know that somebody is still here, while there is nothing to say."""
        while not self._closing.wait(every):
            if self._talking.acquire(blocking=False):
                try:
                    if not self._connection.channel.ended:
                        self._say(messages.PING.frame(bytes(8)))
                except BackupError as error:
                    self._lost = error
                    return
                finally:
                    self._talking.release()

    def _await(self, question: _Question, more_patience: float = 0.0) -> tuple[int, int, str]:
        """Returns the end of the answer. more_patience: see `_next`."""
        with self._talking, self._connection.checked():
            self._moved = time.monotonic()
            while question.end is None:
                self._spec.cancelled()
                self._connection.channel.hear(self._hear, _POLL_SECONDS)
                self._require_life(self._moved, more_patience)
        return question.end

    def _hear(self, data: bytes) -> None:
        for kind, payload in self._connection.frames(data):
            self._moved = time.monotonic()
            if not self._asked:
                raise ProtocolError(f"a frame of type {kind} without a question")
            self._asked[0].hear(kind, payload)
            if self._asked[0].end is not None:
                self._asked.popleft()


class FileByReceiver:
    """A file on its way; see `contract.NewFile`."""

    def __init__(self, store: FileStoreByReceiver, name: str, slot: int) -> None:
        self._store = store
        self._name = name
        self._slot = slot
        self._digest = sha256()
        self._size = 0
        self._open = True
        self.poll = store.poll

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        view = memoryview(data)
        self._size += len(view)
        for at in range(0, len(view), MAX_CHUNK):
            self._store.send_data(self._slot, view[at : at + MAX_CHUNK])

    def finish(self) -> Sum:
        ours = Sum(self._size, self._digest.digest())
        self._store.end_file(self._slot, self._name, ours)
        return ours

    def publish(self) -> None:
        self._open = False
        self._store.publish_file(self._slot, self._name)

    def discard(self) -> None:
        if self._open:
            self._open = False
            with suppress(BackupError):
                self._store.discard_file(self._slot)
