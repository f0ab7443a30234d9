"""Packs are written and read: the same bytes again, an archive for tar, and every blob right."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.pack import writer
from ntt_backup.pack.format import (
    RAW,
    ZSTD,
    ZSTD_DICTIONARY,
    PackError,
    pack_id,
)
from ntt_backup.pack.reader import PackReader
from ntt_backup.pack.writer import PackWriter
from tests.helpers.blobs import MIX, STORE, noise, pack, reader, text


def codecs(data: bytes) -> set[int]:
    return {one.codec for one in reader(data).table}


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("contents", [(), (b"",), (b"x",), (noise(1 << 20, 0),), MIX])
def test_what_was_packed_is_read(contents: Sequence[bytes], compress: bool) -> None:
    data = pack(contents, compress=compress)
    found = reader(data)
    assert {found.read_blob(one) for one in found.table} == set(contents)
    assert len(found.table) == len(set(contents))
    assert found.trailer.store_id == STORE
    for content in contents:
        entry = found.table.find(blake3(content).digest())
        assert entry is not None
        assert found.read_blob(entry) == content
    assert found.table.find(blake3(b"not in it").digest()) is None


def test_the_same_blobs_give_the_same_bytes() -> None:
    assert pack(MIX) == pack(MIX)


def test_a_pack_is_an_archive_of_its_larger_blobs(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(pack(MIX))
    listed = subprocess.run(["tar", "tf", path], capture_output=True, check=True)
    assert listed.stderr == b""
    large = {f"by-hash/{relative_path(blake3(c).hexdigest())}": c for c in MIX if len(c) >= 16384}
    names = listed.stdout.decode().split()
    assert set(names) - set(large) == {".ntt/dict", ".ntt/dense", ".ntt/index"}
    assert names.index(".ntt/dict") < names.index(".ntt/dense")
    assert names[-1] == ".ntt/index"
    (tmp_path / "to").mkdir()
    done = subprocess.run(["tar", "xf", path, "-C", tmp_path / "to"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    found = [one for one in (tmp_path / "to/by-hash").rglob("*") if one.is_file()]
    assert {str(one.relative_to(tmp_path / "to")): one.read_bytes() for one in found} == large
    assert {one.stat().st_mode & 0o7777 for one in found} == {0o444}


def test_a_pack_has_one_dictionary_before_its_first_dense_member_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(writer, "DENSE_MEMBER_BYTES", 300_000)
    for compress in (True, False):
        (tmp_path / "a.tar").write_bytes(
            pack([text(n, 1500) for n in range(700)], compress=compress)
        )
        listed = subprocess.run(["tar", "tf", tmp_path / "a.tar"], capture_output=True, check=True)
        members = [".ntt/dense"] * 4 + [".ntt/index"]
        assert listed.stdout.decode().split() == [".ntt/dict"] * compress + members


def test_a_blob_may_come_in_pieces_of_any_length() -> None:
    content = noise(200_000, 1)
    file = io.BytesIO()
    writer = PackWriter(file.write, STORE, bytes(16))
    writer.begin(blake3(content).digest(), len(content))
    for at in range(0, len(content), 7777):
        writer.more(content[at : at + 7777])
    writer.close()
    assert file.getvalue()[: 3 * 512] == pack([content])[: 3 * 512]
    (entry,) = reader(file.getvalue()).table
    assert reader(file.getvalue()).read_blob(entry) == content


def test_a_blob_of_another_length_than_announced_is_a_mistake() -> None:
    writer = PackWriter(lambda _: None, STORE, bytes(16))
    writer.begin(bytes(32), 5)
    writer.more(b"1234")
    with pytest.raises(ValueError, match="longer"):
        writer.more(b"56")
    with pytest.raises(ValueError, match="shorter"):
        writer.close()


def test_a_blob_of_more_than_eight_gigabytes_has_a_place() -> None:
    size = 9 << 30
    written = bytearray()
    length = 0

    def write(data: bytes | bytearray | memoryview) -> None:
        nonlocal length
        length += len(data)
        if len(data) < 1 << 20:
            written.extend(data)

    writer = PackWriter(write, STORE, bytes(16))
    writer.begin(bytes(32), size)
    piece = bytes(1 << 30)
    for _ in range(9):
        writer.more(piece)
    writer.close()
    listed = subprocess.run(["tar", "tvf", "-"], input=written[:512], capture_output=True)
    assert f"{size}".encode() in listed.stdout

    def read(start: int, wanted: int) -> bytes:
        at = start - (length - len(written))
        return bytes(-at) + written[max(at, 0) : at + wanted]

    (entry,) = PackReader(read, length).table
    assert (entry.offset, entry.stored) == (512, size)


@pytest.mark.parametrize(
    ("contents", "codec"),
    [
        ([text(n, 1500) for n in range(2000)], ZSTD_DICTIONARY),
        ([text(n, 8000) for n in range(8)], ZSTD),
        ([noise(1500, n) for n in range(2000)], RAW),
        ([noise(7800, n) + bytes(200) for n in range(40)], RAW),
    ],
    ids=["alike and many", "few", "noise", "not worth it"],
)
def test_a_sample_decides_how_small_blobs_are_compressed(
    contents: Sequence[bytes], codec: int
) -> None:
    data = pack(contents)
    assert codecs(data) == {codec}
    assert len(data) <= len(pack(contents, compress=False))


def test_a_compressed_blob_does_not_say_again_what_the_table_says() -> None:
    data = pack([text(n, 1500) for n in range(300)])
    assert codecs(data) == {ZSTD_DICTIONARY}
    for entry in reader(data).table:
        frame = zstandard.get_frame_parameters(data[entry.offset :][: entry.stored])
        assert (frame.dict_id, frame.has_checksum) == (0, False)
        assert frame.content_size == zstandard.CONTENTSIZE_UNKNOWN


def test_a_dictionary_is_found_for_blobs_of_which_only_the_heads_are_alike() -> None:
    contents = [noise(800, n % 40) + noise(7200, 40 + n) for n in range(600)]
    assert ZSTD_DICTIONARY in codecs(pack(contents))


@pytest.mark.parametrize(("sizes", "training", "probe"), [([99] * 8, 6, 2), ([100] * 20, 4, 2)])
def test_a_sample_is_no_larger_than_it_must_be(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], training: int, probe: int
) -> None:
    """Three quarters of all train, or 400 bytes; 200 bytes tell."""
    monkeypatch.setattr(writer, "_TRAINING", 400 if sum(sizes) > 1000 else 600)
    monkeypatch.setattr(writer, "_PROBE", 200)
    found = writer._sample(iter([bytes(one) for one in sizes]), sum(sizes))
    assert [*map(len, found)] == [training, probe]


class Words(bytes):
    """A dictionary of four bytes for which nothing needs to be trained."""

    def precompute_compress(self, level: int) -> None: ...

    def as_bytes(self) -> bytes:
        return b"word"


@pytest.mark.parametrize(
    ("plain", "trained", "least", "codec"),
    [
        # What tells has 100 bytes, of which compression must save more than three.
        (96.9, 97, 301, ZSTD),
        (97, 97, 301, RAW),
        (97, 0, 301, RAW),
        # A dictionary must save more than its own length: of the whole pack, 4 of 400.
        (97, 96, 300, RAW),
        (97, 95.9, 300, ZSTD_DICTIONARY),
        (90, 89, 300, ZSTD),
        (90, 88.9, 300, ZSTD_DICTIONARY),
    ],
)
def test_what_saves_just_as_much_as_it_costs_is_left(
    monkeypatch: pytest.MonkeyPatch, plain: float, trained: float, least: int, codec: int
) -> None:
    packed = {None: 100, "plain": plain, "trained": trained}
    monkeypatch.setattr(writer, "_PROBE", 100)
    monkeypatch.setattr(writer, "_LEAST_TRAINING", least)
    monkeypatch.setattr(writer, "_compressor", lambda words: "trained" if words else "plain")
    monkeypatch.setattr(writer, "_packed", lambda probe, how: packed[how])
    monkeypatch.setattr(zstandard, "train_dictionary", lambda *_, **__: Words(b"word"))
    gathered = writer.Dense(compress=True)
    for _ in range(4):
        gathered.add(bytes(32), bytes(100))
    gathered._decide()
    assert (gathered._codec, gathered.dictionary) == (
        codec,
        b"word" if codec == ZSTD_DICTIONARY else b"",
    )


def test_what_gets_no_shorter_stays_as_it_is() -> None:
    gathered = writer.Dense(compress=False)
    gathered._codec, gathered._compress = ZSTD, lambda content: b"c" * (len(content) // 2 + 1)
    for content in (b"x", b"yy", b"zzz"):
        gathered.add(bytes(32), content)
    assert bytes(gathered.finish()) == b"xyycc"
    assert [one.codec for one in gathered.entries(0)] == [RAW, RAW, ZSTD]


def test_a_compressor_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise zstandard.ZstdError("cannot compress: Allocation error : not enough memory")

    monkeypatch.setattr(writer, "_packed", fails)
    with pytest.raises(MemoryError, match="not enough memory"):
        pack([text(n, 8000) for n in range(8)])


def test_one_read_finds_a_small_table() -> None:
    data = pack([noise(20_000, n) for n in range(100)])
    asked = []

    def read(start: int, length: int) -> bytes:
        asked.append((start, length))
        return data[start : start + length]

    PackReader(read, len(data))
    assert asked == [(len(data) - 65536, 65536)]


@pytest.mark.parametrize("count", [1300, 1400, 65536])
def test_a_large_table_is_read_whole(count: int) -> None:
    digests = sorted(blake3(b"%d" % n).digest() for n in range(count))
    file = io.BytesIO()
    writer = PackWriter(file.write, STORE, pack_id(STORE, digests))
    for digest in digests:
        writer.add(digest, b"")
    writer.close()
    found = reader(file.getvalue())
    assert [one.digest for one in found.table] == digests
    assert found.trailer.pack_id == pack_id(STORE, reversed(digests))


def test_a_pack_that_is_cut_off_says_so() -> None:
    data = pack(MIX)
    with pytest.raises(PackError, match="cut off"):
        PackReader(lambda start, length: data[start : start + length - 1], len(data))
    found = reader(data)
    entry = found.table[0]
    with pytest.raises(PackError, match=found.table[0].digest.hex()):
        found.content(entry, b"")
