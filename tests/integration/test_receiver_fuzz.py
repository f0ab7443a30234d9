"""Whatever comes in: an answer or an error, a clean end, and nothing that must not change changes.

The receiver runs in this process, from a file into a file, so that hundreds of sessions fit into
seconds; a defect of it is an exception here.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.receiver import codec, hashing
from ntt_backup.receiver.session import ALLOWED, Receiver, Terms
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import Inbox

NUMBERS = st.sampled_from([0, 1, 2, 3, 2**32 - 1])
CONTENTS = st.lists(st.binary(max_size=40), min_size=1, max_size=5)
SIZES = st.sampled_from([0, 1, 3, 40, write_messages.RESUMABLE + 1, 2**60, 2**64 - 1])
OFFSETS = st.sampled_from([0, 0, 0, 1, 40, 2**63])
DIGESTS = st.binary(min_size=32, max_size=32) | st.sampled_from([blake3(b"abc").digest()])


def pack(contents: list[bytes], lie: int, codec: int, checksum: bool) -> bytes:
    digests = [blake3(content).digest() for content in contents]
    sizes = [len(content) for content in contents]
    sizes[0] = (sizes[0] + lie) % 2**32
    raw = write_messages.table(digests, sizes) + b"".join(contents)
    proof = hashlib.sha256(raw).digest() if checksum else b""
    part = zlib.compress(raw) if codec == write_messages.ZLIB else raw
    return framing.frame(framing.PACK, write_messages.part_prefix(codec, len(raw), proof), part)


def data(content: bytes) -> bytes:
    return framing.frame(
        framing.DATA, write_messages.part_prefix(write_messages.RAW, len(content)), content
    )


def whole_large(content: bytes, checksum: bool) -> bytes:
    proof = hashlib.sha256(blake3(content).digest() + content).digest() if checksum else b""
    return b"".join(
        [
            write_messages.large(blake3(content).digest(), len(content), 0),
            *([data(content)] if content else []),
            write_messages.end(write_messages.COMPLETE, proof),
        ]
    )


FRAME = st.one_of(
    st.builds(
        write_messages.batch, NUMBERS, st.sampled_from([1, 10, 10**6]), st.sampled_from([0, 10**6])
    ),
    st.builds(pack, CONTENTS, st.just(0), st.sampled_from([0, 1]), st.booleans()),
    st.builds(
        pack, CONTENTS, st.sampled_from([0, 0, 1, -1]), st.sampled_from([0, 1, 2, 9]), st.booleans()
    ),
    st.builds(write_messages.large, DIGESTS, SIZES, OFFSETS).filter(bool),
    st.builds(data, st.binary(min_size=1, max_size=50)),
    st.builds(write_messages.end, st.integers(0, 2), st.sampled_from([b"", bytes(32), bytes(5)])),
    st.builds(whole_large, st.binary(max_size=50), st.booleans()),
    st.builds(
        write_messages.numbered,
        st.sampled_from([framing.COMMIT, framing.ABORT]),
        NUMBERS,
    ),
    st.builds(write_messages.ask_offset, DIGESTS, SIZES),
    st.builds(
        lambda ping: framing.frame(framing.PING, ping),
        st.binary(min_size=8, max_size=8),
    ),
    st.just(framing.frame(framing.BYE)),
    st.builds(lambda kind, rest: framing.frame(kind, rest), st.integers(0, 255), st.binary()),
    st.binary(max_size=30),
)


class Proper(NamedTuple):
    """A session as it should be: what is said, for which hash, and how each batch ends."""

    said: bytes
    hashed: str
    endings: dict[int, int]


@st.composite
def proper(draw: st.DrawFn) -> Proper:
    checksum = draw(st.booleans())
    said = b""
    endings = {}
    for number in range(draw(st.integers(1, 12))):
        parts = draw(
            st.lists(
                st.builds(pack, CONTENTS, st.just(0), st.sampled_from([0, 1]), st.just(checksum))
                | st.builds(whole_large, st.binary(max_size=50), st.just(checksum)),
                max_size=3,
            )
        )
        ending = draw(st.sampled_from([framing.COMMIT, framing.COMMIT, framing.ABORT]))
        said += write_messages.batch(number, 100, 10_000) + b"".join(parts)
        said += write_messages.numbered(ending, number)
        endings[number] = ending
    return Proper(said, "sha256" if checksum else "blake3", endings)


def batches() -> st.SearchStrategy[bytes]:
    """So that the fuzz gets deep enough."""
    return proper().map(lambda session: session.said)


SESSION = st.one_of(
    st.lists(FRAME, max_size=20).map(b"".join),
    batches(),
    st.tuples(batches(), st.lists(FRAME, max_size=5).map(b"".join)).map(b"".join),
    st.tuples(batches(), st.integers(0, 5000)).map(lambda pair: pair[0][: pair[1]]),
    st.tuples(batches(), st.integers(0, 5000), st.binary(min_size=1, max_size=4)).map(
        lambda triple: triple[0][: triple[1]] + triple[2] + triple[0][triple[1] + len(triple[2]) :]
    ),
)


def run(root: Path, said: bytes, hashed: str | None, allow: frozenset[str]) -> tuple[int, bytes]:
    """One session that says HELLO, if hashed, and then this; its status and all its answers."""
    hello = {
        "protocol": framing.PROTOCOL,
        "root": str(root),
        "owner": "0123456789ab",
        "run": "11111111-2222-4333-8444-555555555555",
        "slot": "0",
        "hash": hashed or "sha256",
        "sync": "fsync",
    }
    terms = Terms(str(root), allow, 60.0, hashing.available(), codec.available())
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as sink:
        source.write(
            (write_messages.fields(framing.HELLO, hello) + framing.frame(framing.PLACE))
            * bool(hashed)
            + said
        )
        source.seek(0)
        before = open_descriptors()
        status = Receiver(terms, source.fileno(), sink.fileno()).run()
        assert open_descriptors() == before
        sink.seek(0)
        return status, sink.read()


def answers(data: bytes) -> list[tuple[int, bytes]]:
    """All frames of it, each of them readable; nothing may be left over."""
    inbox = Inbox(write_messages.TO_CLIENT)
    inbox.space()[: len(data)] = data
    inbox.filled(len(data))
    found = []
    while (frame := inbox.next()) is not None:
        found.append((frame[0], bytes(frame[1])))
    assert inbox.waiting == 0
    return found


def check(status: int, found: list[tuple[int, bytes]]) -> None:
    """The status says whether there was an ERROR, which is last; no batch is answered twice."""
    kinds = [kind for kind, _ in found]
    assert status == (1 if framing.ERROR in kinds else 0)
    assert framing.ERROR not in kinds[:-1]
    if status:
        code, _ = write_messages.read_error(found[-1][1])
        assert code in ("protocol", "refused")
    numbers = Counter(
        write_messages.read_receipt(payload).number if kind == framing.RECEIPT else payload
        for kind, payload in found
        if kind in (framing.RECEIPT, framing.ABORTED)
    )
    assert all(count == 1 for count in numbers.values())


def scratch() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is such a place: every session syncs."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@settings(max_examples=300)
@given(SESSION, st.sampled_from(["sha256", "blake3"]), st.booleans())
def test_any_session_ends_cleanly(said: bytes, hashed: str, replace: bool) -> None:
    allow = frozenset(ALLOWED) if replace else frozenset(("put",))
    with scratch() as place:
        root = Path(place, "root")
        root.mkdir()
        good = root / "by-hash" / "64" / "37" / blake3(b"abc").hexdigest()
        good.parent.mkdir(parents=True)
        good.write_bytes(b"abc")

        status, said_back = run(root, said, hashed, allow)

        found = answers(said_back)
        assert found[0][0] == framing.READY
        check(status, found)
        assert os.listdir(place) == ["root"]
        assert set(os.listdir(root)) <= {"by-hash", ".ntt-incoming"}
        incoming = root / ".ntt-incoming"
        assert not incoming.exists() or os.listdir(incoming) == ["partial"]
        if hashed == "blake3" or not replace:
            assert good.read_bytes() == b"abc"
        for path in (root / "by-hash").rglob("*"):
            if path.is_file() and hashed == "blake3":
                assert blake3(path.read_bytes()).hexdigest() == path.name


@settings(max_examples=300)
@given(st.binary(max_size=400) | SESSION)
def test_any_bytes_instead_of_a_hello(said: bytes) -> None:
    with scratch() as root:
        status, said_back = run(Path(root), said, None, frozenset(ALLOWED))
        check(status, answers(said_back))
        assert os.listdir(root) == []


@settings(max_examples=100)
@given(proper())
def test_every_batch_of_a_proper_session_is_answered(session: Proper) -> None:
    with scratch() as root:
        status, said_back = run(Path(root), session.said, session.hashed, frozenset(ALLOWED))
        found = answers(said_back)
        assert status == 0
        committed, aborted = [], []
        for kind, payload in found[2:]:  # after both READYs
            if kind == framing.RECEIPT:
                receipt = write_messages.read_receipt(payload)
                assert receipt.outcome == write_messages.SETTLED
                assert {e.verdict for e in receipt.exceptions} <= {write_messages.PRESENT}
                committed.append(receipt.number)
            else:
                aborted.append(write_messages.read_number(payload))
        ends = session.endings
        assert committed == [number for number in ends if ends[number] == framing.COMMIT]
        assert aborted == [number for number in ends if ends[number] == framing.ABORT]
