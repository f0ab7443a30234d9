"""An image is read back by a small reader of these tests: names, sizes, and where contents lie."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from ntt_backup.mount.erofs import BLOCK, MAX_DEVICE, MAX_DEVICES, RECORD, ImageWriter
from tests.unit.erofs_reader import Image, Inode, path

GIB = 1 << 30


def record(digest: bytes, device: int, block: int, size: int) -> bytes:
    return RECORD.pack(digest, device, block, size >> 32, size & 0xFFFFFFFF)


def written(records: list[bytes], devices: list[int]) -> Image:
    file = io.BytesIO()
    tree = ImageWriter(file, devices).write_tree(records)
    image = Image(file.getvalue())
    assert len(image.data) == image.blocks * BLOCK
    assert tree.blobs == len(image.tree())
    assert tree.bytes == sum(inode.size for inode in image.tree().values())
    return image


@pytest.mark.parametrize(("number", "same"), [(0, 0), (1, 0), (5, 2), (6, 2), (7, 2), (3000, 0)])
def test_every_blob_is_found_where_it_lies(number: int, same: int) -> None:
    chance = random.Random(number)
    blobs = {
        bytes(same) + chance.randbytes(32 - same): Inode(
            0o100444, chance.randrange(1, 5 * GIB), chance.randrange(1, 4), chance.randrange(1000)
        )
        for _ in range(number)
    }
    records = sorted(record(one, *inode[2:], inode.size) for one, inode in blobs.items())
    image = written(records, [6 * GIB] * 3)
    assert image.tree() == {path(digest): inode for digest, inode in blobs.items()}
    assert image.devices[:3] == [6 * GIB // BLOCK] * 3


def test_an_empty_blob_a_huge_one_and_the_last_block_of_the_largest_device_have_their_place() -> (
    None
):
    digests = [bytes([n]) * 32 for n in range(3)]
    last = MAX_DEVICE // BLOCK - 1
    image = written(
        [
            record(digests[0], 1, 0, 0),
            record(digests[1], 1, 0, 1 << 39),
            record(digests[2], 1, last, BLOCK),
        ],
        [MAX_DEVICE],
    )
    places = [image.tree()[path(digest)] for digest in digests]
    assert [(one.size, one.block) for one in places] == [(0, 0), (1 << 39, 0), (BLOCK, last)]


def test_what_the_image_keeps_is_in_it() -> None:
    file = io.BytesIO()
    writer = ImageWriter(file, [])
    kept = {bytes([n]) * 32: bytes([n]) * (n * 300) for n in range(1, 9)}
    writer.write_tree(
        [
            record(digest, writer.itself, writer.store(content), len(content))
            for digest, content in kept.items()
        ]
    )
    image = Image(file.getvalue())
    for digest, content in kept.items():
        inode = image.tree()[path(digest)]
        assert inode.device == writer.itself
        assert image.data[inode.block * BLOCK :][: inode.size] == content


def test_a_blob_that_comes_twice_is_written_once() -> None:
    image = written([record(bytes(32), 1, 0, 5), record(bytes(32), 1, 1, 5)], [4096])
    assert image.tree() == {path(bytes(32)): Inode(0o100444, 5, 1, 0)}


@pytest.mark.parametrize(
    ("device", "block", "size"), [(1, 8, 1), (1, 0, 4097), (1, 7, 513), (3, 0, 1), (0, 0, 1)]
)
def test_no_blob_leads_outside_of_its_device(device: int, block: int, size: int) -> None:
    writer = ImageWriter(io.BytesIO(), [4096])
    with pytest.raises(ValueError, match="leads outside"):
        writer.write_tree([record(bytes(32), device, block, size)])


def test_more_than_the_format_can_name_is_refused() -> None:
    for devices in ([1] * (MAX_DEVICES + 1), [MAX_DEVICE + 1]):
        with pytest.raises(ValueError, match="more devices"):
            ImageWriter(io.BytesIO(), devices)


def test_a_blob_takes_about_150_bytes() -> None:
    chance = random.Random(1)
    records = sorted(record(b"\x01\x02" + chance.randbytes(30), 1, 0, 1) for _ in range(5000))
    assert len(written(records, [BLOCK]).data) < 155 * 5000


def test_fsck_of_erofs_finds_nothing_wrong(tmp_path: Path) -> None:
    program = shutil.which("fsck.erofs")
    if program is None:
        pytest.skip("fsck.erofs is not installed")
    device, image = tmp_path / "device", tmp_path / "image"
    device.write_bytes(random.Random(1).randbytes(1 << 20))
    chance = random.Random(2)
    records = [record(chance.randbytes(32), 1, n, chance.randrange(9000)) for n in range(1000)]
    with image.open("w+b") as file:
        ImageWriter(file, [1 << 20]).write_tree(sorted(records))
    done = subprocess.run(
        [program, "--extract", f"--device={device}", f"--device={image}", str(image)],
        capture_output=True,
        text=True,
    )
    if "isn't supported on this platform" in done.stdout + done.stderr:
        pytest.skip("fsck.erofs is older than 1.7: it knows no blocks of 512 bytes")
    assert done.returncode == 0, done.stdout + done.stderr
