"""How many workers of a run go to work, and when the others follow."""

from __future__ import annotations

import pytest

from ntt_backup.client.backoff import Backoff
from ntt_backup.config import Settings
from ntt_backup.daemon.workers import WorkerPool, workers_needed
from ntt_backup.model import PendingEstimate

SETTINGS = Settings(source={"root": "/s"}, remote={"host": "h", "path": "/p"})
LITTLE = PendingEstimate(100, 1_000_000, 0, exact=True)


def due(pool: WorkerPool) -> list[float | None]:
    return [worker.due for worker in pool]


@pytest.mark.parametrize(
    ("pending", "workers"),
    [
        (PendingEstimate(0, 0, 0, exact=True), 1),
        (PendingEstimate(20_000, 1 << 28, 0, exact=True), 1),
        (PendingEstimate(20_001, 1_000_000, 0, exact=True), 2),
        (PendingEstimate(10, (1 << 29) + 1, 0, exact=True), 3),
        (PendingEstimate(10**6, 10**9, 0, exact=True), 4),
        (PendingEstimate(10, 1_000_000, 1, exact=True), 4),
        (PendingEstimate(10, 1_000_000, 0, exact=False), 4),
    ],
)
def test_a_run_starts_with_no_more_workers_than_little_work_is_worth(
    pending: PendingEstimate, workers: int
) -> None:
    assert workers_needed(pending, SETTINGS.run) == workers


@pytest.mark.parametrize(
    ("blobs", "size", "workers"),
    [(24_000, 60_000_000, 1), (48_000, 128_000_000, 2), (10**5, 1, 4), (10**6, 10**12, 4)],
)
def test_a_run_to_a_bucket_makes_few_packs_of_little_work(
    blobs: int, size: int, workers: int
) -> None:
    run = SETTINGS.run.for_bucket()

    assert workers_needed(PendingEstimate(blobs, size, 0, exact=True), run) == workers


def test_workers_that_little_work_does_not_need_follow_when_more_comes() -> None:
    pool = WorkerPool(SETTINGS, "run", Backoff(1, 60), watch=False)
    pool.set_strategy("tar", LITTLE)
    assert due(pool) == [0.0, None, None, None]
    for pending in (None, 0, 20_000):
        pool.start_reserve(pending, 5.0)
    assert due(pool) == [0.0, None, None, None]
    pool.start_reserve(20_001, 5.0)
    assert due(pool) == [0.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("strategy", ["tar", "stream"])
def test_all_workers_that_are_needed_start_at_once(strategy: str) -> None:
    pool = WorkerPool(SETTINGS, "run", Backoff(1, 60), watch=False)
    pool.set_strategy(strategy, PendingEstimate(50_000, 10**6, 0, exact=True))
    assert due(pool) == [0.0, 0.0, 0.0, None]


@pytest.mark.parametrize(("blobs", "loads"), [(24_000, 0), (48_000, 1)])
def test_what_a_bucket_needs_is_loaded_where_more_workers_than_the_first_will_start(
    blobs: int, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("ntt_backup.objects.s3.load", loaded.append)
    settings = Settings(source={"root": "/s"}, remote={"url": "s3://bucket/prefix"})
    pool = WorkerPool(settings, "run", Backoff(1, 60), watch=False)

    pool.load_ahead(PendingEstimate(blobs, 10**6, 0, exact=True))

    assert len(loaded) == loads


def test_workers_that_were_told_to_stop_do_not_follow() -> None:
    pool = WorkerPool(SETTINGS, "run", Backoff(1, 60), watch=False)
    pool.set_strategy("tar", LITTLE)
    pool.stop()
    pool.start_reserve(10**6, 5.0)
    assert not pool.busy


def test_one_that_watches_starts_all() -> None:
    pool = WorkerPool(SETTINGS, "run", Backoff(1, 60), watch=True)
    pool.set_strategy("tar", LITTLE)
    assert due(pool) == [0.0] * 4
