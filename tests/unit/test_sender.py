"""What the sender of `stream` says, frame by frame, to a far side in memory."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zstandard
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.client import receiver_connection
from ntt_backup.client.bootstrap import Banner
from ntt_backup.errors import RemoteUnreachable
from ntt_backup.model import Batch, Blob, Reason, Receipt
from ntt_backup.source.reader import Reader
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.session import Rejection
from ntt_backup.upload.strategies.stream import StreamSession, open_stream
from ntt_backup.upload.strategies.stream_probe import StreamProbe
from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import PACK_BYTES
from ntt_backup.wire.messages import (
    ABORT,
    ASK_OFFSET,
    BATCH,
    BYE,
    COMMIT,
    DATA,
    END,
    HELLO,
    LARGE,
    PACK,
    PLACE,
    Exceptional,
)
from tests.helpers.blobs import noise
from tests.unit.far_side import FarSide, far_side, spec

__all__ = ["far_side"]

MIB = 1 << 20


class Source:
    """A store on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store(root)

    def put(self, content: bytes) -> Blob:
        blob = Blob(blake3(content).hexdigest(), len(content))
        path = self.path(blob)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return blob

    def path(self, blob: Blob) -> Path:
        return self.root / relative_path(blob.blobid)

    def batch(self, name: str, *contents: bytes) -> Batch:
        return Batch(name, tuple(map(self.put, contents)))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def opened(source: Source, **changes: Any) -> StreamSession:
    return open_stream(spec(**changes), source.store)


def received(session: StreamSession) -> Receipt:
    (outcome,) = session.collect(1.0)
    assert isinstance(outcome, Receipt)
    return outcome


def packs(far: FarSide) -> list[list[int]]:
    """The sizes of the blobs in each PACK."""
    parts = [messages.PACK.read(memoryview(one))[2] for one in far.of(PACK)]
    return [list(messages.read_table(raw)[1]) for raw in parts]


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ([], []),
        ([0], [[0]]),
        ([5, 6], [[5, 6]]),
        ([PACK_BYTES - 1, 1, 1], [[PACK_BYTES - 1, 1], [1]]),
        ([PACK_BYTES - 1, 2, 1], [[PACK_BYTES - 1, 2], [1]]),
        ([PACK_BYTES - 2, 1, 5, 1], [[PACK_BYTES - 2, 1, 5], [1]]),
        ([PACK_BYTES, 1], [[PACK_BYTES], [1]]),
        ([PACK_BYTES - 1, PACK_BYTES], [[PACK_BYTES - 1, PACK_BYTES]]),
        ([600_000, 500_000, 600_000, 500_000], [[600_000, 500_000]] * 2),
    ],
)
def test_a_pack_is_sent_as_soon_as_it_is_full(
    far_side: FarSide, source: Source, sizes: list[int], cut: list[list[int]]
) -> None:
    session = opened(source)
    batch = source.batch("b", *(noise(size, seed) for seed, size in enumerate(sizes)))
    session.put(batch)

    assert packs(far_side) == cut
    assert received(session).stored == batch.blobs
    begun = [BATCH, *[PACK] * len(cut), COMMIT] if sizes else []
    assert far_side.kinds == [HELLO, *begun]
    assert session.in_flight == ()


def test_a_remote_that_has_earlier_batches_is_given_as_long_as_a_receipt(
    far_side: FarSide, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    send = far_side.send

    def sending(*args: Any, patience: float, **more: Any) -> None:
        given.append(patience)
        send(*args, patience=patience, **more)

    monkeypatch.setattr(far_side, "send", sending)
    session = opened(source, run={"stall_timeout": 7, "receipt_timeout": 70})
    given.clear()
    for patience in (7, 70):
        session.put(source.batch("b", b"%d" % patience))
        assert {*given} == {patience}
        given.clear()


def test_a_batch_says_how_much_may_follow(far_side: FarSide, source: Source) -> None:
    session = opened(source)
    known = source.batch("known", b"one", b"three")
    unknown = Batch("unknown", (source.put(b"four"), Blob(known.blobs[0].blobid, None)))
    for batch in (known, unknown):
        session.put(batch)
    said = [messages.BATCH.read(one) for one in far_side.of(BATCH)]
    assert said == [(1, 2, 8), (2, 2, framing.MAX_BLOB)]
    one, two = session.collect(1.0)
    assert isinstance(one, Receipt)
    assert isinstance(two, Receipt)
    assert [blob.size for blob in two.stored] == [4, 3]
    assert one.wire_bytes > 8


def test_a_large_blob_goes_in_pieces_after_what_was_gathered(
    far_side: FarSide, source: Source
) -> None:
    session = opened(source)
    batch = source.batch("b", b"before", noise(PACK_BYTES + 1), b"after")
    session.put(batch)

    assert far_side.kinds == [HELLO, BATCH, PACK, LARGE, DATA, DATA, END, PACK, COMMIT]
    (large,) = map(messages.LARGE.read, far_side.of(LARGE))
    assert (large.size, large.offset) == (PACK_BYTES + 1, 0)
    lengths = [messages.DATA.read(memoryview(one))[1] for one in far_side.of(DATA)]
    assert lengths == [MIB, 1]
    assert far_side.of(END) == [bytes([messages.COMPLETE])]
    assert received(session).stored == batch.blobs


def test_a_large_blob_that_cannot_be_opened_is_not_begun(far_side: FarSide, source: Source) -> None:
    batch = source.batch("b", noise(PACK_BYTES + 1), b"after")
    session = opened(source)
    source.path(batch.blobs[0]).write_bytes(b"short")
    session.put(batch)
    assert far_side.kinds == [HELLO, BATCH, PACK, COMMIT]
    told = received(session)
    assert told.stored == batch.blobs[1:]
    assert [one.reason for one in told.failed] == [Reason.WRONG_SIZE]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_large_blob_that_cannot_be_opened_withdraws_none_before_it(
    far_side: FarSide, source: Source, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    batch = source.batch("b", noise(PACK_BYTES + 1, 1), noise(PACK_BYTES + 1, 2))
    session = opened(source)
    opening, opened_paths = Reader.open, []

    def refuse(reader: Reader, path: str) -> int:
        opened_paths.append(path)
        # The first time, its size is found.
        if path == relative_path(batch.blobs[broken].blobid) and opened_paths.count(path) == 2:
            raise PermissionError(13, "Permission denied")
        return opening(reader, path)

    monkeypatch.setattr(Reader, "open", refuse)
    session.put(batch)
    assert (far_side.kinds.count(LARGE), far_side.kinds.count(messages.END)) == (1, 1)
    told = received(session)
    assert told.stored == (batch.blobs[1 - broken],)
    assert [one.blobid for one in told.failed] == [batch.blobs[broken].blobid]


@pytest.mark.parametrize("kind", [BATCH, PACK])
def test_a_receipt_of_a_batch_that_was_not_handed_over_ends_the_session(
    far_side: FarSide, source: Source, kind: int
) -> None:
    session = opened(source)
    batch = source.batch("b", b"one", noise(PACK_BYTES))
    far_side.answer = lambda one, _: far_side.receipt(1, 2) if one == kind else b""
    session._begin_flight(batch)
    session._put_blobs(session._flights[0])
    session._flush(session._flights[0])
    with pytest.raises(RemoteUnreachable, match="violates the protocol"):
        session.collect(1.0)


@pytest.mark.parametrize("verdict", [messages.PRESENT, messages.REPLACED])
def test_what_is_there_already_or_replaced_is_stored(
    far_side: FarSide, source: Source, verdict: int
) -> None:
    session = opened(source)
    told = far_side.receipt(1, 1, Exceptional(1, verdict, ""))
    far_side.answer = lambda kind, _: told if kind == COMMIT else b""
    batch = source.batch("b", b"one", b"two")
    session.put(batch)
    receipt = received(session)
    assert receipt.stored == batch.blobs
    assert 0 < receipt.answer_s <= receipt.duration_s


def test_a_batch_that_fails_while_it_is_sent_ends_there(far_side: FarSide, source: Source) -> None:
    session = opened(source)
    one = Exceptional(0, messages.REFUSED, "ENOSPC: full")
    # It answers no ABORT of a batch that has failed.
    far_side.answer = lambda kind, _: (
        far_side.receipt(1, 0, one, outcome=1) if kind == PACK else b""
    )
    batch = source.batch("b", *(noise(PACK_BYTES, seed) for seed in range(4)))
    put, take = session._send, session._hear

    def send(data: Any, beside: Any = ()) -> None:
        put(data, beside)
        take(0.0)

    session._send = send  # type: ignore[method-assign]
    session.put(batch)
    assert far_side.kinds == [HELLO, BATCH, PACK, ABORT]
    (told,) = session.collect(1.0)
    assert isinstance(told, Rejection)
    assert session.in_flight == ()


def test_a_large_blob_ends_where_its_batch_has_failed(far_side: FarSide, source: Source) -> None:
    session = opened(source)
    one = Exceptional(0, messages.REFUSED, "ENOSPC: full")
    far_side.answer = lambda kind, _: (
        far_side.receipt(1, 0, one, outcome=1) if kind == DATA else b""
    )
    put, take = session._write_coded, session._hear

    def write(*data: Any, **how: Any) -> None:
        put(*data, **how)
        take(0.0)

    session._write_coded = write  # type: ignore[method-assign]
    session.put(source.batch("b", noise(8 << 20)))
    assert far_side.kinds == [HELLO, BATCH, LARGE, DATA, ABORT]
    (told,) = session.collect(1.0)
    assert isinstance(told, Rejection)


@pytest.mark.parametrize(
    ("verdict", "outcome", "anew"),
    [
        (messages.PRESENT, messages.SETTLED, False),
        (messages.MISMATCH, messages.SETTLED, True),
        (messages.REFUSED, messages.FAILED, True),
    ],
)
def test_nothing_refers_to_what_was_altered_or_dropped(
    far_side: FarSide, source: Source, verdict: int, outcome: int, anew: bool
) -> None:
    far_side.codecs = ("zstd-stream", "zstd")
    session = opened(source, run={"codec": "zstd-3"})
    told = Exceptional(0, verdict, "")

    def answers(kind: int, payload: bytes) -> bytes:
        if kind != COMMIT:
            return b""
        number = messages.COMMIT.read(payload)
        return far_side.receipt(number, 1 - outcome, told, outcome=outcome)

    far_side.answer = answers
    for name in "ab":
        session.put(source.batch(name, name.encode() * 2000, b"x"))
        session.collect(1.0)
    _, packed = (messages.PACK.read(memoryview(one))[2] for one in far_side.of(PACK))
    with nullcontext() if anew else pytest.raises(zstandard.ZstdError):
        assert b"b" * 2000 in zstandard.ZstdDecompressor().decompressobj().decompress(packed)


def test_a_stop_ends_a_batch_after_the_blob_that_is_being_sent(
    far_side: FarSide, source: Source
) -> None:
    asked = count(1)
    session = opened(source, stopping=lambda: next(asked) > 1)
    batch = source.batch("b", *(noise(PACK_BYTES, seed) for seed in range(4)))
    session.put(batch)
    found = received(session)
    assert found.batch.blobs == found.stored == batch.blobs[:2]


# --- a large blob that was sent in part -----------------------------------------------------------


@pytest.fixture
def resumable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "RESUMABLE", 3 * MIB)


@pytest.mark.parametrize("offset", [0, 1, MIB, 3 * MIB, 3 * MIB + 1, 3 * MIB + 2, 1 << 50])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.usefixtures("resumable")
def test_a_large_blob_goes_on_after_what_is_there_and_the_same(
    far_side: FarSide, source: Source, offset: int, same: bool
) -> None:
    content = noise(3 * MIB + 1)
    there = blake3(content[:offset]).digest() if same else bytes(32)

    def answers(kind: int, payload: bytes) -> bytes:
        if kind == ASK_OFFSET:
            return messages.OFFSET.frame(offset, there)
        return far_side.stores(kind, payload)

    far_side.answer = answers
    session = opened(source)
    far_side.quiet = True
    batch = source.batch("b", b"small", content)
    session.put(batch)

    pings = {bytes(8)} if 0 < offset <= len(content) else set()
    assert {*far_side.of(messages.PING)} == pings
    at = offset if same and offset <= len(content) else 0
    (large,) = map(messages.LARGE.read, far_side.of(LARGE))
    assert large.offset == at
    lengths = [messages.DATA.read(memoryview(one))[1] for one in far_side.of(DATA)]
    assert sum(lengths) == len(content) - at
    assert far_side.kinds[:4] == [HELLO, BATCH, PACK, ASK_OFFSET]
    assert received(session).stored == batch.blobs


@pytest.mark.usefixtures("resumable")
def test_a_blob_that_is_not_large_enough_is_not_asked_for(
    far_side: FarSide, source: Source
) -> None:
    session = opened(source)
    session.put(source.batch("b", noise(3 * MIB)))
    assert far_side.of(ASK_OFFSET) == []
    received(session)


# --- called back, and the end ---------------------------------------------------------------------


def test_a_session_that_was_closed_says_no_more(far_side: FarSide, source: Source) -> None:
    session = opened(source)
    session.put(source.batch("a", b"a"))
    received(session)
    session.close()
    assert far_side.kinds == [HELLO, BATCH, PACK, COMMIT, BYE]
    assert far_side.ended
    assert not session.usable
    session.close()
    assert far_side.of(BYE) == [b""]


def test_a_trial_is_called_back_batch_by_batch(far_side: FarSide, source: Source) -> None:
    session = opened(source)
    session.begin_trial([source.batch("a", b"one"), source.batch("b", b"two", b"three")])
    assert far_side.kinds == [HELLO, *[BATCH, PACK, ABORT] * 2]
    assert packs(far_side) == [[3], [3, 5]]
    session.end_trial()
    assert session.in_flight == ()
    assert session.collect(0.0) == []


def test_a_trial_that_fails_on_the_remote_raises_its_words(
    far_side: FarSide, source: Source
) -> None:
    one = Exceptional(0, messages.REFUSED, "ENOSPC: No space left on device")
    session = opened(source)

    def fails(kind: int, payload: bytes) -> bytes:
        return far_side.receipt(1, 0, one, outcome=1) if kind == PACK else b""

    far_side.answer = fails
    flight = session._begin_flight(source.batch("a", b"one"))
    session._put_blobs(flight)
    session._flush(flight)
    with pytest.raises(Exception, match="No space left"):
        session.end_trial()


# --- the probe ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True])
def test_a_probe_whose_link_was_lost_makes_another_one(far_side: FarSide, ends: bool) -> None:
    probe = StreamProbe(spec())
    assert probe.facts().placed
    far_side.ended = ends
    probe.make_place()
    assert far_side.connections == 1 + ends
    assert far_side.kinds == [HELLO] * (1 + ends) + [PLACE]
    probe.close()
    assert far_side.ended


def test_a_probe_tries_over_another_connection_where_its_own_has_ended(far_side: FarSide) -> None:
    probe = StreamProbe(spec())
    probe.facts()
    assert far_side.kinds == [HELLO]
    far_side.ended = True
    assert probe.try_out() == "5 trial blobs in 2 batches by stream, then discarded"
    assert far_side.connections == 2
    assert far_side.kinds == [HELLO, HELLO, *[BATCH, PACK, ABORT] * 2]


def test_a_probe_hands_over_the_connection_that_still_lives(far_side: FarSide) -> None:
    probe = StreamProbe(spec())
    assert probe.hand_over() is None
    probe.connect()
    connection = probe.hand_over()
    assert connection is not None
    assert probe.hand_over() is None
    probe.close()
    assert not far_side.ended
    probe.connect()
    far_side.ended = True
    assert probe.hand_over() is None


@pytest.mark.parametrize(
    ("said", "inodes"),
    [({"free_inodes": 0}, 0), ({"free_inodes": -1}, None), ({"free_inodes": "x"}, None), ({}, 7)],
)
def test_a_probe_tells_how_many_files_fit(
    far_side: FarSide, said: dict[str, messages.Field], inodes: int | None
) -> None:
    far_side.ready.update(said)
    assert StreamProbe(spec()).facts().free_inodes == inodes


@pytest.mark.parametrize(
    ("hashes", "checking", "said"),
    [
        (("blake3", "sha256"), "blake3", "checks by BLAKE3"),
        (("sha256",), "b3sum", "checks by BLAKE3 (b3sum)"),
        (("sha256",), "none", "checks by SHA-256 (no BLAKE3 on the remote)"),
    ],
)
def test_a_probe_tells_what_checks_content(
    far_side: FarSide,
    monkeypatch: pytest.MonkeyPatch,
    hashes: tuple[str, ...],
    checking: str,
    said: str,
) -> None:
    banner = Banner("1", "3.11", hashes, checking, ("zlib",), frozenset(["put"]))
    monkeypatch.setattr(receiver_connection, "greet", lambda *_: banner)
    assert StreamProbe(spec()).facts().program == f"receiver 1, Python 3.11, {said}"


@pytest.mark.parametrize(("placed", "free"), [(0, "many"), (1, 5), ("yes", 0)])
def test_a_probe_takes_only_numbers_for_numbers(
    far_side: FarSide, placed: messages.Field, free: messages.Field
) -> None:
    far_side.ready.update(placed=placed, free_bytes=free)
    facts = StreamProbe(spec()).facts()
    assert facts.placed == (placed == 1)
    assert facts.free_bytes == (free if free == 5 else 0)


@pytest.mark.parametrize("ahead", [-5.0, 0.0, 5.0])
def test_a_probe_tells_by_how_much_the_clocks_differ(far_side: FarSide, ahead: float) -> None:
    far_side.ready["clock_us"] = int((time.time() + ahead) * 1e6)
    skew = StreamProbe(spec()).facts().skew_s
    assert skew is not None
    assert (skew > 2) == (ahead != 0)
    assert skew < 10
