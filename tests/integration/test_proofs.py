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
from tests.integration.catalogs import LIVE, add_hashes

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
