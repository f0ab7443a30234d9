"""Decompression never gives more than was announced.

A few bytes can decompress to gigabytes, so output is bounded by the raw length in the frame, and
zstd's window by what a frame may hold, or a stream over many frames may look back. zstd is used
where Python has it (3.14's own, its backport, or the module `zstandard`); zlib is always there.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ntt_backup.wire.framing import Buffer, ProtocolError
from ntt_backup.wire.messages import RAW, STREAM_WINDOW_LOG, ZLIB, ZSTD, ZSTD_STREAM

if TYPE_CHECKING:
    Decompress = Callable[[Buffer, int], bytes]

# The largest window a zstd frame of its own may ask for: 8 MiB, the longest raw part.
_WINDOW_LOG = 23
# What a zstd frame begins with. No block within one does: as a block's header this is an error.
_MAGIC = b"\x28\xb5\x2f\xfd"
# A block of nothing, which does nothing to a stream.
_EMPTY_BLOCK = bytes(3)


def available() -> dict[int, Decompress]:
    """Returns the codecs that this Python has, best first: each takes data and its raw length. They
    are for one session: ZSTD_STREAM remembers what it was given.
    """
    standard = _standard_zstd("compression.zstd") or _standard_zstd("backports.zstd")
    return {**(standard or _zstandard()), ZLIB: _zlib}


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


class _Stream:
    """zstd over many parts: each may refer to what those before it were decompressed to, and gives
    all that went into it. A part that begins as a zstd frame does begins anew; no frame ends.
    """

    def __init__(self, begin: Callable[[], Decompress]) -> None:
        self._begin = begin
        self._go_on: Decompress | None = None

    def __call__(self, data: Buffer, raw_length: int) -> bytes:
        if bytes(data[:4]) == _MAGIC:
            self._go_on = None  # One window at a time.
            self._go_on = self._begin()
        if self._go_on is None:
            raise ProtocolError("a part of a stream that has not begun")
        return self._go_on(data, raw_length)


def _standard_zstd(name: str) -> dict[int, Decompress]:
    try:
        zstd: Any = importlib.import_module(name)
        window = zstd.DecompressionParameter.window_log_max
    except Exception:  # noqa: BLE001 - a broken installation is none
        return {}

    def begin() -> Decompress:
        decompressor = zstd.ZstdDecompressor(options={window: STREAM_WINDOW_LOG})

        def go_on(data: Buffer, raw_length: int) -> bytes:
            try:
                raw = decompressor.decompress(data, max_length=raw_length)
                rest = b"" if decompressor.needs_input else decompressor.decompress(b"", 1)
            except (zstd.ZstdError, EOFError) as problem:
                raise ProtocolError(f"not zstd: {problem}") from None
            return _whole(raw, raw_length, not rest)

        return go_on

    def decompress(data: Buffer, raw_length: int) -> bytes:
        decompressor = zstd.ZstdDecompressor(options={window: _WINDOW_LOG})
        try:
            raw = decompressor.decompress(data, max_length=raw_length)
            rest = b"" if decompressor.eof else decompressor.decompress(b"", max_length=1)
        except zstd.ZstdError as problem:
            raise ProtocolError(f"not zstd: {problem}") from None
        return _whole(raw, raw_length, decompressor.eof and not rest + decompressor.unused_data)

    return {ZSTD_STREAM: _Stream(begin), ZSTD: decompress}


class _Drained(Exception):
    """A part gives no more."""


class _Source:
    """Gives out one part, as a file gives its content. It never ends: more parts follow."""

    part: Buffer = b""

    def read(self, _: int) -> Buffer:
        if not self.part:
            raise _Drained
        part, self.part = self.part, b""
        return part


def _zstandard() -> dict[int, Decompress]:
    try:
        zstd: Any = importlib.import_module("zstandard")
        window = 1 << _WINDOW_LOG
        zstd.ZstdDecompressor(max_window_size=window)
    except Exception:  # noqa: BLE001 - a broken installation is none
        return {}

    def begin() -> Decompress:
        source = _Source()
        # Not a decompressobj: what that returns has no bound.
        decompressor = zstd.ZstdDecompressor(max_window_size=1 << STREAM_WINDOW_LOG)
        reader = decompressor.stream_reader(source)

        def go_on(data: Buffer, raw_length: int) -> bytes:
            source.part, raw = data, b""
            try:
                raw = bytes(reader.read(raw_length))
                # What is decompressed already comes out only when something goes in.
                source.part = _EMPTY_BLOCK
                reader.read(1)
            except _Drained:
                return _whole(raw, raw_length, ended=True)
            except zstd.ZstdError as problem:
                raise ProtocolError(f"not zstd: {problem}") from None
            return _whole(raw, raw_length, ended=False)

        return go_on

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

    return {ZSTD_STREAM: _Stream(begin), ZSTD: decompress}


def _whole(raw: bytes, raw_length: int, ended: bool) -> bytes:
    if len(raw) != raw_length or not ended:
        raise ProtocolError(f"a compressed part that does not hold {raw_length} bytes")
    return raw
