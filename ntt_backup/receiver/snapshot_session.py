"""A session for snapshots lists, receives, reads and removes files below `snapshots/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ntt_backup.blobdir.syscalls import error_line
from ntt_backup.receiver.file_session import FileSession
from ntt_backup.receiver.send_blobs import pieces
from ntt_backup.receiver.snapshot_directory import FoundFile, SnapshotDirectory
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire import file_messages, framing, write_messages
from ntt_backup.wire.file_messages import DIFFERENT, GIVEN, MAX_NAMES, MISSING, TAKEN, UNREADABLE
from ntt_backup.wire.snapshot_names import begun, parts_of

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


class SnapshotSession(FileSession):
    """Takes files, and answers FILES, FILE_END, READ and REMOVE."""

    def __init__(self, workspace: Workspace, terms: Terms, connection: Connection) -> None:
        self._directory = SnapshotDirectory(workspace.root)
        super().__init__(self._directory, "snapshot", terms, connection)

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        return {
            framing.FILES: self._list,
            framing.FILE_DATA: self.receive,
            framing.FILE_END: self._end,
            framing.FORGET: lambda payload: self.forget(),
            framing.READ: self._read,
            framing.REMOVE: self._remove,
        }

    def _list(self, payload: memoryview) -> None:
        self.frames = self._listing(*file_messages.read_below(payload))

    def _listing(self, of_set: str, version: str) -> Generator[bytes, None, None]:
        count = 0
        page: list[FoundFile] = []
        with self.refused():
            for one in self._directory.found(of_set, version):
                page.append(one)
                count += 1
                if len(page) == MAX_NAMES:
                    yield file_messages.names(page)
                    page = []
        if page:
            yield file_messages.names(page)
        yield write_messages.numbered(framing.DONE, count)

    def _end(self, payload: memoryview) -> None:
        name, digest = file_messages.read_end(payload)
        self.require_time(name, begun(parts_of(name)[1]))
        incoming = self.receiving()

        def finish() -> bytes:
            try:
                if incoming.sync()[1] != digest:
                    return file_messages.said(DIFFERENT)
                self._directory.name(incoming, name)
            except FileExistsError:
                return file_messages.said(TAKEN)
            finally:
                self.forget()
            return file_messages.said(GIVEN)

        self.frames = self.aside(finish)

    def _read(self, payload: memoryview) -> None:
        self.require("get")
        self.frames = self._content(*file_messages.read_reading(payload))

    def _content(self, name: str, start: int, length: int) -> Generator[bytes, None, None]:
        with self.refused():
            try:
                fd = self._directory.open(name)
            except FileNotFoundError:
                yield file_messages.said(MISSING)
                return
            except OSError as problem:
                yield file_messages.said(UNREADABLE, error_line(problem))
                return
        end = min(start + length, os.fstat(fd).st_size)
        yield from pieces(fd, start, end)

    def _remove(self, payload: memoryview) -> None:
        self.require("replace")
        names = file_messages.read_removing(payload)
        removed = self._directory.remove
        self.frames = self.aside(lambda: write_messages.numbered(framing.DONE, removed(names)))
