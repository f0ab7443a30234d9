"""What travels how: by what a sample shrinks to, what that costs, and how fast the link is."""

from __future__ import annotations

import os
import random
import zlib

import pytest

from ntt_backup.strategy.compression import (
    LONGEST_PAUSE,
    MEMORY_BYTES,
    Codec,
    Pack,
    Parts,
    choose,
)

_WORDS = [bytes(random.Random(n).choices(b"abcdefgh", k=3 + n % 5)) for n in range(300)]
TEXT = memoryview(b" ".join(random.Random(0).choices(_WORDS, k=150_000)))
NOISE = memoryview(os.urandom(1 << 20))
MEGABYTE_A_SECOND = 1e-6


class Clock:
    """Time passes only while something is compressed."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pack(self, level: int, seconds_a_byte: float) -> Pack:
        def pack(parts: Parts) -> bytes:
            content = b"".join(parts)
            self.now += len(content) * seconds_a_byte
            return zlib.compress(content, level)

        return pack


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def codec(clock: Clock) -> Codec:
    """Level 1 at 1 GB/s, level 9 at 10 MB/s."""
    packs = [clock.pack(1, 0.001 * MEGABYTE_A_SECOND), clock.pack(9, 0.1 * MEGABYTE_A_SECOND)]
    return Codec(7, packs, clock=clock)


def over(codec: Codec, megabytes_a_second: float) -> Codec:
    """The codec when it has seen much go over such a link."""
    codec.sent(MEMORY_BYTES, MEMORY_BYTES * MEGABYTE_A_SECOND / megabytes_a_second)
    return codec


def length(codec: Codec, content: memoryview) -> int:
    return sum(map(len, codec.encode([content])[1]))


def test_a_slow_link_gets_the_tighter_level(codec: Codec) -> None:
    assert length(over(codec, 0.1), TEXT) == len(zlib.compress(TEXT, 9))


def test_a_fast_link_gets_the_quicker_level(codec: Codec) -> None:
    assert length(over(codec, 100), TEXT) == len(zlib.compress(TEXT, 1))


def test_a_link_faster_than_any_gets_it_as_it_is(codec: Codec) -> None:
    assert over(codec, 10_000).encode([TEXT]) == (0, [TEXT])


def test_before_anything_was_sent_what_shrinks_is_shrunk(codec: Codec) -> None:
    number, (packed,) = codec.encode([TEXT])
    assert number == 7
    assert zlib.decompress(packed) == TEXT


def test_a_link_that_slows_down_is_noticed(codec: Codec) -> None:
    over(codec, 10_000)
    numbers = [codec.encode([TEXT])[0] for _ in range(50)]
    assert set(numbers) == {0}
    over(codec, 0.1)
    assert 7 in [codec.encode([TEXT])[0] for _ in range(LONGEST_PAUSE + 1)]


def test_noise_is_tried_ever_more_rarely(codec: Codec, clock: Clock) -> None:
    tried = []
    for _ in range(200):
        before = clock.now
        assert codec.encode([NOISE]) == (0, [NOISE])
        tried.append(clock.now > before)
    assert tried[:8] == [True, False, True, False, False, True, False, False]
    assert 200 / (LONGEST_PAUSE + 1) <= sum(tried) <= 20
    assert 7 in [codec.encode([TEXT])[0] for _ in range(LONGEST_PAUSE + 1)]


def test_what_would_grow_travels_as_it_is() -> None:
    assert choose("zstd-3", ["zstd"]).encode([NOISE]) == (0, [NOISE])


@pytest.mark.parametrize("setting", ["zlib", "zstd-1", "zstd-3"])
def test_a_codec_that_was_asked_for_is_taken_whatever_the_link(setting: str) -> None:
    number, parts = over(choose(setting, ["zlib", "zstd"]), 10_000).encode([TEXT])
    assert number > 0
    assert sum(map(len, parts)) < len(TEXT) / 2


def test_auto_without_any_codec_there_leaves_all_as_it_is() -> None:
    assert choose("auto", []).encode([TEXT]) == (0, [TEXT])
