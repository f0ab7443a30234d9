"""The receiver keeps snapshots, over one connection; see `contract.Repository`.

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

from ntt_backup.client.connection import SLOW, ReceiverQuestions, SessionSpec
from ntt_backup.errors import BackupError, NameTaken, RemoteCannotStore, RemoteDenied
from ntt_backup.snapshot.repository.ahead import ask_ahead
from ntt_backup.snapshot.repository.contract import A_FILE, Buffer, FileMissing, Range, StoredFile
from ntt_backup.snapshot.repository.names import FileName
from ntt_backup.wire import file_messages, framing, read_messages, write_messages
from ntt_backup.wire.framing import MAX_CHUNK, ProtocolError

_REQUESTS: Final = 1024
_POLL_SECONDS: Final = 0.5
# Far below a receiver's --idle-timeout: hashing a large file takes hours.
_PING_SECONDS: Final = 60.0
# 512 TB of packs: a listing that does not end must not fill the memory.
_MOST_FILES: Final = 2_000_000
_END_OF: Final = {
    framing.FILES: (framing.FILE_NAMES, (framing.DONE,)),
    framing.READ: (framing.PIECE, (framing.BLOB_END, framing.FILE_SAID)),
    framing.FILE_END: (framing.FILE_SAID, (framing.FILE_SAID,)),
    framing.REMOVE: (framing.DONE, (framing.DONE,)),
}


class _Question:
    """A question that was asked. most: of the bytes, or of the names, that answer it. end: the kind
    of the last frame, the number in it, and the text.
    """

    def __init__(self, kind: int, most: int) -> None:
        self._kind, self._ends = _END_OF[kind]
        self._most = most
        self.pieces: list[bytes] = []
        self.files: list[StoredFile] = []
        self.end: tuple[int, int, str] | None = None

    def hear(self, kind: int, payload: memoryview) -> None:
        """Takes the next frame of the answer. Raises ProtocolError."""
        if kind == framing.DONE and kind in self._ends:
            number = write_messages.read_number(payload)
            if self._kind == framing.FILE_NAMES and number != len(self.files):
                raise ProtocolError("another number of names than were told")
            self.end = (kind, number, "")
            return
        if kind in self._ends:
            said = kind == framing.FILE_SAID
            read = file_messages.read_said if said else read_messages.read_blob_end
            self.end = (kind, *read(payload))
            return
        if kind != self._kind:
            raise ProtocolError(f"a frame of type {kind} in another answer")
        if kind == framing.PIECE:
            self.pieces.append(bytes(read_messages.read_piece(payload)))
            self._most -= len(self.pieces[-1])
        else:
            for name, size, arrived in file_messages.read_names(payload):
                if self.files and name <= self.files[-1].name:
                    raise ProtocolError("names out of order")
                self.files.append(StoredFile(name, size, arrived))
                self._most -= 1
        if self._most < 0:
            raise ProtocolError("more than was asked for")


class RepositoryByReceiver(ReceiverQuestions):
    """See the module. Raises Unsupported where the remote has no Python that can run the receiver,
    RemoteDenied where a forced command takes no snapshots.
    """

    def __init__(self, spec: SessionSpec) -> None:
        super().__init__(spec, file_messages.TO_CLIENT)
        self._asked: deque[_Question] = deque()
        self._moved = 0.0
        # Why nothing can be said any more.
        self._lost: BackupError | None = None
        self._talking = RLock()
        self._closing = Event()
        with self._connection.checked():
            if "snapshot" not in self.banner.allowed:
                message = "the key leads to a forced command, which takes no snapshots"
                raise self.refusal(RemoteDenied, message, "snapshot")
            self._connection.hello(snapshots=1)
        self._pinging = Thread(target=self._show_life, args=(_PING_SECONDS,), daemon=True)
        self._pinging.start()

    def close(self) -> None:
        self._closing.set()
        with self._talking:
            super().close()
        # A process with threads could not be copied, as a restore is into its jobs.
        self._pinging.join()

    def list(self, below: str = "") -> Iterator[StoredFile]:
        question = self._ask(framing.FILES, file_messages.listing(below), _MOST_FILES)
        self._await(question)
        with self._connection.checked():
            if not all(one.name.startswith(below) for one in question.files):
                raise ProtocolError("names that were not asked for")
        return iter(question.files)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        self.require("get")
        return ask_ahead(ranges, _REQUESTS, self._ask_for, self._content)

    def write(self, name: str) -> FileByReceiver:
        return FileByReceiver(self, str(FileName.read(name)))

    def remove(self, names: Sequence[str]) -> int:
        checked = [str(FileName.read(name)) for name in names]
        if "replace" not in self.banner.allowed:
            raise RemoteDenied(
                "the remote is append-only: it removes no snapshots",
                detail=f"its --allow lists {','.join(sorted(self.banner.allowed))}",
                hint="remove them with a key whose forced command allows replace, too",
            )
        removed = 0
        for at in range(0, len(checked), file_messages.MAX_NAMES):
            frame = file_messages.removing(checked[at : at + file_messages.MAX_NAMES])
            removed += self._await(self._ask(framing.REMOVE, frame))[1]
        return removed

    # --- a file on its way ------------------------------------------------------------------------

    def send_piece(self, data: Buffer) -> None:
        """Sends the next part of the file, at most MAX_CHUNK bytes."""
        self._say(framing.frame(framing.FILE_DATA, data))

    def end_file(self, name: str, size: int, digest: bytes) -> None:
        """Has the remote give the file its name."""
        question = self._ask(framing.FILE_END, file_messages.end(name, digest))
        _, status, text = self._await(question, size / SLOW)
        if status == file_messages.TAKEN:
            raise NameTaken(name, A_FILE)
        if status != file_messages.GIVEN:
            raise RemoteCannotStore(
                "a file of a snapshot on the remote's disk is not what was sent",
                detail=text or name,
                hint="look at the remote's memory and disk before anything else",
            )

    def forget_file(self) -> None:
        """Has the remote remove what it has of the file, as it does when the connection is lost."""
        if not self._connection.channel.ended:
            self._say(framing.frame(framing.FORGET))

    # --- frames -----------------------------------------------------------------------------------

    def _ask_for(self, one: Range) -> tuple[Range, _Question]:
        name = str(FileName.read(one.name))
        frame = file_messages.reading(name, one.start, one.length)
        return one, self._ask(framing.READ, frame, one.length)

    def _content(self, asked: tuple[Range, _Question]) -> bytes:
        wanted, question = asked
        kind, status, text = self._await(question)
        told = kind == framing.FILE_SAID
        if told and status == file_messages.MISSING:
            raise FileMissing(wanted.name)
        if told or status == read_messages.BROKEN:
            raise RemoteDenied(
                "a file of a snapshot cannot be read",
                detail=text or wanted.name,
                hint="look at the remote's disk, and at the owner of snapshots/ there",
            )
        return question.pieces[0] if len(question.pieces) == 1 else b"".join(question.pieces)

    def _ask(self, kind: int, frame: bytes, most: int = 0) -> _Question:
        question = _Question(kind, most)
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
                        self._say(framing.frame(framing.PING, bytes(8)))
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

    def __init__(self, repository: RepositoryByReceiver, name: str) -> None:
        self._repository = repository
        self._name = name
        self._digest = sha256()
        self._size = 0

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        view = memoryview(data)
        self._size += len(view)
        for at in range(0, len(view), MAX_CHUNK):
            self._repository.send_piece(view[at : at + MAX_CHUNK])

    def finish(self) -> bytes:
        digest = self._digest.digest()
        self._repository.end_file(self._name, self._size, digest)
        return digest

    def give_up(self) -> None:
        with suppress(BackupError):
            self._repository.forget_file()
