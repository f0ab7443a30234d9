"""What every strategy's session promises, over every transport: see `strategy.Session`."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ntt_backup.errors import BatchRejected, RemoteCannotStore, RemoteUnreachable
from ntt_backup.model import Batch, Blob
from ntt_backup.process.spawn import PIPE_BYTES
from ntt_backup.upload.strategies.in_flight import PipelinedSession
from ntt_backup.upload.strategies.session import Rejection
from tests.contract.harness import Harness, Tampered, reasons, receipt_of, settle
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import wait_until

# --- what is well ---------------------------------------------------------------------------------


def test_many_batches_go_through_one_session(harness: Harness) -> None:
    session = harness.open()
    chance = random.Random(2)
    batches, outcomes = [], []
    for nth in range(20):
        sizes = [chance.choice((0, 1, 512, 5000, 20_000)) for _ in range(chance.randrange(1, 30))]
        batches.append(harness.batch(f"b{nth}", *map(chance.randbytes, sizes)))
        session.put(batches[-1])
        while len(session.in_flight) >= 4:
            outcomes += session.collect(1.0)
    outcomes += settle(session)
    assert [receipt_of(outcome).batch for outcome in outcomes] == batches
    assert harness.on_remote() == harness.expected(*batches)


def test_a_receipt_has_a_verdict_for_every_blob(local: Harness) -> None:
    good = [local.put(b"good"), local.put(b"")]
    missing, cut_short, corrupt = (
        local.put(b"missing"),
        local.put(b"cut short"),
        local.put(b"corrupt"),
    )
    local.source_path(missing).unlink()
    local.source_path(cut_short).write_bytes(b"cut")
    local.source_path(corrupt).write_bytes(b"CORRUPT")
    odd = Blob("../../etc/passwd")
    batch = Batch("b", (good[0], missing, cut_short, odd, corrupt, good[1]))
    receipt = local.deliver(batch)
    assert receipt.stored == tuple(good)
    assert reasons(receipt.failed) == {
        missing.blobid: "missing",
        cut_short.blobid: "wrong-size",
        corrupt.blobid: "corrupt-source",
        odd.blobid: "bad-blobid",
    }
    assert receipt.wire_bytes > 0
    assert local.on_remote() == local.expected(Batch("", tuple(good)))


def test_a_size_that_the_catalog_does_not_know_is_in_the_receipt(local: Harness) -> None:
    blob = local.put(b"twelve bytes")
    session = local.open()
    session.put(Batch("b", (Blob(blob.blobid, None),)))
    (outcome,) = settle(session)
    assert receipt_of(outcome).stored == (Blob(blob.blobid, 12),)


def test_a_batch_without_a_good_blob_is_answered_without_the_remote(local: Harness) -> None:
    session = local.open()
    before = local.sent
    local.put(b"a sign of life")
    lost = local.put(b"lost")
    local.source_path(lost).unlink()
    session.put(Batch("bad", (lost,)))
    assert session.in_flight == ()
    (outcome,) = session.collect(0.0)
    receipt = receipt_of(outcome)
    assert (receipt.stored, receipt.wire_bytes, local.sent) == ((), 0, before)
    assert reasons(receipt.failed) == {lost.blobid: "missing"}
    following = local.batch("good", b"good")
    session.put(following)
    assert [outcome.batch for outcome in settle(session)] == [following]


def test_content_is_told_as_it_goes_and_comes_to_what_was_stored(local: Harness) -> None:
    chance = random.Random(3)
    lost = local.put(chance.randbytes(700_000))
    local.source_path(lost).unlink()
    small = local.batch("small", *(chance.randbytes(5_000) for _ in range(200)))
    mixed = local.batch("mixed", chance.randbytes(5_000_000), b"", b"12 and a half")
    mixed = Batch("mixed", (*mixed.blobs, lost))
    session = local.open()
    session.put(small)
    session.put(mixed)
    stored = sum(receipt_of(outcome).stored_bytes for outcome in settle(session))
    assert local.carried[-1] == stored == small.size + mixed.size - lost.expected
    steps = [after - before for before, after in pairwise([0, *local.carried])]
    assert min(steps) >= 0
    # What the pipe takes at once is all that can be told at once, however fast it goes.
    assert max(steps) <= PIPE_BYTES < stored / 5


def test_content_that_came_to_nothing_is_taken_back(local: Harness) -> None:
    batches = [local.batch(name, name.encode() * 100_000) for name in ("first", "second")]
    session = local.open()
    for batch in batches:
        session.put(batch)
    assert local.content == sum(batch.size for batch in batches)
    session.abort()
    answered = session.collect(0.0)
    assert local.content == sum(receipt_of(outcome).stored_bytes for outcome in answered)


def test_close_leaves_nothing_but_the_blobs(harness: Harness) -> None:
    session = harness.open()
    batch = harness.batch("b", b"one", b"two")
    session.put(batch)
    settle(session)
    session.close()
    assert not session.usable
    assert [path.name for path in harness.remote_dir.iterdir()] == ["by-hash"]


def test_abort_ends_a_session_with_batches_in_flight_and_never_raises(harness: Harness) -> None:
    session = harness.open()
    batch = harness.batch("b", *(bytes([number]) * 1000 for number in range(50)))
    session.put(batch)
    session.abort()
    session.abort()
    assert not session.usable
    answered = [outcome.batch for outcome in session.collect(0.0)]
    assert [*answered, *session.in_flight] == [batch]


def test_what_the_next_session_sends_again_is_welcome(local: Harness) -> None:
    batch = local.batch("b", *(bytes([number]) * 3000 for number in range(50)))
    first = local.open()
    first.put(batch)
    assert isinstance(first, PipelinedSession)
    first.abort()
    assert first.channel.ended
    local.assert_arrives(batch)


# --- a source that changes ------------------------------------------------------------------------


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "shorter by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer by a byte": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "longer by a lot": lambda path: path.write_bytes(path.read_bytes() + bytes(200_000)),
    "rewritten in place": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "vanished": Path.unlink,
    "replaced by another file": replace_by(lambda path: path.write_bytes(b"other")),
    "replaced by a symlink": replace_by(lambda path: path.symlink_to("/etc/hostname")),
    "replaced by a directory": replace_by(Path.mkdir),
}


@pytest.mark.parametrize("strategy", ["tar"])
@pytest.mark.parametrize(
    ("change", "size"), [*((change, 300_000) for change in CHANGES), ("shorter by a byte", 100)]
)
def test_a_blob_that_changes_after_its_inspection_never_arrives(
    local: Harness, change: str, size: int
) -> None:
    earlier = local.batch("earlier", b"earlier")
    victim = local.put(b"v" * size)
    neighbours = [local.put(b"before"), local.put(b"after")]
    batch = Batch("changing", (neighbours[0], victim, neighbours[1]))
    store = Tampered(local.store)
    session = local.open(store=store)
    session.put(earlier)
    store.then = lambda: CHANGES[change](local.source_path(victim))
    with pytest.raises(BatchRejected):
        session.put(batch)
    assert batch not in session.in_flight
    outcomes = settle(session) if session.usable else session.collect(0.0)
    assert [*(outcome.batch for outcome in outcomes), *session.in_flight] == [earlier]
    assert victim.blobid not in {Path(name).name for name in local.on_remote()}

    again = session if session.usable else local.open()
    again.put(batch)
    (outcome,) = settle(again)
    assert receipt_of(outcome).stored == tuple(neighbours)
    assert set(reasons(receipt_of(outcome).failed)) == {victim.blobid}
    assert local.content == earlier.size * (earlier not in session.in_flight) + sum(
        blob.expected for blob in neighbours
    )
    assert victim.blobid not in {Path(name).name for name in local.on_remote()}


@pytest.mark.parametrize("strategy", ["tar"])
def test_a_blob_that_grows_and_another_that_shrinks_do_not_even_out(local: Harness) -> None:
    grows, shrinks = local.put(b"g" * 512), local.put(b"s" * 1024)

    def swap() -> None:
        local.source_path(grows).write_bytes(b"g" * 1024)
        local.source_path(shrinks).write_bytes(b"s" * 512)

    store = Tampered(local.store)
    store.then = swap
    session = local.open(store=store)
    with pytest.raises(BatchRejected):
        session.put(Batch("b", (grows, shrinks)))
    if session.usable:
        settle(session)
    assert local.on_remote() == {}


# --- a remote that has something there already ----------------------------------------------------


def arrange(harness: Harness, blob: Blob) -> Path:
    """The place of a blob on the remote, with its directory."""
    path = harness.final(blob)
    path.parent.mkdir(parents=True)
    return path


def test_right_content_that_is_there_already_is_left_alone(local: Harness) -> None:
    batch = local.batch("b", b"there already", b"new")
    place = arrange(local, batch.blobs[0])
    place.write_bytes(b"there already")
    before = place.stat()
    receipt = local.deliver(batch)
    assert receipt.stored == batch.blobs
    assert (place.stat().st_ino, place.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert local.on_remote() == local.expected(batch)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda place: place.write_bytes(b"wrong"),
        lambda place: place.write_bytes(b""),
        lambda place: place.symlink_to("/etc/hostname"),
        lambda place: place.symlink_to("/nowhere"),
    ],
    ids=["other content", "an empty file", "a symlink", "a dangling symlink"],
)
def test_what_does_not_match_its_name_is_replaced(
    local: Harness, wrong: Callable[[Path], object]
) -> None:
    batch = local.batch("b", b"right")
    wrong(arrange(local, batch.blobs[0]))
    local.assert_arrives(batch)


def test_a_directory_in_a_blobs_place_is_the_batchs_trouble_and_stays(local: Harness) -> None:
    batch, following = local.batch("b", b"good", b"blocked"), local.batch("next", b"next")
    place = arrange(local, batch.blobs[1])
    place.mkdir()
    (place / "precious").write_bytes(b"kept")
    session = local.open()
    session.put(batch)
    session.put(following)
    about_batch, receipt = settle(session)
    if isinstance(about_batch, Rejection):  # a strategy that cannot tell one blob from another
        assert isinstance(about_batch.error, BatchRejected)
        said = about_batch.error.detail
    else:
        assert about_batch.stored == batch.blobs[:1]
        said = about_batch.failed[0].detail
    assert "a directory stands in its place" in said
    assert receipt_of(receipt).batch == following
    assert (place / "precious").read_bytes() == b"kept"


def test_a_full_remote_says_so_and_what_it_answered_before_is_there(
    over_ssh: Harness, remote: Sshd
) -> None:
    full = remote.full_directory()
    over_ssh.path, over_ssh.remote_dir = full.path, full.local
    remote.run(f"mkdir {full.path}/by-hash").check_returncode()
    small = over_ssh.batch("small", b"small")
    large = over_ssh.batch("large", *(random.Random(n).randbytes(3_000_000) for n in range(8)))
    session = over_ssh.open()
    session.put(small)
    session.put(large)
    receipt, rejection = settle(session)
    assert receipt_of(receipt).batch == small
    assert isinstance(rejection, Rejection)
    assert isinstance(rejection.error, RemoteCannotStore)
    assert rejection.error.hint
    assert rejection.batch == large
    assert over_ssh.content == small.size
    assert over_ssh.final(small.blobs[0]).read_bytes() == b"small"


# --- a remote that is lost ------------------------------------------------------------------------


def test_a_remote_that_is_killed_is_noticed_and_no_batch_is_forgotten(
    over_ssh: Harness, remote: Sshd
) -> None:
    session = over_ssh.open()
    batches = [over_ssh.batch(f"b{nth}", bytes([nth]) * 50_000) for nth in range(3)]
    for batch in batches:
        session.put(batch)
    remote.kill_sessions()
    answered: list[Batch] = []

    def lost() -> bool:
        answered.extend(outcome.batch for outcome in session.collect(0.1))
        session.put(over_ssh.batch("more", b"more"))
        return False

    with pytest.raises(RemoteUnreachable):
        wait_until(lost, "the loss to be noticed")
    answered += [outcome.batch for outcome in session.collect(0.0)]
    assert not session.usable
    assert [*answered, *session.in_flight][:3] == batches
