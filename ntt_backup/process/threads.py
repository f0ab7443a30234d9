"""Threads do one command's work side by side: they start, are fed and heard, and end together."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

_TICK_SECONDS: Final = 0.2
_WAIT_SECONDS: Final = 0.5
_JOIN_SECONDS: Final = 5.0


class Cancelled(Exception):
    """The command is ending: a thread stops what it does."""


class WorkQueue(Generic[Job, Result]):
    """Jobs from one thread for several others, and what came of them.

    room: how many jobs may wait. cancelled is called while a thread waits, and may raise. wake is
    called when a result has come: there is room again.
    """

    def __init__(
        self, room: int, cancelled: Callable[[], None], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._cancelled = cancelled
        self._wake = wake
        self._room = room
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._done: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._closed = False

    @property
    def full(self) -> bool:
        return len(self._jobs) >= self._room

    def put(self, job: Job) -> None:
        """Adds a job; waits for room."""
        with self._changed:
            self._cancelled()
            while self.full:
                self._changed.wait(_WAIT_SECONDS)
                self._cancelled()
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self) -> None:
        """Announces that there will be no more jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, *, wait: bool) -> Job | None:
        """Returns the next job; None where none waits, or with wait, where none will come."""
        with self._changed:
            self._cancelled()
            while not self._jobs:
                if self._closed or not wait:
                    return None
                self._changed.wait(_WAIT_SECONDS)
                self._cancelled()
            self._changed.notify_all()
            return self._jobs.popleft()

    def give(self, result: Result) -> None:
        """Adds what came of a job."""
        self._done.put(result)
        self._wake()

    def done(self) -> list[Result]:
        """Returns the results that have come since the last call."""
        found: list[Result] = []
        while not self._done.empty():
            found.append(self._done.get())
        return found


def run_threads(
    workers: int,
    work: Callable[[str], None],
    tick: Callable[[], None],
    stop: threading.Event,
    news: threading.Event,
) -> None:
    """Does work in that many threads, each with its name, until all are done; tick is called
    meanwhile, in this thread, and at once when news is set. stop is set to end the threads.

    Raises what the first of them, or tick, raises.
    """
    errors: list[BaseException] = []
    ended: list[str] = []

    def run(name: str) -> None:
        try:
            work(name)
        except Cancelled:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the command can tell of it
            errors.append(error)
        finally:
            ended.append(name)
            news.set()

    threads = [
        threading.Thread(target=run, args=(str(number),), daemon=True) for number in range(workers)
    ]
    for thread in threads:
        thread.start()
    try:
        while not errors and len(ended) < workers:
            tick()
            news.wait(_TICK_SECONDS)
            news.clear()
    finally:
        if errors or len(ended) < workers:
            stop.set()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    tick()
