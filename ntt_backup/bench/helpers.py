"""Helper processes measure side by side, all from the same moment on.

Several streams in one process would share one interpreter, and the figure would be its speed. So
each task has a process of its own, as each worker of a run has. A task opens its connection first
and then waits for the others, so that no start is part of a figure. What one task raises ends all.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ntt_backup.errors import BackupError, WorkerFailed
from ntt_backup.process.spawn import Fork, wait_for, write


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a task.

    Times are readings of the monotonic clock, which all processes of a machine share.

    Attributes:
        size: The bytes of content.
        trips: The duration of each round trip, in seconds.
        opening_s: The seconds until the task was ready.
        cpu_s: The seconds of CPU time of the helper and of all processes that the helper started.
    """

    began: float
    ended: float
    size: int = 0
    trips: Sequence[float] = ()
    opening_s: float = 0.0
    cpu_s: float = 0.0


# A task calls the function it is given when it is ready; that returns when all tasks are.
Ready = Callable[[], None]
Task = Callable[[Ready], Answer]


def run_together(tasks: Sequence[Task]) -> list[Answer]:
    """Runs each task in a process of its own and returns their answers in the same order.

    Raises what the first task met that failed.
    """
    helpers: list[_Helper] = []
    try:
        for task in tasks:
            helpers.append(_Helper(task))
        _listen(helpers)
        for helper in helpers:
            write(helper.stdin_fd, b"\n")
        return [Answer(**said) for said in _listen(helpers)]
    finally:
        for helper in helpers:
            helper.kill()


def _listen(helpers: Sequence[_Helper]) -> list[dict[str, Any]]:
    """Returns the next message of each helper."""
    said: dict[_Helper, dict[str, Any]] = {}
    while len(said) < len(helpers):
        silent = [helper for helper in helpers if helper not in said]
        wait_for(reading=[fd for one in silent for fd in one.fds], timeout=None)
        for helper in silent:
            if (message := helper.hear()) is not None:
                said[helper] = message
    return [said[helper] for helper in helpers]


class _Helper(Fork):
    """A process that does one task. Its messages are lines of JSON: ready, then the answer."""

    def __init__(self, task: Task) -> None:
        super().__init__(partial(_work, task), "ntt-bench")
        self._said = b""

    def hear(self) -> dict[str, Any] | None:
        """Returns its next message; None while there is none. Raises what its task raised."""
        self.drain_stderr()
        while b"\n" not in self._said:
            data = self.read()
            if data is None:
                return None
            if not data:
                status = self.wait(1.0)
                last = self.stderr.text.splitlines()[-1:] or [f"it ended with status {status}"]
                raise WorkerFailed("a helper process died", detail=last[0])
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "message" in message:
            raise WorkerFailed(**message)
        return message


def _work(task: Task) -> int:
    started = opened = time.monotonic()

    def ready() -> None:
        nonlocal opened
        opened = time.monotonic()
        _say({})
        os.read(0, 1)

    try:
        answer = task(ready)
    except BackupError as error:
        _say(error.fields)
    else:
        _say(asdict(replace(answer, opening_s=opened - started, cpu_s=_cpu_s())))
    return 0


def _cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _say(message: dict[str, Any]) -> None:
    with os.fdopen(1, "wb", closefd=False) as output:
        output.write(json.dumps(message).encode() + b"\n")
