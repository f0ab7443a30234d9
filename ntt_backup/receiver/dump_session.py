"""A session for dumps of the catalog lists, sends and removes them, and receives one at a time.

The client asks for a dump's name when it has seen pg_dump end well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ntt_backup.blobdir.open import closing
from ntt_backup.blobdir.syscalls import error_line
from ntt_backup.receiver.dump_directory import DumpDirectory
from ntt_backup.receiver.file_session import FileSession
from ntt_backup.receiver.incoming import Incoming
from ntt_backup.receiver.send_blobs import pieces
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire import dump_messages, framing, read_messages, write_messages
from ntt_backup.wire.framing import ProtocolError

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


class DumpSession(FileSession):
    """Takes dumps, and answers DUMPS, NAME, DROP and FETCH."""

    def __init__(self, workspace: Workspace, terms: Terms, connection: Connection) -> None:
        self._directory = DumpDirectory(workspace.root)
        super().__init__(self._directory, "dump", terms, connection)
        self._summed: tuple[int, bytes] | None = None

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        return {
            framing.DUMPS: self._list,
            framing.DUMP_DATA: self.receive,
            framing.DUMP_END: self._end,
            framing.NAME: self._name,
            framing.DROP: self._drop,
            framing.FETCH: self._fetch,
        }

    def _list(self, payload: memoryview) -> None:
        self.frames = self._listing()

    def _listing(self) -> Generator[bytes, None, None]:
        count = 0
        with self.refused():
            for one in self._directory.found():
                yield dump_messages.dump(*one)
                count += 1
        yield _done(count)

    def receiving(self) -> Incoming:
        if self._summed is not None:
            raise ProtocolError("more of a dump that has ended")
        return super().receiving()

    def _end(self, payload: memoryview) -> None:
        incoming = self.receiving()

        def sync() -> bytes:
            self._summed = incoming.sync()
            return dump_messages.dump_sum(*self._summed)

        self.frames = self.aside(sync)

    def _name(self, payload: memoryview) -> None:
        incoming, summed = self.incoming, self._summed
        if incoming is None or summed is None:
            raise ProtocolError("a name before the end of a dump")
        name, record = dump_messages.read_named(payload)
        said = dump_messages.read_record(record)
        if (said.get("bytes"), said.get("sha256")) != (summed[0], summed[1].hex()):
            raise ProtocolError("the record of another dump")
        self.require_time(name, dump_messages.begun(name))

        def give_name() -> bytes:
            self._directory.name(incoming, name, record)
            self.forget()
            self._summed = None
            return _done(1)

        self.frames = self.aside(give_name)

    def _drop(self, payload: memoryview) -> None:
        names, any_of_them = dump_messages.read_names(payload), "replace" in self.terms.allow
        self.frames = self.aside(lambda: _done(self._directory.remove(names, any_of_them)))

    def _fetch(self, payload: memoryview) -> None:
        self.require("get")
        self.frames = self._content(dump_messages.read_named(payload)[0])

    def _content(self, name: str) -> Generator[bytes, None, None]:
        with self.refused():
            try:
                fd = self._directory.open(name)
            except OSError as problem:
                yield read_messages.blob_end(read_messages.BROKEN, error_line(problem))
                return
            with closing(fd):
                size = os.fstat(fd).st_size
                yield from pieces(fd, 0, size)


def _done(count: int) -> bytes:
    return write_messages.numbered(framing.DONE, count)
