"""Manifests of snapshots, mutated: each is read or refused, and none takes much memory.

Some are changed as bytes, most as text whose sum is made right again, as a hostile writer does.
Others are made by hand: a few kilobytes that become hundreds of megabytes, and numbers of things at
their bounds.
"""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import zstandard
from blake3 import blake3

from ntt_backup.snapshot.format.entry import (
    DIRECTORY,
    FILE,
    HARD_LINK,
    MAX_EXTENTS,
    SYMLINK,
    Entry,
    Extent,
)
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    FORMAT,
    Header,
    ManifestReader,
    ManifestTrailer,
    ManifestWriter,
    ending_of,
    tail_size,
)
from ntt_backup.snapshot.format.super_blocks import PackSum, ZstdStream
from ntt_backup.snapshot.names import SnapshotDamaged
from tests.fuzz.bounded import harm_of, harm_of_mutated
from tests.fuzz.mutations import mutated

CHAIN: Final = ("20260101T000000Z-00000001", "20260102T000000Z-00000002")
HEADER: Final = Header("db", CHAIN[1], CHAIN[0], CHAIN, "ab" * 32, ("/srv", "/etc"), "host")
SUM: Final = "0123456789abcdef" * 4
PACKS: Final = (PackSum(1234, "cd" * 32), PackSum(8, "ef" * 32))
_PIECE: Final = 1 << 20
_NUMBERS: Final = re.compile(rb"-?\d+")
_EDGES: Final = [
    *(b"0", b"-1", b"1", b"255", b"4294967296", b"9223372036854775807", b"1e400", b"9" * 5000),
    *(b"null", b"true", b'""', b"[]", b"{}", b"NaN", b"[" * 5000),
]


def read(data: bytes) -> None:
    """Reads a manifest in every way that the program does."""
    for way in (ManifestReader.lines, ManifestReader.entries):
        pieces = (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        deque(way(ManifestReader(pieces)), maxlen=0)
    ending_of(data[-tail_size(data[-END_BYTES:]) :])


def seeds() -> list[bytes]:
    """Returns valid manifests: of nothing, of every kind of entry, and of many small files."""
    extents = [Extent(at * 8192, 4096, at % 2, 1, 8 + at * 99, 99, 0) for at in range(20)]
    some = [
        Entry("a", DIRECTORY, 0o755, xattrs={"user.a": "AAAA"}),
        *(_small(f"a/{number:02}", number) for number in range(40)),
        Entry("big", FILE, 0o600, size=1 << 20, digest=SUM, block=4096, extents=extents),
        Entry("hard", HARD_LINK, 0o600, target="big"),
        Entry("soft", SYMLINK, 0o777, target="../../etc"),
    ]
    many = [_small(f"d{number // 500}/{number:06}", number) for number in range(2000)]
    return [written(()), written(some), written(many)]


def _small(path: str, number: int) -> Entry:
    extents = [Extent(0, 50, 1, 1, 8, 999, number * 50)]
    return Entry(path, FILE, 0o644, 1, 1, 1 << 60, size=50, digest=SUM, extents=extents)


def written(entries: Sequence[Entry], packs: tuple[PackSum, ...] = PACKS) -> bytes:
    """Returns a manifest of entries."""
    out: list[bytes] = []
    writer = ManifestWriter(out.append, HEADER)
    for entry in entries:
        writer.add(entry.line())
    writer.end(ManifestTrailer(len(entries), 10, packs, 20, "12" * 32, 1, 2))
    return b"".join(out)


def changed(data: bytes, chance: random.Random) -> bytes:
    """Returns a manifest that is changed at random."""
    if chance.random() < 0.25:
        return mutated(data, chance)
    text = ZstdStream([data]).read(4 << 20)
    text = text[: text.rfind(b"{", 0, -1)]
    for _ in range(chance.choice((1, 1, 2))):
        text = _other_number(text, chance) if chance.random() < 0.6 else mutated(text, chance)
    return sealed(text)


def _other_number(text: bytes, chance: random.Random) -> bytes:
    """Replaces a number by a small one, one at a bound, or by what is none."""
    found = list(_NUMBERS.finditer(text))
    if not found:
        return text
    one, small = chance.choice(found), b"%d" % chance.randint(0, 1000)
    return text[: one.start()] + chance.choice((small, chance.choice(_EDGES))) + text[one.end() :]


def sealed(text: bytes) -> bytes:
    """Returns the manifest of a text without its seal: three frames, and the last one's length."""
    seal = b'{"blake3":"%b"}\n' % blake3(text).hexdigest().encode()
    first, last = text.find(b"\n") + 1, text.rfind(b"\n", 0, -1) + 1
    parts = (text[:first], text[first:last], text[max(first, last) :] + seal)
    frames = [zstandard.ZstdCompressor().compress(part) for part in parts]
    return b"".join(frames) + b"\x5e\x2a\x4d\x18\4\0\0\0" + len(frames[2]).to_bytes(4, "little")


def bomb(*parts: tuple[bytes, int], sealed: bool = True) -> bytes:
    """Returns a manifest whose text is parts, each repeated; sealed: with the right sum."""
    packed = zstandard.ZstdCompressor(level=3).compressobj()
    digest, out = blake3(), []
    for part, times in parts:
        many = max(1, min(times, (1 << 20) // max(1, len(part))))
        for left in range(times, 0, -many):
            piece = part * min(many, left)
            digest.update(piece)
            out.append(packed.compress(piece))
    seal = b'{"blake3":"%b"}\n' % digest.hexdigest().encode()
    return b"".join(out) + packed.compress(seal if sealed else b"") + packed.flush()


def _first(**changed: object) -> bytes:
    return json.dumps({"format": FORMAT, **asdict(HEADER), **changed}).encode() + b"\n"


def _last(**changed: object) -> bytes:
    return (
        json.dumps({**asdict(ManifestTrailer(1, 10, (), 20, "12" * 32)), **changed}).encode()
        + b"\n"
    )


def _line(more: bytes = b"{", size: int = 1 << 62) -> bytes:
    entry = replace(_small("file", 0), extents=[], digest="", size=size)
    return entry.line()[:-3] + more


def hostile() -> dict[str, Callable[[], bytes]]:
    """Returns manifests that are made to take much memory, by name."""
    extent = b"%d,16777216,1,99999,1152921504606846976,16777216,0,"

    def extents(count: int) -> bytes:
        numbers = b"".join(extent % (1 << 60 | at << 24) for at in range(count))
        return sealed(_first() + _line(b'{"x":[') + numbers[:-1] + b"]}]\n" + _last())

    def keys(count: int) -> bytes:
        return b",".join(b'"%x":0' % number for number in range(count))

    def chain(count: int) -> tuple[str, ...]:
        return tuple(f"20260101T000000Z-{number:08x}" for number in range(count))

    def chained(count: int) -> bytes:
        names = chain(count)
        return _first(chain=names, version=names[-1], parent=names[-2])

    def attributes(count: int) -> bytes:
        named = b",".join(b'"user.%x":""' % number for number in range(count))
        return sealed(_first() + _line(b'{"xa":{') + named + b"}}]\n" + _last())

    def packs(count: int) -> bytes:
        many = [[1 << 40, f"{number:064x}"] for number in range(count)]
        return sealed(_first() + _line() + b"}]\n" + _last(packs=many))

    empty = _line() + b"}]\n"
    return {
        "one line without an end": lambda: bomb((_first(), 1), (b'["a', 1), (b"a" * 4096, 40_000)),
        "a header without an end": lambda: bomb((b'{"a":["', 1), (b"a" * 4096, 40_000)),
        "a header of objects": lambda: bomb((b'{"a":[', 1), (b"{},", 4 << 20), (b"{}]}\n", 1)),
        "a header of keys": lambda: bomb((b"{%b}\n" % keys(1_200_000), 1)),
        "a header of numbers": lambda: bomb((b'{"a":[', 1), (b"12345,", 2_500_000), (b"0]}\n", 1)),
        "a long chain": lambda: bomb((chained(300_000), 1), (empty, 1), (_last(), 1)),
        "a chain at its bound": lambda: sealed(chained(50_000) + empty + _last()),
        "many roots": lambda: bomb((_first(roots=chain(300_000)), 1), (_last(files=0), 1)),
        "as many extents as may be": lambda: extents(MAX_EXTENTS),
        "too many extents": lambda: extents(MAX_EXTENTS + 1),
        "far too many extents": lambda: extents(500_000),
        "a list of small numbers": lambda: bomb(
            (_first(), 1), (_line(b'{"x":['), 1), (b"0,", 14_000_000), (b"0]}]\n", 1)
        ),
        "a list of large numbers": lambda: bomb(
            (_first(), 1), (_line(b'{"x":['), 1), (b"123456789012,", 9_000_000), (b"0]}]\n", 1)
        ),
        "objects in an entry": lambda: sealed(
            _first() + _line(b'{"x":[') + b'{"a":1},' * 130_000 + b"0]}]\n" + _last()
        ),
        "lists in an entry": lambda: bomb(
            (_first(), 1), (_line(b'{"x":['), 1), (b"[],", 10_000_000), (b"0]}]\n", 1)
        ),
        "120,000 attributes": lambda: attributes(120_000),
        "1,000,000 attributes": lambda: attributes(1_000_000),
        "one attribute of 100 MB": lambda: bomb(
            (_first(), 1), (_line(b'{"xa":{"user.a":"'), 1), (b"AAAA", 25 << 20), (b'"}}]\n', 1)
        ),
        "a path of 100 MB": lambda: bomb(
            (_first(), 1), (b'["', 1), (b"a" * 4096, 25_000), (b'","d",0,0,0,0,0,0,0,{}]\n', 1)
        ),
        "many short lines": lambda: bomb((_first(), 1), (b"[]\n", 40 << 20)),
        "many empty lines": lambda: bomb((_first(), 1), (b"\n", 200 << 20)),
        "the same entry again": lambda: bomb((_first(), 1), (empty, 2 << 20), (_last(), 1)),
        "99,999 packs": lambda: packs(99_999),
        "too many packs": lambda: packs(110_000),
        "a trailer of keys": lambda: bomb(
            (_first(), 1), (empty, 1), (b"{%b}\n" % keys(1_200_000), 1)
        ),
        "a trailer without an end": lambda: bomb(
            (_first(), 1), (empty, 1), (b'{"a":"', 1), (b"a" * 4096, 40_000)
        ),
        "lines behind the seal": lambda: bomb(
            (_first(), 1), (empty, 1), (_last(), 1), (b"{}\n", 60 << 20)
        ),
    }


def play(_: Path, seed: int, rounds: int) -> Iterator[str]:
    """Reads manifests; yields what came of those that were neither read nor refused."""
    yield from harm_of(hostile(), read, (SnapshotDamaged,))
    yield from harm_of_mutated("manifest", seeds(), changed, read, SnapshotDamaged, seed, rounds)
