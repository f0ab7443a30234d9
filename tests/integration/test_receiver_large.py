"""Large blobs: in pieces, withdrawn, wrong, resumed after the link was cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.wire import framing, write_messages
from tests.environment import wait_until
from tests.receiver_driver import FarSide, assert_complete, digest_of, names_under, place_of, put

MIB = 1 << 20
# Just over two of the steps after which progress is made durable.
BIG = os.urandom(1000) * ((2 * write_messages.RESUMABLE + 5 * MIB) // 1000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture(params=["sha256", "blake3"])
def hashed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def far(root: Path, hashed: str) -> Iterator[FarSide]:
    with FarSide(root) as far:
        far.hello(hash=hashed)
        yield far


def prefix_hash(hashed: str, data: bytes) -> bytes:
    """What is answered where so much of BIG is there."""
    if hashed == "sha256":
        return hashlib.sha256(digest_of(BIG) + data).digest()
    return digest_of(data)


def send(far: FarSide, content: bytes, offset: int = 0, digest: bytes | None = None) -> None:
    """LARGE to END, within a batch."""
    far.write(write_messages.large(digest or digest_of(content), len(content), offset))
    for piece in far.pieces(content[offset:]):
        far.write(piece)
    far.write(far.end(content))


def batch_of(far: FarSide, number: int, content: bytes, offset: int = 0) -> None:
    far.write(write_messages.batch(number, 1, len(content)))
    send(far, content, offset)
    far.write(write_messages.numbered(framing.COMMIT, number))


def ask_offset(far: FarSide, content: bytes) -> tuple[int, bytes]:
    kind, payload = far.ask(write_messages.ask_offset(digest_of(content), len(content)))
    assert kind == framing.OFFSET
    return write_messages.read_offset(payload)


def partials(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".ntt-incoming" / "partial").glob("*"))


@pytest.mark.parametrize("size", [0, 1, MIB + 1, 5 * MIB])
def test_a_blob_in_pieces_between_small_ones(far: FarSide, root: Path, size: int) -> None:
    large = (b"large " * size)[:size]
    far.write(write_messages.batch(1, 3, size + 2) + far.pack([b"a"]))
    send(far, large)
    far.write(far.pack([b"b"]) + write_messages.numbered(framing.COMMIT, 1))

    receipt = far.receipt()

    assert (receipt.outcome, receipt.stored, receipt.exceptions) == (write_messages.SETTLED, 3, [])
    assert_complete(root)
    assert names_under(root) == {digest_of(blob).hex() for blob in (large, b"a", b"b")}
    assert far.bye() == 0
    assert not (root / ".ntt-incoming").exists()


@pytest.mark.parametrize("size", [3 * MIB, write_messages.RESUMABLE + 1])
def test_a_withdrawn_blob_leaves_nothing_and_its_neighbours_are_stored(
    far: FarSide, root: Path, size: int
) -> None:
    content = bytes(size)
    far.write(write_messages.batch(1, 2, size + 1))
    far.write(write_messages.large(digest_of(content), size, 0))
    for piece in list(far.pieces(content))[:2]:
        far.write(piece)
    far.write(write_messages.end(write_messages.WITHDRAWN) + far.pack([b"a"]))
    far.write(write_messages.numbered(framing.COMMIT, 1))

    receipt = far.receipt()

    assert [e[:2] for e in receipt.exceptions] == [(0, write_messages.WITHDREW)]
    assert receipt.stored == 1
    assert names_under(root) == {digest_of(b"a").hex()}
    assert partials(root) == []


@pytest.mark.parametrize("size", [3 * MIB, write_messages.RESUMABLE + 1])
def test_a_large_blob_that_is_not_what_it_should_be_is_never_named(
    far: FarSide, root: Path, hashed: str, size: int
) -> None:
    content, other = bytes(size), b"\1" + bytes(size - 1)
    far.write(write_messages.batch(1, 1, size))
    far.write(write_messages.large(digest_of(content), size, 0))
    for piece in far.pieces(other):
        far.write(piece)
    far.write(far.end(content) + write_messages.numbered(framing.COMMIT, 1))

    receipt = far.receipt()

    assert [e[:2] for e in receipt.exceptions] == [(0, write_messages.MISMATCH)]
    assert names_under(root) == set()
    assert partials(root) == []


def test_a_large_blob_under_a_name_that_is_not_its_own_is_never_named(
    far: FarSide, root: Path
) -> None:
    far.write(write_messages.batch(1, 1, 3 * MIB))
    send(far, bytes(3 * MIB), digest=digest_of(b"other"))
    far.write(write_messages.numbered(framing.COMMIT, 1))
    assert [e[:2] for e in far.receipt().exceptions] == [(0, write_messages.MISMATCH)]
    assert names_under(root) == set()


def test_a_large_blob_that_is_there(far: FarSide, root: Path) -> None:
    content = bytes(write_messages.RESUMABLE + 1)
    put(root, digest_of(content), content)

    batch_of(far, 1, content)

    assert [e[:2] for e in far.receipt().exceptions] == [(0, write_messages.PRESENT)]
    assert partials(root) == []


def test_after_a_cut_it_goes_on_where_it_was(far: FarSide, root: Path, hashed: str) -> None:
    far.write(
        write_messages.batch(1, 1, len(BIG)) + write_messages.large(digest_of(BIG), len(BIG), 0)
    )
    sent = 0
    for piece in list(far.pieces(BIG))[:70]:
        far.write(piece)
        sent += MIB
    assert far.hang_up() == 0
    assert names_under(root) == set()

    with FarSide(root) as again:
        again.hello(hash=hashed)
        assert ask_offset(again, BIG) == (sent, prefix_hash(hashed, BIG[:sent]))
        batch_of(again, 1, BIG, sent)
        assert again.receipt().stored == 1
        assert partials(root) == []
        assert again.bye() == 0
    assert_complete(root)
    assert names_under(root) == {digest_of(BIG).hex()}


def test_after_a_kill_it_goes_on_from_the_last_durable_offset(
    far: FarSide, root: Path, hashed: str
) -> None:
    far.write(
        write_messages.batch(1, 1, len(BIG)) + write_messages.large(digest_of(BIG), len(BIG), 0)
    )
    for piece in list(far.pieces(BIG))[:70]:
        far.write(piece)
    partial = root / ".ntt-incoming" / "partial" / digest_of(BIG).hex()
    mark = partial.with_name(partial.name + ".mark")
    wait_until(lambda: mark.exists() and mark.read_bytes().strip(), "the first mark")
    far.child.kill()
    far.child.wait()
    # As after a crash of the remote: longer than what is known to be durable.
    with partial.open("r+b") as file:
        file.seek(write_messages.RESUMABLE)
        file.write(bytes(MIB))

    with FarSide(root) as again:
        again.hello(hash=hashed)
        offset, checksum = ask_offset(again, BIG)
        assert (offset, checksum) == (
            write_messages.RESUMABLE,
            prefix_hash(hashed, BIG[: write_messages.RESUMABLE]),
        )
        batch_of(again, 1, BIG, offset)
        assert again.receipt().stored == 1
    assert_complete(root)


@pytest.mark.parametrize("mark", [b"", b"x\n", b"-5\n", b"999999999999\n", b"67108864", b"7" * 40])
def test_a_mark_that_cannot_be_is_none(far: FarSide, root: Path, hashed: str, mark: bytes) -> None:
    directory = root / ".ntt-incoming" / "partial"
    directory.mkdir()
    (directory / digest_of(BIG).hex()).write_bytes(BIG[: 65 * MIB])
    (directory / (digest_of(BIG).hex() + ".mark")).write_bytes(mark)

    assert ask_offset(far, BIG) == (0, prefix_hash(hashed, b""))


def test_a_prefix_that_differs_is_told_by_its_hash_and_can_be_sent_anew(
    far: FarSide, root: Path, hashed: str
) -> None:
    directory = root / ".ntt-incoming" / "partial"
    directory.mkdir()
    damaged = b"damaged" + BIG[7 : 65 * MIB]
    (directory / digest_of(BIG).hex()).write_bytes(damaged)
    (directory / (digest_of(BIG).hex() + ".mark")).write_bytes(b"%d\n" % len(damaged))

    assert ask_offset(far, BIG) == (len(damaged), prefix_hash(hashed, damaged))
    batch_of(far, 1, BIG)

    assert far.receipt().stored == 1
    assert_complete(root)


def test_a_damaged_prefix_that_is_resumed_all_the_same_is_found(far: FarSide, root: Path) -> None:
    directory = root / ".ntt-incoming" / "partial"
    directory.mkdir()
    damaged = b"damaged" + BIG[7 : 65 * MIB]
    (directory / digest_of(BIG).hex()).write_bytes(damaged)
    (directory / (digest_of(BIG).hex() + ".mark")).write_bytes(b"%d\n" % len(damaged))

    offset, _ = ask_offset(far, BIG)
    batch_of(far, 1, BIG, offset)

    assert [e[:2] for e in far.receipt().exceptions] == [(0, write_messages.MISMATCH)]
    assert names_under(root) == set()
    assert partials(root) == []


def test_two_sessions_send_the_same_large_blob(far: FarSide, root: Path, hashed: str) -> None:
    far.write(
        write_messages.batch(1, 1, len(BIG)) + write_messages.large(digest_of(BIG), len(BIG), 0)
    )
    pieces = list(far.pieces(BIG))
    far.write(pieces[0])
    wait_until(lambda: partials(root) != [], "the first session to hold the file")
    with FarSide(root) as other:
        other.hello(hash=hashed, slot="1")
        assert ask_offset(other, BIG) == (0, prefix_hash(hashed, b""))
        batch_of(other, 1, BIG)
        assert other.receipt().stored == 1
    for piece in pieces[1:]:
        far.write(piece)
    far.write(far.end(BIG) + write_messages.numbered(framing.COMMIT, 1))

    assert [e[:2] for e in far.receipt().exceptions] == [(0, write_messages.PRESENT)]
    assert_complete(root)
    assert partials(root) == []


def test_an_aborted_batch_keeps_a_large_blob_for_the_next(
    far: FarSide, root: Path, hashed: str
) -> None:
    far.write(write_messages.batch(1, 1, len(BIG)))
    send(far, BIG)
    assert far.ask(write_messages.numbered(framing.ABORT, 1))[0] == framing.ABORTED
    assert names_under(root) == set()

    assert ask_offset(far, BIG) == (len(BIG), prefix_hash(hashed, BIG))
    batch_of(far, 2, BIG, len(BIG))

    assert far.receipt().stored == 1
    assert_complete(root)


def test_partial_files_that_nobody_wanted_for_a_week_are_removed(far: FarSide, root: Path) -> None:
    directory = root / ".ntt-incoming" / "partial"
    directory.mkdir()
    old, young = directory / ("0" * 64), directory / ("1" * 64)
    for path in (old, young):
        path.write_bytes(b"half")
        path.with_name(f"{path.name}.mark").write_bytes(b"%020d\n" % 4)
    long_ago = old.stat().st_mtime - 8 * 86400
    os.utime(old, (long_ago, long_ago))
    with FarSide(root) as other:
        other.hello(slot="1")
        assert partials(root) == [young.name, f"{young.name}.mark"]


def test_memory_does_not_grow_with_the_blob(far: FarSide) -> None:
    content = bytes(300 * MIB)
    batch_of(far, 1, content)
    assert far.receipt().stored == 1
    status = Path(f"/proc/{far.child.pid}/status").read_text()
    (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    assert int(peak) < 60_000


def test_place_of_a_large_blob(far: FarSide, root: Path) -> None:
    content = bytes(write_messages.RESUMABLE + 1)
    batch_of(far, 1, content)
    assert far.receipt().stored == 1
    path = place_of(root, digest_of(content))
    assert path.stat().st_size == len(content)
    assert path.stat().st_mode & 0o7777 == 0o644
    assert path.stat().st_nlink == 1


def test_an_offer_that_nobody_takes_up_leaves_nothing(far: FarSide, root: Path) -> None:
    assert ask_offset(far, BIG)[0] == 0
    assert far.bye() == 0
    assert not (root / ".ntt-incoming").exists()
