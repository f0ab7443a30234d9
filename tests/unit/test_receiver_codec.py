"""Hashes and codecs of the far side: found where they are, and tried before they are trusted."""

from __future__ import annotations

import importlib
import lzma
import random
import sys
import tracemalloc
import types
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.receiver import codec, hashing
from ntt_backup.upload.strategies.codec import Codec, choose_codec
from ntt_backup.wire.framing import ProtocolError
from ntt_backup.wire.messages import BLAKE3, RAW, SHA256, STREAM_WINDOW_LOG, ZLIB, ZSTD, ZSTD_STREAM


def compress(name: int, raw: bytes) -> bytes:
    if name == ZLIB:
        return zlib.compress(raw)
    for module in ("compression.zstd", "backports.zstd", "zstandard"):
        with suppress(ImportError):
            return bytes(importlib.import_module(module).compress(raw))
    pytest.skip("no zstd for this Python")


CODECS = pytest.mark.parametrize("name", sorted({*codec.available()} - {ZSTD_STREAM}))


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


def test_what_python_itself_decompresses_is_one_frame_of_the_announced_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's own zstd is one of Python 3.14; its classes work as those of lzma do."""
    parameter = types.SimpleNamespace(window_log_max=None)
    fake = types.ModuleType("zstd")
    vars(fake).update(
        DecompressionParameter=parameter,
        ZstdDecompressor=lambda options: lzma.LZMADecompressor(),
        ZstdError=lzma.LZMAError,
    )
    monkeypatch.setitem(sys.modules, "zstd_of_python", fake)
    decompress = codec._standard_zstd("zstd_of_python")[ZSTD]
    right = lzma.compress(bytes(100))
    assert decompress(right, 100) == bytes(100)
    for damage, announced in (
        *((right, length) for length in (1, 99, 101)),
        *((one, 100) for one in (b"", b"nonsense", right[:-1], right + b"x", right * 2)),
    ):
        with pytest.raises(ProtocolError):
            decompress(damage, announced)


class Identity:
    """Decompresses to what it is given; it takes and gives as Python's own zstd does."""

    def __init__(self, options: object) -> None:
        self.held = b""

    @property
    def needs_input(self) -> bool:
        return not self.held

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if data == b"bad":
            raise lzma.LZMAError("damaged")
        self.held += data
        found, self.held = self.held[:max_length], self.held[max_length:]
        return found


def test_a_part_of_a_stream_is_of_the_announced_length_for_python_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = types.ModuleType("zstd")
    parameter = types.SimpleNamespace(window_log_max=None)
    known = {"DecompressionParameter": parameter, "ZstdError": lzma.LZMAError}
    vars(fake).update(ZstdDecompressor=Identity, **known)
    monkeypatch.setitem(sys.modules, "zstd_of_python", fake)
    unpack = codec._standard_zstd("zstd_of_python")[ZSTD_STREAM]
    begin = codec._MAGIC + b"one"
    for announced in (6, 8):
        with pytest.raises(ProtocolError):
            unpack(begin, announced)
    assert unpack(begin, 7) == begin
    assert unpack(b"more", 4) == b"more"
    with pytest.raises(ProtocolError, match="not zstd: damaged"):
        unpack(b"bad", 3)


@pytest.mark.parametrize("announced", [0, 3, 5])
def test_what_is_not_compressed_is_of_the_announced_length_too(announced: int) -> None:
    assert bytes(codec.unpacked({}, RAW, 4, memoryview(b"abcd"))) == b"abcd"
    with pytest.raises(ProtocolError):
        codec.unpacked({}, RAW, announced, memoryview(b"abcd"))


def test_a_bomb_is_not_unpacked() -> None:
    data = zlib.compress(bytes(50 << 20))
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        codec.available()[ZLIB](data, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


# --- a stream over many parts

KNOWN: dict[str, Callable[[], dict[int, codec.Decompress]]] = {
    "zstandard": codec._zstandard,
    "backports.zstd": lambda: codec._standard_zstd("backports.zstd"),
    "compression.zstd": lambda: codec._standard_zstd("compression.zstd"),
}
MODULES = {name: found for name, found in KNOWN.items() if found()}
NOISE = random.Random(1).randbytes(300_000)
TEXT = b"".join(b"line %d of a log that says much the same\n" % n for n in range(30_000))


@pytest.fixture(params=MODULES)
def unpack(request: pytest.FixtureRequest) -> codec.Decompress:
    """A receiver's end of a stream, by each module that this Python has."""
    return MODULES[request.param]()[ZSTD_STREAM]


def sender(level: int = 6) -> Codec:
    return choose_codec(f"zstd-{level}", ("zstd-stream", "zstd"))


def packed(codec: Codec, raw: bytes) -> bytes:
    number, parts = codec.encode([memoryview(raw[:1]), memoryview(raw[1:])])
    assert number == ZSTD_STREAM
    return b"".join(parts)


@pytest.mark.parametrize("module", MODULES)
@given(
    parts=st.lists(st.binary(min_size=1, max_size=3000), min_size=1),
    restarts=st.sets(st.integers(0, 9)),
)
def test_a_stream_gives_back_part_by_part(
    module: str, parts: list[bytes], restarts: set[int]
) -> None:
    unpack, sends = MODULES[module]()[ZSTD_STREAM], sender(1)
    for number, raw in enumerate(parts):
        if number in restarts:
            sends.restart()
        assert unpack(memoryview(bytearray(packed(sends, raw))), len(raw)) == raw


@pytest.mark.parametrize("level", [1, 3, 6])
def test_a_part_gains_from_those_before_it(unpack: codec.Decompress, level: int) -> None:
    sends = sender(level)
    sizes = []
    for raw in (NOISE, TEXT, NOISE):
        part = packed(sends, raw)
        assert unpack(part, len(raw)) == raw
        sizes.append(len(part))
    assert sizes[0] > len(NOISE)
    assert level < 6 or sizes[2] < len(NOISE) // 20


def test_a_stream_of_which_a_part_is_lost_begins_anew(unpack: codec.Decompress) -> None:
    sends = sender()
    unpack(packed(sends, TEXT), len(TEXT))
    packed(sends, NOISE)
    sends.restart()
    assert unpack(packed(sends, NOISE), len(NOISE)) == NOISE


@pytest.mark.parametrize("change", [-1, 1, -len(TEXT) + 1, 1 << 20])
def test_a_part_of_another_length_is_refused(unpack: codec.Decompress, change: int) -> None:
    sends = sender()
    unpack(packed(sends, TEXT), len(TEXT))
    with pytest.raises(ProtocolError):
        unpack(packed(sends, TEXT), len(TEXT) + change)


def test_what_is_no_part_of_a_stream_is_refused(unpack: codec.Decompress) -> None:
    right = packed(sender(), TEXT)
    for damage in (right[4:], right[:-1], right * 2, b"\0" + right, b"", b"nonsense", right[:4]):
        with pytest.raises(ProtocolError):
            unpack(damage, len(TEXT))
    unpack(right, len(TEXT))
    with pytest.raises(ProtocolError, match="not zstd: "):
        unpack(b"\xff" * 20, len(TEXT))


def test_a_stream_that_ends_takes_no_more(unpack: codec.Decompress) -> None:
    run = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    begun = run.compress(TEXT) + run.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    assert unpack(begun, len(TEXT)) == TEXT
    with suppress(ProtocolError):
        unpack(run.compress(TEXT) + run.flush(), len(TEXT))
    with pytest.raises(ProtocolError):
        unpack(bytes(4), 1)


def test_a_window_beyond_the_limit_is_refused(unpack: codec.Decompress) -> None:
    for window_log in (STREAM_WINDOW_LOG, STREAM_WINDOW_LOG + 1, 31):
        with_window = zstandard.ZstdCompressionParameters(
            window_log=window_log, hash_log=10, write_content_size=False
        )
        run = zstandard.ZstdCompressor(compression_params=with_window).compressobj()
        part = run.compress(b"x") + run.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        if window_log == STREAM_WINDOW_LOG:
            assert unpack(part, 1) == b"x"
        else:
            with pytest.raises(ProtocolError):
                unpack(part, 1)


def test_a_bomb_in_a_stream_is_not_unpacked(unpack: codec.Decompress) -> None:
    sends = sender()
    unpack(packed(sends, TEXT), len(TEXT))
    bomb = packed(sends, bytes(50 << 20))
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        unpack(bomb, 1 << 20)
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
