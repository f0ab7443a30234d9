"""A pool of sessions that reconnect, for the commands that read the remote.

`verify`, `restore` and `reconcile` run for hours over unreliable links. Each of their threads has a
session, and passes it to a piece of work. When the remote becomes unreachable, the thread waits as
a run does (`run.backoff_base`, `run.backoff_cap`, at most `run.outage_timeout`), and passes a new
session to the same work; the work itself records what is done.

The first connection is not retried: whoever has typed a command wants to know at once that the
remote is unreachable. All threads connect at the same time, so that handshakes run in parallel.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from ntt_backup.blobdir.walk import StrayKind
from ntt_backup.client.backoff import OutageClock
from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.throttle import SharedPace
from ntt_backup.config import RemoteConfig
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.errors import (
    BackupError,
    ProtocolViolation,
    RemoteDenied,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.model import WHOLE, Shard
from ntt_backup.process.threads import Cancelled, run_threads

T = TypeVar("T")

# The names of one question: the part of a listing that a thread keeps in memory.
_PAGE: Final = 8000
_DIGITS: Final = 64
_STRAYS: Final = dict(enumerate(StrayKind))
# The connections in a row that received frames and did no work, after which a command gives up.
FRUITLESS: Final = 100


class SessionPool:
    """Opens sessions for the threads of one command.

    Args:
        settings: Of the remote and the run.
        command: The name of the command, for errors and for the remote.
        words: The words that the receiver's `--allow` must have: `list`, `verify`, `get`.
        on_outage: Receives the error of an outage, and the seconds of the wait.
        bwlimit: The limit of all data that is received; None for no limit.
    """

    def __init__(
        self,
        settings: RemoteConfig,
        command: str,
        words: Sequence[str],
        on_outage: Callable[[BackupError, float], None],
        bwlimit: Timetable | None = None,
    ) -> None:
        self._fetch = SharedPace.of(bwlimit)
        self._settings = settings
        self._command = command
        self._words = words
        self._on_outage = on_outage
        self._stop = threading.Event()
        self._news = threading.Event()
        self._first: list[ReadSession] = []
        # The names of the sessions that are being opened, and whether any was ever opened.
        self._contact = threading.Condition()
        self._opening: set[str] = set()
        self._met = False

    def open_first(self) -> ReadSession:
        """Opens the first session, without retries. The first thread takes it over."""
        session = self._open("first")
        self._first.append(session)
        return session

    def close(self) -> None:
        """Ends the first session, if no thread has taken it over."""
        while self._first:
            self._first.pop().abort()

    def is_empty(self) -> bool:
        """Returns whether the remote has no blob at all. Asks without retries."""
        session = self._open("look")
        try:
            return session.is_empty()
        finally:
            session.abort()

    def session(self, slot: str) -> ReconnectingSession:
        """Returns a session that is not connected yet. slot: its name."""
        run = self._settings.run
        clock = OutageClock.of(run)
        return ReconnectingSession(lambda: self._first_or(slot), clock, self._wait, run.attempts)

    def run(
        self, workers: int, work: Callable[[ReconnectingSession], None], tick: Callable[[], None]
    ) -> None:
        """Runs work in several threads, each with a session; see `run_threads`."""
        # A session that fails waits for the others, also for one that has not begun.
        self._opening |= {str(number) for number in range(workers)}

        def with_session(slot: str) -> None:
            session = self.session(slot)
            try:
                session.do(lambda _: None)  # All threads connect, and none later than the others.
                work(session)
            finally:
                session.close()

        run_threads(workers, with_session, tick, self._stop, self._news)

    def wake(self) -> None:
        """Has tick called at once."""
        self._news.set()

    def cancelled(self) -> None:
        """Raises Cancelled if the command is ending."""
        if self._stop.is_set():
            raise Cancelled

    def _wait(self, error: BackupError, seconds: float) -> None:
        """Waits after an error. Raises the error if the remote was never reached."""
        with self._contact:
            self._contact.wait_for(lambda: self._met or not self._opening)
            if not self._met:
                raise error
        self._on_outage(error, seconds)
        if self._stop.wait(seconds):
            raise Cancelled

    def _first_or(self, slot: str) -> ReadSession:
        try:
            return self._first.pop()
        except IndexError:
            return self._open(slot)

    def _open(self, slot: str) -> ReadSession:
        with self._contact:
            self._opening.add(slot)
        met = False
        try:
            session = self._connect(slot)
            met = True
            return session
        finally:
            with self._contact:
                self._opening.discard(slot)
                self._met = self._met or met
                self._contact.notify_all()

    def _connect(self, slot: str) -> ReadSession:
        spec = SessionSpec.of(self._settings, f"{self._command}-{os.getpid()}", slot)
        try:
            session = ReadSession(replace(spec, cancelled=self.cancelled, fetch=self._fetch))
        except Unsupported as error:
            raise Unsupported(
                f"{self._command} needs Python 3.8 or newer on the remote",
                detail=str(error),
                hint="install python3 on the remote (all of its standard library, nothing else)."
                " By tar alone blobs can be sent, but not listed, hashed or fetched; without"
                f" Python, fetch them with rsync -a {self._settings.remote.where}/by-hash/ and"
                " check them on this machine",
            ) from error
        try:
            for word in self._words:
                session.require(word)
        except BaseException:
            session.abort()
            raise
        return session


class ReconnectingSession:
    """Does the work of a thread with a session, and with another one if the session was lost.

    It gives up after so many `attempts` that ended in a protocol violation, in a row and without
    work done. The limit for sessions that are lost after an answer is FRUITLESS, since the link may
    be the cause.
    """

    def __init__(
        self,
        open_: Callable[[], ReadSession],
        clock: OutageClock,
        wait: Callable[[BackupError, float], None],
        attempts: int,
    ) -> None:
        self._open = open_
        self._clock = clock
        self._wait = wait
        self._attempts = attempts
        self._violations = 0
        self._fruitless = 0
        self._session: ReadSession | None = None

    def do(self, work: Callable[[ReadSession], T]) -> T:
        """Returns the result of work, which is called again with a new session after an outage.

        It counts in `settled` of the session the pieces that it will not ask for again.
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
        self, prefix: str, on_stray: Callable[[str, StrayKind], None], shard: Shard = WHOLE
    ) -> Iterator[list[tuple[bytes, int]]]:
        """Yields pages of the remote's blobids and sizes, in order.

        The remote lists the next page while the caller uses a page. The session may be asked
        nothing else before the last page.

        Args:
            prefix: The first digits of all blobids.
            shard: The part of these that is listed.
            on_stray: Receives path and kind of each entry that is no blob, once. A kind that only
                a newer receiver knows is UNREADABLE.
        """
        low = int(prefix.ljust(_DIGITS, "0"), 16)
        high = min(shard.end, low + (1 << 4 * (_DIGITS - len(prefix))))
        low = max(shard.first, low)
        last = (high - 1).to_bytes(32, "big")
        while low < high:
            first = low.to_bytes(32, "big")
            page = self.do(partial(ReadSession.names, low=first, high=last, most=_PAGE))
            left = page.names and page.more
            low = int.from_bytes(page.names[-1][0], "big") + 1 if left else high
            if low < high and self._session is not None:
                try:
                    self._session.ask_names(low.to_bytes(32, "big"), last, _PAGE)
                except BackupError:
                    self._drop()  # The next question opens another session.
            for kind, path in page.strays:
                on_stray(path, _STRAYS.get(kind, StrayKind.UNREADABLE))
            yield page.names

    def close(self) -> None:
        """Ends the session in good order."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _work(self, session: ReadSession, work: Callable[[ReadSession], T]) -> T:
        received, settled = session.received, session.settled
        try:
            done = work(session)
            session.settled += 1
            return done
        finally:
            if session.settled > settled:
                self._clock.over()
                self._violations = self._fruitless = 0
            elif session.received > received:
                self._clock.answered()
                self._fruitless += 1

    def _require_hope(self, error: BackupError) -> None:
        """Raises if retries are useless, since each answer would restart the limit of the clock."""
        self._violations += isinstance(error, ProtocolViolation)
        if self._fruitless >= FRUITLESS:
            raise RemoteUnreachable(
                error.message,
                detail=f"{FRUITLESS} connections in a row, and nothing was done on any of them;"
                f" last: {error.detail}",
                hint=error.hint,
            ) from error
        if self._violations >= self._attempts:
            raise RemoteDenied(
                error.message,
                detail=f"{self._violations} times in a row; last: {error.detail}",
                hint="look at the memory and disk of the remote, and whether another program stands"
                " behind its python3 or the forced command; `ntt-backup-remote"
                " install-receiver --write FILE` has a receiver that fits",
            ) from error

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.abort()
