"""The image of packs has each of their blobs; what is damaged is left out, and told of."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.errors import MountImpossible
from ntt_backup.mount.erofs import BLOCK
from ntt_backup.mount.image import Built, Options, Source, build
from ntt_backup.pack.format import (
    MAX_RAW,
    RAW,
    TAIL_BYTES,
    Entry,
    Trailer,
    write_entry,
    write_table,
    write_trailer,
)
from tests.helpers.blobs import ranges
from tests.helpers.mounts import contents, pack, packs, source
from tests.unit.erofs_reader import Image, path


def built(
    tmp_path: Path, sources: list[Source], prefix: str = ""
) -> tuple[Built, Image, list[str]]:
    told: list[str] = []
    with (tmp_path / "image").open("w+b") as file:
        options = Options(tmp_path, prefix, told.append)
        done = build(file, [one.size for one in sources], sources, options)
        file.seek(0)
        return done, Image(file.read()), told


def shown(image: Image, sources: list[Source]) -> dict[str, bytes]:
    """Path to content, as the kernel would read it."""
    return {
        name: image.data[inode.block * BLOCK :][: inode.size]
        if inode.device == len(image.devices)
        else sources[inode.device - 1].read(inode.block * BLOCK, inode.size)
        for name, inode in image.tree().items()
    }


def test_every_blob_of_the_packs_has_its_content(tmp_path: Path) -> None:
    blobs = contents(900)
    sources = [source(data, n) for n, data in enumerate(packs(blobs, 250).values(), 1)]
    large = b"a blob of its own"
    sources.append(
        Source("large", len(large), ranges(large), len(sources) + 1, 0, blake3(large).digest())
    )
    done, image, told = built(tmp_path, sources)
    blobs[blake3(large).digest()] = large
    assert shown(image, sources) == {path(digest): one for digest, one in blobs.items()}
    assert (done.blobs, done.left_out, told) == (len(blobs), 0, [])
    assert done.bytes == sum(map(len, blobs.values()))
    # What lies at a block in its pack stays there; a small one does so by luck.
    assert 0 < done.copied <= sum(len(one) < 16_384 for one in blobs.values())


def test_a_prefix_leaves_the_others_out(tmp_path: Path) -> None:
    blobs = contents(500)
    _, image, _ = built(tmp_path, [source(pack(blobs)[1], 1)], "a")
    assert image.tree().keys() == {path(one) for one in blobs if one.hex().startswith("a")}


def test_the_same_blob_in_two_packs_is_there_once(tmp_path: Path) -> None:
    blobs = contents(50)
    _, data = pack(blobs)
    done, image, _ = built(tmp_path, [source(data, 1), source(data, 2)])
    assert done.blobs == len(image.tree()) == len(blobs)


def test_damaged_packs_and_damaged_small_blobs_are_left_out(tmp_path: Path) -> None:
    good, small, cut = contents(20, 1), contents(20, 2, (3000,)), contents(20, 3)
    sources = [source(pack(one)[1], n) for n, one in enumerate((good, small, cut), 1)]
    broken = bytearray(sources[1].read(0, sources[1].size))
    # Behind the dictionary, if there is one, and the headers: within some blob.
    broken[30_000] ^= 1
    sources[1] = replace(sources[1], read=ranges(bytes(broken)))
    sources[2] = replace(sources[2], size=sources[2].size - 1)
    done, image, told = built(tmp_path, sources)
    right = {path(digest): content for digest, content in (good | small).items()}
    found = shown(image, sources)
    assert found.items() <= right.items()
    assert len(found) == len(right) - 1
    assert done.left_out == len(told) == 2
    assert any(text.startswith("pack-2: ") for text in told)
    assert any(text.startswith("pack-3: ") for text in told)


def hostile(entries: list[Entry], content: bytes) -> bytes:
    """A pack with a table of the test's own, which is what its sums say."""
    body = content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0")
    table = write_table(b"".join(map(write_entry, entries)))
    trailer = Trailer(len(entries), len(body), 0, 0, blake3(table).digest(), bytes(16), bytes(16))
    return body + table + bytes(-len(table) % BLOCK) + write_trailer(trailer) + bytes(2 * BLOCK)


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 4097), (512, 4096), (1 << 47, 1), (0, (1 << 40) - 1), (4095, 2)]
)
def test_a_table_that_leads_outside_of_its_pack_enters_no_image(
    tmp_path: Path, offset: int, size: int
) -> None:
    data = hostile([Entry(bytes(32), offset, size, size, RAW)], bytes(4096))
    done, image, told = built(tmp_path, [source(data, 1)])
    assert (image.tree(), done.left_out) == ({}, 1)
    assert "points outside" in told[0]


def test_a_file_that_is_too_large_for_the_format_is_refused() -> None:
    with pytest.raises(MountImpossible, match="too large"):
        Source("huge", 1 << 40, ranges(b""), 1)


def test_a_blob_that_lies_between_blocks_is_copied_if_it_is_not_too_large(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(5000)
    one = blake3(content).digest()
    data = hostile([Entry(one, 7, 5000, 5000, RAW)], bytes(7) + content)
    _, image, _ = built(tmp_path, [source(data, 1)])
    assert shown(image, []) == {path(one): content}
    size = MAX_RAW + 1
    tail = hostile([Entry(one, 7, size, size, RAW)], b"")
    table = Trailer(1, size + 511, 0, 0, blake3(tail[:BLOCK][:48]).digest(), bytes(16), bytes(16))
    tail = tail[:BLOCK] + write_trailer(table) + bytes(2 * BLOCK)
    length = size + 511 + BLOCK + TAIL_BYTES

    def read(start: int, wanted: int) -> bytes:
        return (bytes(wanted) + tail)[max(0, start + wanted - length) :][-wanted:]

    done, image, told = built(tmp_path, [Source("far", length, read, 1)])
    assert (image.tree(), done.left_out, len(told)) == ({}, 1, 1)
