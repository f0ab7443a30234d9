"""A file session receives one file at a time, a dump or a file of a snapshot.

The end of a file looks like the end of a link that was cut, so no file gets a name by itself. One
without a name is removed when the session ends. Work that waits for the disk runs in a thread, and
the client gets signs of life.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from ntt_backup.receiver.incoming import FileDirectory, Incoming
from ntt_backup.receiver.question_session import QuestionSession
from ntt_backup.receiver.workspace import Refusal, refused

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


# Clocks differ.
_AHEAD = timedelta(days=1)


class FileSession(QuestionSession):
    """Receives files into a directory. code: of a Refusal for an error of the system."""

    def __init__(
        self, directory: FileDirectory, code: str, terms: Terms, connection: Connection
    ) -> None:
        super().__init__(terms, connection)
        self._files = directory
        self._code = code
        self.incoming: Incoming | None = None

    def interrupt(self) -> None:
        """Drops the rest of an answer, and ends a sum early."""
        if self.incoming is not None:
            self.incoming.stopped = True
        super().interrupt()

    def close(self) -> None:
        super().close()
        self.forget()
        self._files.close()

    def refused(self) -> contextlib.AbstractContextManager[None]:
        """Raises Refusal for errors of the system; see `workspace.refused`."""
        return refused(self._files.called, self._code)

    def require_time(self, name: str, begun: datetime) -> None:
        """Raises Refusal where the time in a file's name lies in the future by the clock of this
        machine: such a file would stay the newest one until then.
        """
        if begun > datetime.now(timezone.utc) + _AHEAD:
            raise Refusal("time", f"{name} is more than a day ahead of this machine's clock")

    def receive(self, payload: memoryview) -> None:
        """Takes the next bytes of the file."""
        with self.refused():
            self.receiving().write(payload)

    def receiving(self) -> Incoming:
        """Returns the file that is being received; begins one where there is none."""
        if self.incoming is None:
            with self.refused():
                self.incoming = self._files.begin()
        return self.incoming

    def forget(self) -> None:
        """Removes the file that is being received, if it has no name yet."""
        if self.incoming is not None:
            self.incoming.remove()
        self.incoming = None

    def aside(self, work: Callable[[], bytes]) -> Generator[bytes, None, None]:
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
        with self.refused():
            for problem in problems:
                raise problem
        yield from answers
