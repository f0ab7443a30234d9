"""Manifests: what is written comes back, and what is none raises SnapshotDamaged.

What takes much memory, and what is changed and summed again, is for `tests.fuzz.manifests`.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.snapshot.format import manifest
from ntt_backup.snapshot.format.entry import (
    DIRECTORY,
    FIFO,
    FILE,
    HARD_LINK,
    MAX_SUPER_BLOCK,
    SYMLINK,
    Entry,
    Extent,
    order,
    parse,
    path_of,
)
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    FORMAT,
    MAX_CHAIN,
    MAX_HEADER,
    ManifestReader,
    ManifestTrailer,
    ManifestWriter,
    ending_of,
    tail_size,
)
from ntt_backup.snapshot.format.super_blocks import PackSum
from ntt_backup.snapshot.names import SnapshotDamaged
from tests.fuzz.manifests import CHAIN, HEADER, PACKS, SUM, written


def forged(lines: Sequence[bytes], header: object = None, **trailer: object) -> bytes:
    """A manifest of these lines, whose sum is right."""
    first = {"format": FORMAT, **asdict(HEADER)} if header is None else header
    last = {**asdict(ManifestTrailer(len(lines), 10, (), 20, "12" * 32)), **trailer}
    text = b"".join(
        b"%b\n" % one for one in (json.dumps(first).encode(), *lines, json.dumps(last).encode())
    )
    seal = b'{"blake3":"%b"}\n' % blake3(text).hexdigest().encode()
    return zstandard.ZstdCompressor().compress(text + seal)


def read(data: bytes, piece: int = 1 << 20) -> tuple[list[Entry], ManifestTrailer]:
    reader = ManifestReader(data[at : at + piece] for at in range(0, len(data), piece))
    assert reader.header == HEADER
    entries = list(reader.entries())
    assert reader.trailer is not None
    return entries, reader.trailer


@pytest.mark.parametrize("count", [0, 1, 2000])
def test_a_trailer_that_is_longer_than_a_piece_comes_back(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [Entry(f"{n:05}", FIFO, 0o644, mtime=1) for n in range(count)]
    packs = PACKS * 1500
    data = written(entries, packs)
    for piece, at_once in ((1000, 1 << 16), (1 << 20, 1 << 16), (1 << 20, 100)):
        monkeypatch.setattr(manifest, "_PIECE", at_once)
        found, trailer = read(data, piece)
        assert (found, trailer.packs, trailer.files) == (entries, packs, count)


def names() -> st.SearchStrategy[str]:
    """Paths as the system has them: bytes, of which some mean something to JSON."""
    part = st.binary(min_size=1, max_size=6) | st.sampled_from(
        [b'",', b'","', b"\\", b'"', b"\n[", b"{"]
    )
    return st.lists(part, min_size=1, max_size=3).map(
        lambda parts: b"".join(parts).replace(b"\0", b"0").decode("utf-8", "surrogateescape")
    )


NUMBER = st.integers(0, 2**63 - 1)


@st.composite
def files(draw: st.DrawFn) -> Entry:
    extents, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start, length = at + draw(st.integers(0, 2**40)), draw(st.integers(1, 2**20))
        where = (draw(st.integers(0, 1)), draw(st.integers(1, 99_999)), draw(NUMBER))
        skip = draw(st.integers(0, MAX_SUPER_BLOCK - length))
        extents.append(Extent(start, length, *where, draw(st.integers(1, 1 << 24)), skip))
        at = start + length
    value = st.binary(max_size=9).map(lambda one: base64.b64encode(one).decode())
    return Entry(
        draw(names()),
        FILE,
        *(draw(st.integers(0, 0o7777)), draw(st.integers(0, 2**32 - 1)), 0),
        *(draw(st.integers(-(2**62), 2**62)), draw(NUMBER), draw(st.integers(0, 2**64 - 1))),
        at + draw(st.integers(0, 2**40)),
        digest=draw(st.sampled_from(["", SUM])),
        block=draw(st.sampled_from([0, 4096, 8192, 1 << 24])),
        extents=extents,
        xattrs=draw(st.dictionaries(names(), value, max_size=2)),
        unsettled=draw(st.booleans()),
    )


OTHERS = st.builds(Entry, names(), st.sampled_from([DIRECTORY, FIFO])) | st.builds(
    Entry, names(), st.sampled_from([SYMLINK, HARD_LINK]), target=names()
)


@given(st.lists(files() | OTHERS, max_size=8, unique_by=lambda one: one.path), st.integers(1, 99))
def test_entries_come_back_in_any_pieces(entries: list[Entry], piece: int) -> None:
    entries.sort(key=lambda entry: order(entry.path))
    data = written(entries)
    assert read(data, piece) == (
        entries,
        ManifestTrailer(len(entries), 10, PACKS, 20, "12" * 32, 1, 2),
    )
    lines = list(ManifestReader([data]).lines())
    assert lines == [entry.line() for entry in entries]
    assert [path_of(line) for line in lines] == [entry.path for entry in entries]
    assert ending_of(data[-tail_size(data[-END_BYTES:]) :])[0] == read(data)[1]


def test_a_directory_stands_right_before_what_is_in_it() -> None:
    paths = ["a", "a/b", "a/b/c", "a/é", "a-b", "a.", "a0", "b"]
    assert sorted(random.Random(1).sample(paths, 8), key=order) == paths


def test_long_lines_and_many_packs_come_back() -> None:
    extents = [Extent(n * 8192, 4096, n % 2, 1, n, 77, 0) for n in range(40_000)]
    disk = Entry("b/disk", FILE, size=1 << 40, block=65536, digest=SUM, extents=extents)
    entries = [Entry("a", DIRECTORY), Entry("b", DIRECTORY), disk, Entry("c", FILE)]
    packs = tuple(PackSum(n, SUM) for n in range(20_000))
    data = written(entries, packs)
    assert read(data) == (entries, ManifestTrailer(4, 10, packs, 20, "12" * 32, 1, 2))
    assert ending_of(data[-tail_size(data[-END_BYTES:]) :])[0].packs == packs


EXTENT: list[object] = [0, 50, 1, 1, 8, 99, 0]
PLAIN = Entry(
    "d/a", FILE, 0o644, size=50, digest=SUM, extents=[Extent(0, 50, 1, 1, 8, 99, 0)]
).line()


def fields(**changed: object) -> list[Any]:
    """The values of a good entry's line, with some of them, or of its object, changed."""
    numbers = {"mode": 0o644, "uid": 1, "gid": 1, "mtime": 1, "ctime": 1, "inode": 1, "size": 100}
    values: dict[str, Any] = {"path": "a", "kind": FILE, **numbers}
    more = {"b3": SUM, "bs": 8192, "x": EXTENT, "xa": {"user.a": "YQ=="}}
    for name, value in changed.items():
        (values if name in values else more)[name] = value
    return [*values.values(), more]


WRONG: dict[str, list[object]] = {
    "path": ["", 1, None, "a\0", "\ud800", "\udc00", "a" * 65_537, "a" + "/a" * 1000],
    "kind": ["x", "", 1, None, [], SYMLINK, HARD_LINK, DIRECTORY],
    "mode": [-1, 0o10000, True, 1.0, None, "1"],
    "uid": [-1, 1 << 32, 1.5],
    "mtime": [1 << 63, -1 << 63, False],
    "inode": [1 << 64, 10**400, -1, [1]],
    "size": [-1, 1 << 63, 49, "100", float("nan"), float("inf")],
    "b3": [
        *("", "0", SUM.upper(), SUM + "0", 1, None, [SUM] * 64),
        *(SUM[:-2] + "  ", " " * 64, "g" * 64, "+" + SUM[1:], "\n" * 64),
    ],
    "bs": [1, 4095, 1 << 25, 8192.0, True, "8192", []],
    "to": ["b", 1, None],
    "xa": [[], 1, {"a": 1}, {"a": "!"}, {"a": "YQ"}, {"a\0": ""}, "ab"],
    "x": [
        *([], 1, None, "1234567", {}, [0] * 7, EXTENT[1:], [EXTENT]),
        *([bad, *EXTENT[1:]] for bad in (51, -1, True, 0.0, "0", None, 1 << 70)),
        *([*EXTENT[:at], 0, *EXTENT[at + 1 :]] for at in (1, 3, 5)),
        *([*EXTENT[:at], 1 << 25, *EXTENT[at + 1 :]] for at in (1, 2, 3, 5, 6)),
        [*EXTENT[:4], 1 << 63, 99, 0],
        [*EXTENT, 49, *EXTENT[1:]],
        [50, *EXTENT[1:], 0, *EXTENT[1:]],
    ],
}
BAD: list[object] = [
    *(fields(**{name: value}) for name, values in WRONG.items() for value in values),
    *(fields()[:9], [*fields(), 1], dict.fromkeys("abcdefghij", 1), []),
    fields(kind=DIRECTORY, size=0, bs=0),
    [*fields(kind=HARD_LINK, size=0)[:-1], {"to": "a" + "/a" * 1000}],
]


@pytest.mark.parametrize("bad", BAD, ids=lambda one: str(one)[:60])
def test_a_value_out_of_bounds_is_refused(bad: object) -> None:
    line = json.dumps(bad).encode()
    for lines in ([line], [json.dumps(fields(path="A")).encode(), line]):
        with pytest.raises(SnapshotDamaged):
            read(forged(lines))
    with suppress(SnapshotDamaged):
        parse(line)  # The versions of a manifest are not known to it.


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b" ", b"[", b"]", b"null", b'"abcdefghij"', b"[" * 100_000, b'["a"', b'{"a":1}'),
        *(b'["a","f"', b'["\xff",', b'[\0"\0a\0"\0'),
        *(json.dumps(fields(path="b")).encode() + more for more in (b",", b"x", b"]")),
        b",".join(json.dumps(fields(path=one)).encode() for one in "bc"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_what_is_no_entry_is_refused(line: bytes) -> None:
    for lines in ([line], [json.dumps(fields()).encode(), line]):
        with pytest.raises(SnapshotDamaged):
            read(forged(lines))


def test_entries_out_of_order_or_twice_are_refused() -> None:
    for paths in ("ba", "aa", ["a-", "a/b"], ["a/b", "a"], ["é", "\udcc3\udca9"]):
        lines = [Entry(path, DIRECTORY).line() for path in paths]
        with pytest.raises(SnapshotDamaged, match="order"):
            read(forged(lines))
        with pytest.raises(SnapshotDamaged, match="order"):
            list(ManifestReader([forged(lines)]).lines())


def test_a_manifest_is_written_as_it_grows() -> None:
    out: list[bytes] = []
    writer = ManifestWriter(out.append, HEADER)
    for n in range(10_000):
        writer.add(b'["%s"]\n' % random.Random(n).randbytes(50).hex().encode())
    assert sum(map(len, out)) > 10_000 * 40


@pytest.mark.parametrize(
    ("seal", "why"),
    [
        (b"%b\n\n", "not end with a seal"),
        (b"%b", "cut off|not end with a seal"),
        (b"%b\n%b\n", "not end with a seal"),
        (b"%b\nx", "cut off"),
        (b"{}\n", "has no seal"),
        (b'{"blake3":1}\n', "has no seal"),
        (b'{"blake3":"ab"}\n', "has no seal"),
        (b'{"blake3":"%b","signature":1}\n', "has no seal"),
    ],
)
def test_what_is_no_seal_is_refused(seal: bytes, why: str) -> None:
    *_, end = TEXT.splitlines(keepends=True)
    right = end.rstrip(b"\n") if b"blake3" not in seal else SUM.encode()
    text = TEXT.removesuffix(end) + seal.replace(b"%b", right)
    with pytest.raises(SnapshotDamaged, match=why):
        read(zstandard.ZstdCompressor().compress(text))


@pytest.mark.parametrize(
    ("member", "why"),
    [
        ({"x": "\U0001f600" + "A" * (3 << 20)}, "a line of the manifest is too long"),
        ({"host": "\U0001f600" + "A" * (128 << 10)}, "the header of a manifest"),
        ({"roots": ["/srv" + "A" * (64 << 10), "/etc" + "A" * (64 << 10)]}, "the header"),
    ],
    ids=["a member that is passed over", "a host", "roots"],
)
def test_a_header_is_bounded_before_it_is_kept(member: dict[str, object], why: str) -> None:
    """Some kilobytes, compressed, would take hundreds of megabytes of memory."""
    line = json.dumps({**json.loads(FIRST), **member}, ensure_ascii=False).encode() + b"\n"
    with pytest.raises(SnapshotDamaged, match=why):
        ManifestReader([zstandard.ZstdCompressor().compress(line)])


def test_a_header_has_room_for_the_longest_chain() -> None:
    names = [f"20260102T030405Z-{number:08x}" for number in range(MAX_CHAIN)]
    said = {"chain": names, "version": names[-1], "parent": names[-2]}
    line = json.dumps({**json.loads(FIRST), **said}).encode()
    assert len(line) < MAX_HEADER - (128 << 10)


@pytest.mark.parametrize(
    "changed",
    [
        *({"format": "ntt-snapshot 2"}, {"set": "../x"}, {"set": 1}, {"version": CHAIN[0]}),
        *({"parent": ""}, {"key": "ab"}, {"key": None}, {"host": []}, {"roots": [1]}),
        *({"chain": bad} for bad in ([], None, [*CHAIN, *CHAIN], ["..", CHAIN[1]], CHAIN[1])),
        *({"roots": [bad]} for bad in (1, "a\0", "\ud800")),
    ],
    ids=str,
)
def test_a_header_out_of_bounds_is_refused(changed: dict[str, object]) -> None:
    good = {"format": FORMAT, **asdict(HEADER)}
    with pytest.raises(SnapshotDamaged):
        ManifestReader([forged([], {**good, **changed})])
    with pytest.raises(SnapshotDamaged):
        ManifestReader([forged([], {name: good[name] for name in good if name not in changed})])


@pytest.mark.parametrize(
    "changed",
    [
        *({"files": 1}, {"files": "0"}, {"bytes": -1}, {"bytes": 1 << 63}, {"bytes": True}),
        *({"map_size": None}, {"map_sha256": ""}, {"skipped": 1.0}, {"packs": 1}),
        *({"packs": [bad]} for bad in ([1], ["1", SUM], [1, SUM, 1], [1, 2], [1, SUM[1:]])),
        {"packs": [[1, SUM]] * 100_000},
    ],
    ids=lambda one: str(one)[:60],
)
def test_a_trailer_out_of_bounds_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(SnapshotDamaged):
        read(forged([], **changed))


@pytest.mark.parametrize("header", [[], ["format"], "format", 1])
def test_a_header_that_is_no_object_is_refused(header: object) -> None:
    with pytest.raises(SnapshotDamaged, match="out of place"):
        read(forged([], header))


def test_fields_of_a_newer_program_are_passed_over() -> None:
    data = forged(
        [json.dumps(fields(new=[1])).encode()], {"format": FORMAT, **asdict(HEADER), "n": 1}, new=2
    )
    assert read(data)[0][0].digest == SUM


GOOD = written(
    [
        Entry("a", DIRECTORY),
        *(replace(parse(PLAIN), path=f"a/{n}") for n in range(4)),
        *(parse(json.dumps(fields(path=f"b{n}")).encode()) for n in range(4)),
    ]
)
TEXT = zstandard.ZstdDecompressor().stream_reader(GOOD, read_across_frames=True).read()


@given(st.data())
def test_a_manifest_that_is_cut_or_changed_never_reads_to_its_end(data: st.DataObject) -> None:
    bad = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)))])
    if len(bad) == len(GOOD):
        bit = data.draw(st.integers(0, len(GOOD) * 8 - 1))
        bad[bit // 8] ^= 1 << bit % 8
    with suppress(SnapshotDamaged):
        # Some bits of zstd's frames mean nothing, and the last twelve bytes are for ending_of.
        assert read(bytes(bad)) == read(GOOD)
    with suppress(SnapshotDamaged):
        ending_of(bytes(bad[-tail_size(bytes(bad[-END_BYTES:])) :]))


FIRST = TEXT[: TEXT.index(b"\n") + 1]


def test_a_manifest_of_another_version_is_told() -> None:
    with pytest.raises(SnapshotDamaged, match="too long"):
        tail_size(b"\x5e\x2a\x4d\x18\4\0\0\0\xff\xff\xff\xff")
    for end in (b"", b"\0" * END_BYTES, GOOD[-END_BYTES + 1 :]):
        with pytest.raises(SnapshotDamaged):
            tail_size(end)
