"""Marks of other programs prove nothing, and checks since the first contact do."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ntt_backup.catalog import proofs
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.history import last_checks, note_check
from ntt_backup.catalog.ledger import record_checks
from ntt_backup.catalog.schema import init_db
from tests.helpers.postgres import session
from tests.integration.catalogs import LIVE, add_hashes, rows

DAY = 86400.0
TARGETS = ("local", "external", "remote")


def foreign(conn: Connection, rows: int, marked: int) -> None:
    """A table of another program, which has marked rows for three targets, some with a date."""
    conn.execute(LIVE.encode())
    conn.execute("alter table blobs add size bigint")
    for target in TARGETS:
        conn.execute(
            f"alter table blobs add {target}_copied boolean, add {target}_last_checked timestamptz,"
            f" add {target}_copy_failed boolean".encode()
        )
    add_hashes(conn, rows)
    for target in TARGETS:
        conn.execute(
            f"update blobs set {target}_copied = true, {target}_last_checked ="
            " case when size % 2 = 0 then now() - interval '1 day' end"
            f" where size <= {marked}".encode()
        )


def test_marks_of_another_program_are_told_of_until_something_was_compared(
    database_url: str,
) -> None:
    with session(database_url) as conn:
        foreign(conn, 3000, 1000)
        said: list[str] = []
        for target in TARGETS:
            init_db(conn, target, report=said.append)
        again: list[str] = []
        init_db(conn, "remote", report=again.append)

        told = f"warning: 1,000 rows are marked by another program: {proofs.RECONCILE}"
        assert said.count(told) == 3
        assert again.count(told) == 1
        contact = proofs.first_contact(conn, "remote")
        assert contact.marked == 1000
        assert proofs.unproved(conn, "remote", contact).blobs == 1000

        names = [one for (one,) in conn.execute("select blobid from blobs where size <= 400")]
        record_checks(conn, "remote", names, [])
        note_check(conn, "remote", "verify", lasted=0, exit_code=0, blobs=400, bytes=0, wrong=0)

        assert contact.warning(last_checks(conn, "remote")) == ""
        assert proofs.unproved(conn, "remote", contact).blobs == 600
        again.clear()
        init_db(conn, "remote", report=again.append)
        assert told not in again


def test_a_target_that_our_runs_have_marked_was_met_with_the_first_run(catalog: Connection) -> None:
    """As in a catalog that was made before contacts were noted."""
    catalog.execute("drop table ntt_backup.contacts")
    add_hashes(catalog, 50)
    catalog.execute("update blobs set remote_copied = true, remote_last_checked = now()")
    catalog.execute(
        "insert into ntt_backup.runs (run_id, target, host, pid, strategy, workers, started_at)"
        " values (gen_random_uuid(), 'remote', 'h', 1, 'tar', 1, now() - interval '9 days')"
    )

    untold = proofs.first_contact(catalog, "remote")
    init_db(catalog, "remote")
    told = proofs.first_contact(catalog, "remote")

    assert told.met_at is not None
    assert 8 < (datetime.now(UTC) - told.met_at).days + 1 <= 10
    assert (untold.marked, told.marked) == (0, 0)
    assert proofs.unproved(catalog, "remote", told).blobs == 0


def test_in_a_large_table_what_was_never_checked_is_estimated(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "_FEW", 0)
    monkeypatch.setattr(proofs, "_SAMPLE", 5000)
    add_hashes(catalog, 20_000)
    catalog.execute(
        "update blobs set remote_copied = true,"
        " remote_last_checked = case when size % 4 > 0 then now() end"
    )
    catalog.execute("vacuum analyze blobs")

    found = proofs.unproved(catalog, "remote", proofs.first_contact(catalog, "remote"))

    assert found.estimated
    assert found.blobs == pytest.approx(5000, rel=0.2)
    assert proofs.unproved(
        catalog, "remote", proofs.first_contact(catalog, "remote"), exact=True
    ) == proofs.Unproved(5000, False, 0, found.met_at)


def two_targets(conn: Connection) -> None:
    """40 blobs: 10 proved on both, 10 on one alone, 10 proved long ago, 10 never."""
    init_db(conn, "usb")
    add_hashes(conn, 40)
    conn.execute("update ntt_backup.contacts set met_at = now() - interval '1 year'")
    conn.execute(
        "update blobs set remote_copied = true, remote_last_checked = now() - interval '1 day',"
        " usb_copied = size <= 30, usb_last_checked = case"
        " when size <= 10 then now() - interval '2 days'"
        " when size <= 20 then now() - interval '100 days'"
        " when size <= 25 then now() - interval '2 years' when size <= 27 then 'infinity' end"
    )


@pytest.mark.parametrize("large", [False, True])
def test_blobs_are_counted_by_their_proved_copies(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    two_targets(catalog)
    if large:
        monkeypatch.setattr(proofs, "_QUICK_ROWS", -1)

    found = proofs.count_proofs(catalog, ["remote", "usb"], 90 * DAY)

    assert found.blobs == 40
    assert found.by_proofs() == [0, 30, 10]
    assert sum(one.blobs for one in found.short(2)) == 30
    assert found.short(1) == []
    assert found.of_target("usb") == {"none": 10, "unproved": 10, "old": 10, "proved": 10}
    first = rows(catalog, "select min(blobid) from blobs where size between 11 and 20")[0][0]
    assert first in [one.first for one in found.short(2)]
    assert proofs.kept_count(catalog, ["remote", "usb"], 90 * DAY) == found


def test_the_count_of_a_large_table_is_kept_until_it_is_old(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other programs change meanwhile is not in it, so it says from when it is."""
    monkeypatch.setattr(proofs, "_QUICK_ROWS", -1)
    two_targets(catalog)
    targets = ["remote", "usb"]
    first = proofs.count_proofs(catalog, targets, 90 * DAY)
    catalog.execute("update blobs set usb_copied = false")

    again = proofs.count_proofs(catalog, targets, 90 * DAY)
    other = proofs.count_proofs(catalog, targets, 30 * DAY)
    renewed = proofs.count_proofs(catalog, targets, 90 * DAY, old_s=0)

    assert again == first
    assert other.by_proofs() == renewed.by_proofs() == [0, 40, 0]
    assert renewed.counted_at > first.counted_at
    assert proofs.kept_count(catalog, targets, 90 * DAY) == renewed
    assert len(rows(catalog, "select from ntt_backup.proofs")) == 2


def test_a_target_without_columns_has_no_copy(catalog: Connection) -> None:
    add_hashes(catalog, 5)
    catalog.execute("update blobs set remote_copied = true, remote_last_checked = now()")
    found = proofs.count_proofs(catalog, ["new", "remote"], 90 * DAY)
    assert found.by_proofs() == [0, 5, 0]
    assert found.of_target("new")["none"] == 5


def test_who_may_only_read_counts_and_keeps_nothing(
    catalog: Connection, catalog_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "_QUICK_ROWS", -1)
    add_hashes(catalog, 5)
    with session(catalog_url) as other:
        other.execute("set default_transaction_read_only = on")
        assert proofs.count_proofs(other, ["remote"], 90 * DAY).blobs == 5
    assert proofs.kept_count(catalog, ["remote"], 90 * DAY) is None
