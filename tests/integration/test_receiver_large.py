"""Large blobs: in pieces, withdrawn, wrong, resumed after the link was cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.wire import messages
from tests.helpers.receivers import (
    RemoteReceiver,
    abort,
    assert_complete,
    commit,
    digest_of,
    names_under,
    verdicts,
)
from tests.helpers.waiting import wait_until

MIB = 1 << 20
# Just over two of the steps after which progress is made durable.
BIG = os.urandom(1000) * ((2 * messages.RESUMABLE + 5 * MIB) // 1000)


@pytest.fixture(params=[pytest.param("sha256", marks=pytest.mark.long), "blake3"])
def hashed(request: pytest.FixtureRequest) -> str:
    """The hash of the session; one is enough for a test that names it."""
    return str(request.param)


@pytest.fixture
def receiver(root: Path, hashed: str) -> Iterator[RemoteReceiver]:
    with RemoteReceiver(root) as receiver:
        receiver.hello(hash=hashed)
        yield receiver


def prefix_hash(hashed: str, data: bytes) -> bytes:
    """What is answered where so much of BIG is there."""
    if hashed == "sha256":
        return hashlib.sha256(digest_of(BIG) + data).digest()
    return digest_of(data)


def resume(receiver: RemoteReceiver, number: int, content: bytes, offset: int) -> None:
    """A batch of one large blob, from offset on."""
    begin = messages.BATCH.frame(number, 1, len(content))
    receiver.write(begin, receiver.large(content, offset), commit(number))


def ask_offset(receiver: RemoteReceiver, content: bytes) -> tuple[int, bytes]:
    kind, payload = receiver.ask(messages.ASK_OFFSET.frame(digest_of(content), len(content)))
    assert kind == messages.OFFSET
    return messages.OFFSET.read(payload)


def partials(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".ntt-incoming" / "partial").glob("*"))


@pytest.mark.parametrize("size", [0, 1, 5 * MIB])
def test_a_large_blob_between_small_ones_is_stored(
    receiver: RemoteReceiver, root: Path, size: int
) -> None:
    large = (b"large " * size)[:size]
    receiver.write(messages.BATCH.frame(1, 3, size + 2) + receiver.pack([b"a"]))
    receiver.write(receiver.large(large))
    receiver.write(receiver.pack([b"b"]) + commit(1))

    receipt = receiver.receipt()

    assert (receipt.outcome, receipt.stored, receipt.exceptions) == (messages.SETTLED, 3, [])
    assert_complete(root)
    assert names_under(root) == {digest_of(blob).hex() for blob in (large, b"a", b"b")}
    assert receiver.bye() == 0
    assert not (root / ".ntt-incoming").exists()


@pytest.mark.parametrize("size", [3 * MIB, messages.RESUMABLE + 1])
def test_a_withdrawn_blob_leaves_nothing_and_its_neighbours_are_stored(
    receiver: RemoteReceiver, root: Path, size: int
) -> None:
    content = bytes(size)
    receiver.write(messages.BATCH.frame(1, 2, size + 1))
    receiver.write(messages.LARGE.frame(digest_of(content), size, 0))
    for piece in list(receiver.pieces(content))[:2]:
        receiver.write(piece)
    receiver.write(messages.END.frame(messages.WITHDRAWN) + receiver.pack([b"a"]))
    receiver.write(commit(1))

    receipt = receiver.receipt()

    assert verdicts(receipt) == {0: messages.WITHDREW}
    assert receipt.stored == 1
    assert names_under(root) == {digest_of(b"a").hex()}
    assert partials(root) == []


def test_a_large_blob_is_resumed_from_the_durable_offset_after_a_kill(
    receiver: RemoteReceiver, root: Path, hashed: str
) -> None:
    receiver.write(
        messages.BATCH.frame(1, 1, len(BIG)) + messages.LARGE.frame(digest_of(BIG), len(BIG), 0)
    )
    for piece in list(receiver.pieces(BIG))[:70]:
        receiver.write(piece)
    partial = root / ".ntt-incoming" / "partial" / digest_of(BIG).hex()
    mark = partial.with_name(partial.name + ".mark")
    wait_until(lambda: mark.exists() and mark.read_bytes().strip(), "the first mark")
    receiver.child.kill()
    receiver.child.wait()
    # As after a crash of the remote: longer than what is known to be durable.
    with partial.open("r+b") as file:
        file.seek(messages.RESUMABLE)
        file.write(bytes(MIB))

    with RemoteReceiver(root) as again:
        again.hello(hash=hashed)
        offset, checksum = ask_offset(again, BIG)
        assert (offset, checksum) == (
            messages.RESUMABLE,
            prefix_hash(hashed, BIG[: messages.RESUMABLE]),
        )
        resume(again, 1, BIG, offset)
        assert again.receipt().stored == 1
    assert_complete(root)


@pytest.mark.parametrize("hashed", ["sha256"])
def test_two_sessions_that_send_the_same_large_blob_store_it_once(
    receiver: RemoteReceiver, root: Path, hashed: str
) -> None:
    receiver.write(
        messages.BATCH.frame(1, 1, len(BIG)) + messages.LARGE.frame(digest_of(BIG), len(BIG), 0)
    )
    pieces = list(receiver.pieces(BIG))
    receiver.write(pieces[0])
    wait_until(lambda: partials(root) != [], "the first session to hold the file")
    with RemoteReceiver(root) as other:
        other.hello(hash=hashed, slot="1")
        assert ask_offset(other, BIG) == (0, prefix_hash(hashed, b""))
        other.write(other.batch(1, [BIG], large=True))
        assert other.receipt().stored == 1
    for piece in pieces[1:]:
        receiver.write(piece)
    receiver.write(receiver.end(BIG) + commit(1))

    assert verdicts(receiver.receipt()) == {0: messages.PRESENT}
    assert_complete(root)
    assert partials(root) == []


def test_an_aborted_batch_keeps_a_large_blob_for_the_next(
    receiver: RemoteReceiver, root: Path, hashed: str
) -> None:
    receiver.write(messages.BATCH.frame(1, 1, len(BIG)))
    receiver.write(receiver.large(BIG))
    assert receiver.ask(abort(1))[0] == messages.ABORTED
    assert names_under(root) == set()

    assert ask_offset(receiver, BIG) == (len(BIG), prefix_hash(hashed, BIG))
    resume(receiver, 2, BIG, len(BIG))

    assert receiver.receipt().stored == 1
    assert_complete(root)


@pytest.mark.parametrize("hashed", ["blake3"])
def test_memory_does_not_grow_with_a_large_blob(receiver: RemoteReceiver) -> None:
    content = bytes(150 * MIB)
    receiver.write(receiver.batch(1, [content], large=True))
    assert receiver.receipt().stored == 1
    assert receiver.peak_kilobytes() < 60_000


@pytest.mark.parametrize("hashed", ["sha256"])
def test_an_offset_that_is_not_used_leaves_nothing(receiver: RemoteReceiver, root: Path) -> None:
    assert ask_offset(receiver, BIG)[0] == 0
    assert receiver.bye() == 0
    assert not (root / ".ntt-incoming").exists()
