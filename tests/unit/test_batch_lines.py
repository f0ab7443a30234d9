"""What a quiet daemon logs of its small batches: little, and nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.config.sections import LogSettings
from ntt_backup.daemon.event_log import (
    SMALL_BLOBS,
    SMALL_BYTES,
    TOGETHER_SECONDS,
    BatchLines,
    EventLog,
)
from ntt_backup.events import BatchComplete, MarksLost

SMALL = BatchComplete(
    pid=4711,
    worker=0,
    batch="0.1",
    blobs=2,
    copied=1,
    failed=1,
    bytes=100,
    wire_bytes=150,
    duration_s=0.5,
    mb_per_s=0.0002,
    attempt=1,
    answer_s=0.25,
)


def test_the_first_small_batch_is_told_at_once_and_the_next_ones_are_summed_up() -> None:
    lines = BatchLines()
    assert list(lines.take(SMALL, 100.0)) == [SMALL]
    second = replace(SMALL, batch="0.2", attempt=2, answer_s=0.75)
    for nth, event in enumerate((second, replace(SMALL, batch="0.3"))):
        assert list(lines.take(event, 101.0 + nth)) == []
    assert list(lines.due(100.0 + TOGETHER_SECONDS - 1)) == []
    (told,) = lines.due(100.0 + TOGETHER_SECONDS)
    assert told == replace(
        SMALL, batch="0.3", batches=2, blobs=4, copied=2, failed=2, bytes=200, wire_bytes=300,
        duration_s=1.0, attempt=2, answer_s=0.5, mb_per_s=0.0002,
    )  # fmt: skip
    assert list(lines.due(1e9)) == list(lines.rest()) == []


def test_after_a_quiet_minute_a_batch_is_told_at_once_again() -> None:
    lines = BatchLines()
    for now in (0.0, TOGETHER_SECONDS, 2 * TOGETHER_SECONDS):
        assert list(lines.take(SMALL, now)) == [SMALL]


@pytest.mark.parametrize(
    "change", [{"blobs": SMALL_BLOBS + 1}, {"bytes": SMALL_BYTES + 1}, {"pack": "packs/aa/bb"}]
)
def test_a_larger_batch_is_told_by_itself_after_what_was_held_back(change: dict[str, Any]) -> None:
    lines, large = BatchLines(), replace(SMALL, batch="0.9", **change)
    list(lines.take(SMALL, 0.0))
    list(lines.take(replace(SMALL, batch="0.2"), 1.0))
    assert list(lines.take(large, 2.0)) == [replace(SMALL, batch="0.2"), large]
    assert list(lines.take(large, 3.0)) == [large]


def test_what_was_held_back_is_told_before_its_marks_are_lost() -> None:
    lines, lost = BatchLines(), MarksLost(pid=4711, worker=0, blobs=1, bytes=50)
    for event in (SMALL, replace(SMALL, worker=1)):
        assert list(lines.take(event, 0.0)) == [event]
        assert list(lines.take(replace(event, batch="0.2"), 1.0)) == []
    assert list(lines.take(lost, 2.0)) == [replace(SMALL, batch="0.2"), lost]
    assert list(lines.take(lost, 3.0)) == [lost]
    assert [one.worker for one in lines.rest()] == [1]


def test_workers_are_told_apart_and_the_end_tells_all() -> None:
    lines = BatchLines()
    other = replace(SMALL, worker=1)
    assert [*lines.take(SMALL, 0.0), *lines.take(other, 0.0)] == [SMALL, other]
    assert [*lines.take(SMALL, 1.0), *lines.take(other, 1.0), *lines.take(other, 2.0)] == []
    assert {one.worker: one.batches for one in lines.rest()} == {0: 1, 1: 2}
    assert list(lines.rest()) == []


def test_five_inserts_a_second_make_a_log_of_a_few_megabytes_a_day(tmp_path: Path) -> None:
    """An hour of four workers; each blob is counted once."""
    settings = LogSettings(jsonl=tmp_path / "log")
    log, lines = EventLog(settings, "0f4c6c9e-1d5c-4d7c-8f0a-2f5b8d6f9a11", "remote"), BatchLines()
    hour = 5 * 3600
    for nth in range(hour):
        event = replace(SMALL, worker=nth % 4, blobs=1, copied=1, failed=0)
        for told in (*lines.take(event, nth / 5), *lines.due(nth / 5)):
            log.event(told)
    for told in lines.rest():
        log.event(told)
    log.close()
    written = [json.loads(line) for line in settings.jsonl.read_text().splitlines()]
    assert sum(line["copied"] for line in written) == hour
    assert sum(line["batches"] for line in written) == hour
    assert 24 * settings.jsonl.stat().st_size < 4_000_000
