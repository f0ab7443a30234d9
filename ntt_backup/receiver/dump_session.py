"""A session for dumps of the catalog: it lists, sends and removes them, and receives one at a time.

The end of a dump looks like the end of a link that was cut, so no dump gets a name by itself: the
client asks for it when it has seen pg_dump end well. A dump without a name is removed when the
session ends. Work that waits for the disk runs in a thread, and the client gets signs of life.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ntt_backup.blobdir.open import closing
from ntt_backup.blobdir.syscalls import error_line
from ntt_backup.receiver.dump_directory import PGDUMP, DumpDirectory, Incoming
from ntt_backup.receiver.question_session import QuestionSession
from ntt_backup.receiver.send_blobs import pieces
from ntt_backup.receiver.workspace import Workspace, refused
from ntt_backup.wire import dump_messages, framing, read_messages, write_messages
from ntt_backup.wire.framing import MAX_CHUNK, ProtocolError

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


class DumpSession(QuestionSession):
    """Takes dumps, and answers DUMPS, NAME, DROP and FETCH."""

    def __init__(self, workspace: Workspace, terms: Terms, connection: Connection) -> None:
        super().__init__(terms, connection)
        self._directory = DumpDirectory(workspace.root)
        self._incoming: Incoming | None = None
        self._summed: tuple[int, bytes] | None = None

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        return {
            framing.DUMPS: self._list,
            framing.DUMP_DATA: self._data,
            framing.DUMP_END: self._end,
            framing.NAME: self._name,
            framing.DROP: self._drop,
            framing.FETCH: self._fetch,
        }

    def interrupt(self) -> None:
        """Drops the rest of an answer, and ends a sum early."""
        if self._incoming is not None:
            self._incoming.stopped = True
        super().interrupt()

    def close(self) -> None:
        super().close()
        if self._incoming is not None:
            self._incoming.remove()
        self._directory.close()

    def _list(self, payload: memoryview) -> None:
        self.frames = self._listing()

    def _listing(self) -> Generator[bytes, None, None]:
        count = 0
        with refused(PGDUMP, "dump"):
            for one in self._directory.found():
                yield dump_messages.dump(one.name, one.size, one.record)
                count += 1
        yield _done(count)

    def _data(self, payload: memoryview) -> None:
        with refused(PGDUMP, "dump"):
            self._receiving().write(payload)

    def _end(self, payload: memoryview) -> None:
        with refused(PGDUMP, "dump"):
            incoming = self._receiving()

        def sync() -> bytes:
            self._summed = incoming.sync()
            return dump_messages.dump_sum(*self._summed)

        self.frames = self._aside(sync)

    def _receiving(self) -> Incoming:
        """Returns the dump that is being received; begins one where there is none."""
        if self._summed is not None:
            raise ProtocolError("more of a dump that has ended")
        if self._incoming is None:
            self._incoming = self._directory.begin()
        return self._incoming

    def _name(self, payload: memoryview) -> None:
        incoming, summed = self._incoming, self._summed
        if incoming is None or summed is None:
            raise ProtocolError("a name before the end of a dump")
        name, record = dump_messages.read_named(payload)
        said = dump_messages.read_record(record)
        if (said.get("bytes"), said.get("sha256")) != (summed[0], summed[1].hex()):
            raise ProtocolError("the record of another dump")

        def give_name() -> bytes:
            self._directory.name(incoming, name, record)
            incoming.remove()
            self._incoming = self._summed = None
            return _done(1)

        self.frames = self._aside(give_name)

    def _drop(self, payload: memoryview) -> None:
        names, any_of_them = dump_messages.read_names(payload), "replace" in self.terms.allow
        self.frames = self._aside(lambda: _done(self._directory.remove(names, any_of_them)))

    def _fetch(self, payload: memoryview) -> None:
        self.require("get")
        self.frames = self._content(dump_messages.read_named(payload)[0])

    def _content(self, name: str) -> Generator[bytes, None, None]:
        with refused(PGDUMP, "dump"):
            try:
                fd = self._directory.open(name)
            except OSError as problem:
                yield read_messages.blob_end(read_messages.BROKEN, error_line(problem))
                return
            with closing(fd):
                size = os.fstat(fd).st_size
                yield from pieces(fd, size, range(0, size, MAX_CHUNK), MAX_CHUNK)

    def _aside(self, work: Callable[[], bytes]) -> Generator[bytes, None, None]:
        """Yields empty frames while work is done in a thread, then the frame that it returns."""
        answers: list[bytes] = []
        problems: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(work())
            except BaseException as problem:  # noqa: BLE001 - raised again below
                problems.append(problem)
            os.write(self.connection.wake, b"\0")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while not answers and not problems:
                yield b""
        finally:
            thread.join()
        with refused(PGDUMP, "dump"):
            for problem in problems:
                raise problem
        yield from answers


def _done(count: int) -> bytes:
    return write_messages.numbered(framing.DONE, count)
