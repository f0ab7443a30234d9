"""Reading ahead: the same blobs, in the order of the disk."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.model import Blob
from ntt_backup.process.memory import SharedNumber
from ntt_backup.source import read_ahead
from ntt_backup.source.read_ahead import Claimed, Order, ReadAhead
from ntt_backup.source.store import Store
from tests.helpers.waiting import wait_until


@pytest.fixture
def claimed(tmp_path: Path) -> Claimed:
    """Blobs that were stored in another order than that of their names."""
    contents = [str(nth).encode() for nth in range(300)]
    for content in contents:
        path = tmp_path / relative_path(blake3(content).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    blobids = sorted(blake3(content).hexdigest() for content in contents)
    return [(Blob(blobid, None), int(blobid[:2], 16)) for blobid in blobids]


@pytest.mark.parametrize("order", ["inode", "extent"])
def test_what_was_claimed_comes_in_the_order_of_the_disk(
    tmp_path: Path, claimed: Claimed, order: Order
) -> None:
    ahead = ReadAhead(Store(tmp_path), order)
    arranged = ahead.arranged(claimed)
    assert sorted(arranged, key=str) == sorted(claimed, key=str)
    assert ahead.batches > 1
    if order == "inode":
        inodes = [(tmp_path / relative_path(one.blobid)).stat().st_ino for one, _ in arranged]
        assert inodes == sorted(inodes)


@pytest.mark.parametrize("known", [True, False])
def test_where_reading_is_slow_the_places_on_the_disk_are_the_order(
    tmp_path: Path, claimed: Claimed, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {one.blobid: -nth for nth, (one, _) in enumerate(claimed)}
    monkeypatch.setattr(ReadAhead, "_is_slow", lambda *_: True)
    monkeypatch.setattr(ReadAhead, "_place", lambda _, one: known and by_name[one.blobid])
    signs: list[None] = []
    arranged = ReadAhead(Store(tmp_path, lambda: signs.append(None)), "auto").arranged(claimed)
    wanted = claimed[::-1] if known else ReadAhead(Store(tmp_path), "inode").arranged(claimed)
    assert arranged == wanted
    assert signs


def test_without_an_order_nothing_is_rearranged(tmp_path: Path, claimed: Claimed) -> None:
    ahead = ReadAhead(Store(tmp_path), "hash")
    assert ahead.arranged(claimed) == claimed
    assert ahead.batches == 1


@pytest.mark.parametrize("order", ["auto", "inode", "extent"])
def test_what_cannot_be_read_is_left_to_the_sender(
    tmp_path: Path, claimed: Claimed, order: Order
) -> None:
    odd = [Blob("../../etc/passwd", 1), Blob("f" * 64, 1), Blob("", None)]
    (tmp_path / "aa" / "aa").mkdir(parents=True, exist_ok=True)
    (tmp_path / "aa" / "aa" / ("a" * 64)).symlink_to("/dev/zero")
    all_of_it = [*claimed, *((one, 0) for one in (*odd, Blob("a" * 64, 1)))]
    random.Random(1).shuffle(all_of_it)
    assert sorted(ReadAhead(Store(tmp_path), order).arranged(all_of_it), key=str) == sorted(
        all_of_it, key=str
    )


def test_one_worker_reads_at_a_time(
    tmp_path: Path, claimed: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = 0.0, []
    waits = threading.Event()
    turn = SharedNumber(1.0)

    def read(*_: object) -> None:
        nonlocal now
        left.append(turn.value - now)
        now += 1.0

    clock = SimpleNamespace(monotonic=lambda: now, sleep=lambda _: waits.set())
    monkeypatch.setattr(read_ahead, "time", clock)
    monkeypatch.setattr(read_ahead, "_THREADS", 1)
    monkeypatch.setattr(ReadAhead, "_read", read)
    ahead = ReadAhead(Store(tmp_path), "inode", turn=turn)
    some = [one for one, _ in ahead.arranged(claimed)]
    wait_until(waits.is_set, "it waits for its turn")
    assert ahead.reading
    assert not ahead.has_read(some[:1])
    turn.value = 0.0
    wait_until(lambda: ahead.has_read(some), "all is read")
    assert not ahead.reading
    assert min(left) > 0.0, "its turn was over before its end"
    wait_until(lambda: turn.value <= now, "the next one may read")


def test_a_worker_that_was_killed_holds_up_nobody(tmp_path: Path, claimed: Claimed) -> None:
    ahead = ReadAhead(Store(tmp_path), "inode", turn=SharedNumber(time.monotonic() + 0.2))
    some = [one for one, _ in ahead.arranged(claimed)]
    wait_until(lambda: ahead.has_read(some), "all is read")


def test_where_the_disk_does_not_answer_nothing_is_waited_for(
    tmp_path: Path, claimed: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    asked: list[Blob] = []

    def read(_: ReadAhead, blob: Blob) -> None:
        asked.append(blob)
        answers.wait()

    monkeypatch.setattr(ReadAhead, "_read", read)
    monkeypatch.setattr(read_ahead, "_TURN_SECONDS", 60.0)
    turn = SharedNumber(0.0)
    ahead = ReadAhead(Store(tmp_path), "inode", turn=turn)
    ahead.arranged(claimed)
    wait_until(lambda: len(asked) == read_ahead._THREADS, "all threads read")
    assert ahead.reading
    monkeypatch.setattr(read_ahead, "_TURN_SECONDS", 0.0)
    turn.value = 0.0
    assert not ahead.reading
    answers.set()


class PageCache:
    """What the kernel has of files: nothing first, and then so many bytes more with each call."""

    STEP = 2

    def __init__(self) -> None:
        self.here: dict[int, int] = {}
        self.calls = 0

    def preadv(self, fd: int, *_: object) -> int:
        status = os.fstat(fd)
        here = min(self.here.get(status.st_ino, 0), status.st_size)
        if here == 0:
            raise BlockingIOError
        return here

    def advise(self, fd: int, offset: int, *_: object) -> None:
        """Reads from offset on, and only as much as the disk takes at a time."""
        self.calls += 1
        inode = os.fstat(fd).st_ino
        if offset <= self.here.get(inode, 0):
            self.here[inode] = max(self.here.get(inode, 0), offset + self.STEP)


def test_what_the_kernel_has_dropped_is_read_again(
    tmp_path: Path, claimed: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PageCache()
    monkeypatch.setattr(os, "preadv", cache.preadv)
    monkeypatch.setattr(os, "posix_fadvise", cache.advise)
    # The catalog may say more than there is.
    some = [Blob(one.blobid, 99) for one, _ in claimed]
    with ReadAhead(Store(tmp_path), "hash").at_hand(some):
        assert not cache.calls
    with ReadAhead(Store(tmp_path), "inode").at_hand(some):
        needed = sum(-(-len(str(nth)) // cache.STEP) for nth in range(len(some)))
        assert cache.calls == needed
        cache.here.clear()
        wait_until(lambda: cache.calls == 2 * needed, "what is dropped meanwhile is read, too")


def test_what_waits_long_to_be_sent_is_not_kept_at_hand(
    tmp_path: Path, claimed: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause may last for days."""
    monkeypatch.setattr(read_ahead, "_KEEP_SECONDS", 0.0)
    ended = threading.Event()
    keep = ReadAhead._keep

    def keep_and_tell(self: ReadAhead, *given: Any) -> None:
        keep(self, *given)
        ended.set()

    monkeypatch.setattr(ReadAhead, "_keep", keep_and_tell)
    with ReadAhead(Store(tmp_path), "inode").at_hand([one for one, _ in claimed[:2]]):
        wait_until(ended.is_set, "it ends")


@pytest.mark.parametrize("order", ["auto", "inode", "extent"])
def test_where_no_thread_can_be_started_nothing_is_read_ahead(
    tmp_path: Path, claimed: Claimed, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    others_turn = SharedNumber(time.monotonic() + 60)
    arranged = ReadAhead(Store(tmp_path), order, turn=others_turn).arranged(claimed)
    assert sorted(arranged, key=str) == sorted(claimed, key=str)


@pytest.mark.parametrize("order", ["inode", "extent"])
def test_reading_ahead_leaves_access_times_as_they_are(
    tmp_path: Path, claimed: Claimed, order: Order
) -> None:
    paths = list(tmp_path.rglob("*"))
    for path in paths:
        os.utime(path, (1, path.stat().st_mtime))
    ahead = ReadAhead(Store(tmp_path), order)
    ahead.arranged(claimed)
    ahead._threads.shutdown()
    assert {path.stat().st_atime for path in paths} == {1}
