"""The send loop while everything around it fails: nothing is lost, doubled or wrongly blamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.catalog.connection import Server
from ntt_backup.config import RunSettings
from ntt_backup.errors import (
    BackupError,
    CatalogUnavailable,
    RemoteCannotStore,
    RemoteUnreachable,
    SourceError,
    StoreSuspect,
)
from ntt_backup.model import Blob
from ntt_backup.process.spawn import wait_for
from tests.unit.fakes import FakeDisk, Script
from tests.unit.scene import Scene, scene

REMOTE_FAULTS = [
    "remote away",
    "lost in put",
    "answered, then lost in put",
    "lost",
    "answered, then lost",
    "changed",
    "changed, stream lost",
    "busy",
]
CATALOG_FAULTS = [
    "catalog away",
    "catalog lost at take",
    "catalog lost at record",
    "catalog lost at release",
    "catalog lost at look",
]


@pytest.fixture
def stop_pipe() -> Iterator[tuple[int, int]]:
    fds = os.pipe()
    yield fds
    for fd in fds:
        os.close(fd)


# --- what is well ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 11, 300])
def test_everything_is_sent_once(count: int) -> None:
    made = scene(count)
    made.worker().run()
    made.assert_done()
    assert sum(len(batch.blobs) for batch in made.remote.batches) == count


def test_a_batch_is_sent_when_it_was_read_ahead_in_the_order_of_blobids() -> None:
    made, disk = scene(60), FakeDisk()
    copied: list[int] = []
    made.pipe.on_state = lambda state: disk.read(5) if state == "waiting" else None
    made.remote.on_put = lambda _: copied.append(len(made.catalog.copied))
    made.worker(ahead=disk).run()
    made.assert_done()
    assert all([*batch.blobs] == sorted(batch.blobs, key=str) for batch in made.remote.batches)
    assert copied[0] == 0 < copied[-1], "nothing was recorded while it waited for the disk"


@pytest.mark.parametrize(("reads_ahead", "largest"), [(False, 40), (True, 10)])
def test_batches_grow_unless_a_disk_is_read_ahead(
    reads_ahead: bool, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunSettings, "most_blobs", 40)
    made, disk = scene(300), FakeDisk()
    made.pipe.on_state = lambda state: disk.read(5) if state == "waiting" else None
    made.worker(ahead=disk if reads_ahead else None).run()
    made.assert_done()
    assert max(len(batch.blobs) for batch in made.remote.batches) == largest


def test_an_accepted_connection_and_each_settled_batch_are_told_of() -> None:
    made = scene(15)
    made.worker(window=1).run()
    told = [one["settled"] for one in made.pipe.of("answered")]
    assert told == [False, True, True]


def test_no_more_batches_are_under_way_than_the_window_allows() -> None:
    made = scene(300)
    made.worker(window=3).run()
    assert made.remote.most_in_flight == 3


def test_a_batch_is_told_of_when_it_is_recorded_and_not_before() -> None:
    made = scene(50)
    told = 0

    def check(event: dict[str, Any]) -> None:
        nonlocal told
        if event["event"] == "batch_complete":
            told += event["copied"]
            assert len(made.catalog.copied) == told

    made.pipe.on_event = check
    made.worker().run()
    assert told == 50


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [[0], [99], [3, 4], list(range(0, 100, 20))])
def test_bad_blobs_end_alone_and_their_neighbours_arrive(poison: list[int]) -> None:
    made = scene(100, poison=poison)
    made.worker(attempts=2).run()
    made.assert_done([made.all[number].blobid for number in poison])
    assert {one["reason"] for one in made.pipe.of("blob_failed")} == {"remote-rejected"}


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["ok", *REMOTE_FAULTS]), max_size=25),
    st.lists(st.sampled_from(["ok", *CATALOG_FAULTS]), max_size=25),
    st.sets(st.integers(0, 39), max_size=2),
    st.integers(1, 4),
)
def test_whatever_fails_in_whatever_order_all_is_settled_in_the_end(
    remote: list[str], catalog: list[str], poison: set[int], window: int
) -> None:
    made = scene(40, remote, catalog, sorted(poison))
    # More attempts than faults: a blob that is refused so often is failed, and rightly.
    made.worker(window=window, attempts=30 if not poison else 1).run()
    bad = {made.all[number].blobid for number in poison}
    if poison:
        # "changed" is a refusal too, so with few attempts a neighbour may be given up as well.
        assert bad <= made.catalog.failed.keys()
        assert made.catalog.copied | made.catalog.failed.keys() == {b.blobid for b in made.all}
    else:
        made.assert_done()


def test_an_answer_that_came_with_the_loss_of_the_link_is_recorded() -> None:
    made = scene(30, remote=["ok"] * 3 + ["answered, then lost in put"])
    made.worker().run()
    made.assert_done()
    sent = [blob.blobid for batch in made.remote.batches for blob in batch.blobs]
    assert len(sent) == 30 + 20  # two of three batches had no answer


def test_outages_and_retries_are_told_of() -> None:
    made = scene(10, remote=["remote away", "lost in put"], catalog=["catalog away"])
    made.worker().run()
    whats = [(one["what"], one["attempt"]) for one in made.pipe.of("outage")]
    assert whats == [("catalog", 1), ("remote", 1), ("remote", 2)]
    (retry,) = made.pipe.of("batch_retry")
    assert (retry["batch"], retry["blobs"], retry["attempt"]) == ("0.1", 10, 2)
    assert "lost" in retry["reason"]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("lost in put", ["0.1", "0.2", "0.3"]),
        ("changed, stream lost", ["0.3", "0.1", "0.2"]),
        ("busy", ["0.1", "0.2", "0.3"]),
    ],
)
def test_every_batch_that_goes_again_is_told_of_with_its_name(fault: str, told: list[str]) -> None:
    made = scene(30, remote=["ok"] * (4 if fault == "busy" else 3) + [fault])
    made.worker().run()
    made.assert_done()
    assert [one["batch"] for one in made.pipe.of("batch_retry")] == told


def test_an_answer_that_came_before_the_link_was_lost_ends_no_outage() -> None:
    faults = ["ok"] * 3 + ["answered, then lost in put", "remote away"]
    made = scene(30, remote=faults)
    made.worker().run()
    made.assert_done()
    told = [one["event"] for one in made.pipe.events if one["event"].startswith("outage")]
    assert told == ["outage", "outage", "outage_end"]
    assert [one["attempt"] for one in made.pipe.of("outage")] == [1, 2]


def test_a_link_that_breaks_with_every_answer_is_a_new_outage_each_time() -> None:
    made = scene(30, remote=["ok", "answered, then lost in put"] * 3)
    made.worker(window=1).run()
    made.assert_done()
    assert [one["attempt"] for one in made.pipe.of("outage")] == [1, 1, 1]


def test_a_batch_under_which_the_link_breaks_again_and_again_gets_smaller() -> None:
    made = scene(8, remote=["lost in put"] * 3)
    made.worker(attempts=3).run()
    made.assert_done()
    assert [len(batch.blobs) for batch in made.remote.batches] == [8, 8, 8, 4, 4]


def test_what_is_refused_while_the_catalog_is_away_is_claimed_anew_before_it_is_sent_again() -> (
    None
):
    made = scene(30, remote=["ok", "ok", "ok", "ok", "busy"], catalog=["ok"] * 4)
    lost = False

    def lose_catalog(_: object) -> None:
        nonlocal lost
        if len(made.remote.batches) == 3 and not lost:
            lost = True
            made.catalog.script = Script(["catalog lost at record", "catalog away"])

    made.remote.on_put = lose_catalog
    made.worker(window=2).run()
    made.assert_done()


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("far", "table", "kind"),
    [
        (["remote away"] * 99, [], RemoteUnreachable),
        (["lost in put"] * 99, [], RemoteUnreachable),
        ([], ["catalog away"] * 99, CatalogUnavailable),
    ],
)
def test_an_outage_that_outlasts_the_patience_ends_the_work_and_fails_nothing(
    far: list[str], table: list[str], kind: type[BackupError]
) -> None:
    made = scene(20, far, table)
    with pytest.raises(kind):
        made.worker(outage_timeout=0).run()
    assert made.catalog.failed == {}
    assert len(made.catalog.pending) == 20


def test_a_watching_worker_waits_out_any_outage() -> None:
    made = scene(20, ["remote away"] * 5 + ["lost in put"] * 5, ["catalog away"] * 5)

    def stop_when_done(event: dict[str, Any]) -> None:
        made.pipe.stopping = not made.catalog.pending

    made.pipe.on_event = stop_when_done
    made.worker(watch=True, outage_timeout=0, attempts=100).run()
    made.assert_done()


def test_a_full_remote_ends_the_work_but_what_it_answered_for_is_recorded() -> None:
    made = scene(60, remote=["ok"] * 3 + ["full"])
    with pytest.raises(RemoteCannotStore):
        made.worker(window=3).run()
    assert made.catalog.copied == made.remote.stored
    assert made.catalog.copied
    assert made.catalog.failed == {}
    assert not any(session.usable for session in made.remote.sessions)


def test_a_store_that_comes_back_is_waited_for() -> None:
    made = scene(20)
    made.store.error = SourceError("not mounted")

    def mount(event: dict[str, Any]) -> None:
        if event["event"] == "outage" and event["attempt"] == 3:
            made.store.error = None

    made.pipe.on_event = mount
    made.worker().run()
    made.assert_done()
    assert {one["what"] for one in made.pipe.of("outage")} == {"source"}


@pytest.mark.parametrize("watch", [False, True])
def test_a_store_that_is_there_in_part_is_for_a_person_to_look_at(watch: bool) -> None:
    made = scene(20)
    made.store.error = StoreSuspect("most of it is missing")
    with pytest.raises(StoreSuspect):
        made.worker(watch=watch).run()
    assert made.remote.batches == []
    assert made.pipe.of("outage") == []


def stop_after(made: Scene, batches: int) -> None:
    def check(_: object) -> None:
        made.pipe.stopping = len(made.remote.batches) >= batches

    made.remote.on_put = check


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_told_to_stop_it_finishes_what_is_in_flight_and_begins_nothing(batches: int) -> None:
    made = scene(100)
    stop_after(made, batches)
    made.worker().run()
    assert len(made.remote.batches) == batches
    assert made.catalog.copied == {b.blobid for one in made.remote.batches for b in one.blobs}
    assert made.catalog.locks == {}


def test_told_to_stop_while_the_catalog_stays_away_it_ends_and_claims_nothing_false() -> None:
    made = scene(100)

    def stop_and_cut(_: object) -> None:
        if len(made.remote.batches) == 3:
            made.pipe.stopping = True
            made.catalog.script = Script(["catalog lost at record"] + ["catalog away"] * 99)

    made.remote.on_put = stop_and_cut
    made.worker().run()
    assert made.catalog.copied <= made.remote.stored
    assert made.pipe.of("batch_complete") == []


@pytest.mark.parametrize("heard", [False, True])
def test_a_watching_worker_sends_what_is_inserted_and_ends_when_told(heard: bool) -> None:
    made = scene(5)
    late = Blob("ff" * 32, 10)

    def next_scene(state: str) -> None:
        if state == "idle" and late.blobid not in made.catalog.copied:
            made.catalog.insert(late, heard=heard)
        elif state == "idle":
            assert not wait_for(reading=[made.catalog.notify], timeout=0), "it would wake at once"
            made.pipe.stop()

    made.pipe.on_state = next_scene
    # It would sleep for a day, were it not woken.
    made.worker(watch=True, poll_interval=86400).run()
    made.all.append(late)
    made.assert_done()


@pytest.mark.parametrize(("limit", "sessions"), [(-1.0, 2), (60.0, 1)])
def test_a_session_is_closed_when_nothing_was_sent_for_long(
    monkeypatch: pytest.MonkeyPatch, limit: float, sessions: int
) -> None:
    monkeypatch.setattr("ntt_backup.upload.worker._IDLE_SESSION_SECONDS", limit)
    made = scene(5)
    late = Blob("ff" * 32, 10)

    def next_scene(state: str) -> None:
        if state == "idle" and late.blobid not in made.catalog.copied:
            made.catalog.insert(late, heard=False)
        elif state == "idle":
            made.pipe.stop()

    made.pipe.on_state = next_scene
    made.worker(watch=True, poll_interval=86400).run()
    made.all.append(late)
    made.assert_done()
    # A second one while the first is usable would fail the test.
    assert len(made.remote.sessions) == sessions


def test_a_look_that_is_asked_for_ends_the_wait_for_the_catalog() -> None:
    made = scene(5, catalog=["catalog lost at take"])
    asked: list[str] = []

    def look(state: str) -> None:
        if state == "outage":
            asked.append(state)
            assert len(asked) < 20, "it waits all the same"
            made.pipe.hurried = True

    made.pipe.on_state = look
    made.worker(backoff_base=60, backoff_cap=3600).run()
    made.assert_done()
    assert asked


def test_ranges_that_others_hold_are_waited_for() -> None:
    made = scene(20)
    other = made.catalog.connect()
    (theirs,) = {blob.blobid for blob in made.all[:1]}
    made.catalog.locks[made.catalog.range_of(theirs)] = other

    def other_ends(state: str) -> None:
        if state == "idle":
            other.close()

    made.pipe.on_state = other_ends
    made.worker().run()
    made.assert_done()


def test_nothing_is_searched_between_the_last_answer_and_the_look_that_ends_the_work() -> None:
    made = scene(20)
    searches: list[int] = []
    made.pipe.on_event = lambda _: searches.append(made.catalog.searches)
    made.worker().run()
    made.assert_done()
    assert [told["event"] for told in made.pipe.events[-2:]] == ["batch_complete", "drained"]
    assert searches[-1] == searches[-2]


def test_a_catalog_that_is_lost_after_the_last_answer_is_back_before_the_work_ends() -> None:
    made = scene(20)

    def lose_catalog(event: dict[str, Any]) -> None:
        if event["event"] == "batch_complete" and not made.catalog.pending:
            made.catalog.script = Script(["catalog lost at release", "catalog away"])

    made.pipe.on_event = lose_catalog
    made.worker().run()
    made.assert_done()
    told = [one["event"] for one in made.pipe.events]
    assert told[-5:] == ["batch_complete", "outage", "outage", "outage_end", "drained"]


def test_marks_that_a_crash_of_the_server_has_lost_are_counted_once() -> None:
    """It commits without waiting for the disk: the last batch is pending again after a crash."""
    made = scene(20)
    first = {blob.blobid: blob for blob in made.all}

    def crash(event: dict[str, Any]) -> None:
        if event["event"] == "batch_complete" and made.catalog.connections == 1:
            for blobid in sorted(made.catalog.copied)[:5]:
                made.catalog.copied.discard(blobid)
                made.remote.answered.discard(blobid)
                made.catalog.pending[blobid] = first[blobid]
            made.catalog.script = Script(["catalog lost at release"])

    made.pipe.on_event = crash
    made.worker().run()
    assert made.catalog.copied == set(first)
    (lost,) = made.pipe.of("marks_lost")
    assert lost["blobs"] == 5
    assert lost["bytes"] == sum(first[one].size or 0 for one in sorted(first)[:5])
    told = sum(one["copied"] for one in made.pipe.of("batch_complete"))
    assert told - lost["blobs"] == len(first)


def test_a_worker_follows_a_promoted_standby_and_leaves_an_old_primary() -> None:
    made = scene(20)
    latest = made.catalog.latest

    def promote(event: dict[str, Any]) -> None:
        if event["event"] == "batch_complete" and made.catalog.connections == 1:
            made.catalog.server = Server("7", 2)
            made.catalog.script = Script(["catalog lost at release"])
        elif event["event"] == "batch_complete" and made.catalog.connections == 2:
            latest.note("7", 3)  # Another process has found the next one.
            made.catalog.server = Server("7", 3)

    made.pipe.on_event = promote
    made.worker().run()
    made.assert_done()
    moved = [(one["before"], one["timeline"]) for one in made.pipe.of("catalog_moved")]
    assert moved == [(1, 2)]
    assert any("old primary" in one["reason"] for one in made.pipe.of("outage"))
    assert made.catalog.connections == 3


@pytest.mark.parametrize("where", ["take", "record"])
def test_a_session_that_expired_while_the_worker_was_stopped_is_no_outage(where: str) -> None:
    made = scene(20, catalog=["ok", f"session expired at {where}"])
    made.worker().run()
    made.assert_done()
    assert made.catalog.connections == 2
    assert made.pipe.of("outage") == made.pipe.of("outage_end") == []


@pytest.mark.parametrize("question", ["searches", "looks"])
def test_a_long_search_or_look_is_gone_on_with_at_once_and_ends_no_work(question: str) -> None:
    """Nor does a search lead to a look, which takes as long among dead rows."""
    made = scene(20)
    setattr(made.catalog, question, 5)
    states: list[str] = []
    made.pipe.on_state = states.append
    made.worker().run()
    made.assert_done()
    assert getattr(made.catalog, question) < 0
    assert "idle" not in states


def test_a_stop_ends_the_question_whether_anything_is_pending() -> None:
    made = scene(20)
    made.catalog.looks = 1_000_000

    def stop() -> None:
        made.pipe.stopping = True

    made.catalog.on_look = stop
    made.worker().run()
    made.assert_done()
    assert made.catalog.looks > 0
    assert made.pipe.of("drained") == []


def test_a_word_from_the_coordinator_ends_a_long_wait(stop_pipe: tuple[int, int]) -> None:
    made = scene(10, remote=["remote away"])
    made.pipe.fd, writer = stop_pipe

    def stop(state: str) -> None:
        if state == "outage":
            os.write(writer, b"stop\n")

    made.pipe.on_state = stop
    made.worker(backoff_base=60, backoff_cap=60).run()
    made.assert_done()
