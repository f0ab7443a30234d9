"""What lies on the remote, for the commands that read it: several sessions, and patience.

`verify`, `restore` and `reconcile` run for hours over a link that drops, and each wants a few
connections side by side. So that none of them has to know how a connection is opened, lost and
opened again, a crew of threads does it here: each has a session of its own and hands it to a piece
of work; when the remote goes away under it, it waits as a run does (`run.backoff_base`,
`run.backoff_cap`, at most `run.outage_timeout`) and hands the same work a new session. The work
keeps in its own hands what is done already.

Threads, not processes as in a run: hashing, reading and writing let go of the interpreter's lock,
and there is one catalog connection and one report. The first contact has no patience: who has
typed a command wants to hear at once that the remote is not there. All of a crew make it side by
side: one after the other they would leave a distant link idle for as long as a handshake takes.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from ntt_backup import identity
from ntt_backup.client.read_session import Reach, ReadingSession
from ntt_backup.client.ssh import Ssh
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import (
    BackupError,
    RemoteDenied,
    RemoteNonsense,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.planner import Backoff, OutageClock
from ntt_backup.wire import read_messages

T = TypeVar("T")
Job = TypeVar("Job")
Result = TypeVar("Result")

_TICK_SECONDS: Final = 0.2
_WAIT_SECONDS: Final = 0.5
# Names asked for at once: what a worker holds of a listing.
_PAGE: Final = 8000
_JOIN_SECONDS: Final = 5.0
# Connections in a row on which frames came, and nothing was done: something there ends them all.
FRUITLESS: Final = 100


class Cancelled(Exception):
    """The command is ending: a thread lets go of what it does."""


class FarSide:
    """The remote of some settings. command is what needs it, for errors and for the remote's eyes.

    words: what the command must be allowed there: `list`, `verify`, `get`. on_outage is told the
    error and for how many seconds it will be waited.
    """

    def __init__(
        self,
        settings: RemoteConfig,
        command: str,
        words: Sequence[str],
        on_outage: Callable[[BackupError, float], None],
    ) -> None:
        self._settings = settings
        self._command = command
        self._words = words
        self._on_outage = on_outage
        self._stop = threading.Event()
        self._news = threading.Event()
        self._first: list[ReadingSession] = []
        # How many sessions are being opened, and whether any ever was.
        self._contact = threading.Condition()
        self._opening = 0
        self._met = False

    def greet(self) -> ReadingSession:
        """The first session, without waiting for a remote that is away: the first reader takes it
        over. Raises BackupError.
        """
        session = self._open("first")
        self._first.append(session)
        return session

    def close(self) -> None:
        """End the first session, where no reader has taken it."""
        while self._first:
            self._first.pop().abort()

    def is_empty(self) -> bool:
        """Whether no blob at all is there: before blobs are blamed, their disk is looked for. A
        session of its own, without waiting for a remote that is away. Raises BackupError.
        """
        session = self._open("look")
        try:
            pages = session.names(bytes(32), b"\xff" * 32, most=1)
            return not any(isinstance(page, list) and page for page in pages)
        finally:
            session.abort()

    def reader(self, slot: str) -> Reader:
        """A place of work with a session of its own."""
        run = self._settings.run
        clock = OutageClock(
            Backoff(run.backoff_base, run.backoff_cap), run.outage_timeout, random.random
        )
        return Reader(lambda: self._first_or(slot), clock, self._patient, run.attempts)

    def crew(self, workers: int, work: Callable[[Reader], None], tick: Callable[[], None]) -> None:
        """Have that many threads do work, each with a reader; tick is called meanwhile, in this
        thread. Returns when all are done. Raises what the first of them, or tick, raises.
        """
        crew = Crew(workers, lambda slot: self._work(slot, work), self._stop, self._news)
        crew.run(tick)

    def wake(self) -> None:
        """Have the crew's tick called now."""
        self._news.set()

    def cancelled(self) -> None:
        """Raise Cancelled where the command is ending."""
        if self._stop.is_set():
            raise Cancelled

    def _work(self, slot: str, work: Callable[[Reader], None]) -> None:
        reader = self.reader(slot)
        try:
            work(reader)
        finally:
            reader.close()

    def _patient(self, error: BackupError, seconds: float) -> None:
        """Wait, if the remote was there once; raises the error where it never was."""
        with self._contact:
            self._contact.wait_for(lambda: self._met or not self._opening)
            if not self._met:
                raise error
        self._on_outage(error, seconds)
        if self._stop.wait(seconds):
            raise Cancelled

    def _first_or(self, slot: str) -> ReadingSession:
        try:
            return self._first.pop()
        except IndexError:
            return self._open(slot)

    def _open(self, slot: str) -> ReadingSession:
        with self._contact:
            self._opening += 1
        met = False
        try:
            session = self._connect(slot)
            met = True
            return session
        finally:
            with self._contact:
                self._opening -= 1
                self._met = self._met or met
                self._contact.notify_all()

    def _connect(self, slot: str) -> ReadingSession:
        settings = self._settings
        reach = Reach(
            transport=Ssh(settings.remote),
            root=settings.remote.path,
            owner=identity.owner(settings),
            run_id=f"{self._command}-{os.getpid()}",
            slot=slot,
            run=settings.run,
            cancelled=self.cancelled,
        )
        try:
            session = ReadingSession(reach)
        except Unsupported as error:
            raise self._no_receiver(error) from error
        try:
            for word in self._words:
                session.require(word)
        except BaseException:
            session.abort()
            raise
        return session

    def _no_receiver(self, error: BackupError) -> BackupError:
        host, path = self._settings.remote.host, self._settings.remote.path
        return Unsupported(
            f"{self._command} needs Python 3.8 or newer on the remote",
            detail=str(error),
            hint="install python3 there (all of its standard library, nothing else). By tar alone"
            " blobs can be sent, but not listed, hashed or fetched; without Python there, fetch"
            f" them with rsync -a {host}:{path}/by-hash/ and have them checked here",
        )


class Reader:
    """One thread's way to the remote: does work with a session, and again with another one.

    attempts: how many sessions in a row may end in nonsense without one piece of work settled. Of
    those that end without a word of what is wrong it is FRUITLESS: that may be the link.
    """

    def __init__(
        self,
        open_: Callable[[], ReadingSession],
        clock: OutageClock,
        wait: Callable[[BackupError, float], None],
        attempts: int,
    ) -> None:
        self._open = open_
        self._clock = clock
        self._wait = wait
        self._attempts = attempts
        self._nonsense = 0
        self._fruitless = 0
        self._session: ReadingSession | None = None

    def do(self, work: Callable[[ReadingSession], T]) -> T:
        """What work returns; called again, with a new session, whenever the remote went away.

        work counts in the session's `settled` what it will not ask for again. Raises BackupError
        for what waiting does not mend, or where it was away, or talked nonsense, for too long.
        """
        while True:
            try:
                if self._session is None:
                    self._session = self._open()
                return self._work(self._session, work)
            except BackupError as error:
                self._drop()
                self._require_hope(error)
                wait_s = self._clock.next_wait(time.monotonic()) if error.retryable else None
                if wait_s is None:
                    raise
                self._wait(error, wait_s)

    def names(
        self,
        low: int,
        high: int,
        on_stray: Callable[[int, str], None] = lambda kind, path: None,
    ) -> Iterator[list[tuple[bytes, int]]]:
        """Pages of names and sizes there, in order, from low up to but not including high.

        A page that is asked for again tells of its strays once.
        """
        while low < high:
            names, strays, more = self.do(partial(_page, low, high))
            for kind, path in strays:
                on_stray(kind, path)
            yield names
            low = int.from_bytes(names[-1][0], "big") + 1 if names and more else high

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _work(self, session: ReadingSession, work: Callable[[ReadingSession], T]) -> T:
        answers, settled = session.answers, session.settled
        try:
            done = work(session)
            session.settled += 1
            return done
        finally:
            if session.settled > settled:
                self._clock.over()
                self._nonsense = self._fruitless = 0
            elif session.answers > answers:
                self._clock.answered()
                self._fruitless += 1

    def _require_hope(self, error: BackupError) -> None:
        """Frames may come each time, so the clock alone would never end it."""
        self._nonsense += isinstance(error, RemoteNonsense)
        if self._fruitless >= FRUITLESS:
            raise RemoteUnreachable(
                error.message,
                detail=f"{FRUITLESS} connections in a row, and nothing was done on any of them;"
                f" last: {error.detail}",
                hint=error.hint,
            ) from error
        if self._nonsense >= self._attempts:
            raise RemoteDenied(
                error.message,
                detail=f"{self._nonsense} times in a row; last: {error.detail}",
                hint="look at the memory and disk of the remote, and whether another program stands"
                " behind its python3 or the forced command; `ntt-backup-remote"
                " install-receiver --write FILE` has a receiver that fits",
            ) from error

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.abort()


def _page(
    low: int, high: int, session: ReadingSession
) -> tuple[list[tuple[bytes, int]], list[tuple[int, str]], bool]:
    """(names with sizes, strays, whether there may be more names)."""
    names: list[tuple[bytes, int]] = []
    strays: list[tuple[int, str]] = []
    more = False
    first, last = low.to_bytes(32, "big"), (high - 1).to_bytes(32, "big")
    told = lambda kind, path: strays.append((kind, path))  # noqa: E731
    for found in session.names(first, last, most=_PAGE, on_stray=told):
        if isinstance(found, read_messages.Listed):
            more = found.more
        else:
            names += found
    return names, strays, more


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
        self._jobs: queue.Queue[Job] = queue.Queue(room)
        self._done: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._closed = False

    @property
    def full(self) -> bool:
        return self._jobs.full()

    def put(self, job: Job) -> None:
        """Add a job; wait for room."""
        while True:
            self._cancelled()
            try:
                return self._jobs.put(job, timeout=_WAIT_SECONDS)
            except queue.Full:
                continue

    def close(self) -> None:
        """Announce that there will be no more jobs."""
        self._closed = True

    def take(self, *, wait: bool) -> Job | None:
        """Return the next job; None where there is none now, or with wait, will be none."""
        while True:
            self._cancelled()
            closed = self._closed
            try:
                return self._jobs.get(timeout=_WAIT_SECONDS if wait and not closed else 0.001)
            except queue.Empty:
                if closed or not wait:
                    return None

    def give(self, result: Result) -> None:
        """Add what came of a job."""
        self._done.put(result)
        self._wake()

    def done(self) -> list[Result]:
        """Return the results that have come since the last call."""
        found: list[Result] = []
        while not self._done.empty():
            found.append(self._done.get())
        return found


class Crew:
    """Threads that do the same work until there is none. work is given the thread's name.

    stop is set to end them, news to have the tick called before its time.
    """

    def __init__(
        self,
        workers: int,
        work: Callable[[str], None],
        stop: threading.Event,
        news: threading.Event,
    ) -> None:
        self._work = work
        self._stop = stop
        self._news = news
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(str(number),), daemon=True)
            for number in range(workers)
        ]

    def run(self, tick: Callable[[], None]) -> None:
        """See `FarSide.crew`."""
        for thread in self._threads:
            thread.start()
        try:
            while not self._errors and any(thread.is_alive() for thread in self._threads):
                tick()
                self._news.wait(_TICK_SECONDS)
                self._news.clear()
        finally:
            if self._errors or any(thread.is_alive() for thread in self._threads):
                self._stop.set()
            deadline = time.monotonic() + _JOIN_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._errors:
            raise self._errors[0]
        tick()

    def _run(self, name: str) -> None:
        try:
            self._work(name)
        except Cancelled:
            return
        except BaseException as error:  # noqa: BLE001 - raised where the command can tell of it
            self._errors.append(error)
        finally:
            self._news.set()
