"""Figures that are reckoned from others: what follows on the first blobs of a range."""

from __future__ import annotations

from typing import Any

import pytest

from ntt_backup.catalog import stats
from ntt_backup.catalog.range_locks import interval


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
        (0, 40, "00", "zz", 40),
    ],
)
def test_how_close_the_first_blobs_lie_tells_how_many_follow(
    index: int, count: int, first: str, last: str, followed: int
) -> None:
    assert stats._followed(interval(index), count, first, last) == followed


@pytest.mark.parametrize(
    ("rows", "percent"), [(0, 100.0), (20_000, 100.0), (40_000, 50.0), (20_000_000, 0.1)]
)
def test_a_glance_reads_a_part_of_a_large_table(
    monkeypatch: pytest.MonkeyPatch, rows: int, percent: float
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(stats, "read_parts", lambda *_: {})
    monkeypatch.setattr(stats, "rows_about", lambda _: rows)
    monkeypatch.setattr(stats, "quick_rows", lambda *args: asked.append(args[3]))
    conn: Any = None
    assert stats.proved(conn, "remote") is None
    assert asked == [{"percent": percent}]
