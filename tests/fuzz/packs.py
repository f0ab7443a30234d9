"""Packs, mutated: each is read or refused, and none takes much memory.

Some are changed as bytes. Most are changed in their trailer or their table, whose sums are made
right again, as a hostile writer does; so are those that are sealed, within their seal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import zstandard
from blake3 import blake3

from ntt_backup.pack.age_encryption import is_sealed
from ntt_backup.pack.format import (
    BLOCK,
    ENTRY_BYTES,
    MAX_RAW,
    TAIL_BYTES,
    VERSION,
    ZSTD,
    Entry,
    PackError,
    Trailer,
    read_trailer,
    write_block,
    write_entry,
    write_table,
    write_trailer,
)
from ntt_backup.pack.reader import PackReader
from tests.fuzz.bounded import harm_of, harm_of_mutated
from tests.fuzz.mutations import mutated
from tests.helpers.blobs import STORE, Person, noise, pack, ranges, seal, text

OWNER: Final = Person.new()
_FIELDS_AT: Final = 10
_FIELDS: Final = 142


def read(data: bytes) -> None:
    """Reads all blobs of a pack; one that is damaged ends nothing."""
    found = PackReader(ranges(data), len(data), OWNER.opens if is_sealed(data) else None)
    for entry in found.table:
        try:
            found.check(entry)
        except PackError:
            continue


def seeds() -> list[bytes]:
    """Returns valid packs: of nothing, of blobs that compress, of large ones, and sealed ones."""
    small = [text(n, 40 * n) for n in range(1, 120)]
    plain = [pack([]), pack(small), pack([*small, noise(40_000, 1), noise(200_000, 2)])]
    return [*plain, *(seal(one, [OWNER.public]) for one in plain)]


def changed(data: bytes, chance: random.Random) -> bytes:
    """Returns a pack that is changed at random."""
    way = chance.random()
    if way < 0.25:
        return mutated(data, chance)
    if way < 0.65:
        return _other_trailer(data, chance)
    return _other_table(data, chance)


def _other_trailer(data: bytes, chance: random.Random) -> bytes:
    """Changes fields of the trailer, and makes its own sum right."""
    at = len(data) - TAIL_BYTES
    fields = mutated(data[at + _FIELDS_AT : at + _FIELDS_AT + _FIELDS], chance)
    version = int.from_bytes(data[at + 8 : at + _FIELDS_AT], "big")
    if chance.random() < 0.1:
        version = chance.choice((0, VERSION, 2, 65_535))
    return data[:at] + write_block(version, fields[:400]) + bytes(2 * BLOCK)


def _other_table(data: bytes, chance: random.Random) -> bytes:
    """Changes the table of a pack, or of what is a pack within a sealed one, with its sums."""
    try:
        trailer = read_trailer(data, len(data))
    except PackError:
        return seal(_other_table(chance.choice(_PLAIN), chance), [OWNER.public])
    begin, size = trailer.table_offset, trailer.table_bytes
    table = bytearray(data[begin : begin + size])
    for _ in range(chance.choice((1, 1, 3)) if table else 0):
        # Offsets and sizes, not the digests, which are in order.
        at = chance.randrange(len(table) // ENTRY_BYTES) * ENTRY_BYTES + 32
        piece = mutated(bytes(table[at : at + ENTRY_BYTES - 32]), chance)
        table[at : at + ENTRY_BYTES - 32] = piece[: ENTRY_BYTES - 32].ljust(ENTRY_BYTES - 32, b"\0")
    summed = Trailer(
        trailer.entries,
        begin,
        trailer.dictionary_offset,
        trailer.dictionary_bytes,
        blake3(table).digest(),
        trailer.pack_id,
        trailer.store_id,
    )
    padding = data[begin + size : len(data) - TAIL_BYTES]
    return data[:begin] + table + padding + write_trailer(summed) + bytes(2 * BLOCK)


_PLAIN: Final = [pack([text(n, 40 * n) for n in range(1, 60)])]


def made(entries: list[Entry], content: bytes) -> bytes:
    """Returns a pack of these entries, whose content lies at its begin."""
    table = write_table(b"".join(map(write_entry, entries)))
    body = content + bytes(-len(content) % BLOCK)
    filler = bytes(-len(table) % BLOCK)
    summed = blake3(table).digest()
    trailer = Trailer(len(entries), len(body), 0, 0, summed, bytes(16), STORE)
    return body + table + filler + write_trailer(trailer) + bytes(2 * BLOCK)


def hostile() -> dict[str, Callable[[], bytes]]:
    """Returns packs that are made to take much memory, by name."""

    def bomb(raw: int, said: int) -> bytes:
        frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(raw))
        return made([Entry(bytes(32), 0, len(frame), said, ZSTD)], frame)

    def many(count: int) -> bytes:
        numbers = (number.to_bytes(32, "big") for number in range(count))
        return made([Entry(one, 0, 0, 0, 0) for one in numbers], b"")

    return {
        "a blob at its bound": lambda: bomb(MAX_RAW, MAX_RAW),
        "a blob that is longer than it says": lambda: bomb(20 * MAX_RAW, MAX_RAW),
        "a blob that is longer than any": lambda: bomb(MAX_RAW, MAX_RAW + 1),
        "200,000 entries": lambda: many(200_000),
        "a sealed blob at its bound": lambda: seal(bomb(MAX_RAW, MAX_RAW), [OWNER.public]),
    }


def play(_: Path, seed: int, rounds: int) -> Iterator[str]:
    """Reads packs; yields what came of those that were neither read nor refused."""
    yield from harm_of(hostile(), read, (PackError,))
    yield from harm_of_mutated("pack", seeds(), changed, read, PackError, seed, rounds)
