"""Sizes, durations, counts and errors as people read them, and text made safe to print."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from ntt_backup.errors import ConfigError, RemoteUnreachable
from ntt_backup.formatting import (
    duration,
    many,
    moment,
    printable,
    rate,
    render_error,
    size,
    use_iec,
)


def test_printable_keeps_words_and_joins_lines() -> None:
    assert printable("tar: Grüße\n\n  tar: Ende \n") == "tar: Grüße;   tar: Ende"
    assert printable("\ud800\x1b[0m") == "\\ud800\\x1b[0m"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (754, "12 min 34 s"),
        (3_600 * 3 + 719, "3 h 11 min"),
        (86_400 * 5 + 3_600, "5 d 1 h"),
    ],
)
def test_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 Bytes"),
        (1, "1 Byte"),
        (999, "999 Bytes"),
        (1_000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_960, "1.0 MB"),
        (10**12, "1.0 TB"),
        (10**22, "10000.0 EB"),
    ],
)
def test_size_counts_in_thousands(count: int, text: str) -> None:
    assert size(count) == text


def test_a_moment_is_local_and_says_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    try:
        when = datetime(2026, 3, 4, 23, 30, tzinfo=UTC)
        assert moment(when) == "2026-03-05 00:30 CET"
        assert moment(when, zone=False) == "2026-03-05 00:30"
        # Here that is in the year 10000: a remote may name a version so.
        assert moment(datetime.max.replace(tzinfo=UTC)) == "9999-12-31 23:59 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_one_is_singular_and_all_else_is_plural() -> None:
    assert [many(n, "blob") for n in (0, 1, 1_000)] == ["0 blobs", "1 blob", "1,000 blobs"]
    assert [many(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]


def test_error_says_what_why_and_what_to_do() -> None:
    full = ConfigError("cannot read x\x1b[0m", detail="denied\nagain", hint="chmod it\x07")
    assert render_error(full).split("\n") == [
        "error: cannot read x\\x1b[0m: denied; again",
        "hint: chmod it\\x07",
    ]
    assert render_error(RemoteUnreachable("no answer")) == "error: no answer"


def test_sizes_are_shown_in_either_unit() -> None:
    assert (size(3 * 2**20), rate(12.0)) == ("3.1 MB", "12.0 MB/s")
    use_iec(iec=True)
    try:
        assert (size(3 * 2**20), rate(12.0)) == ("3.0 MiB", "11.4 MiB/s")
    finally:
        use_iec(iec=False)
