"""Volumes of a target are read in pieces: few requests, bounded memory, no failure hidden."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from threading import Lock

import pytest

from ntt_backup.errors import RemoteUnreachable
from ntt_backup.mount.erofs import MAX_DEVICE
from ntt_backup.mount.volumes import PIECE, Pieces, Volume, lay_out
from ntt_backup.packstore.tables import LargeBlob


def large(number: int, size: int) -> LargeBlob:
    return LargeBlob(number.to_bytes(32, "big"), size)


FIRST = large(0, 0).key


class Store:
    """Objects and the requests that were made of them."""

    def __init__(self, *sizes: int) -> None:
        chance = random.Random(1)
        self.objects = {large(n, 0).key: chance.randbytes(size) for n, size in enumerate(sizes)}
        self.requests: list[tuple[str, int]] = []
        self.fetched = 0
        self.fails: Callable[[], BaseException | None] = lambda: None
        self._lock = Lock()
        self.volume = Volume()
        for n, size in enumerate(sizes):
            self.volume.add(large(n, size))
        self.whole = b"".join(
            one.ljust(-(-len(one) // PIECE) * PIECE, b"\0") for one in self.objects.values()
        )

    def fetch(self, key: str, start: int, length: int) -> bytes:
        with self._lock:
            self.requests.append((key, start))
            self.fetched += length
        if error := self.fails():
            raise error
        return self.objects[key][start : start + length]


def test_any_range_is_what_the_objects_have_with_zeros_behind_each() -> None:
    store = Store(1, PIECE, 3 * PIECE + 5, 700_000)
    pieces = Pieces([store.volume], store.fetch)
    chance = random.Random(2)
    for _ in range(200):
        start = chance.randrange(store.volume.size)
        length = chance.randrange(1, 3 * PIECE)
        assert pieces.read(0, start, length) == store.whole[start : start + length]
    assert pieces.read(0, store.volume.size, 10) == b""


def read_all(pieces: Pieces, size: int, start: int = 0) -> Iterator[bytes]:
    for at in range(start, start + size, 1 << 17):
        yield pieces.read(0, at, 1 << 17)


def test_reading_on_fetches_each_byte_once_by_few_requests() -> None:
    store = Store(40 * PIECE)
    assert b"".join(read_all(Pieces([store.volume], store.fetch), 40 * PIECE)) == store.whole
    assert store.fetched == 40 * PIECE
    assert len(store.requests) <= 12


def test_as_much_is_fetched_where_several_files_are_read_at_once() -> None:
    volume, fetched = Volume(), []
    starts = [volume.add(large(n, 40 * PIECE)) for n in range(8)]

    def fetch(key: str, start: int, length: int) -> bytes:
        fetched.append(length)
        return bytes(length)

    pieces = Pieces([volume], fetch)
    for _ in zip(*(read_all(pieces, 40 * PIECE, start) for start in starts), strict=True):
        pass
    # At the end of each file the beginning of the next one may be fetched once more.
    assert sum(fetched) <= 1.2 * volume.size


def test_what_is_fetched_ahead_and_does_not_come_is_asked_for_again_alone() -> None:
    store = Store(8 * PIECE)
    store.objects[FIRST] = store.objects[FIRST][: 7 * PIECE]
    pieces = Pieces([store.volume], store.fetch)
    assert b"".join(read_all(pieces, 7 * PIECE)) == store.whole[: 7 * PIECE]
    with pytest.raises(OSError, match="instead of"):
        pieces.read(0, 7 * PIECE, 10)


def test_reading_here_and_there_fetches_only_that() -> None:
    store = Store(40 * PIECE)
    pieces = Pieces([store.volume], store.fetch)
    for number in (30, 3, 17, 9):
        pieces.read(0, number * PIECE + 5, 100)
    assert len(store.requests) == 4


def test_what_is_kept_is_bounded() -> None:
    volume = Volume()
    volume.add(large(0, 300 * PIECE))
    pieces = Pieces([volume], lambda key, start, length: bytes(length))
    for number in range(0, 300, 2):
        pieces.read(0, number * PIECE, 10)
    assert len(pieces._kept) <= 64


def test_a_failure_reaches_the_reader_and_the_next_read_tries_again() -> None:
    store = Store(PIECE)
    pieces = Pieces([store.volume], store.fetch)
    store.fails = lambda: RemoteUnreachable("away")
    with pytest.raises(RemoteUnreachable):
        pieces.read(0, 0, 10)
    store.fails = lambda: None
    assert pieces.read(0, 0, 10) == store.whole[:10]


def test_an_object_that_became_shorter_is_an_error_and_no_zeros() -> None:
    store = Store(PIECE)
    store.objects[FIRST] = store.objects[FIRST][:-1]
    with pytest.raises(OSError, match="instead of"):
        Pieces([store.volume], store.fetch).read(0, 0, 10)


def test_fuse_gets_eio_and_the_log_one_line() -> None:
    try:
        import mfusepy
    except (ImportError, OSError) as missing:
        pytest.skip(str(missing))
    from ntt_backup.mount.fuse import Files

    store = Store(PIECE)
    said: list[str] = []
    files = Files(
        Pieces([store.volume], store.fetch), [store.volume.size], lambda: None, said.append
    )
    assert files.getattr("/0")["st_size"] == PIECE
    assert files.read("/0", 100, 5, 0) == store.whole[5:105]
    for path in ("/1", "/x"):
        with pytest.raises(mfusepy.FuseOSError) as refused:
            files.getattr(path)
        assert refused.value.errno == errno.ENOENT
    store.objects.clear()
    files = Files(Pieces([store.volume], store.fetch), [1], lambda: None, said.append)
    with pytest.raises(mfusepy.FuseOSError) as failed:
        files.read("/0", 100, 5, 0)
    assert failed.value.errno == errno.EIO
    assert len(said) == 1


def test_objects_are_laid_out_in_volumes_that_a_device_can_have() -> None:
    half = MAX_DEVICE // 2
    sizes = (5, half, PIECE + 1, half, half)
    laid = list(lay_out(large(n, size) for n, size in enumerate(sizes)))
    volumes = {id(volume): volume for _, volume, _ in laid}
    assert len(volumes) == 3
    assert all(volume.size <= MAX_DEVICE for volume in volumes.values())
    assert [start for _, _, start in laid[:3]] == [
        0,
        PIECE,
        PIECE + -(-half // PIECE) * PIECE,
    ]
