"""A large blob on its way to the target of a restore: what counts as done, and what is seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from blake3 import blake3

from ntt_backup.client.read_session import ReadSession
from ntt_backup.errors import RemoteUnreachable
from ntt_backup.process.threads import WorkQueue
from ntt_backup.restore.destination import RestoreTarget, TargetWriter
from ntt_backup.restore.from_receiver import Batch, Fetching, FromReceiver
from ntt_backup.wire.messages import Large
from tests.helpers.blobs import tree


class Shared:
    """One large blob is wanted, and not there."""

    def __init__(self) -> None:
        self.queue: WorkQueue[Batch, None] = WorkQueue(1, lambda: None)
        self.queue.add_job(Batch([(bytes(32), 1 << 40)], 1.0))
        self.queue.close()

    def has(self, writer: TargetWriter, entry: object) -> bool:
        return False


class Kept:
    """What is there of it, each time it is looked at."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = iter(sizes)

    def forget(self) -> None: ...

    def has_part(self, digest: bytes) -> bool:
        return True

    def resume(self, digest: bytes, alive: Callable[[], None]) -> int:
        alive()
        return next(self._sizes)


class Lost:
    """A connection that is lost when something is asked for."""

    settled = 0
    shown = 0

    def show_life(self) -> None:
        self.shown += 1

    def ask_contents(self, digests: list[bytes], offset: int, listed: dict[bytes, int]) -> None:
        raise RemoteUnreachable("the connection to the remote was lost")


def test_a_part_that_was_kept_counts_as_progress_once() -> None:
    writer = cast(TargetWriter, Kept(0, 100, 100, 200, 200))
    fetching = Fetching(cast(FromReceiver, Shared()), writer)
    done = []
    for _ in range(5):
        session = Lost()
        with pytest.raises(RemoteUnreachable):
            fetching.work(cast(ReadSession, session))
        done.append(session.settled)
        assert session.shown == 1
    assert done == [0, 1, 0, 1, 0]


def test_a_large_blob_that_two_threads_fetch_is_whole_when_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntt_backup.restore.destination.RESUMABLE", 10)
    content = bytes(range(20))
    digest = blake3(content).digest()
    name, large = digest.hex(), Large(digest, len(content), 0)
    seen = {f"{name[:2]}/{name[2:4]}/{name}": content}

    def come(writer: TargetWriter, start: int, end: int) -> None:
        writer.piece(memoryview(content)[start:end])

    with (
        closing(RestoreTarget(tmp_path)) as target,
        closing(TargetWriter(target, "w1", lambda count: None)) as first,
        closing(TargetWriter(target, "w2", lambda count: None)) as second,
    ):
        first.begin(large)
        come(first, 0, 15)
        assert not second.has_part(digest)
        second.begin(large)
        come(second, 0, 5)
        come(first, 15, 20)
        first.end("")
        assert first.publish() == 1
        assert (tmp_path / name[:2] / name[2:4] / name).read_bytes() == content
        come(second, 5, 20)
        second.end("")
        assert second.publish() == 0  # It was there.
        # What is left of it by the next one is the next one's to resume.
        first.begin(large)
        first.publish()
        assert not second.has_part(digest)
        first.forget()
        first.publish()
        assert second.has_part(digest)
    assert {path: found for path, found in tree(tmp_path).items() if path in seen} == seen


def test_a_part_that_the_remote_does_not_go_on_with_is_not_resumed_again(tmp_path: Path) -> None:
    """Its blob is shorter there, and too small to be resumed."""
    content = b"short"
    digest = blake3(content).digest()
    with (
        closing(RestoreTarget(tmp_path)) as target,
        closing(TargetWriter(target, "w", lambda count: None)) as writer,
    ):
        (tmp_path / ".ntt-restore" / "partial" / digest.hex()).write_bytes(bytes(9))
        assert writer.resume(digest) == 9
        writer.begin(Large(digest, len(content), len(content)))
        writer.end("")
        assert writer.again() == [digest]
        assert not writer.has_part(digest)


class Chosen(Shared):
    """Two blobs of a list are wanted, whose sizes nobody knows."""

    def __init__(self, *digests: bytes) -> None:
        self.queue = WorkQueue(1, lambda: None)
        self.queue.add_job(Batch([(one, None) for one in digests], None))
        self.queue.close()

    def finish(self, writer: TargetWriter, part: float | None) -> None: ...


class Asked:
    """A connection that is lost within a blob, or gives nothing."""

    settled = 0

    def __init__(self, lost_in: Large | None = None) -> None:
        self._lost_in = lost_in
        self.questions: list[tuple[list[bytes], int]] = []

    def show_life(self) -> None: ...

    def ask_contents(self, digests: list[bytes], offset: int, listed: dict[bytes, int]) -> None:
        self.questions.append((digests, offset))

    def contents(self, writer: TargetWriter) -> None:
        if self._lost_in is not None:
            writer.begin(self._lost_in)
            writer.piece(memoryview(bytes(15)))
            raise RemoteUnreachable("the connection to the remote was lost")


@pytest.mark.parametrize("earlier", [True, False])
def test_a_large_blob_of_a_list_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """After a part that an earlier call has left, or a connection that was lost."""
    monkeypatch.setattr("ntt_backup.restore.destination.RESUMABLE", 10)
    small, large = blake3(b"small").digest(), blake3(b"large").digest()
    with (
        closing(RestoreTarget(tmp_path)) as target,
        closing(TargetWriter(target, "w", lambda count: None)) as writer,
    ):
        fetching = Fetching(cast(FromReceiver, Chosen(small, large)), writer)
        if earlier:
            (tmp_path / ".ntt-restore" / "partial" / large.hex()).write_bytes(bytes(15))
        else:
            lost = Asked(Large(large, 20, 0))
            with pytest.raises(RemoteUnreachable):
                fetching.work(cast(ReadSession, lost))
            assert lost.questions == [([small, large], 0)]
        session = Asked()
        fetching.work(cast(ReadSession, session))
    assert session.questions == [([small], 0), ([large], 15)]
