"""Helper processes that do tasks side by side, from the same moment on.

They are started once and used again: a program's start takes longer than many a measurement. What
one of them meets ends the work of all, for half a measurement is none. Whatever ends this process
ends them, and with each its ssh and tar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from ntt_backup.bench.tasks import Answer, Said, Task
from ntt_backup.errors import BackupError, WorkerFailed
from ntt_backup.process.pipeline import Child, wait_for, write

PROGRAM: Final = (sys.executable, "-m", "ntt_backup.bench.helper")
_TICK_SECONDS: Final = 0.2


class Crew:
    """As many helpers as the largest number of tasks so far. on_tick is called while they work."""

    def __init__(self, on_tick: Callable[[], None] = lambda: None) -> None:
        self._on_tick = on_tick
        self._helpers: list[_Helper] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.dismiss()

    def run(self, tasks: Sequence[Task]) -> list[Answer]:
        """The answers, in order, of tasks that all began when the last was ready.

        Raises what the first helper met that could not do its task.
        """
        while len(self._helpers) < len(tasks):
            self._helpers.append(_Helper())
        helpers = self._helpers[: len(tasks)]
        try:
            for helper, task in zip(helpers, tasks, strict=True):
                helper.tell(task.model_dump_json())
            self._gather(helpers)
            for helper in helpers:
                helper.tell("go")
            answers = [said.answer for said in self._gather(helpers)]
        except BaseException:
            self.dismiss()
            raise
        return [answer for answer in answers if answer is not None]

    def dismiss(self) -> None:
        """End all helpers now, and what they started."""
        while self._helpers:
            self._helpers.pop().kill()

    def _gather(self, helpers: Sequence[_Helper]) -> list[Said]:
        """The next word of each."""
        words: dict[int, Said] = {}
        while len(words) < len(helpers):
            waiting = [one for number, one in enumerate(helpers) if number not in words]
            fds = [fd for one in waiting for fd in one.fds]
            wait_for(reading=fds, timeout=_TICK_SECONDS)
            self._on_tick()
            for number, helper in enumerate(helpers):
                if number not in words and (said := helper.hear()) is not None:
                    if said.exit_code:
                        raise _failure(said)
                    words[number] = said
        return [words[number] for number in range(len(helpers))]


class _Helper:
    def __init__(self) -> None:
        # A session of its own: Ctrl-C at the terminal is ours to handle, and goes to us alone.
        self._child = Child(PROGRAM, new_session=True)
        self._said = b""

    @property
    def fds(self) -> list[int]:
        return self._child.fds

    def tell(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        while data:
            try:
                data = data[write(self._child.stdin_fd, data) :]
            except BrokenPipeError:
                raise self._lost() from None
            if data:
                wait_for(writing=[self._child.stdin_fd], timeout=None)

    def hear(self) -> Said | None:
        """Its next word; None while there is none."""
        self._child.drain_stderr()
        while b"\n" not in self._said:
            data = self._child.read()
            if data is None:
                return None
            if not data:
                raise self._lost()
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return Said.model_validate_json(line)

    def kill(self) -> None:
        self._child.kill()

    def _lost(self) -> BackupError:
        status = self._child.wait(1.0)
        last = self._child.stderr.text.splitlines()[-1:]
        return WorkerFailed(
            "a helper process died", detail=last[0] if last else f"it ended with status {status}"
        )


def _failure(said: Said) -> BackupError:
    return WorkerFailed(said.message, detail=said.detail, hint=said.hint, exit_code=said.exit_code)
