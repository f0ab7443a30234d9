"""A process beside the workers, as the coordinator sees it: whatever it does, the run goes on."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.client.backoff import Backoff
from ntt_backup.config import Settings, load
from ntt_backup.daemon.side_jobs import MOST_BROKEN, RETRY_SECONDS, SideJob, dump_job
from ntt_backup.dump.events import DumpFailed, DumpSkipped, DumpStart
from ntt_backup.events import Event, Outage, Warning
from ntt_backup.process.messages import JobOver, Message
from ntt_backup.process.pipeline import Child, wait_for
from ntt_backup.snapshot.events import SnapshotFailed, SnapshotsRecovered
from tests.helpers.waiting import PATIENCE

INTERVAL = 86400.0


def settings(**values: Any) -> Settings:
    """Values go by "table.key"."""
    flags = {"source.root": "/srv/store", "remote.host": "far", "remote.path": "/srv/backup"}
    return load(Settings, flags={**flags, **values}, environ={}, file=None)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs in the place of the process; to be written by the test."""
    path = tmp_path / "program.py"

    def fork(*_: object) -> Child:
        return Child((sys.executable, str(path)))

    monkeypatch.setattr("ntt_backup.daemon.side_jobs.fork", fork)
    return path


def never(*_: object) -> Event:
    raise AssertionError


def heard(dump: SideJob, now: float = 0.0) -> Iterator[Event]:
    """All events until the process has ended."""
    while dump.running:
        wait_for(reading=dump.fds, timeout=PATIENCE)
        yield from dump.hear(now)


def test_events_of_the_dump_process_are_passed_on_and_its_end_is_not(program: Path) -> None:
    program.write_text(
        'print(\'{"event": "dump_skipped", "pid": 1, "name": "x"}\')\n'
        "print('a library says something'); print('[1]'); print('{}')\n"
        'print(\'{"event": "job_over", "failed": false}\')\n'
    )
    dump = dump_job(settings())
    dump.start_if_due(0.0)
    assert list(heard(dump)) == [DumpSkipped(pid=1, name="x")]
    assert not dump.failed
    dump.start_if_due(INTERVAL - 1)
    assert not dump.running
    dump.start_if_due(INTERVAL)
    assert dump.running
    dump.discard()
    assert not dump.running


@pytest.mark.parametrize(
    ("max_age", "next_look"), [(INTERVAL * 7, INTERVAL), (60.0, 60.0), (0.0, INTERVAL)]
)
def test_no_dump_grows_older_than_it_may(program: Path, max_age: float, next_look: float) -> None:
    program.write_text('print(\'{"event": "job_over", "failed": false}\')')
    dump = dump_job(settings(**{"dump.max_age": max_age}))
    dump.start_if_due(0.0)
    assert list(heard(dump)) == []
    dump.start_if_due(next_look - 1)
    assert not dump.running
    dump.start_if_due(next_look)
    assert dump.running
    dump.discard()


def test_a_dump_process_that_dies_has_failed_and_is_tried_again_sooner(program: Path) -> None:
    program.write_text("import os, sys; print('oh no', file=sys.stderr, flush=True); os.abort()")
    dump = dump_job(settings())
    dump.start_if_due(0.0)
    (event,) = heard(dump, now=5.0)
    assert isinstance(event, DumpFailed)
    assert (event.exit_code, event.detail) == (1, "oh no")
    assert dump.failed
    dump.start_if_due(5.0 + RETRY_SECONDS - 1)
    assert not dump.running
    dump.start_if_due(5.0 + RETRY_SECONDS)
    assert dump.running
    dump.discard()


def test_a_dump_process_that_cannot_be_started_has_failed_and_is_tried_again_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork(*_: object) -> Child:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr("ntt_backup.daemon.side_jobs.fork", fork)
    dump = dump_job(settings())
    dump.start_if_due(0.0)
    (event,) = dump.hear(0.0)
    assert not dump.running
    assert isinstance(event, DumpFailed)
    assert event.detail == "no memory"
    assert dump.failed
    assert list(dump.hear(0.0)) == []
    dump.start_if_due(RETRY_SECONDS)
    assert len(list(dump.hear(RETRY_SECONDS))) == 1


def test_a_job_that_says_when_is_started_then_and_sooner_after_failures(program: Path) -> None:
    def says(failed: str, again_s: int) -> None:
        program.write_text(
            f'print(\'{{"event": "job_over", "failed": {failed}, "again_s": {again_s}}}\')'
        )

    def start(now: float) -> None:
        job.start_if_due(now - 1)
        assert not job.running
        job.start_if_due(now)
        assert list(heard(job, now)) == []

    job = SideJob(lambda _: JobOver(failed=False), "x", every=50.0, died=never)
    says("false", 500)
    job.start_if_due(0.0)
    assert list(heard(job)) == []
    says("true", 500)
    start(500.0)
    start(560.0)
    says("false", 7)
    start(680.0)
    assert not job.failed
    says("true", 500)
    start(687.0)
    start(747.0)


@pytest.mark.parametrize(
    ("failed", "every", "now", "runs"),
    [("false", 60.0, 5.0, True), ("true", None, 1e9, False)],
    ids=["other sets", "switched off"],
)
def test_a_job_whose_schedule_changes_while_it_works_is_started_by_the_new_one(
    program: Path, failed: str, every: float | None, now: float, runs: bool
) -> None:
    program.write_text(f'print(\'{{"event": "job_over", "failed": {failed}, "again_s": 86400}}\')')
    job, other = (
        SideJob(lambda _: JobOver(failed=False), "x", every=one, died=never)
        for one in (INTERVAL, every)
    )
    job.start_if_due(0.0)
    job.become(other, look=True)
    assert list(heard(job, now=5.0)) == []
    job.start_if_due(now)
    assert job.running == runs
    job.discard()


def test_a_job_tells_once_that_it_is_well_after_an_error(program: Path) -> None:
    job = SideJob(
        lambda _: JobOver(failed=False), "x", every=1.0, died=never, well=SnapshotsRecovered
    )

    def kinds(failed: str, now: float, *said: str) -> list[str]:
        over = f'{{"event": "job_over", "failed": {failed}}}'
        program.write_text("".join(f"print({line!r})\n" for line in (*said, over)))
        job.start_if_due(now)
        return [one.kind for one in heard(job, now)]

    error = SnapshotFailed(set="", exit_code=5, message="m", detail="", hint="")
    assert kinds("false", 0.0) == []
    assert kinds("true", 1e5, error.encode().decode().strip()) == ["snapshot_failed"]
    assert kinds("true", 2e5) == []
    assert kinds("false", 3e5) == ["snapshots_recovered"]
    assert kinds("true", 4e5) == []
    assert kinds("false", 5e5) == []


@pytest.mark.parametrize("works", [False, True], ids=["after", "meanwhile"])
def test_dumps_that_are_switched_off_fail_no_more(program: Path, works: bool) -> None:
    error = DumpFailed(exit_code=5, message="m", detail="", hint="").encode().decode().strip()
    program.write_text(f'print({error!r}); print(\'{{"event": "job_over", "failed": true}}\')')
    job, off = dump_job(settings()), dump_job(settings(**{"run.skip_pgdump": True}))
    job.start_if_due(0.0)
    kinds = [] if works else [one.kind for one in heard(job)]
    job.become(off, look=False)
    kinds += [one.kind for one in (*heard(job), *job.hear(1.0))]
    assert kinds == ["dump_failed", "dump_recovered"]
    assert not job.failed


def test_a_job_that_dies_is_told_of_by_its_newest_settings(program: Path) -> None:
    def died(*_: object) -> Event:
        return Warning(reason="it died")

    program.write_text("import os; os.abort()")
    job, other = (
        SideJob(lambda _: JobOver(failed=False), "x", every=1.0, died=one) for one in (never, died)
    )
    job.start_if_due(0.0)
    job.become(other, look=True)
    assert [one.line for one in heard(job)] == ["warning: it died"]


def test_no_dump_process_is_started_when_dumps_are_switched_off(program: Path) -> None:
    dump = dump_job(settings(**{"run.skip_pgdump": True}))
    dump.start_if_due(1e9)
    assert not dump.running
    assert dump.fds == []


AWAY = JobOver(failed=False, away="remote", reason="the link is down", detail="refused")


def told(program: Path, *messages: Message) -> None:
    """Has the process say this and end."""
    program.write_text("".join(f"print({one.encode().decode().strip()!r})\n" for one in messages))


def test_a_dump_that_meets_an_outage_waits_as_blobs_do_and_goes_on_with_the_first_answer(
    program: Path,
) -> None:
    told(program, AWAY)
    dump = dump_job(settings(), Backoff(40.0, 40.0))
    dump.start_if_due(0.0)
    (event,) = heard(dump, now=5.0)
    assert isinstance(event, Outage)
    assert (event.what, event.reason, event.detail) == ("remote", "the link is down", "refused")
    assert (event.worker, event.attempt) == (None, 1)
    assert not dump.failed
    dump.start_if_due(5.0 + 3.9)
    assert not dump.running
    dump.answer("catalog")
    dump.start_if_due(5.0)
    assert not dump.running
    dump.answer("remote")
    told(program, JobOver(failed=False))
    dump.start_if_due(5.0)
    assert list(heard(dump, now=6.0)) == []
    dump.answer("remote")  # It waits for nothing any more.
    dump.start_if_due(7.0)
    assert not dump.running


def test_a_dump_without_an_answer_is_tried_again_after_the_backoff_and_never_fails(
    program: Path,
) -> None:
    told(program, AWAY)
    dump, now = dump_job(settings(), Backoff(10.0, 10.0)), 0.0
    for attempt in range(1, 2 * MOST_BROKEN):
        dump.start_if_due(now)
        (event,) = heard(dump, now)
        assert isinstance(event, Outage)
        assert event.attempt == attempt
        assert 1.0 <= event.wait_s <= 10.0
        now += 10.0
    assert not dump.failed


def test_a_dump_that_is_due_in_a_known_outage_is_not_even_started(program: Path) -> None:
    told(program, JobOver(failed=False))
    dump = dump_job(settings(), Backoff(1.0, 1.0))
    for away in ("remote", "catalog"):
        dump.start_if_due(0.0, {away})
        assert not dump.running
    dump.start_if_due(0.0, {"source"})
    assert dump.running
    dump.discard()


def test_a_dump_that_the_link_breaks_each_time_fails_in_the_end(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be begun again and again, while blobs pass and nothing looks wrong."""
    patient: list[object] = []

    def fork(body: Any, *_: object) -> Child:
        patient.extend(body.args)
        return Child((sys.executable, str(program)))

    monkeypatch.setattr("ntt_backup.daemon.side_jobs.fork", fork)
    told(program, DumpStart(reason="old", program="17"), AWAY)
    dump = SideJob(
        lambda _: JobOver(failed=False),
        "x",
        every=INTERVAL,
        died=never,
        backoff=Backoff(1.0, 1.0),
    )
    for _ in range(MOST_BROKEN + 1):
        dump.hurry()
        dump.start_if_due(0.0)
        list(heard(dump))
    assert patient == [True] * MOST_BROKEN + [False]
