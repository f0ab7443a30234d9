"""docs/snapshot-format.md: its example is read, and a reader made after it reads what we write."""

from __future__ import annotations

import json
import random
import re
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import zstandard
from blake3 import blake3

from ntt_backup.errors import RemoteError
from ntt_backup.snapshot import names
from ntt_backup.snapshot.restore.files import RestoreOptions
from ntt_backup.snapshot.restore.version import restore
from tests.helpers.memory_store import MemoryStore
from tests.unit.taker import Taker

PAGE = Path(__file__).parents[2] / "docs/snapshot-format.md"
CHAIN = ("20260301T040000Z-5f0c1a2b", "20260302T040000Z-91d3e4f5")


def read(files: Mapping[str, bytes], name: str) -> dict[str, tuple[list[Any], bytes]]:
    """The entries of a version, each with its content. Nothing of ours is called."""
    stream = zstandard.ZstdDecompressor().stream_reader(
        files[f"{name}/manifest"], read_across_frames=True
    )
    text = stream.read()
    first, *lines, last, seal = text.splitlines()
    sealed = text[: text.rindex(b"\n", 0, -1) + 1]
    assert json.loads(seal) == {"blake3": blake3(sealed).hexdigest()}
    header, trailer = json.loads(first), json.loads(last)
    assert header["format"] == "ntt-snapshot 1"
    assert f"{header['set']}/{header['version']}" == name
    map = files[f"{name}/map"]
    assert (len(map), sha256(map).hexdigest()) == (trailer["map_size"], trailer["map_sha256"])
    sums = zstandard.ZstdDecompressor().stream_reader(map).read()
    for number, pack in enumerate(trailer["packs"], 1):
        data = files[f"{name}/pack-{number:05}"]
        assert [len(data), sha256(data).hexdigest()] == pack
    found: dict[str, tuple[list[Any], bytes]] = {}
    for line in lines:
        entry = json.loads(line)
        path, kind, size, more = entry[0], entry[1], entry[8], entry[9]
        content = bytearray(size)
        extents = more.get("x", [])
        for at in range(0, len(extents), 7):
            start, length, version, number, offset, stored, skip = extents[at : at + 7]
            data = files[f"{header['set']}/{header['chain'][version]}/pack-{number:05}"]
            assert data[:8] == b"NTTSNAP\x01"
            part = zstandard.ZstdDecompressor().decompress(data[offset : offset + stored])
            content[start : start + length] = part[skip : skip + length]
        if kind == "f":
            assert blake3(content).hexdigest() == more["b3"]
        block = more.get("bs", size + 1)
        for at in range(0, size if "bs" in more else 0, block):
            data = bytes(content[at : at + block])
            keyed = blake3(data, key=bytes.fromhex(header["key"])).digest(8)
            assert sums[:8] == (keyed if any(data) else bytes(8))
            sums = sums[8:]
        found[path] = entry, bytes(content)
    assert not sums
    assert len(found) == trailer["files"]
    return found


def example() -> dict[str, bytes]:
    """The files of the page's example."""
    text = PAGE.read_text(encoding="utf-8")
    (lines,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    first, second, map = (
        bytes.fromhex(one) for one in re.findall(r"```hex\n(.*?)```", text, re.DOTALL)
    )
    return {
        f"db/{CHAIN[0]}/pack-00001": first,
        f"db/{CHAIN[1]}/pack-00001": second,
        f"db/{CHAIN[1]}/map": map,
        f"db/{CHAIN[1]}/manifest": zstandard.ZstdCompressor().compress(lines.encode()),
    }


def test_the_example_of_the_page_is_what_it_says(tmp_path: Path) -> None:
    files = example()
    found = read(files, f"db/{CHAIN[1]}")
    pages = b"a" * 4096 + bytes(4096) + b"c" * 4096
    assert found["srv/db/16384"][1] == pages
    assert b64decode(found["srv/db/conf"][0][9]["xa"]["user.by"]) == b"puppet"
    repository = MemoryStore()
    repository.files = files
    done = restore(lambda: repository, "db", tmp_path / "out", RestoreOptions(), trust=True)
    assert done.problems == []
    assert (tmp_path / "out/srv/db/16384").read_bytes() == pages
    assert (tmp_path / "out/srv/db/now").read_bytes() == b"port = 5432\n"


def test_a_reader_made_after_the_page_reads_what_we_write(tmp_path: Path) -> None:
    taker = Taker(tmp_path / "tree", tmp_path / "copies")
    large = bytearray(random.Random(1).randbytes(1 << 20) * 3 + bytes(1 << 20))
    taker.write("d/small", b"small")
    (taker.root / "d/gr\udcfcn\u20ac").symlink_to("small")
    for number in range(3):
        large[number * 500_000] ^= 1
        taker.write("large", bytes(large))
        found = read(taker.repository.files, f"s/{taker.take().version}")
        below = str(taker.root)[1:]
        assert found[f"{below}/large"][1] == large
        assert found[f"{below}/d/small"][1] == b"small"
        assert found[f"{below}/d/gr\udcfcn\u20ac"][0][9] == {"to": "small"}


def test_a_version_comes_behind_the_newest_whatever_the_clock_says() -> None:
    now = datetime(2026, 3, 4, 12, tzinfo=UTC)
    assert names.new_version(now).startswith("20260304T120000Z-")
    for hours, stamp in ((1, "20260304T130001Z-"), (-1, "20260304T120000Z-")):
        newest = f"{names.stamp(now + timedelta(hours=hours))}-0badcafe"
        assert names.new_version(now, newest).startswith(stamp)
    with pytest.raises(RemoteError, match="can be newer than"):
        names.new_version(now, "99991231T235959Z-0badcafe")
    for number in (0, names.MAX_PACKS + 1):
        with pytest.raises(ValueError, match="99999 packs"):
            names.pack_name("db", "v", number)
    for number in (1, names.MAX_PACKS):
        assert names.pack_name("db", "v", number) == f"db/v/pack-{number:05}"
