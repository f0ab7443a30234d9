"""A session for files lists, receives, reads and removes the files in one area of the target.

The end of a file looks like the end of a link that was cut, so no file gets a name by itself: the
client asks for the name once it has compared what lies on the disk. A file without a name is
removed when the session ends. Work that waits for the disk runs in a thread, and the client gets
signs of life.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ntt_backup.blobdir.descriptors import error_line, forget
from ntt_backup.receiver.file_areas import FileArea, FoundFile, Incoming
from ntt_backup.receiver.question_session import QuestionSession, in_threads, pieces
from ntt_backup.receiver.workspace import refused
from ntt_backup.wire import messages
from ntt_backup.wire.framing import ProtocolError
from ntt_backup.wire.messages import MAX_FILE_NAMES, MISSING, SUCCEEDED, TAKEN, UNREADABLE
from ntt_backup.wire.stored_names import is_told

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


_PIECE = 1 << 20


class FileSession(QuestionSession):
    """Takes files, and answers FILES, FILE_END, PUBLISH, READ, PROVE and REMOVE."""

    def __init__(self, area: FileArea, terms: Terms, connection: Connection) -> None:
        super().__init__(terms, connection)
        self._area = area
        self._incoming: dict[int, Incoming] = {}
        # The slots whose files are complete.
        self._ended: set[int] = set()
        self._stopped = False

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        if not self._area.tidy:
            return {messages.REMOVE: self._remove}
        return {
            messages.FILES: self._list,
            messages.FILE_DATA: self._receive,
            messages.FILE_END: self._end,
            messages.PUBLISH: self._publish,
            messages.DISCARD: lambda payload: self._discard(messages.DISCARD.read(payload)),
            messages.READ: self._read,
            messages.PROVE: self._prove,
            messages.REMOVE: self._remove,
        }

    def interrupt(self) -> None:
        """Drops the rest of an answer, and ends a sum early."""
        for incoming in list(self._incoming.values()):  # A thread may give one its name now.
            incoming.stopped = True
        self._stopped = True
        super().interrupt()

    def close(self) -> None:
        super().close()
        for slot in list(self._incoming):
            self._discard(slot)
        self._area.close()

    def _list(self, payload: memoryview) -> None:
        self.frames = self._listing(messages.FILES.read(payload, self._area.called))

    def _listing(self, below: str) -> Generator[bytes, None, None]:
        count = 0
        page: list[FoundFile] = []
        with self._refused():
            for one in self._area.found(below):
                page.append(one)
                count += 1
                if len(page) == MAX_FILE_NAMES:
                    yield messages.FILE_NAMES.frame(page)
                    page = []
        if page:
            yield messages.FILE_NAMES.frame(page)
        yield messages.DONE.frame(count)

    def _receive(self, payload: memoryview) -> None:
        slot, data = messages.FILE_DATA.read(payload)
        with self._refused():
            self._receiving(slot).write(data)

    def _receiving(self, slot: int) -> Incoming:
        """Returns the file that is being received in a slot; begins one where there is none."""
        if slot in self._ended:
            raise ProtocolError("more of a file that has ended")
        if slot not in self._incoming:
            self._incoming[slot] = self._area.begin()
        return self._incoming[slot]

    def _end(self, payload: memoryview) -> None:
        slot = messages.FILE_END.read(payload)
        with self._refused():
            incoming = self._receiving(slot)
        self._ended.add(slot)
        self.frames = self._aside(lambda: messages.FILE_SUM.frame(*incoming.sync()))

    def _publish(self, payload: memoryview) -> None:
        slot, name = messages.PUBLISH.read(payload, self._area.called)
        if slot not in self._ended:
            raise ProtocolError("a name before the end of a file")

        def publish() -> bytes:
            try:
                self._area.publish(self._incoming[slot], name)
            except FileExistsError:
                return messages.FILE_SAID.frame(TAKEN)
            finally:
                self._discard(slot)
            return messages.FILE_SAID.frame(SUCCEEDED)

        self.frames = self._aside(publish)

    def _discard(self, slot: int) -> None:
        """Forgets the file in a slot, and removes it where it has no name yet."""
        self._ended.discard(slot)
        incoming = self._incoming.pop(slot, None)
        if incoming is not None:
            incoming.remove()

    def _read(self, payload: memoryview) -> None:
        start, length, name = messages.READ.read(payload, self._area.called)
        if not is_told(self._area.called, name):
            self.require("get")
        self.frames = self._content(name, start, length)

    def _content(self, name: str, start: int, length: int) -> Generator[bytes, None, None]:
        with self._refused():
            try:
                fd = self._area.open(name)
            except FileNotFoundError:
                yield messages.FILE_SAID.frame(MISSING)
                return
            except OSError as problem:
                yield messages.FILE_SAID.frame(UNREADABLE, error_line(problem))
                return
        end = min(start + length, os.fstat(fd).st_size)
        yield from pieces(fd, start, end)

    def _prove(self, payload: memoryview) -> None:
        kind, name = messages.PROVE.read(payload, self._area.called)
        new = self.terms.hashes.get(kind)
        if new is None:
            raise ProtocolError("a hash that was not offered")
        self._stopped = False

        def prove() -> bytes:
            digest, size = new(b""), 0
            try:
                fd = self._area.open_durable(name)
                forget(fd)  # This session may have read the file before.
                while not self._stopped and (data := os.pread(fd, _PIECE, size)):
                    digest.update(data)
                    size += len(data)
                forget(fd)
            except FileNotFoundError:
                return messages.FILE_SAID.frame(MISSING)
            except OSError as problem:
                return messages.FILE_SAID.frame(UNREADABLE, error_line(problem))
            return messages.FILE_SUM.frame(size, digest.digest())

        self.frames = self._aside(prove)

    def _remove(self, payload: memoryview) -> None:
        names = messages.REMOVE.read(payload, self._area.called)
        allow = self.terms.allow
        self.frames = self._aside(lambda: messages.DONE.frame(self._area.remove(names, allow)))

    def _refused(self) -> contextlib.AbstractContextManager[None]:
        """Raises Refusal for errors of the system; see `workspace.refused`."""
        return refused(self._area.called, self._area.word)

    def _aside(self, work: Callable[[], bytes]) -> Generator[bytes, None, None]:
        """Yields empty frames while work is done in a thread, then the frame that it returns."""
        answers: list[bytes] = []
        with self._refused():
            yield from in_threads(lambda: answers.append(work()), 1, self.connection.wake)
        yield from answers
