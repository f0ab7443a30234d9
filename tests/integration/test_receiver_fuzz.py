"""Whatever comes in: an answer or an error, a clean end, and nothing that must not change changes.

The receiver runs in this process, so that a defect of it is an exception here.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.receiver.terms import ALLOWED
from ntt_backup.wire import framing, messages
from tests.helpers.receivers import BYE, PLACE, Frames, ScriptedSession, digest_of

NUMBERS = st.sampled_from([0, 1, 2, 3, 2**32 - 1])
CONTENTS = st.lists(st.binary(max_size=40), min_size=1, max_size=5)
SIZES = st.sampled_from([0, 1, 3, 40, messages.RESUMABLE + 1, 2**60, 2**64 - 1])
OFFSETS = st.sampled_from([0, 0, 0, 1, 40, 2**63])
DIGESTS = st.binary(min_size=32, max_size=32) | st.just(digest_of(b"abc"))
HASHES = st.sampled_from(["sha256", "blake3"])


def pack(contents: list[bytes], lie: int, codec: int, hashed: str) -> bytes:
    sizes = [len(content) for content in contents]
    sizes[0] = (sizes[0] + lie) % 2**32
    raw = messages.table([digest_of(each) for each in contents], sizes) + b"".join(contents)
    part = zlib.compress(raw) if codec == messages.ZLIB else raw
    return Frames(Path(), hashed).raw_pack(raw, codec, part)


def whole_large(content: bytes, hashed: str) -> bytes:
    return Frames(Path(), hashed).large(content)


FRAME = st.one_of(
    st.builds(
        messages.BATCH.frame, NUMBERS, st.sampled_from([1, 10, 10**6]), st.sampled_from([0, 10**6])
    ),
    st.builds(pack, CONTENTS, st.just(0), st.sampled_from([0, 1]), HASHES),
    st.builds(
        pack, CONTENTS, st.sampled_from([0, 0, 1, -1]), st.sampled_from([0, 1, 2, 9]), HASHES
    ),
    st.builds(messages.LARGE.frame, DIGESTS, SIZES, OFFSETS).filter(bool),
    st.binary(min_size=1, max_size=50).map(lambda each: b"".join(Frames(Path()).pieces(each))),
    st.builds(messages.END.frame, st.integers(0, 2), st.sampled_from([b"", bytes(32), bytes(5)])),
    st.builds(whole_large, st.binary(max_size=50), HASHES),
    st.builds(messages.COMMIT.frame, NUMBERS),
    st.builds(messages.ABORT.frame, NUMBERS),
    st.builds(messages.ASK_OFFSET.frame, DIGESTS, SIZES),
    st.builds(messages.PING.frame, st.binary(min_size=8, max_size=8)),
    st.just(BYE),
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
    hashed = draw(HASHES)
    said = b""
    endings: dict[int, int] = {}
    for number in range(draw(st.integers(1, 12))):
        parts = draw(
            st.lists(
                st.builds(pack, CONTENTS, st.just(0), st.sampled_from([0, 1]), st.just(hashed))
                | st.builds(whole_large, st.binary(max_size=50), st.just(hashed)),
                max_size=3,
            )
        )
        ending = draw(st.sampled_from([messages.COMMIT, messages.COMMIT, messages.ABORT]))
        said += messages.BATCH.frame(number, 100, 10_000) + b"".join(parts)
        said += ending.frame(number)
        endings[number] = ending
    return Proper(said, hashed, endings)


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


def check(client: ScriptedSession) -> None:
    """The status says whether there was an ERROR, which is last; no batch is answered twice."""
    assert messages.ERROR not in client.kinds[:-1]
    if client.answers:
        assert client.error in ("", "protocol", "refused")
    numbers = Counter(
        messages.RECEIPT.read(payload).number if kind == messages.RECEIPT else payload
        for kind, payload in client.answers
        if kind in (messages.RECEIPT, messages.ABORTED)
    )
    assert all(count == 1 for count in numbers.values())


def scratch() -> tempfile.TemporaryDirectory[str]:
    """In memory where that is possible: every session syncs."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


@given(SESSION, HASHES, st.booleans())
def test_any_session_ends_cleanly(said: bytes, hashed: str, replace: bool) -> None:
    with scratch() as place:
        root = Path(place, "root")
        good = root / "by-hash" / "64" / "37" / blake3(b"abc").hexdigest()
        good.parent.mkdir(parents=True)
        good.write_bytes(b"abc")

        client = ScriptedSession(root, ALLOWED if replace else ["put"], hash=hashed)
        client.say(PLACE, said)

        assert client.kinds[0] == messages.READY
        check(client)
        assert os.listdir(place) == ["root"]
        assert set(os.listdir(root)) <= {"by-hash", ".ntt-incoming"}
        incoming = root / ".ntt-incoming"
        assert not incoming.exists() or os.listdir(incoming) == ["partial"]
        assert good.read_bytes() == b"abc"
        for path in (root / "by-hash").rglob("*"):
            if path.is_file():
                assert blake3(path.read_bytes()).hexdigest() == path.name


@given(st.binary(max_size=400) | SESSION)
def test_any_bytes_instead_of_a_hello_change_nothing(said: bytes) -> None:
    with scratch() as root:
        check(ScriptedSession(Path(root), ALLOWED).send(said))
        assert os.listdir(root) == []


@given(proper())
def test_every_batch_of_a_proper_session_is_answered(session: Proper) -> None:
    with scratch() as root:
        client = ScriptedSession(Path(root), ALLOWED, hash=session.hashed)
        client.say(PLACE, session.said)
        assert client.status == 0
        committed, aborted = [], []
        for kind, payload in client.answers[2:]:  # after both READYs
            if kind == messages.RECEIPT:
                receipt = messages.RECEIPT.read(payload)
                assert receipt.outcome == messages.SETTLED
                assert {e.verdict for e in receipt.exceptions} <= {messages.PRESENT}
                committed.append(receipt.number)
            else:
                aborted.append(messages.ABORTED.read(payload))
        ends = session.endings
        assert committed == [number for number in ends if ends[number] == messages.COMMIT]
        assert aborted == [number for number in ends if ends[number] == messages.ABORT]
