"""Patience with a remote that is read: what is waited out, and what ends a command."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import cast

import pytest

from ntt_backup.client.backoff import Backoff, OutageClock
from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.session_pool import FRUITLESS, ReconnectingSession, SessionPool
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError, RemoteUnreachable
from ntt_backup.process import threads
from ntt_backup.process.threads import WorkQueue, run_threads
from ntt_backup.wire import messages
from ntt_backup.wire.framing import CRC_BYTES, HEADER
from tests.helpers.waiting import PATIENCE

Work = Callable[[ReadSession], str]
NAMES = [(number.to_bytes(32, "big"), number) for number in range(1, 50)]
LOST = RemoteUnreachable("the connection to the remote was lost", detail="status 255")


class Connection:
    """As much of a session as is looked at."""

    def __init__(self) -> None:
        self.received = 0
        self.settled = 0

    def abort(self) -> None: ...

    close = abort


class Waits(list[float]):
    """How long was waited, each time."""

    def note(self, error: BackupError, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def session(waits: Waits) -> ReconnectingSession:
    """One that waits as long as a run does, without its chance."""
    clock = OutageClock(Backoff(1, 60), 3600.0, lambda: 1.0)
    return ReconnectingSession(lambda: cast(ReadSession, Connection()), clock, waits.note, 3)


def dies(after: int, *, settles: int) -> Work:
    """Work whose connection is lost that often, each time after an answer; the first of them after
    that many pieces of work were settled.
    """
    calls = iter(range(after))

    def work(session: ReadSession) -> str:
        session.received += 1
        if (number := next(calls, None)) is None:
            return "done"
        session.settled += number < settles
        raise LOST

    return work


def test_a_connection_that_is_lost_often_is_waited_for_while_work_is_done(
    session: ReconnectingSession,
) -> None:
    assert session.do(dies(5 * FRUITLESS, settles=5 * FRUITLESS)) == "done"


def test_a_connection_without_work_done_is_tried_more_rarely_and_not_for_ever(
    session: ReconnectingSession, waits: Waits
) -> None:
    with pytest.raises(RemoteUnreachable) as caught:
        session.do(dies(5 * FRUITLESS, settles=0))
    assert f"{FRUITLESS} connections" in caught.value.detail
    assert "status 255" in caught.value.detail
    assert len(waits) == FRUITLESS - 1
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]


def test_work_that_is_done_ends_the_count_of_lost_connections(
    session: ReconnectingSession, waits: Waits
) -> None:
    for _ in range(3):
        assert session.do(dies(FRUITLESS - 1, settles=0)) == "done"
    assert waits[0] == waits[FRUITLESS - 1]


class Lister(ReadSession):
    """A session that lists NAMES in pages, and is lost with the nth frame."""

    _aborted = False

    def __init__(self, nth: int) -> None:
        self.received = self.settled = 0
        self._listing = None
        self._left = nth
        self._answers: deque[bytes] = deque()

    def abort(self) -> None:
        self._aborted = True

    def _send(self, frame: bytes) -> None:
        assert not self._aborted, "its pipes are closed"
        self._count_frame()
        low, high, most = messages.LIST.read(payload_of(frame))
        found = [one for one in NAMES if low <= one[0] <= high]
        page = messages.NAMES.frame(found[:most])
        self._answers += page, messages.LISTED.frame(len(found), 0, 0, len(found) > most)

    def _next(self, more_patience: float = 0.0) -> tuple[int, memoryview]:
        self._count_frame()
        self.received += 1
        frame = self._answers.popleft()
        return frame[HEADER.size - 1], payload_of(frame)

    def _count_frame(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise LOST


def payload_of(frame: bytes) -> memoryview:
    return memoryview(frame)[HEADER.size : -CRC_BYTES]


@pytest.mark.parametrize("nth", [4, 5, 6, 7])
def test_a_listing_goes_on_where_the_connection_was_lost(
    waits: Waits, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next page was asked for already, and with a page that came before that."""
    monkeypatch.setattr("ntt_backup.client.session_pool._PAGE", 10)
    sessions = [Lister(1), *(Lister(nth) for _ in range(len(NAMES)))]
    clock = OutageClock(Backoff(1, 60), 3600.0, lambda: 1.0)
    listing = ReconnectingSession(lambda: sessions.pop(0), clock, waits.note, attempts=3)
    pages = list(listing.names("", lambda path, kind: None))
    assert [name for page in pages for name in page] == NAMES
    assert len(sessions) < len(NAMES) - 1


@pytest.mark.timeout(PATIENCE)
def test_a_first_connection_that_fails_waits_for_one_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So does a receiver that refuses one login of several: the command goes on."""
    refused, said = threading.Event(), list[str]()
    settings = RemoteConfig.model_validate(
        {"remote": {"url": "file:///mnt"}, "run": {"backoff_base": 0.01, "backoff_cap": 0.01}}
    )
    pool = SessionPool(settings, "verify", (), lambda error, seconds: said.append(error.message))

    def connect(slot: str) -> ReadSession:
        if slot == "0" and not refused.is_set():
            refused.set()
            raise LOST
        return cast(ReadSession, Connection())

    def one_after_the_other(count: int, work: Callable[[str], None], *_: object) -> None:
        first = threading.Thread(target=work, args=("0",))
        first.start()
        assert refused.wait(PATIENCE)
        first.join(0.05)
        work("1")
        first.join()

    monkeypatch.setattr(pool, "_connect", connect)
    monkeypatch.setattr("ntt_backup.client.session_pool.run_threads", one_after_the_other)
    done: list[str] = []
    pool.run(2, lambda session: done.append(session.do(lambda _: "done")), lambda: None)
    assert (done, said) == (["done"] * 2, [LOST.message])


@pytest.mark.timeout(PATIENCE)
def test_a_result_makes_room_for_a_job_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More jobs than there is room for, and a tick that by itself would come too late."""
    monkeypatch.setattr(threads, "_TICK_SECONDS", 3600.0)
    news = threading.Event()
    jobs: WorkQueue[int, int] = WorkQueue(2, lambda: None, news.set)
    waiting = deque(range(20))
    done: list[int] = []

    def work(_: str) -> None:
        while (job := jobs.take_job(wait=True)) is not None:
            jobs.add_result(job)

    def feed() -> None:
        done.extend(jobs.take_results())
        while waiting and not jobs.full:
            jobs.add_job(waiting.popleft())
        if not waiting:
            jobs.close()

    run_threads(2, work, feed, threading.Event(), news)
    assert sorted(done) == list(range(20))


@pytest.mark.timeout(PATIENCE)
def test_the_end_of_the_work_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for a job when there will be no more, and a tick that would come late."""
    monkeypatch.setattr(threads, "_TICK_SECONDS", 60.0)
    monkeypatch.setattr(threads, "_WAIT_SECONDS", 60.0)
    for _ in range(20):
        jobs: WorkQueue[int, None] = WorkQueue(2, lambda: None)
        waiting = threading.Barrier(3)

        def work(
            name: str, jobs: WorkQueue[int, None] = jobs, waiting: threading.Barrier = waiting
        ) -> None:
            waiting.wait()
            if name == "0":
                jobs.close()
            assert jobs.take_job(wait=True) is None

        run_threads(3, work, lambda: None, threading.Event(), threading.Event())


def test_ctrl_c_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads read from a remote that is slow, and cannot look whether they shall end."""
    monkeypatch.setattr(threads, "_SOON_SECONDS", 0.0)
    monkeypatch.setattr(threads, "_JOIN_SECONDS", 0.1)
    answer = threading.Event()

    def work(_: str) -> None:
        answer.wait(PATIENCE)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_threads(2, work, interrupt, threading.Event(), threading.Event())
    answer.set()
    said = "stopping: waiting at most 0.1 s for 2 connections; Ctrl-C again ends at once\n"
    assert capsys.readouterr().err == said
