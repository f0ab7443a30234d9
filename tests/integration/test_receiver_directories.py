"""Directories of `by-hash` that arrive whole, and what becomes of them when others were quicker."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.wire import messages
from ntt_backup.wire.messages import Receipt
from tests.helpers.receivers import (
    RemoteReceiver,
    assert_complete,
    commit,
    digest_of,
    litter,
    lock_only,
    names_under,
    place_of,
    put,
    verdicts,
)

pytestmark = pytest.mark.usefixtures("placed")


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


@pytest.fixture(params=["sha256", "blake3"])
def receiver(request: pytest.FixtureRequest, root: Path) -> Iterator[RemoteReceiver]:
    with RemoteReceiver(root) as receiver:
        receiver.hello(hash=request.param)
        yield receiver


def begin(receiver: RemoteReceiver, number: int, *contents: bytes) -> None:
    """A batch up to its COMMIT: all of it is in the stage."""
    receiver.write(messages.BATCH.frame(number, len(contents), sum(map(len, contents))))
    for content in contents:
        receiver.write(receiver.pack([content]))
    receiver.ping()


def committed(receiver: RemoteReceiver, number: int) -> Receipt:
    receiver.write(commit(number))
    receipt = receiver.receipt()
    assert receipt.outcome == messages.SETTLED, receipt
    return receipt


def staged(root: Path) -> list[str]:
    """What lies in the stage, by its last name."""
    return sorted(os.path.basename(name) for name in litter(root) if "/" in name)


def test_a_new_directory_is_filled_in_the_stage_and_moved(
    receiver: RemoteReceiver, root: Path
) -> None:
    begin(receiver, 1, A, B, C)
    assert not (root / "by-hash/3f").exists()
    assert {digest_of(each).hex() for each in (A, B, C)} < set(staged(root))

    assert committed(receiver, 1) == Receipt(
        1, messages.SETTLED, messages.HASHES[receiver.hash], 3, []
    )

    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C)}
    assert_complete(root)
    assert lock_only(root)


def test_later_blobs_join_a_directory_that_was_moved(receiver: RemoteReceiver, root: Path) -> None:
    receiver.write(receiver.batch(1, [A]))
    receiver.write(receiver.batch(2, [B]))
    assert [receiver.receipt().stored for _ in range(2)] == [1, 1]
    begin(receiver, 3, C)
    assert committed(receiver, 3).stored == 1
    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C)}
    assert lock_only(root)


def test_blobs_may_come_in_any_order(receiver: RemoteReceiver, root: Path) -> None:
    (near,) = alike(1, b"\x3f\x08")
    place_of(root, digest_of(ELSEWHERE)).parent.mkdir(parents=True)
    begin(receiver, 1, A, near, ELSEWHERE, B)
    assert committed(receiver, 1).stored == 4
    assert names_under(root) == {digest_of(each).hex() for each in (A, B, near, ELSEWHERE)}
    assert lock_only(root)


def test_a_directory_that_was_made_meanwhile_gets_the_files_one_by_one(
    receiver: RemoteReceiver, root: Path
) -> None:
    begin(receiver, 1, A, B, C, ELSEWHERE)
    put(root, digest_of(B), B)
    put(root, digest_of(C), b"wrong")

    receipt = committed(receiver, 1)

    assert verdicts(receipt) == {
        1: messages.PRESENT,
        2: messages.REPLACED,
    }
    assert receipt.stored == 2
    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C, ELSEWHERE)}
    assert_complete(root)
    assert lock_only(root)


def test_repeated_and_wrong_blobs_are_not_looked_for_in_the_new_directory(root: Path) -> None:
    """A blob that came twice lies beside the directory, one that was wrong nowhere."""
    with RemoteReceiver(root) as receiver:
        receiver.hello(hash="blake3")
        receiver.write(
            messages.BATCH.frame(1, 4, 1000)
            + receiver.pack([A, A, b"wrong", C], [digest_of(each) for each in (A, A, B, C)])
        )
        receiver.ping()
        place_of(root, digest_of(A)).parent.mkdir(parents=True)

        receipt = committed(receiver, 1)

        assert verdicts(receipt) == {
            1: messages.PRESENT,
            2: messages.MISMATCH,
        }
        assert names_under(root) == {digest_of(A).hex(), digest_of(C).hex()}
        assert lock_only(root)


def test_new_directories_join_one_above_that_was_made_meanwhile(
    receiver: RemoteReceiver, root: Path
) -> None:
    begin(receiver, 1, A, ELSEWHERE)
    (root / "by-hash/3f").mkdir()
    assert committed(receiver, 1).stored == 2
    assert names_under(root) == {digest_of(each).hex() for each in (A, ELSEWHERE)}
    assert lock_only(root)


@pytest.mark.parametrize("what", ["link", "file"])
def test_a_link_or_file_in_the_place_of_a_directory_is_left_alone(
    receiver: RemoteReceiver, root: Path, tmp_path: Path, what: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    begin(receiver, 1, A, B, ELSEWHERE)
    there = place_of(root, digest_of(A)).parent
    there.parent.mkdir()
    if what == "link":
        there.symlink_to(outside)
    else:
        there.write_text("a file")

    receipt = committed(receiver, 1)

    assert [each.verdict for each in receipt.exceptions] == [messages.REFUSED] * 2
    assert receipt.stored == 1
    assert list(outside.iterdir()) == []
    assert there.is_symlink() or there.read_text() == "a file"
    assert lock_only(root)


def test_a_large_blob_joins_a_new_directory(receiver: RemoteReceiver, root: Path) -> None:
    receiver.write(messages.BATCH.frame(1, 3, 1000) + receiver.pack([A]))
    receiver.write(receiver.large(B))
    receiver.write(receiver.pack([C]))
    assert committed(receiver, 1).stored == 3
    assert names_under(root) == {digest_of(each).hex() for each in (A, B, C)}
    assert_complete(root)
    assert lock_only(root)


def test_a_directory_inherits_the_group_of_by_hash(receiver: RemoteReceiver, root: Path) -> None:
    """Where an administrator has set that bit on by-hash, but not on the root."""
    by_hash = root / "by-hash"
    by_hash.chmod(by_hash.stat().st_mode | stat.S_ISGID)
    begin(receiver, 1, A)
    assert committed(receiver, 1).stored == 1
    made = place_of(root, digest_of(A)).parent
    assert made.stat().st_mode & made.parent.stat().st_mode & stat.S_ISGID
