"""The loop of a check, whatever the source is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from ntt_backup.audit.proof import Blobs
from ntt_backup.audit.verify import Check, Checked, Question
from ntt_backup.catalog.connection import Connection
from ntt_backup.model import Blob
from ntt_backup.process.threads import WorkQueue


@dataclass
class OneBlob(Check[Blobs]):
    """Lists one blob, and notes how often it is asked for more."""

    left: list[Blobs | None] = field(default_factory=lambda: [(Blob("ab" * 32),), None])

    def next_job(self) -> Blobs | None:
        return self.left.pop(0)

    def blobs_of(self, job: Blobs) -> Blobs:
        return job

    def is_empty(self) -> bool:
        return False

    def record(self, right: list[str], lost: object, tried: object) -> None: ...


def test_a_source_is_asked_for_nothing_more_once_it_had_no_more() -> None:
    jobs = WorkQueue[Blobs, Checked[Blobs]](2, lambda: None)
    check = OneBlob(cast(Connection, None), "remote", Question(), lambda _: None, jobs)

    def threads(step: Callable[[], None]) -> None:
        for _ in range(3):
            step()
        job = jobs.take_job(wait=True)
        assert job is not None
        jobs.add_result(Checked(job, 1))
        assert jobs.take_job(wait=True) is None

    assert check.run(threads).checked == 1
