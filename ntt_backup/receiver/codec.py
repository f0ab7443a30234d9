"""Decompression that never gives more than was announced.

A few bytes can decompress to gigabytes, so output is bounded by the raw length in the frame, and
zstd's window by what a frame may hold. zstd is used where Python has it (3.14's own, its backport,
or the module `zstandard`); zlib is always there.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ntt_backup.wire.framing import Buffer, ProtocolError
from ntt_backup.wire.write_messages import RAW, ZLIB, ZSTD

if TYPE_CHECKING:
    Decompress = Callable[[Buffer, int], bytes]

# The largest window a zstd frame may ask for: 8 MiB, the longest raw part.
_WINDOW_LOG = 23


def available() -> dict[int, Decompress]:
    """Returns the codecs that this Python has, best first: each takes data and its raw length."""
    zstd = _standard_zstd("compression.zstd") or _standard_zstd("backports.zstd") or _zstandard()
    found: dict[int, Decompress] = {}
    if zstd is not None:
        found[ZSTD] = zstd
    found[ZLIB] = _zlib
    return found


def unpacked(
    codecs: dict[int, Decompress], codec: int, raw_length: int, part: memoryview
) -> memoryview:
    """Returns the raw part of a PACK or DATA."""
    if codec == RAW:
        if len(part) != raw_length:
            raise ProtocolError(f"{len(part)} bytes where {raw_length} were announced")
        return part
    decompress = codecs.get(codec)
    if decompress is None:
        raise ProtocolError(f"codec {codec} was not offered")
    return memoryview(decompress(part, raw_length))


def _zlib(data: Buffer, raw_length: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(data, raw_length)
        rest = decompressor.decompress(decompressor.unconsumed_tail, 1)
    except zlib.error as problem:
        raise ProtocolError(f"not zlib: {problem}") from None
    return _whole(raw, raw_length, decompressor.eof and not rest + decompressor.unused_data)


def _standard_zstd(name: str) -> Decompress | None:
    try:
        zstd: Any = importlib.import_module(name)
        options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    except Exception:  # noqa: BLE001 - a broken installation is none
        return None

    def decompress(data: Buffer, raw_length: int) -> bytes:
        decompressor = zstd.ZstdDecompressor(options=options)
        try:
            raw = decompressor.decompress(data, max_length=raw_length)
            rest = b"" if decompressor.eof else decompressor.decompress(b"", max_length=1)
        except zstd.ZstdError as problem:
            raise ProtocolError(f"not zstd: {problem}") from None
        return _whole(raw, raw_length, decompressor.eof and not rest + decompressor.unused_data)

    return decompress


def _zstandard() -> Decompress | None:
    try:
        zstd: Any = importlib.import_module("zstandard")
        window = 1 << _WINDOW_LOG
        zstd.ZstdDecompressor(max_window_size=window)
    except Exception:  # noqa: BLE001 - a broken installation is none
        return None

    def decompress(data: Buffer, raw_length: int) -> bytes:
        # Not the one-shot call: that allocates whatever the data's own header says.
        decompressor = zstd.ZstdDecompressor(max_window_size=window)
        try:
            with decompressor.stream_reader(data) as reader:
                raw = bytes(reader.read(raw_length))
                rest = reader.read(1)
        except zstd.ZstdError as problem:
            raise ProtocolError(f"not zstd: {problem}") from None
        return _whole(raw, raw_length, not rest)

    return decompress


def _whole(raw: bytes, raw_length: int, ended: bool) -> bytes:
    if len(raw) != raw_length or not ended:
        raise ProtocolError(f"a compressed part that does not hold {raw_length} bytes")
    return raw
