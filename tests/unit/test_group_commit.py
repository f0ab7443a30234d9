"""The way of a batch from COMMIT to RECEIPT: what each sync covers, and what its failure means."""

from __future__ import annotations

import errno
from collections.abc import Collection

import pytest

from ntt_backup.receiver.group_commit import GroupCommit
from ntt_backup.receiver.staged_batch import StagedBatch
from ntt_backup.wire import framing, messages
from ntt_backup.wire.messages import Receipt


class FakeSync:
    """A sync begins when it is told to, and ends when the test says so."""

    by_file = False

    def __init__(self) -> None:
        self.busy = False
        self.started: list[set[str]] = []
        self._ended: list[OSError | None] = []

    def start(self, directories: Collection[str]) -> None:
        assert not self.busy
        self.busy = True
        self.started.append(set(directories))

    def end(self, problem: OSError | None = None) -> None:
        self._ended.append(problem)

    def result(self) -> tuple[bool, OSError | None]:
        if not self._ended:
            return False, None
        self.busy = False
        return True, self._ended.pop()


class FakePublisher:
    """Takes down what is placed; fails for the numbers it is told."""

    def __init__(self) -> None:
        self.placed: list[int] = []
        self.failing: dict[int, OSError] = {}

    def publish_batch(self, batch: StagedBatch, stage: int) -> set[str]:
        if batch.number in self.failing:
            raise self.failing[batch.number]
        self.placed.append(batch.number)
        return {f"dir-{batch.number}"}


class Desk:
    """A `GroupCommit` with all that is around it."""

    def __init__(self) -> None:
        self.sync = FakeSync()
        self.publisher = FakePublisher()
        self.receipts: list[Receipt] = []
        self.commits = GroupCommit(
            self.sync,  # type: ignore[arg-type]
            self.publisher,  # type: ignore[arg-type]
            -1,  # No stage: what is discarded was never written.
            messages.SHA256,
        )

    def commit(self, *numbers: int) -> None:
        for number in numbers:
            batch = StagedBatch(number, 10, 100, 0)
            batch.add(bytes(32), 1)
            self.commits.add(batch)
        self.advance()

    def end_sync(self, problem: OSError | None = None) -> None:
        self.sync.end(problem)
        self.advance(problem)

    def advance(self, problem: OSError | None = None) -> None:
        receipts, found = self.commits.finish_sync()
        assert found is problem
        self.receipts += receipts
        self.receipts += self.commits.start_sync()

    @property
    def answered(self) -> list[tuple[int, int]]:
        return [(receipt.number, receipt.outcome) for receipt in self.receipts]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_sync_covers_only_what_was_there_when_it_began(desk: Desk) -> None:
    desk.commit(1)
    desk.commit(2)
    desk.end_sync()
    assert desk.publisher.placed == [1]
    desk.commit(3)
    desk.end_sync()
    assert (desk.publisher.placed, desk.answered) == ([1, 2], [(1, messages.SETTLED)])
    desk.end_sync()
    desk.end_sync()
    assert [number for number, _ in desk.answered] == [1, 2, 3]
    assert len(desk.sync.started) == 4


def test_in_steady_state_there_is_one_sync_a_batch(desk: Desk) -> None:
    for number in range(100):
        desk.commit(number)
        desk.end_sync()
    while desk.sync.busy:
        desk.end_sync()
    assert [number for number, _ in desk.answered] == list(range(100))
    assert len(desk.sync.started) <= 103


def test_a_batch_that_cannot_be_published_fails_alone(desk: Desk) -> None:
    desk.publisher.failing[2] = OSError(errno.ENOSPC, "")
    desk.commit(1, 2, 3)
    desk.end_sync()
    assert desk.answered == [(2, messages.FAILED)]
    assert desk.receipts[0].exceptions[0].text == "ENOSPC: No space left on device"
    desk.end_sync()
    assert desk.answered[1:] == [(1, messages.SETTLED), (3, messages.SETTLED)]


def test_a_failed_sync_fails_all_without_a_receipt_and_none_after_it(desk: Desk) -> None:
    desk.commit(1)
    desk.end_sync()
    desk.commit(2)
    desk.end_sync(OSError(errno.EIO, ""))
    assert desk.answered == [(1, messages.FAILED), (2, messages.FAILED)]
    assert (desk.publisher.placed, desk.sync.busy, desk.commits.waiting) == ([1], False, 0)
    desk.commit(3)
    desk.end_sync()
    desk.end_sync()
    assert desk.answered[2:] == [(3, messages.SETTLED)]


def test_waiting_is_bounded_in_batches_and_in_blobs(desk: Desk) -> None:
    desk.commit(*range(messages.MAX_UNSETTLED - 1))
    assert not desk.commits.full
    desk.commit(100)
    assert desk.commits.full
    for _ in range(3):
        desk.end_sync()
    assert not desk.commits.full
    batch = StagedBatch(200, framing.MAX_BLOBS, 0, 0)
    batch.add(bytes(32 * framing.MAX_BLOBS), 0)
    desk.commits.add(batch)
    assert desk.commits.full
