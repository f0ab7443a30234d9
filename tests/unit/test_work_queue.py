"""A work queue: neither the threads nor the one that feeds them wait without need."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from ntt_backup.audit.hashing import Checked, CheckQueue, Job
from ntt_backup.client import pool
from ntt_backup.client.pool import Crew
from ntt_backup.model import Blob


@pytest.mark.timeout(20)
def test_a_result_makes_room_for_the_next_job_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More jobs than there is room for, and a tick that by itself would come too late."""
    monkeypatch.setattr(pool, "_TICK_SECONDS", 3600.0)
    news = threading.Event()
    queue = CheckQueue(2, lambda: None, news.set)
    jobs: deque[Job] = deque((Blob(f"{number:064x}"),) for number in range(20))
    done: list[Job] = []

    def work(_: str) -> None:
        while (job := queue.take(wait=True)) is not None:
            queue.give(Checked(job, 0, ()))

    def feed() -> None:
        done.extend(checked.blobs for checked in queue.done())
        while jobs and not queue.full:
            queue.put(jobs.popleft())
        if not jobs:
            queue.close()

    Crew(2, work, threading.Event(), news).run(feed)
    assert sorted(job[0].blobid for job in done) == [f"{number:064x}" for number in range(20)]
