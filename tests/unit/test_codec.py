"""The codec: what is compressed, by what, and in packs of which size."""

from __future__ import annotations

import random

import pytest

from ntt_backup.errors import Unsupported
from ntt_backup.upload.strategies.codec import (
    LONGEST_PAUSE,
    MOST_PACK_BYTES,
    SAMPLE_BYTES,
    choose_codec,
)
from ntt_backup.wire.framing import PACK_BYTES
from ntt_backup.wire.messages import RAW, ZLIB, ZSTD


@pytest.mark.parametrize("setting", ["auto", "zstd-1", "zstd-12"])
def test_what_shrinks_is_compressed_and_what_does_not_travels_as_it_is(setting: str) -> None:
    codec = choose_codec(setting, ("zstd", "zlib"))
    text = [memoryview(b"all work and no play " * 5000)]
    number, parts = codec.encode(text)
    assert number == ZSTD
    assert sum(map(len, parts)) < 5000
    assert codec.encode([memoryview(b"\x00\x01\x02")]) == (RAW, [memoryview(b"\x00\x01\x02")])


@pytest.mark.parametrize(
    ("setting", "offered", "number"),
    [
        ("auto", ["zstd", "zlib"], ZSTD),
        ("auto", ["zlib"], ZLIB),
        ("auto", [], RAW),
        ("none", ["zstd", "zlib"], RAW),
        ("zlib", ["zstd", "zlib"], ZLIB),
        ("zstd-3", ["zstd"], ZSTD),
    ],
)
def test_a_codec_is_one_that_the_remote_has(setting: str, offered: list[str], number: int) -> None:
    assert choose_codec(setting, offered).number == number


@pytest.mark.parametrize(("offered", "has"), [(["zlib"], "zlib"), ([], "nothing")])
def test_a_codec_that_the_remote_lacks_is_asked_for_in_vain(offered: list[str], has: str) -> None:
    with pytest.raises(Unsupported, match="cannot decompress zstd") as refused:
        choose_codec("zstd-3", offered)
    assert refused.value.detail == f"it has {has}"


def test_packs_are_large_where_content_shrinks_and_only_there() -> None:
    codec = choose_codec("auto", ("zstd", "zlib"))
    assert codec.pack_bytes == MOST_PACK_BYTES
    codec.encode([memoryview(random.Random(1).randbytes(100_000))])
    assert codec.pack_bytes == PACK_BYTES
    assert choose_codec("zstd-1", ("zstd",)).pack_bytes == MOST_PACK_BYTES
    assert choose_codec("none", ("zstd",)).pack_bytes == PACK_BYTES


def test_a_pack_of_which_only_the_middle_shrinks_is_compressed() -> None:
    noise = random.Random(1).randbytes(1 << 20)
    codec = choose_codec("auto", ("zstd",))
    number, _ = codec.encode([memoryview(noise + bytes(2 << 20) + noise)])
    assert number == ZSTD


def test_content_that_does_not_shrink_is_tried_ever_more_rarely() -> None:
    codec = choose_codec("auto", ("zstd",))
    noise = [memoryview(random.Random(1).randbytes(SAMPLE_BYTES))]
    for _ in range(100):
        assert codec.encode(noise)[0] == RAW
    text = [memoryview(b"all work and no play " * 5000)]
    found = [codec.encode(text)[0] for _ in range(LONGEST_PAUSE + 1)]
    assert found[-1] == ZSTD
    assert RAW in found
