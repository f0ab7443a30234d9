"""Threads of one command: they start together, get jobs, return results, and end together."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

from ntt_backup.formatting import duration, many

Job = TypeVar("Job")
Result = TypeVar("Result")

_TICK_SECONDS: Final = 0.2
_WAIT_SECONDS: Final = 0.5
_SOON_SECONDS: Final = 0.5
_JOIN_SECONDS: Final = 5.0


class Cancelled(Exception):
    """The command is ending: a thread stops its work."""


class WorkQueue(Generic[Job, Result]):
    """A queue of jobs from one thread for several others, and of their results.

    Args:
        room: The most jobs that may wait.
        cancelled: Is called while a thread waits, and may raise.
        wake: Is called when a result was added, and so there is room again.
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

    def add_job(self, job: Job) -> None:
        """Adds a job, and waits for room if necessary."""
        with self._changed:
            self._cancelled()
            while self.full:
                self._changed.wait(_WAIT_SECONDS)
                self._cancelled()
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the queue: there will be no more jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take_job(self, *, wait: bool) -> Job | None:
        """Returns the next job; None if there is none yet, or with `wait`, if none will come."""
        with self._changed:
            self._cancelled()
            while not self._jobs:
                if self._closed or not wait:
                    return None
                self._changed.wait(_WAIT_SECONDS)
                self._cancelled()
            self._changed.notify_all()
            return self._jobs.popleft()

    def add_result(self, result: Result) -> None:
        self._done.put(result)
        self._wake()

    def take_results(self) -> list[Result]:
        """Returns the results that were added since the last call."""
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
    """Runs work in several threads, each with a name, until all have ended.

    Args:
        workers: The number of threads.
        work: The function of a thread, called with the thread's name.
        tick: Is called in this thread several times a second, and at once when news is set.
        stop: Is set to end the threads.
        news: Is set to call tick.

    Raises:
        BaseException: The first error of a thread, or of tick.
    """
    errors: list[BaseException] = []
    ended: list[str] = []

    def run(name: str) -> None:
        try:
            work(name)
        except Cancelled:
            return
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
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
        _join(threads)
    if errors:
        raise errors[0]
    tick()


def _join(threads: Sequence[threading.Thread]) -> None:
    """Waits some seconds until the threads have ended, and says so where that is not soon."""
    began = time.monotonic()
    for limit in (_SOON_SECONDS, _JOIN_SECONDS):
        for thread in threads:
            thread.join(max(0.0, began + limit - time.monotonic()))
        busy = sum(thread.is_alive() for thread in threads)
        if busy and limit == _SOON_SECONDS:
            waits = f"waiting at most {duration(_JOIN_SECONDS)} for {many(busy, 'connection')}"
            with suppress(OSError):
                print(f"stopping: {waits}; Ctrl-C again ends at once", file=sys.stderr, flush=True)
