"""What a restore counts as done while a large blob comes over a link that keeps dropping."""

from __future__ import annotations

from typing import cast

import pytest

from ntt_backup.client.read_session import ReadSession
from ntt_backup.errors import RemoteUnreachable
from ntt_backup.process.threads import WorkQueue
from ntt_backup.restore.from_receiver import Batch, Fetching
from ntt_backup.restore.target_dir import TargetWriter
from ntt_backup.restore.work import Work


class Shared:
    """One large blob is wanted, and not there."""

    def __init__(self) -> None:
        self.queue: WorkQueue[Batch, None] = WorkQueue(1, lambda: None)
        self.queue.put(Batch([(bytes(32), 1 << 40)], 1.0))
        self.queue.close()

    def has(self, writer: TargetWriter, entry: object) -> bool:
        return False


class Kept:
    """What is there of it, each time it is looked at."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = iter(sizes)

    def forget(self) -> None: ...

    def has_base(self, digest: bytes) -> bool:
        return False

    def has_part(self, digest: bytes) -> bool:
        return True

    def resume(self, digest: bytes) -> int:
        return next(self._sizes)


class Lost:
    """A connection that is lost when something is asked for."""

    settled = 0

    def ask_contents(self, digests: list[bytes], offset: int) -> None:
        raise RemoteUnreachable("the connection to the remote was lost")


def test_a_part_that_was_kept_counts_as_progress_once() -> None:
    writer = cast(TargetWriter, Kept(0, 100, 100, 200, 200))
    fetching = Fetching(cast(Work[Batch], Shared()), writer)
    done = []
    for _ in range(5):
        session = Lost()
        with pytest.raises(RemoteUnreachable):
            fetching.work(cast(ReadSession, session))
        done.append(session.settled)
    assert done == [0, 1, 0, 1, 0]
