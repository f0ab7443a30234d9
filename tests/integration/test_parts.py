"""Sessions that are about a part of the blobs: their figures add up, and none tells of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from uuid import uuid4

import pytest

from ntt_backup.audit.scan import ScanResult, scan
from ntt_backup.catalog import stats
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.failures import acknowledge, is_mine, iter_damaged, iter_failed
from ntt_backup.catalog.history import (
    last_checks,
    latest_runs,
    lock_work,
    note_check,
    parts_of_others,
    recent_runs,
    start_run,
)
from ntt_backup.catalog.ledger import Ledger, load_scan, requeue
from ntt_backup.catalog.proofs import count_proofs, first_contact, kept_count, unproved
from ntt_backup.catalog.range_locks import Claims, claim_order
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.catalog.selection import Checks, Choice, any_known, first_pending, sample
from ntt_backup.config.values import parse_prefixes
from ntt_backup.errors import CatalogRefused
from ntt_backup.model import Blob, Failure, Part, Reason
from ntt_backup.source.store import Store
from tests.helpers.blobs import put
from tests.helpers.postgres import TARGET
from tests.integration.catalogs import MALFORMED, add, add_hashes
from tests.integration.test_scan import Interrupted
from tests.integration.test_stats import add_many, no_time_for

PARTS = [parse_prefixes(one) for one in ("0-5 f3", "60-af", "b0-f2 f4-ff")]


@pytest.fixture
def sessions(catalog_url: str, catalog: Connection) -> Iterator[list[Connection]]:
    made = [connect(catalog_url, "test", part=part) for part in PARTS]
    yield made
    for one in made:
        one.close()


def test_the_parts_have_each_text_once_also_what_is_no_blobid(
    catalog: Connection, sessions: Sequence[Connection]
) -> None:
    add_hashes(catalog, 300)
    add(catalog, *MALFORMED)
    everything = {blobid for (blobid,) in catalog.execute("select blobid from blobs")}
    for look in (
        lambda conn: [one.blobid for one in first_pending(conn, TARGET, 9999, 60_000) or ()],
        lambda conn: [one.blobid for one in Checks(conn, TARGET, Choice(), local=True).next(9999)],
        lambda conn: [blob.blobid for blob, _ in claims_of(conn).take(9999)],
        lambda conn: [one for one in everything if is_mine(conn, one)],
    ):
        found = [look(one) for one in sessions]
        assert sorted(chain(*found)) == sorted(everything)
        for conn, blobids in zip(sessions, found, strict=True):
            hashes = [one for one in blobids if len(one) == 64]
            assert len(hashes) > 0
            assert all(map(conn.part.has, hashes))


def claims_of(conn: Connection) -> Claims:
    return Claims(conn, TARGET, claim_order(0, 4, conn.part))


def test_what_is_pending_in_other_parts_keeps_nobody_waiting(
    catalog: Connection, sessions: Sequence[Connection]
) -> None:
    add(catalog, "60" * 32)
    assert [any_known(one) for one in sessions] == [False, True, False]
    assert [claims_of(one).any_pending() for one in sessions] == [False, True, False]
    assert [first_pending(one, TARGET, 1, 60_000) for one in sessions] == [
        [],
        [Blob("60" * 32)],
        [],
    ]
    assert claims_of(sessions[0]).take(10) == []


@pytest.mark.parametrize("counted", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_figures_of_the_parts_add_up(
    catalog: Connection,
    sessions: Sequence[Connection],
    monkeypatch: pytest.MonkeyPatch,
    counted: bool,
) -> None:
    add_many(catalog, 20_000)
    catalog.execute("update blobs set remote_copied = true where blobid ~ '[0-7]$'")
    record_failures(catalog)
    catalog.execute("vacuum analyze blobs")
    whole = stats.exact_totals(catalog, TARGET)
    if not counted:
        no_time_for(["pending_total", "totals", "uncopied_by_reason"], monkeypatch)
        monkeypatch.setattr(stats, "_FEW", 0)
        monkeypatch.setattr(stats, "_MILLISECONDS", 8000)
    found = [stats.quick_totals(one, TARGET) for one in sessions]
    for field in fields(stats.Totals):
        expected = getattr(whole, field.name)
        if isinstance(expected, int) and field.name not in ("without_blobid", "copied_bytes"):
            total = sum(getattr(one, field.name) for one in found)
            assert total == (expected if counted else pytest.approx(expected, rel=0.15)), field.name
    assert sum(one.failed_by_reason.get("missing", 0) for one in found) == 300
    assert sum(stats.still_failed(one, TARGET) for one in sessions) == 300
    for conn, one in zip(sessions, found, strict=True):
        assert one.pending == pytest.approx(whole.pending * len(conn.part.prefixes) / 256, rel=0.15)
        assert all(conn.part.has(blob.blobid) for blob in sample(conn, TARGET, 64)[:-8])
    (proved, *_) = [stats.proved(one, TARGET) for one in sessions]
    assert proved is not None
    assert 0 < proved.blobs < whole.copied / 2


def record_failures(catalog: Connection) -> None:
    rows = catalog.execute("select blobid from blobs where remote_copied is null limit 300")
    Ledger(catalog, TARGET).record([], [Failure(one, Reason.MISSING) for (one,) in rows.fetchall()])


def test_a_host_tells_of_the_failures_of_its_part_and_requeues_these(
    catalog: Connection, sessions: Sequence[Connection]
) -> None:
    add_hashes(catalog, 600)
    record_failures(catalog)
    catalog.execute(
        "update blobs set remote_copy_failed = true where blobid in"
        " (select blobid from blobs where remote_copy_failed is null order by blobid limit 200)"
    )
    every = [{one.blobid for one in iter_failed(conn, TARGET)} for conn in sessions]
    assert sum(map(len, every)) == len(set().union(*every)) == 500
    assert all(all(map(conn.part.has, one)) for conn, one in zip(sessions, every, strict=True))
    assert sum(len(list(iter_damaged(one))) for one in sessions) == 300
    assert len(stats.failure_examples(sessions[0], TARGET, 999)) < 300
    known = acknowledge(sessions[0], TARGET)
    assert stats.still_failed(sessions[0], TARGET) == 0
    assert known + sum(stats.still_failed(one, TARGET) for one in sessions[1:]) == 300
    # Who names a blob means that one.
    other = min(every[1])
    assert requeue(sessions[0], TARGET, None, [other]) == 1
    assert [requeue(one, TARGET) for one in sessions] == [
        len(every[0]),
        len(every[1]) - 1,
        len(every[2]),
    ]


def test_proofs_are_counted_by_parts_and_the_first_contact_is_with_all(
    catalog: Connection, sessions: Sequence[Connection]
) -> None:
    add_hashes(catalog, 600)
    catalog.execute("update blobs set remote_copied = true")
    catalog.execute("delete from ntt_backup.contacts")
    contact = first_contact(sessions[0], TARGET)
    assert contact.marked == 600
    left = [unproved(one, TARGET, contact, exact=True).blobs for one in sessions]
    assert sum(left) == 600
    assert min(left) > 0
    counts = [count_proofs(one, [TARGET], 60, renew=True) for one in sessions]
    assert [one.blobs for one in counts] == left
    kept = [kept_count(one, [TARGET], 60) for one in (*sessions, catalog)]
    assert [one and one.blobs for one in kept] == [*left, None]


def test_runs_and_checks_are_those_of_the_part_and_a_drill_is_of_all(
    catalog: Connection, sessions: Sequence[Connection]
) -> None:
    for conn in (*sessions, catalog):
        start_run(conn, uuid4(), TARGET, host="h", pid=1, strategy="tar", workers=1)
    for look in (latest_runs, lambda conn, target: recent_runs(conn, target, 9)):
        assert [len(look(one, TARGET)) for one in (*sessions, catalog)] == [1, 1, 1, 4]
    assert parts_of_others(sessions[0], TARGET) == [(PARTS[1], "h"), (PARTS[2], "h")]
    assert parts_of_others(catalog, TARGET) == []
    # What is no text of ours is nobody's part.
    catalog.execute("update ntt_backup.runs set prefixes = '../..' where prefixes = '60-af'")
    assert parts_of_others(sessions[0], TARGET) == [(PARTS[2], "h")]

    for name in ("verify", "drill"):
        note_check(sessions[1], TARGET, name, lasted=1, exit_code=7, blobs=1, bytes=1, wrong=1)
    calls = [{one.command for one in last_checks(conn, TARGET)} for conn in (*sessions, catalog)]
    assert calls == [{"drill"}, {"drill", "verify"}, {"drill"}, {"drill", "verify"}]


def test_hosts_check_their_parts_at_the_same_time_each_once(
    catalog_url: str, sessions: Sequence[Connection]
) -> None:
    assert all(lock_work(one, "checks", TARGET) for one in sessions)
    with connect(catalog_url, "test", part=PARTS[0]) as again:
        assert not lock_work(again, "checks", TARGET)


def test_a_host_with_a_part_needs_a_catalog_that_can_note_it(
    catalog: Connection, sessions: Sequence[Connection]
) -> None:
    catalog.execute("alter table ntt_backup.runs drop column prefixes")
    catalog.execute("alter table ntt_backup.checks drop column prefixes")
    verify_schema(catalog, TARGET)
    start_run(catalog, uuid4(), TARGET, host="h", pid=1, strategy="tar", workers=1)
    note_check(catalog, TARGET, "verify", lasted=1, exit_code=0, blobs=1, bytes=1, wrong=0)
    assert len(latest_runs(catalog, TARGET)) == len(last_checks(catalog, TARGET)) == 1
    with pytest.raises(CatalogRefused, match=r"lacks checks\.prefixes, runs\.prefixes") as caught:
        verify_schema(sessions[0], TARGET)
    assert "init-db" in caught.value.hint


def test_scans_of_parts_whose_roots_have_one_name_do_not_mix(
    catalog: Connection,
    sessions: Sequence[Connection],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ntt_backup.audit.scan.BATCH_SIZE", 10)
    blobids = {put(root, b"%d" % number).blobid for number in range(200)}

    def end(result: ScanResult) -> None:
        if result.registered >= 20:
            raise Interrupted

    stores = [Store(root, part=part) for part in PARTS]
    with pytest.raises(Interrupted):
        scan(sessions[0], stores[0], on_progress=end)
    saved = load_scan(catalog, f"{root} {PARTS[0]}")
    assert saved is not None
    assert not saved.finished
    assert scan(sessions[1], stores[1]).resumed_from is None
    assert scan(sessions[2], stores[2]).resumed_from is None
    found = scan(sessions[0], stores[0])
    assert found.resumed_from == saved.directory
    assert found.registered + saved.registered == sum(map(PARTS[0].has, blobids))
    rest = Part(tuple({*range(256)} - {*PARTS[0].prefixes}))
    assert len(found.outside) == len({one[:2] for one in blobids if rest.has(one)})
    assert all(map(rest.has, found.outside))
    assert {one for (one,) in catalog.execute("select blobid from blobs")} == blobids
    assert scan(catalog, Store(root)).outside == []
