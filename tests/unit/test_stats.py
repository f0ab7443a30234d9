"""Figures that are reckoned from others: what follows on the first blobs, and what is the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from psycopg import errors

from ntt_backup.catalog import glance, stats
from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.glance import Proved
from ntt_backup.catalog.ranges import interval
from ntt_backup.catalog.stats import (
    Reasons,
    StoredObjects,
    Totals,
    _followed,
    _position,
    stored_objects,
)
from ntt_backup.model import PendingEstimate


class Rows(list[Any]):
    """What a statement gives."""

    def fetchall(self) -> list[Any]:
        return self


class Session:
    """Answers each statement, by its name, with the rows of a test; notes settings."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.limits: list[tuple[str, object]] = []
        self.walks = 0

    def execute(self, name: str, values: Any = None) -> Rows:
        found = self.answers[name]
        return Rows(found(values) if callable(found) else found)

    def transaction(self) -> Session:
        return self

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def configure(conn: Session, setting: str, value: object, *, local: bool) -> None:
        conn.limits.append((setting, value))
        assert local

    def walk_indexes(conn: Session, *, local: bool) -> None:
        conn.walks += 1
        assert local

    for module in (stats, glance):
        monkeypatch.setattr(module, "read_parts", lambda *_: {})
    monkeypatch.setattr(stats, "statement", lambda name, **_: name)
    monkeypatch.setattr(stats, "walk_indexes", walk_indexes)
    monkeypatch.setattr(stats, "configure", configure)


def test_a_blobid_has_a_place_among_all() -> None:
    for blobid, place in (
        (None, 0.0),
        ("", 0.0),
        ("8", 0.5),
        ("c0", 0.75),
        ("0" * 12 + "f", 0.0),
        ("0" * 11 + "1", 16.0**-12),
        ("zz", 1.0),
    ):
        assert _position(blobid) == place


@pytest.mark.parametrize(
    ("index", "count", "first", "last", "followed"),
    [
        (0, 40, "00", "008", 76),
        (255, 40, "ff", "ff8", 76),
        (1, 40, "014", "018", 38 * 3),
        (0, 39, "00", "008", 39),
        (0, 40, "00", "00", 40),
        (0, 40, "00", "00fff", 40),
        (0, 40, "zz", "zz", 40),
    ],
)
def test_how_close_the_first_blobs_lie_tells_how_many_follow(
    index: int, count: int, first: str, last: str, followed: int
) -> None:
    assert _followed(interval(index), count, first, last) == followed


@pytest.mark.parametrize(
    ("looks", "blobs"), [(99, 2 * 256 + 28), (2, (2 * 16 + 28) * 256 // 16), (1, None)]
)
def test_as_many_ranges_are_read_as_time_allows_and_others_are_alike(
    monkeypatch: pytest.MonkeyPatch, looks: int, blobs: int | None
) -> None:
    """Of 256 ranges each has two blobs, one of them with a size; the first has thirty."""
    asked: list[int] = []

    def starts(values: dict[str, Any]) -> list[tuple[Any, ...]]:
        assert values["limit"] == 40
        asked.extend(values["indexes"])
        return [(30 if one == 0 else 2, "a", "b", 10, 1) for one in values["indexes"]]

    monkeypatch.setattr(time, "monotonic", lambda: len(asked) / 8)
    conn: Any = Session(pending_starts=starts)
    found = stats._sampled(conn, {}, float(looks))
    assert len(asked) == len(set(asked)) == min(256, 8 * looks)
    assert asked[:3] == [0, 37, 74]
    assert (conn.walks, len(conn.limits)) == (1, len(asked) // 8)
    if blobs is None:
        assert found is None
    else:
        share = blobs / (2 * len(asked) + 28)
        wanted = (blobs, int(10 * len(asked) * share), int(len(asked) * share))
        assert found == PendingEstimate(*wanted, exact=False)


@pytest.mark.parametrize(("milliseconds", "limit"), [(0, 1), (1, 1), (50, 50)])
def test_the_planner_is_asked_for_no_longer_than_that(milliseconds: int, limit: int) -> None:
    plan = [([{"Plan": {"Plan Rows": 100.0}}],)]
    conn: Any = Session(pending_plan=plan, size_statistics=[(10, 0.25)])
    found = stats._planned(conn, {}, milliseconds)
    assert found == PendingEstimate(100, 750, 25, exact=False)
    assert conn.limits == [("lock_timeout", limit)]


@pytest.mark.parametrize(("left", "limit"), [(0.25, 250), (0.0, 1), (-9.0, 1)])
def test_a_time_that_is_over_is_no_limit_of_0(
    monkeypatch: pytest.MonkeyPatch, left: float, limit: int
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    conn: Any = Session()
    stats._limit(conn, 100.0 + left)
    assert conn.limits == [("statement_timeout", limit)]


def cancelled(_: object) -> Any:
    raise errors.QueryCanceled


@pytest.mark.parametrize(
    ("sampled", "estimate"),
    [(PendingEstimate(5, 6, 7, exact=False),) * 2, (None, PendingEstimate(1, 2, 3, exact=False))],
)
def test_half_of_the_time_is_for_a_count(
    monkeypatch: pytest.MonkeyPatch, sampled: PendingEstimate | None, estimate: PendingEstimate
) -> None:
    planned = PendingEstimate(1, 2, 3, exact=False)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(stats, "_sampled", lambda *_: sampled)
    monkeypatch.setattr(stats, "_planned", lambda *_: planned)
    counted = [((5, 42, 1),), PendingEstimate(5, 42, 1, exact=True)]
    for answer, told in (counted, (cancelled, estimate)):
        conn: Any = Session(pending_total=answer)
        assert stats.pending_estimate(conn, "remote", 8000) == told
        assert (conn.walks, conn.limits) == (1, [("statement_timeout", 4000)])


def test_rows_are_told_unless_they_take_too_long() -> None:
    for answer, told in (([(1, 2)], [(1, 2)]), (cancelled, None)):
        conn: Any = Session(name=answer)
        assert stats.quick_rows(conn, "name", {}, {}) == told
        assert (conn.walks, conn.limits) == (1, [("statement_timeout", 50)])


Figures = Callable[..., Totals]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Figures of a large table with so many rows, of which that is pending, failed, and copied by
    the history of runs.
    """

    def found(
        rows: int,
        pending: PendingEstimate,
        copied: tuple[int, int],
        *,
        failed: Reasons | None = None,
        without: list[tuple[int]] | None = None,
    ) -> Totals:
        def reasons(*_: object, few: bool) -> Reasons:
            assert few == pending.exact
            return failed or Reasons()

        monkeypatch.setattr(stats, "_expected_rows", lambda *_: stats._FEW + 1)
        monkeypatch.setattr(stats, "pending_estimate", lambda *_: pending)
        monkeypatch.setattr(stats, "quick_reasons", reasons)
        monkeypatch.setattr(stats, "quick_rows", lambda *_: without)
        conn: Any = Session(copied_by_runs=[copied], all_rows=[(rows,)])
        return stats.quick_totals(conn, "remote")

    return found


def test_what_is_copied_is_the_word_of_runs_where_it_fits(figures: Figures) -> None:
    pending = PendingEstimate(100, 1000, 0, exact=True)
    for copied, told in ((850, 850), (950, 950), (849, 900), (951, 900), (0, 900)):
        found = figures(1000, pending, (copied, copied * 10), without=[(4,)])
        assert (found.copied, found.copied_bytes) == (told, told * 10)
        assert (found.pending, found.pending_bytes, found.without_blobid) == (100, 1000, 4)
        assert found.estimated == ("copied", "copied_bytes")


def test_what_is_not_told_of_a_large_table_is_named(figures: Figures) -> None:
    """More is said to be pending than there are rows, and no blob has a size but one."""
    pending = PendingEstimate(400, 70, 399, exact=False)
    failed = Reasons({"missing": 3}, {"remote-missing": 1}, 999, counted=False)
    found = figures(300, pending, (0, 0), failed=failed)
    assert (found.copied, found.copied_bytes, found.without_blobid) == (0, 0, 0)
    assert (found.failed, found.failed_bytes, found.unsized) == (3, 210, 399)
    assert found.estimated == (
        *("copied", "copied_bytes", "failed", "failed_by_reason", "failed_bytes", "pending"),
        *("pending_by_reason", "pending_bytes", "unsized", "without_blobid"),
    )
    # A table that was never analyzed is as large as the planner expects.
    assert figures(0, pending, (0, 0)).copied == stats._FEW + 1 - 400


def test_a_table_of_few_rows_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def count(conn: Session, target: str, milliseconds: int) -> str:
        limits.append(milliseconds)
        return "counted"

    monkeypatch.setattr(stats, "_count", count)
    monkeypatch.setattr(stats, "_expected_rows", lambda *_: stats._FEW)
    conn: Any = Session()
    found: Any = stats.quick_totals(conn, "remote")
    assert (found, limits) == ("counted", [stats._MILLISECONDS])


def test_failures_are_counted_without_what_another_program_has_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reasons(*_: object, few: bool) -> Reasons:
        assert not few
        return Reasons({"missing": 3, "unreadable": 1})

    monkeypatch.setattr(stats, "quick_rows", lambda *_: None)
    monkeypatch.setattr(stats, "quick_reasons", reasons)
    conn: Any = Session()
    assert stats.still_failed(conn, "remote") == 4
    monkeypatch.setattr(stats, "quick_rows", lambda *_: [(7,)])
    assert stats.still_failed(conn, "remote") == 7


@pytest.mark.parametrize("told", [["uncopied_by_reason", "listed_by_reason"], [], None])
@pytest.mark.parametrize("few", [True, False])
def test_reasons_are_counted_by_the_rows_that_a_moment_allows(
    monkeypatch: pytest.MonkeyPatch, few: bool, told: list[str] | None
) -> None:
    found = {
        "uncopied_by_reason": [("missing", True, 2, 20), ("remote-missing", False, 1, 5)],
        "listed_by_reason": [("missing", True, 3, 30), ("unreadable", True, 1, 7)],
    }
    noted = [("missing", True, 9, 0), ("remote-corrupt", False, 8, 0)]
    asked = []

    def quick(_: object, name: str, *more: object) -> list[tuple[Any, ...]] | None:
        asked.append(name)
        if told is None:
            return None
        return found[name] if name in told else []

    monkeypatch.setattr(stats, "quick_rows", quick)
    conn: Any = Session(noted_by_reason=noted)
    reasons = stats.quick_reasons(conn, "remote", few=few)
    unlisted = ["uncopied_by_reason"] * few
    assert asked == [*unlisted, *["listed_by_reason"] * (told is None or not few)]
    if told is None:
        assert reasons == Reasons({"missing": 9}, {"remote-corrupt": 8}, 0, counted=False)
    elif not told:
        assert reasons == Reasons()
    elif few:
        assert reasons == Reasons({"missing": 2}, {"remote-missing": 1}, 20)
    else:
        assert reasons == Reasons({"missing": 3, "unreadable": 1}, {}, 37)


@pytest.mark.parametrize("quick", [[(4, 400)], None])
def test_the_objects_of_a_bucket_are_counted_as_long_as_it_takes_or_not(
    monkeypatch: pytest.MonkeyPatch, quick: list[tuple[int, int]] | None
) -> None:
    monkeypatch.setattr(stats, "quick_rows", lambda *_: quick)
    conn: Any = Session(stored_packs=[(2, 99)], large_copied=[(5, 500)])
    assert stored_objects(conn, "remote", 1, exact=True) == StoredObjects(2, 99, 5, 500)
    large = (4, 400) if quick else (None, None)
    assert stored_objects(conn, "remote", 1, exact=False) == StoredObjects(2, 99, *large)


@pytest.mark.parametrize("milliseconds", [0, 250])
def test_what_is_counted_exactly_has_no_limit(
    monkeypatch: pytest.MonkeyPatch, milliseconds: int
) -> None:
    figures = (1, 2, 3, 10, 20, 30, 1, 0)
    rows = [("missing", True, 3, 30), ("remote-missing", False, 1, 5)]
    conn: Any = Session(one_snapshot=[], totals=[figures], uncopied_by_reason=rows)
    found = stats._count(conn, "remote", milliseconds) if milliseconds else None
    found = found or stats.exact_totals(conn, "remote")
    assert found == Totals(*figures, {"missing": 3}, {"remote-missing": 1})
    assert conn.limits == [("statement_timeout", 250)] * (milliseconds > 0)


def test_examples_of_failures_are_none_where_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = [("ab", "missing", "why", 2, None, None, None)]
    conn: Any = Session()
    for rows, told in ((found, [FailedBlob(*found[0])]), (None, [])):
        monkeypatch.setattr(glance, "quick_rows", lambda *_, rows=rows: rows)
        assert glance.failure_examples(conn, "remote", 3) == told
    monkeypatch.setattr(glance, "rows_about", lambda _: 5)
    monkeypatch.setattr(glance, "quick_rows", lambda *_: [(5, 1, 2, 3, 4)])
    assert glance.proved(conn, "remote") == Proved(5, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("rows", "percent"), [(0, 100.0), (20_000, 100.0), (40_000, 50.0), (20_000_000, 0.1)]
)
def test_a_glance_reads_a_part_of_a_large_table(
    monkeypatch: pytest.MonkeyPatch, rows: int, percent: float
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(glance, "rows_about", lambda _: rows)
    monkeypatch.setattr(glance, "quick_rows", lambda *args: asked.append(args[3]))
    conn: Any = Session()
    assert glance.proved(conn, "remote") is None
    assert asked == [{"percent": percent}]
