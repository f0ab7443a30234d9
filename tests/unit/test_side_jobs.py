"""A process beside the workers, as the coordinator sees it: whatever it does, the run goes on."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.client.backoff import Backoff
from ntt_backup.config import Settings, load
from ntt_backup.daemon.events import CheckFailed, CheckStart
from ntt_backup.daemon.side_jobs import MOST_BROKEN, RETRY_SECONDS, CheckJob, DumpJob, SideJob
from ntt_backup.dump.events import DumpFailed, DumpSkipped, DumpStart
from ntt_backup.events import Event, Outage, Warning
from ntt_backup.process.messages import JobOver, Message, ProcessEnded, Tick
from ntt_backup.process.spawn import Child, wait_for
from ntt_backup.snapshot.events import SnapshotFailed, SnapshotsRecovered
from tests.helpers.waiting import PATIENCE

INTERVAL = 86400.0
OVER, FAILED = JobOver(failed=False), JobOver(failed=True)
AWAY = JobOver(failed=False, away="remote", reason="the link is down", detail="refused")
NO_DUMP = DumpFailed(exit_code=5, message="m", detail="", hint="")
DIES = "import os, sys; print('oh no', file=sys.stderr, flush=True); os.abort()"

HANGS = "import sys, time; sys.stdout.flush(); time.sleep(600)"

Says = Callable[..., None]


def settings(**values: Any) -> Settings:
    """Values go by "table.key"."""
    flags = {"source.root": "/srv/store", "remote.host": "far", "remote.path": "/srv/backup"}
    return load(Settings, flags={**flags, **values}, environ={}, file=None)


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Sets what the next process in the place of the job says: messages, or a program."""
    path = tmp_path / "program.py"

    def fork(body: Any, _name: str) -> Child:
        work, _pace = body.args
        return Child((sys.executable, str(path), str(work.args)))

    def say(*said: Message | str) -> None:
        path.write_text("\n".join(one if isinstance(one, str) else printing(one) for one in said))

    monkeypatch.setattr("ntt_backup.process.child.Fork", fork)
    return say


def printing(message: Message) -> str:
    # The line is written as a whole, and its end with it.
    return f"print({message.encode().decode()!r}, end='')"


class Job(SideJob):
    """A job with an interval. what: the event of its death says."""

    name = "x"
    needs = frozenset()
    looks = True
    recovered = SnapshotsRecovered

    def __init__(self, every: float | None, backoff: Backoff | None = None) -> None:
        self.every = every
        super().__init__(settings(), backoff)

    def interval(self) -> float | None:
        return self.every

    def died(self, ended: ProcessEnded, last: Event | None) -> Event:
        return Warning(reason=f"{self.settings.target} died")


def begin(job: SideJob, now: float = 0.0) -> None:
    job.start_if_due(now)
    assert job.running


def end(job: SideJob, now: float = 0.0) -> list[Event]:
    """What is told of its process until after its end."""
    heard = [*job.hear(now)]
    while job.running:
        wait_for(reading=job.fds, timeout=PATIENCE)
        heard += job.hear(now)
    return [*heard, *job.hear(now)]


def play(job: SideJob, now: float) -> list[Event]:
    """What is told of a process that is due now, and was not a second before."""
    job.start_if_due(now - 1)
    assert not job.running
    begin(job, now)
    return end(job, now)


def test_events_of_the_dump_process_are_passed_on_and_its_end_is_not(says: Says) -> None:
    skipped = DumpSkipped(pid=1, name="x")
    says(skipped, "print('a library says something'); print('[1]'); print('{}')", OVER)
    dump = DumpJob(settings())
    begin(dump)
    assert end(dump) == [skipped]
    assert not dump.failed
    begin(dump, INTERVAL)
    dump.discard()
    assert not dump.running


@pytest.mark.parametrize(
    ("max_age", "next_look"), [(INTERVAL * 7, INTERVAL), (60.0, 60.0), (0.0, INTERVAL)]
)
def test_no_dump_grows_older_than_it_may(says: Says, max_age: float, next_look: float) -> None:
    says(OVER)
    dump = DumpJob(settings(**{"dump.max_age": max_age}))
    begin(dump)
    assert end(dump) == []
    assert play(dump, next_look) == []


@pytest.mark.parametrize("starts", [True, False])
def test_a_dump_process_that_dies_or_cannot_start_has_failed_and_is_tried_again_sooner(
    says: Says, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    def fork(*_: object) -> Child:
        raise OSError(errno.ENOMEM, "oh no")

    says(DIES)
    if not starts:
        monkeypatch.setattr("ntt_backup.process.child.Fork", fork)
    dump = DumpJob(settings())
    begin(dump)
    (event,) = end(dump, now=5.0)
    assert isinstance(event, DumpFailed)
    assert (event.exit_code, event.detail) == (1, "oh no")
    assert dump.failed
    assert list(dump.hear(5.0)) == []
    assert len(play(dump, 5.0 + RETRY_SECONDS)) == 1


def test_a_job_that_says_when_is_started_then_and_sooner_after_failures(says: Says) -> None:
    one = Job(50.0)
    says(JobOver(failed=False, again_s=500))
    begin(one)
    assert end(one) == []
    says(JobOver(failed=True, again_s=500))
    assert play(one, 500.0) == play(one, 560.0) == []
    says(JobOver(failed=False, again_s=7))
    assert play(one, 680.0) == []
    assert not one.failed
    says(JobOver(failed=True, again_s=500))
    assert play(one, 687.0) == play(one, 747.0) == []


@pytest.mark.parametrize(
    ("failed", "every", "now", "runs"),
    [(False, 60.0, 5.0, True), (True, None, 1e9, False)],
    ids=["other sets", "switched off"],
)
def test_a_job_whose_schedule_changes_while_it_works_is_started_by_the_new_one(
    says: Says, failed: bool, every: float | None, now: float, runs: bool
) -> None:
    says(JobOver(failed=failed, again_s=INTERVAL))
    one = Job(INTERVAL)
    begin(one)
    one.every = every
    one.adopt(settings())
    assert end(one, now=5.0) == []
    one.start_if_due(now)
    assert one.running == runs
    one.discard()


def test_a_job_tells_once_that_it_is_well_after_an_error(says: Says) -> None:
    one = Job(1.0)
    error = SnapshotFailed(set="", exit_code=5, message="m", detail="", hint="")
    told = []
    stories: list[list[Message]] = [[OVER], [error, FAILED], [FAILED], [OVER], [FAILED], [OVER]]
    for nth, said in enumerate(stories):
        says(*said)
        one.start_if_due(nth * 1e5)
        told.append([event.kind for event in end(one, nth * 1e5)])
    assert told == [[], ["snapshot_failed"], [], ["snapshots_recovered"], [], []]


@pytest.mark.parametrize("works", [False, True], ids=["after", "meanwhile"])
def test_dumps_that_are_switched_off_fail_no_more(says: Says, works: bool) -> None:
    says(NO_DUMP, FAILED)
    dump = DumpJob(settings())
    begin(dump)
    heard = [] if works else end(dump)
    dump.adopt(settings(**{"run.skip_pgdump": True}))
    heard += end(dump, 1.0)
    assert [one.kind for one in heard] == ["dump_failed", "dump_recovered"]
    assert not dump.failed


def test_a_job_that_dies_is_told_of_by_its_newest_settings(says: Says) -> None:
    says(DIES)
    one = Job(1.0)
    begin(one)
    one.adopt(settings().model_copy(update={"target": "usb"}))
    assert [event.line for event in end(one)] == ["warning: usb died"]


def test_no_dump_process_is_started_when_dumps_are_switched_off(says: Says) -> None:
    dump = DumpJob(settings(**{"run.skip_pgdump": True}))
    dump.start_if_due(1e9)
    assert not dump.running
    assert dump.fds == []


def test_a_dump_that_meets_an_outage_waits_as_blobs_do_and_goes_on_with_the_first_answer(
    says: Says,
) -> None:
    says(AWAY)
    dump = DumpJob(settings(), Backoff(40.0, 40.0))
    begin(dump)
    (event,) = end(dump, now=5.0)
    assert isinstance(event, Outage)
    assert (event.what, event.reason, event.detail) == ("remote", "the link is down", "refused")
    assert (event.worker, event.attempt) == (None, 1)
    assert not dump.failed
    for now in (5.0 + 3.9, 5.0):
        dump.start_if_due(now)
        assert not dump.running
        dump.answer("catalog")
    dump.answer("remote")
    says(OVER)
    dump.start_if_due(5.0)
    assert end(dump, now=6.0) == []
    dump.answer("remote")  # It waits for nothing any more.
    dump.start_if_due(7.0)
    assert not dump.running


def test_a_dump_without_an_answer_is_tried_again_after_the_backoff_and_never_fails(
    says: Says,
) -> None:
    says(AWAY)
    dump = DumpJob(settings(), Backoff(10.0, 10.0))
    for attempt in range(1, 2 * MOST_BROKEN):
        dump.start_if_due(attempt * 10.0)
        (event,) = end(dump, attempt * 10.0)
        assert isinstance(event, Outage)
        assert event.attempt == attempt
        assert 1.0 <= event.wait_s <= 10.0
    assert not dump.failed


def test_a_dump_that_is_due_in_a_known_outage_is_not_even_started(says: Says) -> None:
    says(OVER)
    dump = DumpJob(settings(), Backoff(1.0, 1.0))
    for away in ("remote", "catalog"):
        dump.start_if_due(0.0, {away})
        assert not dump.running
    dump.start_if_due(0.0, {"source"})
    assert dump.running
    dump.discard()


def test_a_dump_that_the_link_breaks_each_time_fails_in_the_end(says: Says) -> None:
    """Else it would be begun again and again, while blobs pass and nothing looks wrong."""
    patient = printing(Warning(reason="patient"))
    tells = f"import sys\nif sys.argv[1] == '(True,)': {patient}"
    says(tells, DumpStart(reason="old", program="17"), AWAY)
    dump = Job(INTERVAL, Backoff(1.0, 1.0))
    heard = []
    begin(dump)
    for _ in range(MOST_BROKEN + 1):
        heard.append(end(dump)[0].kind)
        dump.answer("remote")  # A blob has passed.
        begin(dump)
    dump.discard()
    assert heard == ["warning"] * MOST_BROKEN + ["dump_start"]


def test_a_check_that_meets_the_same_outage_again_and_again_does_not_fail(says: Says) -> None:
    patient = printing(Warning(reason="patient"))
    tells = f"import sys\nif sys.argv[1] == '(True,)': {patient}"
    says(tells, CheckStart(command="verify"), AWAY)
    check = CheckJob(settings(**{"checks.verify": {"every": "1d"}}), Backoff(1.0, 1.0))
    for attempt in range(2 * MOST_BROKEN):
        check.start_if_due(attempt * 10.0)
        told = [event.kind for event in end(check, attempt * 10.0)]
        assert told == ["warning", "check_start", "outage"]


def heard(job: SideJob, count: int) -> None:
    """Waits until a process has told so many events at the time 0."""
    told: list[Event] = []
    while len(told) < count:
        wait_for(reading=job.fds, timeout=PATIENCE)
        told += job.hear(0.0)


@pytest.mark.parametrize(
    ("max_time", "name", "works", "killed", "why"),
    [
        (100.0, "verify", 800.0, 801.0, "it took 13 min 21 s"),
        (None, "verify", 86400.0, 86401.0, "it did nothing for 1 d 0 h"),
        (None, "policy", 86400.0, 86401.0, "it did nothing for 1 d 0 h"),
    ],
)
def test_a_check_that_hangs_is_killed_and_the_next_one_is_done(
    says: Says, max_time: float | None, name: str, works: float, killed: float, why: str
) -> None:
    check = {"every": "1h", **({"max_time": max_time} if max_time else {})}
    job = CheckJob(settings(**{"checks.verify": check}))
    says(CheckStart(command=name), HANGS)
    begin(job)
    heard(job, 1)
    # What is read meanwhile holds for the next one.
    job.adopt(settings(**{"checks.verify": {"every": "1h", "max_time": 1}}))
    assert list(job.hear(works)) == []
    (event,) = end(job, killed)
    assert isinstance(event, CheckFailed)
    assert (event.command, event.message) == (name, f"a check was killed: {why}")
    says(OVER)
    begin(job, killed + RETRY_SECONDS)
    assert [one.kind for one in end(job, killed + RETRY_SECONDS)] == ["checks_recovered"]


def test_a_check_that_shows_signs_of_life_is_not_killed(says: Says) -> None:
    job = CheckJob(settings(**{"checks.verify": {"every": "1h"}}))
    flush = "import sys; sys.stdout.flush()"
    says(CheckStart(command="verify"), flush, "input()", Tick(state="checking"), HANGS)
    begin(job)
    heard(job, 1)
    job.tell(b"\n")
    assert wait_for(reading=job.fds, timeout=PATIENCE)
    assert list(job.hear(80_000.0)) == list(job.hear(160_000.0)) == []
    assert job.running
    assert [one.kind for one in end(job, 180_000.0)] == ["check_failed"]


def test_a_dump_that_says_nothing_is_not_killed(says: Says) -> None:
    says(DumpStart(reason="old", program="17"), HANGS)
    dump = DumpJob(settings())
    begin(dump)
    heard(dump, 1)
    assert list(dump.hear(1e9)) == []
    assert dump.running
    dump.discard()
