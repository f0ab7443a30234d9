"""Directories of `by-hash` that arrive whole, and what becomes of them when others were quicker."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.write_messages import Receipt
from tests.receiver_driver import (
    FarSide,
    assert_complete,
    digest_of,
    litter,
    names_under,
    place_of,
    put,
)


def alike(count: int, prefix: bytes = b"\x3f\x07") -> list[bytes]:
    """Contents whose names belong in one directory, in the order of their names."""
    found: list[bytes] = []
    number = 0
    while len(found) < count:
        content = b"%d" % number
        if digest_of(content).startswith(prefix):
            found.append(content)
        number += 1
    return sorted(found, key=digest_of)


A, B, C = alike(3)
ELSEWHERE = b"some other directory"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "by-hash").mkdir(parents=True)
    return root


@pytest.fixture(params=["sha256", "blake3"])
def far(request: pytest.FixtureRequest, root: Path) -> Iterator[FarSide]:
    with FarSide(root) as far:
        far.hello(hash=request.param)
        yield far


def begin(far: FarSide, number: int, *contents: bytes) -> None:
    """A batch up to its COMMIT: all of it is in the stage."""
    far.write(write_messages.batch(number, len(contents), sum(map(len, contents))))
    for content in contents:
        far.write(far.pack([content]))
    assert far.ask(framing.frame(framing.PING, bytes(8)))[0] == framing.PONG


def commit(far: FarSide, number: int) -> Receipt:
    far.write(write_messages.numbered(framing.COMMIT, number))
    receipt = far.receipt()
    assert receipt.outcome == write_messages.SETTLED, receipt
    return receipt


def lock_only(root: Path) -> bool:
    """Nothing but the living session's lock lies in its stage."""
    (stage, lock) = litter(root)
    return lock == f"{stage}/lock"


def staged(root: Path) -> list[str]:
    """What lies in the stage, by its last name."""
    return sorted(os.path.basename(name) for name in litter(root) if "/" in name)


def test_a_new_directory_is_filled_in_the_stage_and_moved(far: FarSide, root: Path) -> None:
    begin(far, 1, A, B, C)
    assert not (root / "by-hash/3f").exists()
    assert {digest_of(each).hex() for each in (A, B, C)} < set(staged(root))

    assert commit(far, 1) == Receipt(
        1, write_messages.SETTLED, write_messages.HASHES[far.hash], 3, []
    )

    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C)}
    assert_complete(root)
    assert lock_only(root)


def test_what_comes_after_it_joins_it(far: FarSide, root: Path) -> None:
    far.write(far.batch(1, [A]))
    far.write(far.batch(2, [B]))
    assert [far.receipt().stored for _ in range(2)] == [1, 1]
    begin(far, 3, C)
    assert commit(far, 3).stored == 1
    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C)}
    assert lock_only(root)


def test_one_that_somebody_made_meanwhile_takes_the_files_one_by_one(
    far: FarSide, root: Path
) -> None:
    begin(far, 1, A, B, C, ELSEWHERE)
    put(root, digest_of(B), B)
    put(root, digest_of(C), b"wrong")

    receipt = commit(far, 1)

    assert {each.position: each.verdict for each in receipt.exceptions} == {
        1: write_messages.PRESENT,
        2: write_messages.REPLACED,
    }
    assert receipt.stored == 2
    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C, ELSEWHERE)}
    assert_complete(root)
    assert lock_only(root)


def test_what_is_not_in_it_is_not_looked_for_there(root: Path) -> None:
    """A blob that came twice lies beside the directory, one that was wrong nowhere."""
    with FarSide(root) as far:
        far.hello(hash="blake3")
        far.write(
            write_messages.batch(1, 4, 1000)
            + far.pack([A, A, b"wrong", C], [digest_of(each) for each in (A, A, B, C)])
        )
        assert far.ask(framing.frame(framing.PING, bytes(8)))[0] == framing.PONG
        place_of(root, digest_of(A)).parent.mkdir(parents=True)

        receipt = commit(far, 1)

        assert {each.position: each.verdict for each in receipt.exceptions} == {
            1: write_messages.PRESENT,
            2: write_messages.MISMATCH,
        }
        assert names_under(root) == {digest_of(A).hex(), digest_of(C).hex()}
        assert lock_only(root)


@pytest.mark.parametrize("what", ["link", "file"])
def test_something_else_that_somebody_put_there_meanwhile_is_left_alone(
    far: FarSide, root: Path, tmp_path: Path, what: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    begin(far, 1, A, B, ELSEWHERE)
    there = place_of(root, digest_of(A)).parent
    there.parent.mkdir()
    if what == "link":
        there.symlink_to(outside)
    else:
        there.write_text("a file")

    receipt = commit(far, 1)

    assert [each.verdict for each in receipt.exceptions] == [write_messages.REFUSED] * 2
    assert receipt.stored == 1
    assert list(outside.iterdir()) == []
    assert there.is_symlink() or there.read_text() == "a file"
    assert lock_only(root)


def test_the_same_blob_twice(far: FarSide, root: Path) -> None:
    begin(far, 1, A, A, B)
    receipt = commit(far, 1)
    assert [tuple(each)[:2] for each in receipt.exceptions] == [(1, write_messages.PRESENT)]
    assert names_under(root) == {digest_of(A).hex(), digest_of(B).hex()}
    assert lock_only(root)


def test_blobs_out_of_order(far: FarSide, root: Path) -> None:
    begin(far, 1, C, ELSEWHERE, A)
    assert commit(far, 1).stored == 3
    assert names_under(root) == {digest_of(each).hex() for each in (A, C, ELSEWHERE)}
    assert lock_only(root)


def test_a_large_blob_among_them(far: FarSide, root: Path) -> None:
    far.write(write_messages.batch(1, 3, 1000) + far.pack([A]))
    far.write(write_messages.large(digest_of(B), len(B), 0) + b"".join(far.pieces(B)) + far.end(B))
    far.write(far.pack([C]))
    assert commit(far, 1).stored == 3
    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C)}
    assert_complete(root)
    assert lock_only(root)


def test_no_directory_for_content_that_is_wrong(root: Path) -> None:
    with FarSide(root) as far:
        far.hello(hash="blake3")
        far.write(write_messages.batch(1, 1, 100) + far.pack([b"wrong"], [digest_of(A)]))
        receipt = commit(far, 1)
        assert [each.verdict for each in receipt.exceptions] == [write_messages.MISMATCH]
        assert list((root / "by-hash").iterdir()) == []
        assert lock_only(root)


def test_what_is_called_back_leaves_nothing(far: FarSide, root: Path) -> None:
    begin(far, 1, A, B, ELSEWHERE)
    assert far.ask(write_messages.numbered(framing.ABORT, 1))[0] == framing.ABORTED
    assert lock_only(root)
    begin(far, 2, A, B)
    assert commit(far, 2).stored == 2
    assert names_under(root) == {digest_of(each).hex() for each in (A, B)}


def test_what_a_killed_session_leaves_is_removed(root: Path) -> None:
    with FarSide(root) as killed:
        killed.hello()
        begin(killed, 1, A, B)
    assert digest_of(A).hex() in staged(root)
    with FarSide(root) as far:
        far.hello()
        assert lock_only(root)


def test_a_directory_inherits_the_group_of_by_hash(far: FarSide, root: Path) -> None:
    """Where an administrator has set that bit on by-hash, but not on the root."""
    by_hash = root / "by-hash"
    by_hash.chmod(by_hash.stat().st_mode | stat.S_ISGID)
    begin(far, 1, A)
    assert commit(far, 1).stored == 1
    made = place_of(root, digest_of(A)).parent
    assert made.stat().st_mode & made.parent.stat().st_mode & stat.S_ISGID


def test_a_directory_inherits_the_access_list_of_by_hash(far: FarSide, root: Path) -> None:
    entries = [(0x01, 7), (0x04, 5), (0x20, 0)]  # owner, group, others: nothing for these
    no_id = 0xFFFFFFFF
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each, no_id) for each in entries)
    try:
        os.setxattr(root / "by-hash", "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("this file system has no access lists")
    begin(far, 1, A)
    assert commit(far, 1).stored == 1
    assert stat.S_IMODE(place_of(root, digest_of(A)).parent.stat().st_mode) == 0o750
