"""When a run takes which set, and what it tells of a take."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.config import Settings, load
from ntt_backup.errors import BackupError, LockHeld, RemoteDenied, RemoteUnreachable, SourceError
from ntt_backup.events import Event, Warning
from ntt_backup.filestore.local_cache import directory_for
from ntt_backup.snapshot import job
from ntt_backup.snapshot.events import SnapshotComplete, SnapshotFailed, SnapshotProgress
from ntt_backup.snapshot.job import due_in, take_due
from ntt_backup.snapshot.last_take import last, noting
from ntt_backup.snapshot.names import new_version
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.take.new_version import Report, Taken
from ntt_backup.snapshot.take.walk import SnapshotSet
from ntt_backup.snapshot.versions import last_begun
from tests.helpers.memory_store import MemoryStore
from tests.helpers.waiting import PATIENCE
from tests.unit.taker import Taker

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOUR = 3600.0

Take = Callable[[Settings, SnapshotSet, Report], Taken]


@pytest.mark.parametrize(
    ("age", "wait"),
    [(None, 0), (HOUR, 0), (HOUR - 600, 600), (-600, HOUR - 600), (-9 * HOUR, 0)],
    ids=["none", "old", "young", "a little ahead", "far ahead"],
)
def test_a_set_is_due_by_the_age_of_its_newest_version(age: float | None, wait: float) -> None:
    begun = None if age is None else NOW - timedelta(seconds=age)
    assert due_in(begun, HOUR, NOW) == wait


def test_the_newest_whole_version_is_as_old_as_its_manifest_says(tmp_path: Path) -> None:
    """The name of one after one of a clock that was ahead is ahead, too."""
    taker = Taker(tmp_path / "tree", tmp_path / "cache")
    taker.write("file", b"content")
    assert last_begun(taker.repository, "s", taker.now, taker.origins) is None
    taker.now += timedelta(days=400)
    taker.take()
    taker.now -= timedelta(days=400)
    taker.take()
    taker.repository.files[f"s/{new_version(NOW + timedelta(days=999))}/map"] = b"unfinished"
    assert last_begun(taker.repository, "s", taker.now, taker.origins) == taker.now


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Two sets, one of them due each hour, the other each second hour."""
    file = tmp_path / "config.toml"
    file.write_text(
        f'[source]\nroot = "/srv"\n[remote]\nurl = "file:///x"\n[log]\njsonl = "{tmp_path}/log"\n'
        'progress_interval = "0.1s"\n'
        '[snapshots.etc]\npaths = ["/etc"]\nevery = "1h"\n'
        '[snapshots.home]\npaths = ["/home"]\nevery = "2h"\n'
        '[snapshots.hand]\npaths = ["/srv"]\n'
    )
    return load(Settings, file=file, environ={})


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Take], None]:
    """Puts a function in the place of takes, of sets that the target has not yet."""

    def use(made: Take) -> None:
        def take_version(settings: Settings, set: SnapshotSet, *, report: Report) -> Taken:
            with noting(settings, set.name) as note:
                taken = made(settings, set, report)
                note(taken)
            return taken

        monkeypatch.setattr(job, "take_version", take_version)

    monkeypatch.setattr(job, "open_store", lambda *_: MemoryStore())
    return use


def taken(set: SnapshotSet, **more: Any) -> Taken:
    return Taken(set.name, new_version(NOW), **more)


def test_a_failure_keeps_no_other_set_back_and_is_known_until_a_take_goes_well(
    settings: Settings, take: Callable[[Take], None]
) -> None:
    events: list[Event] = []

    def fail(_: Settings, set: SnapshotSet, __: Report) -> Taken:
        if set.name == "etc":
            raise RemoteUnreachable("it is away")
        return taken(set, files=7)

    take(fail)
    over = take_due(settings, events.append)
    assert over.failed
    assert over.again_s is not None
    assert HOUR - PATIENCE < over.again_s <= HOUR
    (failed,) = [one for one in events if isinstance(one, SnapshotFailed)]
    (complete,) = [one for one in events if isinstance(one, SnapshotComplete)]
    assert (failed.set, complete.set) == ("etc", "home")
    assert (last(settings, "etc").error, last(settings, "home").files) == ("it is away", 7)

    take(lambda _, set, __: taken(set))
    assert not take_due(settings, events.append).failed
    assert last(settings, "etc").error == ""


def test_an_outage_before_a_set_was_due_is_forgotten_once_that_is_known(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    versions = {}
    for one in ("etc", "home"):
        name = new_version(datetime.now(UTC))
        versions[f"{one}/{name}/manifest"] = b"x"
        directory_for("snapshots", settings.remote).joinpath(one).mkdir(parents=True)
        Origins.of(settings).keep_made(one, name, "00" * 32)

    def opened(*_: object) -> MemoryStore:
        if away:
            raise RemoteUnreachable("it is away")
        repository = MemoryStore()
        repository.files |= versions
        repository.before = deny
        return repository

    def deny(verb: str, _: str) -> None:
        if verb == "read":
            raise RemoteDenied("the key may only add")

    monkeypatch.setattr(job, "open_store", opened)
    for away, error in ((True, "it is away"), (False, "")):
        assert take_due(settings, lambda _: None).failed == away
        assert last(settings, "etc").error == error


def test_an_outage_that_is_waited_for_ends_the_work_and_is_noted_nowhere(
    settings: Settings, take: Callable[[Take], None]
) -> None:
    """It is no failure of any set; what is known of the last take remains."""
    events: list[Event] = []

    def fail(error: BackupError) -> Take:
        def make(_: Settings, __: SnapshotSet, ___: Report) -> Taken:
            raise error

        return make

    take(fail(SourceError("cannot be read")))
    assert take_due(settings, events.append, patient=True).failed
    before = last(settings, "etc")
    assert before.error == "cannot be read"
    del events[:]
    take(fail(RemoteUnreachable("the link is down", detail="refused")))
    over = take_due(settings, events.append, patient=True)
    assert (over.failed, over.away) == (False, "remote")
    assert (over.reason, over.detail) == ("the link is down", "refused")
    assert [one.kind for one in events if isinstance(one, SnapshotFailed)] == []
    assert last(settings, "etc") == before


def test_a_set_that_somebody_takes_now_is_no_failure(
    settings: Settings, take: Callable[[Take], None]
) -> None:
    events: list[Event] = []

    def held(_: Settings, set: SnapshotSet, __: Report) -> Taken:
        raise LockHeld(f"another take of {set.name} is running")

    take(held)
    over = take_due(settings, events.append)
    assert not over.failed
    assert over.again_s is not None
    assert over.again_s < HOUR
    assert [one.kind for one in events if isinstance(one, Warning)] == ["warning", "warning"]
    assert last(settings, "etc").error == ""


def test_a_set_is_due_in_time_however_long_the_take_of_another_one_lasts(
    settings: Settings, take: Callable[[Take], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def slow(_: Settings, set: SnapshotSet, __: Report) -> Taken:
        clock[0] += HOUR / 2 if set.name == "home" else 0.0
        return taken(set)

    take(slow)
    assert take_due(settings, lambda _: None).again_s == HOUR / 2


def test_a_take_says_how_far_it_is_by_the_size_of_the_last_version(
    settings: Settings, take: Callable[[Take], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def slow(_: Settings, set: SnapshotSet, report: Report) -> Taken:
        for passed in (100, 200, 500):
            clock[0] += 10.0
            report.progress(1, passed, 50, 20)
            report.progress(1, passed, 50, 20)
        for number in range(30):
            report.problem(f"/etc/{number}", "it is locked")
        return taken(set, bytes=400, unreadable=30)

    take(slow)
    assert take_due(settings, events.append).failed
    first = len(events)
    said = [one for one in events if isinstance(one, SnapshotProgress) and one.set == "etc"]
    assert [one.eta_s for one in said] == [None, None, None]
    assert sum(isinstance(one, Warning) for one in events) == 2 * 21
    take_due(settings, events.append)
    said = [one for one in events[first:] if isinstance(one, SnapshotProgress) and one.set == "etc"]
    assert [one.eta_s for one in said] == [30.0, 20.0, None]
