"""Super blocks by another codec: what ours compresses by zstd, by gz and lz4, too, on one core."""

from __future__ import annotations

import ctypes
import ctypes.util
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import zstandard
from rich.table import Table

from ntt_backup.snapshot.format.entry import MAX_SUPER_BLOCK
from ntt_backup.snapshot.format.manifest import ManifestReader
from ntt_backup.snapshot.names import pack_name
from tests.bench.archivers import Place
from tests.bench.contender import Failed
from tests.bench.snapshot_peers import Ours
from tests.bench.snapshot_states import database, mirror

_MB: Final = 1e6

# Compresses, and makes the same bytes again of that; the size of these is known.
_Codec = tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]


def codecs(home: Path, megabytes: int) -> Table:
    """Takes both states of a database, and compresses their super blocks once more, each alone."""
    states = database(megabytes)(home / "states")
    work, data, repository = (home / name for name in ("work", "data", "repository"))
    for directory in (work, repository):
        directory.mkdir()
    ours = Ours(Place(None, work, data, repository))
    ours.prepare()
    table = Table(title="super blocks of ten tables, 1 % of each deleted", title_justify="left")
    for name in ("", "version", "content", "stored", "compressed", "decompressed"):
        table.add_column(name, justify="right" if name else "left")
    for kind, state in zip(("full", "increment"), states, strict=True):
        mirror(state, data)
        blocks = list(_super_blocks(ours.manifest(ours.take().version)))
        size = sum(map(len, blocks))
        for name, codec in _codecs().items():
            stored, spent = _measured(codec, blocks)
            speeds = (f"{size / _MB / seconds:,.0f} MB/s" for seconds in spent)
            table.add_row(name, kind, f"{size / _MB:.1f} MB", f"{stored / _MB:.2f} MB", *speeds)
    return table


def _super_blocks(manifest: Path) -> Iterator[bytes]:
    """Yields the content of the super blocks that a version has added."""
    places: set[tuple[int, int, int]] = set()
    with manifest.open("rb") as file:
        reader = ManifestReader(iter(lambda: file.read(1 << 20), b""))
        own = len(reader.header.chain) - 1
        for entry in reader.entries():
            new = (one for one in entry.extents if one.version == own)
            places.update((one.pack, one.offset, one.stored) for one in new)
    decompressor = zstandard.ZstdDecompressor()
    version = manifest.parent.name
    for number, offset, stored in sorted(places):
        with (manifest.parents[2] / pack_name("bench", version, number)).open("rb") as pack:
            pack.seek(offset)
            yield decompressor.decompress(pack.read(stored), MAX_SUPER_BLOCK)


def _measured(codec: _Codec, blocks: list[bytes]) -> tuple[int, tuple[float, float]]:
    """Returns the bytes that are stored, and the CPU seconds to compress and to decompress."""
    compress, decompress = codec
    began = time.process_time()
    packed = [compress(block) for block in blocks]
    between = time.process_time()
    back = [decompress(one, len(block)) for one, block in zip(packed, blocks, strict=True)]
    ended = time.process_time()
    if back != blocks:
        raise Failed("super blocks come back otherwise")
    return sum(map(len, packed)), (between - began, ended - between)


def _codecs() -> Mapping[str, _Codec]:
    """Returns those that pgBackRest has, at its default levels; lz4 where the system has it."""
    zstd = zstandard.ZstdCompressor(level=3, write_checksum=True)
    found: dict[str, _Codec] = {
        "zst, level 3, as ours": (zstd.compress, zstandard.ZstdDecompressor().decompress),
        "gz, level 6": (
            lambda block: zlib.compress(block, 6),
            lambda packed, _: zlib.decompress(packed),
        ),
    }
    if library := ctypes.util.find_library("lz4"):
        lz4 = ctypes.CDLL(library)

        def compress(block: bytes) -> bytes:
            room = ctypes.create_string_buffer(lz4.LZ4_compressBound(len(block)))
            size = lz4.LZ4_compress_default(block, room, len(block), len(room))
            return room.raw[:size]

        def decompress(packed: bytes, size: int) -> bytes:
            room = ctypes.create_string_buffer(size)
            lz4.LZ4_decompress_safe(packed, room, len(packed), size)
            return room.raw

        found["lz4, level 1"] = compress, decompress
    return found
