"""Stores to measure with: made by seed, with the sizes that production has.

Copies of some system directory would be smaller to write, but are other files on every machine, and
zeros or repeats compress away on the wire; both have fooled people. Here a store is a function of
its `Recipe` alone: sizes are drawn by the production distribution, log-uniform within a class, and
content is BLAKE3's output stream, which nothing compresses. Two kinds compress: `text` as text does
(zstd to about a third): words by a Zipf law, in an order that never repeats; and `tree` as source
code does (to about a fifth): lines by a Zipf law, some of them in many files, none above 100 KB.

`python -m tests.bench.stores KIND DIRECTORY --megabytes 100` makes one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from blake3 import blake3

Kind = Literal["small", "mix", "large", "text", "tree"]

# Cached stores of another version are not taken: raise it with every change of what is made.
VERSION = 1
# Share of the blobs, smallest and largest size in bytes.
PRODUCTION = (
    (0.278, 16, 1_000),  # shorter ones are rare: there are only so many, and each is one blob
    (0.472, 1_000, 10_000),
    (0.157, 10_000, 100_000),
    (0.062, 100_000, 1_000_000),
    (0.024, 1_000_000, 10_000_000),
    (0.0067, 10_000_000, 100_000_000),
    (0.0003, 100_000_000, 1_000_000_000),
)
_CHUNK = 4_000_000
_VOCABULARY = 20_000
_SLOTS = 1 << 16
_LINES = 30_000
_LARGEST_SIZE = {"small": 10_000, "tree": 100_000}
# Blobs above this part of a store's bytes are left out: else one of them could be all of it.
_LARGEST_PART = {"mix": 16, "text": 16, "large": 4}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a store is made of: either so many blobs or so many bytes, or whichever comes first.

    `small`: all blobs under 10 KB. `tree`: under 100 KB. `mix`, `text`: all classes. `large`: those
    from 1 MB on. Of the last three, blobs above a sixteenth (`large`: a quarter) of `bytes` are
    left out. each: the size of every blob, whatever the kind.
    """

    kind: Kind
    blobs: int | None = None
    bytes: int | None = None
    seed: int = 1
    each: int | None = None

    def __post_init__(self) -> None:
        if self.blobs is None and self.bytes is None:
            raise ValueError("a store needs a number of blobs or of bytes")

    @property
    def name(self) -> str:
        """The name of its directory; another one for any other content."""
        parts = [self.kind, *([f"{self.blobs}n"] if self.blobs is not None else [])]
        parts += [f"{self.bytes}b"] if self.bytes is not None else []
        parts += [f"{self.each}each"] if self.each is not None else []
        return "-".join([*parts, f"seed{self.seed}", f"v{VERSION}"])


@dataclass(frozen=True, slots=True)
class Store:
    """A store on disk: root holds `aa/bb/<blobid>`. directories counts those of both levels."""

    recipe: Recipe
    root: Path
    blobs: int
    bytes: int
    directories: int

    @property
    def kind(self) -> Kind:
        return self.recipe.kind


def sizes(recipe: Recipe) -> Iterator[int]:
    """Their sizes in bytes, in the order they are made; the sum is recipe.bytes, where given."""
    if recipe.each is not None:
        yield from itertools.repeat(recipe.each, recipe.blobs or (recipe.bytes or 0) // recipe.each)
        return
    chance = random.Random(f"{recipe.kind}/{recipe.seed}")
    classes = [one for one in PRODUCTION if _belongs(recipe.kind, *one[1:])]
    shares = list(itertools.accumulate(share for share, _, _ in classes))
    largest = math.inf
    if recipe.bytes is not None and recipe.kind in _LARGEST_PART:
        largest = recipe.bytes / _LARGEST_PART[recipe.kind]
    left: float = math.inf if recipe.bytes is None else recipe.bytes
    blobs: float = math.inf if recipe.blobs is None else recipe.blobs
    while left > 0 and blobs > 0:
        point = chance.random() * shares[-1]
        _, low, high = classes[sum(point >= bound for bound in shares)]
        size = int(low * (high / low) ** chance.random())
        if size > largest and any(low <= largest for _, low, _ in classes):
            continue
        size = int(min(size, left))
        yield size
        left -= size
        blobs -= 1


def _belongs(kind: Kind, low: int, high: int) -> bool:
    if kind in _LARGEST_SIZE:
        return high <= _LARGEST_SIZE[kind]
    return kind != "large" or low >= 1_000_000


def cached(recipe: Recipe, directory: Path) -> Store:
    """The store of this recipe below directory; made there, unless an earlier call has."""
    home = directory / recipe.name
    if not (home / "manifest.json").exists():
        draft = directory / f".{recipe.name}.draft"
        for unfinished in (draft, home):
            if unfinished.exists():
                shutil.rmtree(unfinished)
        manifest = make(recipe, draft / "store")
        (draft / "manifest.json").write_text(json.dumps(manifest))
        draft.rename(home)
    figures = json.loads((home / "manifest.json").read_text())
    return Store(recipe, home / "store", figures["blobs"], figures["bytes"], figures["directories"])


def make(recipe: Recipe, root: Path) -> dict[str, object]:
    """Write the store into root, a new directory; the manifest: its recipe and what it holds."""
    root.mkdir(parents=True)
    seen: set[str] = set()
    directories: set[str] = set()
    total = 0
    writers = {"text": _Words, "tree": _Lines}
    writer = writers[recipe.kind](recipe.seed) if recipe.kind in writers else None
    for number, size in enumerate(sizes(recipe)):
        stream = stream_of(recipe, number)
        pieces = writer.text(stream, size) if writer else stream.pieces(size)
        blobid = _write(root, directories, pieces)
        if blobid not in seen:  # the shortest may meet
            total += size
        seen.add(blobid)
    return {
        **asdict(recipe),
        "version": VERSION,
        "blobs": len(seen),
        "bytes": total,
        "directories": len(directories),
    }


def stream_of(recipe: Recipe, number: int) -> Stream:
    """Returns what the content of a store's blob is made of."""
    return Stream(f"{recipe.kind}/{recipe.seed}/{number}")


def _write(root: Path, directories: set[str], pieces: Iterator[bytes]) -> str:
    """Write one blob where it belongs; its blobid. The first piece alone is held in memory."""
    first, second = next(pieces, b""), next(pieces, None)
    hasher = blake3(first)
    if second is None:
        path = _place(root, directories, hasher.hexdigest())
        with open(path, "wb", buffering=0) as file:
            file.write(first)
        return hasher.hexdigest()
    draft = root / ".draft"
    with open(draft, "wb") as file:
        file.write(first)
        for piece in itertools.chain([second], pieces):
            hasher.update(piece)
            file.write(piece)
    draft.rename(_place(root, directories, hasher.hexdigest()))
    return hasher.hexdigest()


def _place(root: Path, directories: set[str], blobid: str) -> str:
    """The path of a blob whose directories exist. Strings, since a Path a blob takes longer."""
    parent = f"{blobid[:2]}/{blobid[2:4]}"
    if parent not in directories:
        directories.update((blobid[:2], parent))
        (root / parent).mkdir(parents=True, exist_ok=True)
    return f"{root}/{parent}/{blobid}"


class Stream:
    """Endless bytes that look random, the same for the same name."""

    def __init__(self, name: str) -> None:
        self._hasher = blake3(name.encode())
        self._position = 0

    def read(self, size: int) -> bytes:
        data = self._hasher.digest(length=size, seek=self._position)
        self._position += size
        return data

    def pieces(self, size: int) -> Iterator[bytes]:
        """size bytes, a few megabytes at a time."""
        while size > 0:
            piece = self.read(min(size, _CHUNK))
            size -= len(piece)
            yield piece


class _Words:
    """Text: every word drawn anew from a vocabulary, the n-th word in proportion to 1/n."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"words/{seed}")
        letters, weights = "etaoinshrdlucmfwypvbgkqjxz", range(26, 0, -1)
        words = [
            "".join(chance.choices(letters, weights, k=chance.randint(2, 11)))
            for _ in range(_VOCABULARY)
        ]
        # Two bytes of a stream choose a slot, and a word has as many slots as it is frequent.
        zipf = [1 / (rank + 1) for rank in range(_VOCABULARY)]
        places = chance.choices(range(_VOCABULARY), zipf, k=_SLOTS)
        ends = (" ", " ", " ", " ", " ", " ", " ", " ", ", ", ", ", ". ", ".\n")
        self._table = [(words[place] + chance.choice(ends)).encode() for place in places]

    def text(self, stream: Stream, size: int) -> Iterator[bytes]:
        """size bytes of text, a few megabytes at a time."""
        left = size
        while left > 0:
            slots = array("H", stream.read(2 * min(left // 7 + 1, _CHUNK // 8)))
            if sys.byteorder == "big":
                slots.byteswap()
            piece = b"".join(map(self._table.__getitem__, slots))[:left]
            left -= len(piece)
            yield piece


class _Lines(_Words):
    """Source code: whole lines that are written again and again, and single words between them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        chance, words = random.Random(f"lines/{seed}"), self._table
        lines = [
            b"    " * chance.randint(0, 4) + b"".join(chance.choices(words, k=7)).rstrip() + b"\n"
            for _ in range(_LINES)
        ]
        zipf = [1 / (rank + 1) for rank in range(_LINES)]
        self._table = chance.choices(lines, zipf, k=_SLOTS // 5) + words[: -(_SLOTS // 5)]


def main() -> None:
    """Make one store, or find it made, and say what it holds."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stores", description=main.__doc__)
    parser.add_argument("kind", choices=get_args(Kind))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--blobs", type=int, metavar="N")
    parser.add_argument("--megabytes", type=float, metavar="MB", help="10^6 bytes each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.blobs is None and options.megabytes is None:
        parser.error("say how much: --blobs or --megabytes")
    total = None if options.megabytes is None else int(options.megabytes * 1e6)
    started = time.perf_counter()
    store = cached(Recipe(options.kind, options.blobs, total, options.seed), options.directory)
    took = time.perf_counter() - started
    print(f"{store.root}: {store.blobs:,} blobs, {store.bytes / 1e6:,.1f} MB, {took:.1f} s")


if __name__ == "__main__":
    main()
