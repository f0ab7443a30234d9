"""The list of what failed, in pages; which of it is known; and what the ledger says of one blob."""

from __future__ import annotations

import pytest
from psycopg import sql

from ntt_backup.catalog import failures, stats
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.failures import UNKNOWN, acknowledge, find_blob, iter_failed, ledger_of
from ntt_backup.catalog.ledger import Ledger, requeue
from ntt_backup.catalog.pending import read_parts
from ntt_backup.catalog.statements import fragment, statement
from ntt_backup.errors import CatalogError, ConfigError
from ntt_backup.model import Failure, Reason

TARGET = "remote"
NAMES = [f"{number:02x}" * 32 for number in range(7)]


@pytest.fixture
def failed(catalog: Connection) -> Connection:
    """Three are missing, two unreadable, one was failed by another program, one is pending."""
    insert = "insert into blobs (blobid, size) select unnest(%s::text[]), 5"
    catalog.execute(insert, [NAMES])
    reasons = [Reason.MISSING] * 3 + [Reason.UNREADABLE] * 2
    found = [Failure(*one, "why") for one in zip(NAMES, reasons, strict=False)]
    Ledger(catalog, TARGET).record([], found)
    mark = "update blobs set remote_copy_failed = true where blobid = %s"
    catalog.execute(mark, [NAMES[5]])
    return catalog


def listed(conn: Connection, **choice: str | float) -> list[tuple[str, str]]:
    found = iter_failed(conn, TARGET, **choice)  # type: ignore[arg-type]
    return [(one.blobid, one.reason) for one in found]


def test_all_that_failed_is_listed_whatever_the_size_of_a_page(
    failed: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_PAGE", 2)

    everything = listed(failed)

    assert everything == [
        *((name, "missing") for name in NAMES[:3]),
        *((name, "unreadable") for name in NAMES[3:5]),
        (NAMES[5], UNKNOWN),
    ]
    assert listed(failed, reason="unreadable") == everything[3:5]
    assert listed(failed, reason=UNKNOWN) == everything[5:]


def test_what_takes_too_long_to_find_is_told_of(
    failed: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed.execute(
        "insert into blobs (blobid) select repeat(md5(n::text), 2) from generate_series(1, 99999) n"
    )
    monkeypatch.setattr(failures, "_PATIENCE_MS", 1)
    cut: list[bool] = []

    found = list(iter_failed(failed, TARGET, on_cut=lambda: cut.append(True)))

    assert len(found) == 5
    assert cut == [True]
    assert listed(failed, reason=UNKNOWN) == [(NAMES[5], UNKNOWN)]
    # What was asked for by its reason is not cut short where somebody else has set a limit.
    failed.execute("set statement_timeout = 1")
    with pytest.raises(CatalogError):
        listed(failed, reason=UNKNOWN)


def test_since_leaves_out_what_failed_before(failed: Connection) -> None:
    older = "update ntt_backup.failures set last_at = now() - interval '2 d' where blobid <> %s"
    failed.execute(older, [NAMES[1]])

    assert listed(failed, since=86_400) == [(NAMES[1], "missing")]


def test_what_is_known_is_not_told_of_until_it_fails_again(failed: Connection) -> None:
    assert stats.still_failed(failed, TARGET) == 5
    assert acknowledge(failed, TARGET, "missing") == 3
    assert stats.still_failed(failed, TARGET) == 2
    assert acknowledge(failed, TARGET) == 2
    assert stats.still_failed(failed, TARGET) == 0
    assert {one.known_at is not None for one in iter_failed(failed, TARGET, reason="missing")} == {
        True
    }

    Ledger(failed, TARGET).record([], [Failure(NAMES[0], Reason.MISSING, "again")])

    assert stats.still_failed(failed, TARGET) == 1
    (again, *_) = iter_failed(failed, TARGET)
    assert (again.attempts, again.known_at) == (2, None)


def test_a_catalog_without_the_newest_column_still_tells_what_failed(failed: Connection) -> None:
    failed.execute("alter table ntt_backup.failures drop column known_at")

    assert len(listed(failed)) == 6
    assert stats.still_failed(failed, TARGET) == 5
    assert [one.target for one in ledger_of(failed, NAMES[0])] == [TARGET]


def test_named_blobs_alone_are_requeued(failed: Connection) -> None:
    assert requeue(failed, TARGET, blobids=[NAMES[0], NAMES[5], NAMES[6]]) == 2

    assert [name for name, _ in listed(failed)] == NAMES[1:5]
    assert requeue(failed, TARGET) == 4


def test_the_first_digits_name_a_blob_where_no_other_begins_so(failed: Connection) -> None:
    failed.execute("insert into blobs (blobid) values (%s), ('../x')", ["06" * 31 + "ff"])

    assert find_blob(failed, "03") == NAMES[3]
    assert find_blob(failed, NAMES[6]) == NAMES[6]
    assert find_blob(failed, "../x") == "../x"
    for name, said in (
        ("06", "several"),
        ("f", "no blob"),
        ("", "no blob"),
        ("\udcff", "no blob"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_blob(failed, name)


@pytest.mark.parametrize(("count", "more"), [(2, False), (5, False), (6, True), (9, True)])
def test_five_of_the_blobs_that_begin_so_are_named(
    catalog: Connection, count: int, more: bool
) -> None:
    names = [f"ab{number:062x}" for number in range(count)]
    catalog.execute("insert into blobs (blobid) select unnest(%s::text[])", [names])
    with pytest.raises(ConfigError, match="several blobs begin with ab") as caught:
        find_blob(catalog, "ab")
    assert caught.value.detail == ", ".join(names[:5]) + (", ..." if more else "")
    for name in (names[0], names[-1]):
        assert find_blob(catalog, name) == name


def test_the_ledger_of_each_target_is_told(failed: Connection) -> None:
    failed.execute(
        "alter table blobs add other_copied boolean, add other_last_checked timestamptz,"
        " add other_copy_failed boolean, add half_copied boolean"
    )
    failed.execute("update blobs set other_copied = true, other_last_checked = now()")

    other, ours = ledger_of(failed, NAMES[0])

    assert (other.target, other.copied, other.failed, other.failure) == ("other", True, False, None)
    assert other.last_checked is not None
    assert (ours.target, ours.size, ours.copied, ours.failed) == (TARGET, 5, False, True)
    assert ours.failure is not None
    assert (ours.failure.reason, ours.failure.attempts) == ("missing", 1)
    (unlisted,) = (one for one in ledger_of(failed, NAMES[5]) if one.target == TARGET)
    assert unlisted.failure is not None
    assert unlisted.failure.reason == UNKNOWN


@pytest.mark.parametrize("name", ["next_failed", "next_failed_unlisted"])
def test_a_page_of_failed_blobs_reads_nothing_before_it(failed: Connection, name: str) -> None:
    for way in ("hashjoin", "nestloop", "bitmapscan", "seqscan"):
        failed.execute(f"set enable_{way} = off")
    query = statement(name, **read_parts(failed, TARGET), known_at=fragment("known_at"))
    values = {"target": TARGET, "reason": None, "since": None, "limit": 9, "past": "8" * 64}
    plan = failed.execute(sql.SQL("explain ") + query, values).fetchall()
    assert sum("8" * 64 in line for (line,) in plan) == 2, plan
