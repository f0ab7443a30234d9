"""Hashes and codecs of the far side: found where they are, and tried before they are trusted."""

from __future__ import annotations

import sys
import types
import zlib
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.receiver import codec, hashing
from ntt_backup.wire.framing import ProtocolError
from ntt_backup.wire.write_messages import BLAKE3, SHA256, ZLIB, ZSTD


def bomb() -> bytes:
    return zlib.compress(bytes(200 << 20), 9)


@given(st.binary(min_size=1, max_size=5000))
def test_zlib_gives_back_what_went_in(raw: bytes) -> None:
    decompress = codec.available()[ZLIB]
    assert decompress(memoryview(zlib.compress(raw)), len(raw)) == raw


@pytest.mark.parametrize("announced", [1, 99, 101])
def test_another_length_than_announced_is_refused(announced: int) -> None:
    with pytest.raises(ProtocolError):
        codec.available()[ZLIB](zlib.compress(bytes(100)), announced)


@pytest.mark.parametrize(
    "damage",
    [b"", b"nonsense", zlib.compress(bytes(100))[:-1], zlib.compress(bytes(100)) + b"x"],
)
def test_data_that_is_no_zlib_is_refused(damage: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.available()[ZLIB](damage, 100)


def test_a_bomb_is_not_unpacked() -> None:
    import tracemalloc

    data = bomb()
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        codec.available()[ZLIB](data, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.skipif(ZSTD not in codec.available(), reason="no zstd for this Python")
class TestZstd:
    def compress(self, raw: bytes) -> bytes:
        for name in ("compression.zstd", "backports.zstd", "zstandard"):
            try:
                module: Any = __import__(name, fromlist=["compress"])
            except ImportError:
                continue
            return bytes(module.compress(raw))
        raise AssertionError("found by the codec, but not here")

    @given(st.binary(min_size=1, max_size=5000))
    def test_it_gives_back_what_went_in(self, raw: bytes) -> None:
        assert codec.available()[ZSTD](memoryview(self.compress(raw)), len(raw)) == raw

    @pytest.mark.parametrize("announced", [1, 99, 101])
    def test_another_length_than_announced_is_refused(self, announced: int) -> None:
        with pytest.raises(ProtocolError):
            codec.available()[ZSTD](self.compress(bytes(100)), announced)

    def test_data_that_is_no_zstd_is_refused(self) -> None:
        right = self.compress(bytes(100))
        for damage in (b"", b"nonsense", right[:-1], right + b"x", right * 2):
            with pytest.raises(ProtocolError):
                codec.available()[ZSTD](damage, 100)


# --- hashes


def test_blake3_is_preferred_and_sha256_is_always_there() -> None:
    assert list(hashing.available()) == [BLAKE3, SHA256]


def test_a_broken_blake3_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __init__(self, data: bytes = b"") -> None: ...
        def update(self, data: bytes) -> None: ...
        def digest(self) -> bytes:
            return bytes(32)

    fake = types.ModuleType("blake3")
    fake.blake3 = Wrong  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "blake3", fake)
    monkeypatch.setattr(hashing, "LIBRARIES", ("libnothing.so.0",))

    assert list(hashing.available()) == [SHA256]


@given(st.lists(st.binary(max_size=3000), max_size=5))
def test_the_c_library_gives_the_same_hashes(parts: list[bytes]) -> None:
    new = hashing._library()
    if new is None:
        pytest.skip("libblake3 is not installed")
    hasher = new(b"")
    for number, part in enumerate(parts):
        hasher.update(memoryview(bytearray(part)) if number % 2 else part)
    assert hasher.digest() == blake3(b"".join(parts)).digest()
