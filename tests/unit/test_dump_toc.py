"""The table of contents of a dump is read without believing any of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.dump import toc
from ntt_backup.dump.toc import DumpDamaged

ROWS = b"a\t1\nb\\tc\t2\n\\N\t3\n"


def number(value: int) -> bytes:
    return bytes([value < 0]) + abs(value).to_bytes(4, "little")


def text(value: str | None) -> bytes:
    data = (value or "").encode()
    return number(-1) if value is None else number(len(data)) + data


def entry(
    dump_id: int,
    kind: str,
    name: str,
    *,
    owner: str = "",
    definition: str = "",
    drop: str = "",
    copy: str = "",
    schema: str | None = "public",
    relkind: bool = True,
) -> bytes:
    fields = [text(name), text(kind), number(2)]
    fields += map(text, (definition, drop, copy, schema, "", ""))
    depends = [text("7"), text(""), text("8"), text(None)]  # An empty text is not the end.
    middle = [number(0) if relkind else b"", text(owner), text("false"), *depends, bytes(9)]
    return b"".join([number(dump_id), number(0), text("0"), text("0"), *fields, *middle])


def archive(*entries: bytes, method: int = 0, version: int = 16) -> bytes:
    head = b"PGDMP" + bytes([1, version, 0, 4, 8, 1])
    head += number(method) if version < 15 else bytes([method])
    date = number(0) * 7 + text("db") + text("18") + text("18")
    return head + date + number(len(entries)) + b"".join(entries)


def block(dump_id: int, *chunks: bytes) -> bytes:
    parts = [number(len(one)) + one for one in chunks]
    return b"\1" + number(dump_id) + b"".join(parts) + number(0)


COPY = 'COPY public.blobs (blobid, "odd""a, b") FROM stdin;\n'
DATA = entry(5, "TABLE DATA", "blobs", copy=COPY)
END = b"\\.\n\n\n"


def rows_of(data: bytes, contents: toc.Toc, piece: int = 7) -> list[bytes]:
    found: list[bytes] = []
    pieces = (data[at : at + piece] for at in range(0, len(data), piece))
    toc.copy_rows(pieces, contents, {5: found.extend})
    return found


@pytest.mark.parametrize("method", [0, 1, 3])
def test_the_rows_of_one_table_are_given_however_they_are_stored(method: int) -> None:
    others = block(4, b"x" * 999) + b"\3" + number(9) + number(77) + number(2) + b"ab" + number(0)
    stored = {
        0: [ROWS[:3], ROWS[3:], END],
        1: [zlib.compress(ROWS + END)],
        3: [zstandard.compress(ROWS + END)],
    }[method]
    data = archive(DATA, method=method) + others + number(0) + block(5, *stored)
    contents = toc.read(data)
    (one,) = contents.entries
    assert one.columns == ["blobid", 'odd"a, b']
    assert rows_of(data, contents) == ROWS.splitlines(keepends=True)
    # Archives of before 1.15 have a level of compression in the place of its name, as a number.
    plain = entry(5, "TABLE DATA", "blobs", copy=COPY, relkind=False)
    old = archive(plain, method=method, version=14) + block(5, *stored)
    if method < 2:
        assert toc.read(old).method == contents.method
        assert rows_of(old, toc.read(old)) == ROWS.splitlines(keepends=True)
    # What lies behind the rows that are wanted is nobody's.
    assert rows_of(data + b"nonsense", contents) == ROWS.splitlines(keepends=True)


def test_rights_are_those_of_the_list_and_not_of_any_text() -> None:
    bad = "x\nGRANT ALL TO evil;\n"
    data = archive(
        entry(1, "TABLE", bad, owner=bad, definition=bad, drop="DROP TABLE public.t;\n"),
        entry(2, "FUNCTION", "f()", owner="alice", definition=bad, drop="DROP FUNCTION f();\n"),
        entry(3, "TABLE", "own", owner="us", drop="DROP TABLE public.own;\n"),
        entry(4, "INDEX", "i", owner="alice", drop="DROP INDEX i;\n"),
        entry(5, "TABLE", "lie", owner="alice", drop="drop database x;\n"),
        entry(
            6,
            "ACL",
            "t",
            definition='GRANT SELECT ON t TO "a;\nGRANT b";\nREVOKE x FROM y;\nDROP z;',
        ),
        entry(7, "COMMENT", "t", definition=bad),
    )
    assert list(toc.read(data).rights("us")) == [
        'ALTER TABLE public.t OWNER TO "x\nGRANT ALL TO evil;\n";',
        "ALTER FUNCTION f() OWNER TO alice;",
        'GRANT SELECT ON t TO "a;\nGRANT b";',
        "REVOKE x FROM y;",
    ]


@pytest.mark.parametrize(
    "copy",
    [
        "",
        "drop table blobs;",
        "COPY public.blobs (a) FROM stdin; drop table blobs;",
        "COPY public.blobs (a) FROM program 'x';",
        "COPY public.blobs (a, (b)) FROM stdin;",
        "COPY public.blobs (a b) FROM stdin;",
    ],
)
def test_columns_are_those_of_a_copy_and_of_nothing_else(copy: str) -> None:
    (one,) = toc.read(archive(entry(5, "TABLE DATA", "blobs", copy=copy))).entries
    assert one.columns == []


def pieces_of(data: bytes) -> Iterator[bytes]:
    yield data


@given(st.binary(max_size=400), st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_nonsense_is_refused(nonsense: bytes, at: int, count: int) -> None:
    whole = archive(DATA, method=1) + block(5, zlib.compress(ROWS + END))
    lie = whole[:at] + count.to_bytes(4, "little") + whole[at + 4 :]
    for data in (nonsense, whole[:at], lie, b"PGDMP" + nonsense, whole[:-at] + nonsense):
        with suppress(DumpDamaged):
            rows_of(data, toc.read(data), piece=100)


def test_a_list_without_end_a_long_row_and_a_bomb_are_refused() -> None:
    data = archive()[:-5] + number(200_001)
    with pytest.raises(DumpDamaged, match="200,001 entries"):
        toc.read(data)
    with pytest.raises(DumpDamaged, match=r"1\.17"):
        toc.read(archive(version=17))
    for method, compress in ((1, zlib.compress), (3, zstandard.compress)):
        bomb = compress(bytes(100 << 20))
        assert len(bomb) < 200_000
        data = archive(DATA, method=method) + block(5, bomb)
        with pytest.raises(DumpDamaged, match="a row is too long"):
            rows_of(data, toc.read(data), piece=1 << 16)


def test_a_head_is_read_in_either_size_of_its_numbers() -> None:
    for version in (14, 15, 16):
        assert toc.read(archive(version=version)).entries == ()
    data = archive()
    wide = data[:8] + b"\x08\x04" + data[10:12]
    eight = b"".join(bytes([0]) + n.to_bytes(8, "little") for n in (0, 0, 0, 0, 0, 0, 0))
    texts = b"".join(b"\0" + len(one).to_bytes(8, "little") + one for one in (b"d", b"1", b"2"))
    assert toc.read(wide + eight + texts + bytes(9)).integer == 8


@pytest.mark.parametrize(
    ("at", "byte"),
    [
        (0, ord("p")),
        (5, 0),
        (5, 2),
        (6, 13),
        (6, 17),
        (8, 3),
        (8, 5),
        (8, 0),
        (9, 3),
        (9, 9),
        (10, 0),
        (10, 2),
        (10, 3),
        (11, 4),
    ],
    ids=str,
)
def test_another_head_is_refused(at: int, byte: int) -> None:
    data = bytearray(archive(DATA))
    toc.read(bytes(data))
    data[at] = byte
    with pytest.raises(DumpDamaged):
        toc.read(bytes(data))


def test_of_a_head_nothing_may_be_missing() -> None:
    head = archive(DATA)
    for size in range(len(head)):
        with pytest.raises(DumpDamaged):
            toc.read(head[:size])


@pytest.mark.parametrize(
    ("method", "why"),
    [(1, "incorrect header"), (2, "compressed by lz4"), (3, "zstd")],
)
def test_rows_that_cannot_be_decompressed_are_refused(method: int, why: str) -> None:
    data = archive(DATA, method=method) + block(5, ROWS, END)
    with pytest.raises(DumpDamaged, match=why):
        rows_of(data, toc.read(data))


@pytest.mark.parametrize("count", [-1, 1, 200_001])
def test_another_number_of_entries_is_refused(count: int) -> None:
    with pytest.raises(DumpDamaged):
        toc.read(archive()[:-5] + number(count))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has no rows in it"),
        (block(4, ROWS, END), "has no rows in it"),
        (b"\2" + number(5) + block(5, ROWS)[6:], "no block of data"),
        (b"\1" + number(-5) + number(0), "is negative"),
        (b"\1" + number(5) + number(-3) + b"a\n", "is negative"),
        (block(5, ROWS, END)[:-1], "ends within"),
        (b"\1" + number(5) + number(9) + b"a\n", "ends within"),
        (b"\3" + number(9) + number(77) + number(2), "ends within"),
        (block(5, b"a\t1"), "end of a table's rows is missing"),
    ],
)
def test_other_data_are_refused(data: bytes, why: str) -> None:
    data = archive(DATA) + data
    with pytest.raises(DumpDamaged, match=why):
        rows_of(data, toc.read(data))


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_row_has_a_longest_length(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(toc, "_LONGEST_LINE", 8)
    data = archive(DATA) + block(5, b"12345678\nab\n", END)
    assert rows_of(data, toc.read(data), piece) == [b"12345678\n", b"ab\n"]
    data = archive(DATA) + block(5, b"123456789", b"1234567890\n", END)
    with pytest.raises(DumpDamaged, match="a row is too long"):
        rows_of(data, toc.read(data), piece)
