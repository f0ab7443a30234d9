"""Hashes and codecs of the far side: found where they are, and tried before they are trusted."""

from __future__ import annotations

import importlib
import sys
import tracemalloc
import types
import zlib
from contextlib import suppress

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.receiver import codec, hashing
from ntt_backup.wire.framing import ProtocolError
from ntt_backup.wire.write_messages import BLAKE3, SHA256, ZLIB


def compress(name: int, raw: bytes) -> bytes:
    if name == ZLIB:
        return zlib.compress(raw)
    for module in ("compression.zstd", "backports.zstd", "zstandard"):
        with suppress(ImportError):
            return bytes(importlib.import_module(module).compress(raw))
    pytest.skip("no zstd for this Python")


CODECS = pytest.mark.parametrize("name", sorted(codec.available()))


@CODECS
@given(raw=st.binary(min_size=1, max_size=5000))
def test_a_codec_gives_back_what_went_in(name: int, raw: bytes) -> None:
    assert codec.available()[name](memoryview(compress(name, raw)), len(raw)) == raw


@CODECS
def test_another_length_and_other_data_are_refused(name: int) -> None:
    right = compress(name, bytes(100))
    for announced in (1, 99, 101):
        with pytest.raises(ProtocolError):
            codec.available()[name](right, announced)
    for damage in (b"", b"nonsense", right[:-1], right + b"x", right * 2):
        with pytest.raises(ProtocolError):
            codec.available()[name](damage, 100)


def test_a_bomb_is_not_unpacked() -> None:
    data = zlib.compress(bytes(50 << 20))
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        codec.available()[ZLIB](data, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


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
