"""Frames and messages: what goes in comes out, and what cannot be is refused."""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import Inbox, ProtocolError
from ntt_backup.wire.messages import Exceptional, Receipt
from ntt_backup.wire.stored_names import DUMPS, SNAPSHOTS
from tests.helpers.receivers import PROJECT

U32 = st.integers(0, 2**32 - 1)
DIGEST = st.binary(min_size=32, max_size=32)
EXCEPTIONS = st.builds(
    Exceptional,
    U32,
    st.integers(messages.PRESENT, messages.WITHDREW),
    st.text(max_size=400),
)
READERS = [
    messages.READY.read,
    messages.RECEIPT.read,
    messages.ERROR.read,
    lambda data: messages.read_table(memoryview(data)),
    lambda data: messages.PACK.read(data) if len(data) >= 5 else None,
    lambda data: messages.DATA.read(data) if len(data) >= 5 else None,
    lambda data: messages.END.read(data) if data else None,
    *(
        partial(read, area=area)
        for area in (DUMPS, SNAPSHOTS)
        for read in (
            lambda data, area: messages.FILES.read(data, area),
            lambda data, area: messages.PUBLISH.read(data, area) if data else None,
            lambda data, area: messages.REMOVE.read(data, area),
            lambda data, area: list(messages.FILE_NAMES.read(data, area)),
            lambda data, area: messages.READ.read(data, area) if len(data) >= 16 else None,
        )
    ),
    lambda data: messages.FILE_DATA.read(data) if data else None,
    lambda data: messages.FILE_SAID.read(data) if data else None,
]


def payload(frame: bytes) -> bytes:
    return frame[framing.HEADER.size : -framing.CRC_BYTES]


@given(st.dictionaries(st.text(), st.text() | st.integers(-(10**17), 10**18), max_size=8))
def test_fields_come_back_as_they_went(values: dict[str, str | int]) -> None:
    assert messages.READY.read(payload(messages.HELLO.frame(values))) == values


NOT_FLAT = [
    *("", "[]", "7", "{", "\xff", "[" * 60_000, '{"a":' * 3000, '{"a":1,"a":2}'),
    *(f'{{"a":{value}}}' for value in ("[1]", '{"b":1}', "1.5", "NaN", "null", "9" * 20)),
]


@pytest.mark.parametrize("text", NOT_FLAT)
def test_fields_that_are_not_flat_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        messages.READY.read(text.encode("latin-1"))


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_a_packs_table_comes_back_as_it_went(contents: list[bytes]) -> None:
    digests = [bytes([index]) * 32 for index in range(len(contents))]
    raw = messages.table(digests, [len(content) for content in contents]) + b"".join(contents)

    joined, sizes, begin = messages.read_table(memoryview(raw))

    assert joined == b"".join(digests)
    assert list(sizes) == [len(content) for content in contents]
    assert raw[begin:] == b"".join(contents)


@given(
    U32,
    st.sampled_from([messages.SETTLED, messages.FAILED]),
    st.lists(EXCEPTIONS, max_size=20),
)
def test_a_receipt_comes_back_with_its_texts_on_one_line(
    number: int, outcome: int, exceptions: list[Exceptional]
) -> None:
    sent = Receipt(number, outcome, messages.BLAKE3, 17, exceptions)

    found = messages.RECEIPT.read(payload(messages.RECEIPT.frame(*sent)))

    assert found[:4] == sent[:4]
    assert [e[:2] for e in found.exceptions] == [e[:2] for e in exceptions]
    for exception in found.exceptions:
        assert len(exception.text.encode()) <= 3 * framing.MAX_TEXT
        assert exception.text.isprintable()


def test_the_largest_receipt_fits_its_frame() -> None:
    text = "x" * 301
    exceptions = [Exceptional(at, messages.REFUSED, text) for at in range(framing.MAX_BLOBS)]

    data = payload(
        messages.RECEIPT.frame(*Receipt(1, messages.SETTLED, messages.SHA256, 0, exceptions))
    )

    assert len(data) <= framing.MAX_PAYLOAD
    assert len(messages.RECEIPT.read(data).exceptions) == framing.MAX_BLOBS


def test_an_errors_control_characters_are_not_shown() -> None:
    frame = framing.frame(messages.ERROR, b"storage\0a\x1b[2Jb\xff")
    assert messages.ERROR.read(payload(frame)) == ("storage", "a?[2Jb\\xff")


@given(st.sampled_from(READERS), st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_protocol_error(reader: Any, data: bytes) -> None:
    try:
        reader(data)
    except ProtocolError:
        pass
    except struct.error:
        # Shorter than any length that the inbox lets through.
        assert len(data) < messages.to_client(messages.WRITING)[messages.RECEIPT][0]


# --- the inbox

FRAMES = st.lists(
    st.one_of(
        st.builds(
            lambda data: framing.frame(messages.PING, data),
            st.binary(min_size=8, max_size=8),
        ),
        st.builds(messages.COMMIT.frame, U32),
        st.builds(
            lambda size: framing.frame(messages.PACK, bytes(size)),
            st.integers(9, 3 * 2**20),
        ),
    ),
    max_size=6,
)


@given(FRAMES, st.lists(st.integers(1, 2**20), min_size=1, max_size=20))
def test_frames_come_out_whole_however_they_arrive(sent: list[bytes], cuts: list[int]) -> None:
    inbox = Inbox(messages.to_receiver(messages.WRITING))
    rest = memoryview(b"".join(sent))
    least = len(rest) // 1000  # Megabytes byte by byte take a minute.
    found = []
    turn = 0
    while True:
        while (frame := inbox.next()) is not None:
            found.append(framing.frame(*frame))
        if not rest:
            break
        space = inbox.space()
        count = min(max(least, cuts[turn % len(cuts)]), len(space), len(rest))
        turn += 1
        assert count > 0
        space[:count] = rest[:count]
        rest = rest[count:]
        inbox.filled(count)

    assert found == sent
    assert inbox.waiting == 0


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (0, 0),
        (31, 8),
        (255, 0),
        (messages.READY, 2),
        (messages.PACK, 2**32 - 1),
        (messages.PACK, framing.MAX_PAYLOAD + 1),
        (messages.HELLO, framing.MAX_FIELDS + framing.CRC_BYTES + 1),
        (messages.PING, 8),
        (messages.BYE, 0),
        (messages.BYE, framing.CRC_BYTES + 1),
        (messages.COMMIT, 0),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_its_payload(kind: int, length: int) -> None:
    inbox = Inbox(messages.to_receiver(messages.WRITING))
    header = framing.head(kind, length)
    inbox.space()[: len(header)] = header
    inbox.filled(len(header))

    with pytest.raises(ProtocolError):
        inbox.next()


@pytest.mark.parametrize(
    ("frame", "lengths"),
    [
        (messages.COMMIT.frame(7), messages.to_receiver(messages.WRITING)),
        (messages.LARGE.frame(bytes(32), 3, 0), messages.to_receiver(messages.WRITING)),
        (messages.END.frame(messages.COMPLETE), messages.to_receiver(messages.WRITING)),
        (messages.BYE.frame(), messages.to_receiver(messages.WRITING)),
        (
            messages.RECEIPT.frame(*Receipt(5, 0, 0, 3, [Exceptional(2, messages.REFUSED, "why")])),
            messages.to_client(messages.WRITING),
        ),
        (messages.OFFSET.frame(5, bytes(32)), messages.to_client(messages.WRITING)),
    ],
)
def test_a_frame_with_any_one_bit_altered_is_no_frame(
    frame: bytes, lengths: dict[int, tuple[int, int]]
) -> None:
    for bit in range(8 * len(frame)):
        altered = bytearray(frame)
        altered[bit // 8] ^= 1 << bit % 8
        inbox = Inbox(lengths)
        inbox.space()[: len(altered)] = altered
        inbox.filled(len(altered))
        try:
            found = inbox.next()
        except ProtocolError:
            continue
        # Its length grew: it waits for more, and its check will then not fit either. Or what it is
        # now is content, whose own checks are the receiver's.
        assert found is None or found[0] in framing.CONTENT, bit


def test_the_numbers_are_those_of_the_document() -> None:
    text = (PROJECT / "docs" / "protocol.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z_]+) \| (\d+) \|", text, re.MULTILINE))
    assert len(rows) == 47
    assert {name: getattr(messages, name) for name in rows} == {
        name: int(number) for name, number in rows.items()
    }
    assert framing.MAX_PAYLOAD == 8 * 2**20 + 4096
    assert framing.MAX_RAW == 8 * 2**20
    assert framing.PACK_BYTES == framing.MAX_CHUNK == 2**20
    assert (framing.MAX_BLOBS, framing.MAX_TEXT) == (100_000, 300)
    assert messages.MAX_UNSETTLED == 8
