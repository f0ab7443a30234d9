"""Dumps as a series: cut by content, patched, replayed, and what an increment needs."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.config import RemoteConfig
from ntt_backup.dump import form, patch
from ntt_backup.dump import series as series_format
from ntt_backup.dump.form import Form, base_of, kept_base
from ntt_backup.dump.last_text import LastText, NewText
from ntt_backup.dump.record import PLAIN, SERIES, Stored
from ntt_backup.dump.removed import Findable, Removed
from ntt_backup.dump.segments import MOST, Cutter
from ntt_backup.dump.series import Segment, SeriesDamaged, Writer, replay
from ntt_backup.dump.stored_text import BaseUnusable, DumpText, needed_by
from ntt_backup.errors import DumpFailed
from tests.helpers.memory_store import MemoryStore
from tests.helpers.waiting import PATIENCE
from tests.unit.sample_records import RECORD, a_dump

SMALL = {"size": 128, "most": 512}
lines = st.binary(max_size=60) | st.sampled_from([b"row", b"", b"x" * 700, b"\r"])
texts = st.lists(lines, max_size=60).map(b"\n".join)


def rows(count: int, seed: int = 1) -> list[bytes]:
    """Rows of a catalog: names that do not compress, then what is alike."""
    values = random.Random(seed)
    names = (b"%064x" % values.getrandbits(256) for _ in range(count))
    return [a_row(name + b"\t2026-03-04 12:00:00\tt\n") for name in names]


def a_row(line: bytes) -> bytes:
    """A line as pg_dump writes it, with its length before it."""
    return b"\0" + len(line).to_bytes(4, "little") + line


class Series:
    """The dumps of one text after the other, as they lie on the remote: the first one is whole."""

    def __init__(self, directory: Path, **cutter: int) -> None:
        self.files: list[bytes] = []
        self._directory = directory
        self._cutter = cutter
        self._base = ""

    def add(self, text: bytes, *, piece: int = 1000) -> int:
        """The size of one more dump."""
        old = LastText.find(self._directory, "0", self._base)
        new = None if self.files else NewText(self._directory)
        writer = Writer(old, new, Cutter(**self._cutter))
        parts = [writer.add(text[at : at + piece]) for at in range(0, len(text), piece)]
        self.files.append(b"".join([*parts, writer.end()]))
        if new is not None:
            self._base = hashlib.sha256(text).hexdigest()
            new.keep("0", self._base)
        if old is not None:
            old.close()
        return len(self.files[-1])

    def text(self, number: int) -> bytes:
        """What dump number is a dump of."""
        whole, one = ([file[:7], file[7:]] for file in (self.files[0], self.files[number]))
        return b"".join(replay(one, replay(whole)) if number else replay(whole))


# --- cutting --------------------------------------------------------------------------------------


@given(texts, st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_a_text_is_cut_in_the_same_places_however_it_comes(text: bytes, sizes: list[int]) -> None:
    def cut(pieces: Sequence[bytes]) -> list[bytes]:
        cutter = Cutter(**SMALL)
        return [*(one for piece in pieces for one in cutter.add(piece)), *cutter.end()]

    at, pieces = 0, list[bytes]()
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    segments = cut(pieces)
    assert b"".join(segments) == text
    assert all(0 < len(one) <= SMALL["most"] for one in segments)
    assert segments == cut([text])


# --- patches --------------------------------------------------------------------------------------


@given(texts, texts, st.lists(lines), st.booleans(), st.binary(max_size=200))
def test_a_patch_makes_the_new_text_and_nonsense_is_refused(
    old: bytes, new: bytes, gone: list[bytes], thorough: bool, nonsense: bytes
) -> None:
    removed = Findable()
    removed.add(gone)
    made = patch.make(old, new, removed, thorough=thorough)
    assert patch.apply(old, made, len(new), removed)[0] == new
    for damaged in (nonsense, made[:-3], bytes([made[0] ^ 1]) + made[1:]):
        for known in (removed, Removed()):
            with suppress(patch.PatchDamaged):
                assert len(patch.apply(old, damaged, 1000, known)[0]) <= 1001


def a_patch(numbers: Iterable[int], lines: bytes = b"") -> bytes:
    """A patch that says what no writer would say."""
    packed = zstandard.ZstdCompressor().compress(patch._varints(numbers))
    return patch._HEAD.pack(len(packed)) + packed + zstandard.ZstdCompressor().compress(lines)


def test_runs_of_more_lines_than_the_text_may_have_are_refused_before_they_are_looked_at() -> None:
    """A few kilobytes of them, all of a long text, would keep a restore busy for hours."""
    count = 50_000
    old = b"\n" * count
    back = patch._unsigned(-count)
    runs = [0, 0, count, *[0, back, count] * 2000]
    with pytest.raises(patch.PatchDamaged, match="more lines than"):
        patch.apply(old, a_patch([0, *runs]), count, Removed())
    empty = [0, 0, 0] * 2000
    with pytest.raises(patch.PatchDamaged, match="more runs than"):
        patch.apply(old, a_patch([0, *empty]), 1000, Removed())
    copy = patch.apply(old, a_patch([0, 0, 0, count + 1, 0, 0, 0]), count, Removed())
    assert copy[0] == old


@pytest.mark.parametrize(
    ("numbers", "lines", "most", "made"),
    [
        ([0, 1, 2, 1, 0, 0, 0], b"new", 14, b"new\nnext line."),
        ([0, 0, 0, 1, 0, 1, 1, 0, 0, 0], b"", 21, b"first line\nfirst line"),
        ([0, 0, 0, 1, 0, 1, 1, 0, 0, 0], b"", 20, "it makes a text that is too long"),
        ([0, 0, 0, 3, 0, 0, 0], b"", 40, "a run of lines that are not there"),
        ([0, 0, 1, 1, 0, 0, 0], b"", 40, "a run of lines that are not there"),
        ([0, 0, 6, 0, 0, 0, 0], b"", 40, "a run of lines that are not there"),
        ([0, 1, 0, 0], b"0123456789a", 11, b"0123456789a"),
        ([0, 1, 0, 0], b"0123456789a", 10, "it has too much in it"),
        ([1, 0, 0, 0, 0], b"", 40, b""),
        ([0, 0, 0], b"", 40, "shorter"),
        ([0, 0, 0, 1, (1 << 63) - 1], b"", 40, "shorter"),
        ([0, 0, 0, 1, 1 << 63], b"", 40, "a number is too long"),
    ],
)
def test_a_patch_refers_to_what_is_there_and_makes_no_more_than_it_may(
    numbers: list[int], lines: bytes, most: int, made: bytes | str
) -> None:
    """made: the text, or why there is none."""
    old, removed, given = b"first line\nnext line.", Removed(), a_patch(numbers, lines)
    removed.add([b"gone"])
    if isinstance(made, bytes):
        assert patch.apply(old, given, most, removed)[0] == made
        return
    with pytest.raises(patch.PatchDamaged, match=made):
        patch.apply(old, given, most, removed)


def test_texts_that_take_too_much_memory_have_no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = b"one\ntwo", b"one\ntwo\nthree\nfour"
    made = patch.make(old, new, Findable())
    assert patch.possible(old, new)
    monkeypatch.setattr(patch, "LINES", 3)
    assert patch.possible(old, old)
    assert not patch.possible(old, new)
    assert not patch.possible(new, old)
    with pytest.raises(patch.PatchDamaged, match="too many lines"):
        patch.apply(b"", patch.make(b"", new, Findable()), len(new), Removed())
    assert patch.apply(old, made, len(new), Removed())[0] == new  # It gives two lines of its own.
    monkeypatch.setattr(patch, "_OLD_BYTES", len(old) - 1)
    assert not patch.possible(old, old)
    with pytest.raises(patch.PatchDamaged, match="its old text is too long"):
        patch.apply(old, made, len(new), Removed())


def a_block(content: bytes, size: int, *, first: int = 0, count: int = 0) -> bytes:
    """A block of a series: a patch, where its content begins as one."""
    return (
        series_format._HEAD.pack(series_format._PATCH, 16, first, count, len(content), size)
        + content
    )


def a_whole_dump(*segments: bytes) -> bytes:
    frames = [(zstandard.ZstdCompressor().compress(one), len(one)) for one in segments]
    return b"".join(
        series_format._HEAD.pack(series_format._WHOLE, 16, 0, 0, len(frame), size) + frame
        for frame, size in frames
    )


def numbers_without_end(count: int = 16 * MOST) -> list[bytes]:
    """More than sixty million numbers, in 4 kB."""
    packed = zstandard.ZstdCompressor(level=19).compress(bytes(count))
    return [a_block(patch._HEAD.pack(len(packed)) + packed, MOST)]


def more_numbers_than_lines() -> list[bytes]:
    return numbers_without_end(patch._NUMBERS * 9)


def lines_without_end() -> list[bytes]:
    """A patch of 16 million lines without anything in them."""
    runs = [0, 0, 0, MOST, 0, 0, 0]
    return [a_whole_dump(*[b"\n" * MOST] * 4), a_block(a_patch(runs), MOST, count=4)]


def as_many_lines_as_may_be() -> list[bytes]:
    """A patch of as many lines and runs as a patch may have, of texts that are as long."""
    count = patch.LINES - 1
    text = b"\n".join(b"%04x" % (n & 0xFFFF) for n in range(count)) + bytes(100)
    text += bytes(MOST - len(text))
    runs = [number for n in range(count // 2) for number in (0, 0 if n == 0 else 2, 1)]
    given = text[: MOST // 2]
    made = a_patch([0, *runs, given.count(b"\n"), 0, 0], given)
    return [a_whole_dump(text), a_block(made, MOST, count=1)]


def removed_lines_of_all() -> list[bytes]:
    """An increment that keeps as many removed lines as it may."""
    many = [b"%x" % n * 32 for n in range(1 << 14)]
    segments = [b"\n".join([b"a", b"b", *many, b"c", b"d"])] * 30
    cut = a_patch([0, 0, 0, 2, 0, 2 * len(many), 2, 0, 0, 0])
    size = len(b"a\nb\nc\nd")
    blocks = [a_block(cut, size, first=n, count=1) for n in range(len(segments))]
    return [a_whole_dump(*segments), b"".join(blocks)]


MEASURE = """
import resource, sys
from tests.unit import test_dump_series as t
files = getattr(t, sys.argv[1])()
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    base, *rest = [[file] for file in files]
    made = sum(map(len, t.replay(*rest, t.replay(base)) if rest else t.replay(base)))
except t.SeriesDamaged as error:
    made = error
print(made, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sep=";")
"""


@pytest.mark.parametrize(
    ("made", "end"),
    [
        (numbers_without_end, "it has too much in it"),
        (more_numbers_than_lines, "it has too many numbers"),
        (lines_without_end, "its old text is too long"),
        (as_many_lines_as_may_be, "a segment has another length"),
        (removed_lines_of_all, "210"),
    ],
)
def test_a_small_increment_takes_little_memory(made: Callable[[], list[bytes]], end: str) -> None:
    """What it takes is measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, made.__name__],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    said, kilobytes = done.stdout.split(";")
    assert (said, int(kilobytes) < 100_000) == (end, True), done.stdout


edits = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 20), st.lists(lines, max_size=5)))


@given(texts, st.lists(edits, max_size=6))
def test_every_dump_of_a_history_comes_back_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory,
    text: bytes,
    history: list[list[tuple[int, int, list[bytes]]]],
) -> None:
    series, known = Series(tmp_path_factory.mktemp("cache"), **SMALL), [text]
    series.add(text)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("ntt_backup.dump.removed.KEPT", 500)
        for changes in history:
            now = known[-1].split(b"\n")
            for where, removed, added in changes:
                at = where * len(now) // 100
                moved = [line + b"!" for line in now[at : at + removed]]
                now[at : at + removed] = added
                now += moved
            known.append(b"\n".join(now))
            series.add(known[-1])
        assert [series.text(number) for number in range(len(known))] == known
    assert decompressed(series.files[0]) == text


def decompressed(file: bytes) -> bytes:
    """What zstd alone makes of a full dump."""
    zstd = zstandard.ZstdDecompressor()
    return zstd.stream_reader(file, read_across_frames=True).read()


def one_percent_updated(old: list[bytes], at: set[int]) -> list[bytes]:
    return [row.replace(b"\tt", b"\tf") if n in at else row for n, row in enumerate(old)]


def one_percent_deleted(old: list[bytes], at: set[int]) -> list[bytes]:
    return [row for n, row in enumerate(old) if n not in at]


def one_percent_moved_near(old: list[bytes], at: set[int]) -> list[bytes]:
    rows = list(old)
    for n in at:
        rows[n : n + 40] = [*rows[n + 1 : n + 40], *rows[n : n + 1]]
    return rows


def one_percent_updated_and_moved_to_the_end(old: list[bytes], at: set[int]) -> list[bytes]:
    moved = [a_row(old[n][5:-1] + b"\t2026\n") for n in at]
    return [*one_percent_deleted(old, at), *moved]


def a_third_deleted_and_some(old: list[bytes], at: set[int]) -> list[bytes]:
    return one_percent_deleted(old[: len(old) // 3] + old[2 * len(old) // 3 :], at)


def two_of_three_ends_of_segments_deleted(old: list[bytes], at: set[int]) -> list[bytes]:
    """Three segments become one, or two that end where none did."""
    cutter = Cutter(size=1 << 16, most=1 << 18)
    segments = [*cutter.add(b"".join(old)), *cutter.end()]
    ends = {one.splitlines(keepends=True)[-1] for n, one in enumerate(segments) if n % 3 < 2}
    return [row for row in old if row not in ends]


def half_as_much_inserted(old: list[bytes], at: set[int]) -> list[bytes]:
    return [*old[: len(old) // 2], *[b"the same\n"] * (len(old) // 2), *old[len(old) // 2 :]]


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (one_percent_updated, 0.01),
        (one_percent_deleted, 0.01),
        (one_percent_moved_near, 0.01),
        (one_percent_updated_and_moved_to_the_end, 0.005),
        # Some segments of the fifty until the places are found again.
        (a_third_deleted_and_some, 0.05),
        (half_as_much_inserted, 0.01),
        (two_of_three_ends_of_segments_deleted, 0.01),
    ],
)
def test_what_has_changed_is_what_is_sent(
    tmp_path: Path, change: Callable[[list[bytes], set[int]], list[bytes]], share: float
) -> None:
    old, series = rows(40_000), Series(tmp_path, size=1 << 16, most=1 << 18)
    full = series.add(b"".join(old))
    at = set(random.Random(2).sample(range(len(old)), len(old) // 100))
    new = b"".join(change(old, at))
    assert series.add(new) < full * share
    assert series.text(1) == new


def test_removed_lines_are_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntt_backup.dump.removed.KEPT", 3 * (64 + 100))
    removed, names = Findable(), rows(20)
    for at in range(0, len(names), 2):
        removed.add(names[at : at + 2])
    assert removed.like(row.replace(b"\tt", b"\tf") for row in names) == [17, 18, 19]
    assert removed.lines([19, 17]) == [names[19], names[17]]
    for unknown in (16, -1, 20, 1 << 60):
        with pytest.raises(IndexError):
            removed.lines([unknown])
    # However often a patch names it.
    removed.add([bytes(400)])
    removed.add([bytes(100)])
    with pytest.raises(ValueError, match="too many"):
        removed.lines([21] * (MOST // 100 + 1))


def test_rows_in_another_order_ship_as_a_full_dump_does(tmp_path: Path) -> None:
    old, series = rows(10_000), Series(tmp_path, size=1 << 15, most=1 << 17)
    full = series.add(b"".join(old))
    assert decompressed(series.files[0]) == b"".join(old)
    new = b"".join(sorted(old))
    assert full * 0.9 < series.add(new) < full * 1.1
    assert series.text(1) == new


@given(st.integers(0, 10**6), st.integers(0, 1), st.integers(1, 255))
def test_damage_is_never_more_than_another_text(
    tmp_path_factory: pytest.TempPathFactory, where: int, number: int, mask: int
) -> None:
    old, series = rows(200), Series(tmp_path_factory.mktemp("cache"), size=2048, most=8192)
    series.add(b"".join(old))
    series.add(b"".join(old[:50] + old[55:] + rows(3, 2)))
    damaged = bytearray(series.files[number])
    damaged[where % len(damaged)] ^= mask
    series.files[number] = bytes(damaged)
    try:
        assert len(series.text(1)) < 100_000
    except SeriesDamaged:
        return


def test_a_form_says_how_pg_dump_is_called_and_sums_what_comes(tmp_path: Path) -> None:
    text = b"".join(rows(100))
    plain, series = Form(), Form(new=NewText(tmp_path))
    assert (plain.format, plain.options, plain.add(text), plain.end()) == (PLAIN, (), text, b"")
    assert (series.format, series.options) == (SERIES, ("--compress=0",))
    made = series.add(text) + series.end()
    assert decompressed(made) == text
    for total, data in ((plain.text, text), (series.text, text)):
        assert (total.size, total.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    series.close()
    assert list(tmp_path.iterdir()) == []


# --- the whole dump on this machine ---------------------------------------------------------------


def test_a_last_dump_that_is_damaged_here_makes_the_next_one_larger_and_no_worse(
    tmp_path: Path,
) -> None:
    old, series = b"".join(rows(20_000)), Series(tmp_path, size=1 << 15, most=1 << 17)
    full = series.add(old)
    path = tmp_path / "0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    new = b"".join(one_percent_deleted(rows(20_000), set(range(0, 20_000, 100))))
    assert full / 100 < series.add(new) < full / 10
    assert series.text(1) == new


def test_only_the_dump_that_is_asked_for_is_found_here(tmp_path: Path) -> None:
    right, other = (hashlib.sha256(text).hexdigest() for text in (b"two\n", b"one\n"))
    Series(tmp_path).add(b"one\n")
    (tmp_path / "0").rename(tmp_path / "1")
    Series(tmp_path).add(b"two\n")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    found = LastText.find(tmp_path, "0", right)
    assert found is not None
    assert found.text(0) == b"two\n"
    data = (tmp_path / "0").read_bytes()
    os.truncate(tmp_path / "0", 1)
    assert found.text(0) is None
    (tmp_path / "0").write_bytes(data)
    Form("0", 1, found).close()
    with pytest.raises(ValueError, match="closed file"):
        found.text(0)
    assert LastText.find(tmp_path, "1", other) is None
    assert LastText.find(tmp_path, "0", "00" * 32) is None
    (tmp_path / "0").write_bytes(data[:-40] + bytes(8) + data[-32:])
    assert LastText.find(tmp_path, "0", right) is None


def test_what_a_killed_dump_left_here_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    for name in (".new-1", ".new-2", "last"):
        (tmp_path / name).write_bytes(b"left")
    new = NewText(tmp_path)
    assert len(list(tmp_path.glob(".new-*"))) == 1
    new.give_up()
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_what_this_machine_cannot_keep_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullAtItsEnd(Full):
        def write(self, data: Any) -> int:
            return io.BytesIO.write(self, data)

    def add(new: NewText) -> None:
        new.add(Segment(bytes(32), 0, 4, b"frame"))

    ends: list[tuple[type[Full], Callable[[NewText], None]]] = [
        (Full, add),
        (FullAtItsEnd, lambda new: new.keep("1", "00" * 32)),
        (FullAtItsEnd, NewText.give_up),
    ]
    for kind, end in ends:
        new, file = NewText(tmp_path), kind()
        with monkeypatch.context() as patched:
            assert new._file is not None
            new._file.close()
            patched.setattr(new, "_file", file)
            end(new)
        assert file.closed
        assert list(tmp_path.iterdir()) == []


# --- what an increment needs ----------------------------------------------------------------------


def a_series(*bases: int) -> list[Stored]:
    """Dumps numbered from 1, each an increment on the one of that number; 0: a whole one."""
    return [
        replace(a_dump(format=SERIES, number=n, base=str(base) if base else ""), name=str(n))
        for n, base in enumerate(bases, 1)
    ]


def test_a_segment_of_a_series_is_as_its_head_says() -> None:
    frame = zstandard.ZstdCompressor().compress(b"row\n")
    old = [b"row\n", b"two\n", b"three\n", b"four\n", b"five\n"]
    made = patch.make(b"".join(old[:4]), b"row\n", Findable())

    def back(*numbers: int, data: bytes = frame) -> bytes:
        compress = zstandard.ZstdCompressor().compress
        whole, part, rest = series_format._WHOLE, series_format._PATCH, series_format._REST
        heads = [(whole, rest, 0, 0, len(compress(one)), len(one)) for one in old]
        head = series_format._HEAD.pack
        base = b"".join(head(*one) + compress(text) for one, text in zip(heads, old, strict=True))
        kind, *others = numbers
        return b"".join(replay([head((whole, part)[kind], rest, *others) + data], replay([base])))

    odd_heads = [
        series_format._HEAD.pack(magic, rest, 0, 0, len(frame), 4)
        for magic, rest in (
            (series_format._WHOLE + 2, series_format._REST),
            (series_format._WHOLE, series_format._REST + 1),
        )
    ]
    back_again = series_format._HEAD.pack(series_format._WHOLE, series_format._REST, 2, 1, 0, 0)
    assert back(0, 0, 0, len(frame), 4) == b"row\n"
    assert back(0, 0, 2, 0, 0, data=b"") == b"row\ntwo\n"
    assert back(1, 0, 4, len(made), 4, data=made) == b"row\n"
    for numbers, data in (
        ((0, 0, 1, len(frame), 4), frame),
        ((0, 3, 1, 0, 0), back_again),
        *(((0, 0, 0, 0, 0), odd + frame) for odd in odd_heads),
        ((0, 0, 0, len(frame), 3), frame),
        ((0, 0, 0, len(frame), 5), frame),
        ((0, 0, 0, len(frame) + 1, 4), frame),
        ((0, 0, 0, len(frame), MOST + 1), frame),
        ((0, 0, 0, 2 * MOST + 1, 4), frame),
        ((0, 0, 6, 0, 0), b""),
        ((1, 0, 5, len(made), 4), made),
        ((1, 2, 4, len(made), 4), made),
    ):
        with pytest.raises(SeriesDamaged):
            back(*numbers, data=data)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"size": 5}, "is not complete: it has 5 bytes"),
        ({"size": None}, "is not complete: it has nothing but its record"),
        ({"record": None}, "is not complete: it has 1000 bytes"),
        ({"name": "other"}, "is missing"),
        ({"record": replace(RECORD, number=9, format=SERIES)}, "is missing"),
        ({"record": RECORD}, "is no whole dump of a series"),
        ({"record": replace(RECORD, format=SERIES, base="1")}, "is no whole dump of a series"),
    ],
)
def test_an_increment_needs_a_whole_dump_that_is_older(change: dict[str, Any], why: str) -> None:
    base, one = a_series(0, 1)
    assert needed_by(one, {"1": base}) == [base, one]
    assert needed_by(base, {}) == [base]
    odd = replace(base, **change)
    with pytest.raises(BaseUnusable, match=f"^1 {why}"):
        needed_by(one, {odd.name: odd})


def test_an_increment_on_itself_or_an_increment_is_refused() -> None:
    for bases in ((0, 1, 2), (1,), (2, 1)):
        dumps = a_series(*bases)
        with pytest.raises(BaseUnusable):
            needed_by(dumps[-1], {one.name: one for one in dumps})


def holding(files: dict[str, bytes]) -> MemoryStore:
    """A store with these files, whose names may be any."""
    store = MemoryStore()
    store.files = files
    return store


def made_of(one: Stored, file: bytes, text: int) -> Stored:
    """A dump with this file. text: the bytes of what pg_dump wrote, as its record says."""
    assert one.record is not None
    sha256 = hashlib.sha256(file).hexdigest()
    record = replace(one.record, bytes=len(file), sha256=sha256, text_bytes=text)
    return replace(one, size=len(file), record=record)


def test_a_dump_for_which_there_is_no_memory_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object) -> Iterator[bytes]:
        yield b"some"
        raise MemoryError

    monkeypatch.setattr("ntt_backup.dump.stored_text.replay", without_memory)
    one = made_of(a_series(0)[0], b"", 9)
    found = DumpText(holding({one.name: b""}), [one])
    assert list(found) == [b"some"]
    assert (found.damaged, found.why) == (one.name, "it takes too much memory")


@pytest.mark.parametrize("short", ["neither", "base", "increment"])
def test_a_text_has_no_more_bytes_than_its_record_says(tmp_path: Path, short: str) -> None:
    """A few kilobytes may make terabytes; those of a base that are passed over, too."""
    text, series = b"".join(rows(50)), Series(tmp_path, size=512, most=2048)
    series.add(text)
    series.add(text)
    base, one = (
        made_of(dump, file, len(text) - (name == short))
        for dump, file, name in zip(
            a_series(0, 1), series.files, ("base", "increment"), strict=True
        )
    )
    found = DumpText(holding(dict(zip("12", series.files, strict=True))), [base, one])
    assert (b"".join(found) == text) == (short == "neither")
    if short != "neither":
        assert (found.damaged, found.why) == ("2", "it makes more than its record says")


def test_an_increment_that_cannot_be_kept_on_this_machine_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail() -> None:
        raise full

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    with pytest.raises(DumpFailed, match="cannot be kept on this machine") as caught:
        list(DumpText(holding({}), a_series(0, 1)))
    assert os.strerror(errno.ENOSPC) in caught.value.detail


def test_nonsense_in_a_dump_of_a_series_with_the_right_sum_is_told_of(tmp_path: Path) -> None:
    series = Series(tmp_path)
    series.add(b"".join(rows(50)))
    file = series.files[0][:-1]
    one = made_of(a_series(0)[0], file, 10_000)
    found = DumpText(holding({one.name: file}), [one])
    assert b"".join(found) == b""
    assert (found.damaged, found.why) == (one.name, "its end is missing")


# --- which dump is whole --------------------------------------------------------------------------


WHOLE = (0, 0, 1000)


@pytest.mark.parametrize(
    ("history", "full_every", "made"),
    [
        ([], 14, (0, 0)),
        ([WHOLE], 14, (1, 1)),
        ([WHOLE], 1, (0, 0)),
        # On the last one.
        ([WHOLE, (1, 1, 10), WHOLE, (3, 1, 10)], 3, (3, 2)),
        # Every so manyth is whole, whichever of the others were removed.
        ([WHOLE, (1, 1, 10), WHOLE, (3, 1, 10)], 2, (0, 0)),
        ([WHOLE, (1, 4, 10)], 6, (1, 5)),
        ([WHOLE, (1, 4, 10)], 5, (0, 0)),
        ([WHOLE, (1, 4, 10), (1, 2, 10)], 5, (0, 0)),
        # The next one after a large increment is whole.
        ([WHOLE, (1, 1, 250)], 14, (1, 2)),
        ([WHOLE, (1, 1, 251)], 14, (0, 0)),
        ([WHOLE, (1, 1, 251), (1, 2, 250)], 14, (1, 3)),
        ([(9, 1, 10)], 14, (0, 0)),
    ],
)
def test_which_dump_is_an_increment_and_on_what(
    history: list[tuple[int, int, int]], full_every: int, made: tuple[int, int]
) -> None:
    """history: of each dump its base, its step, and its bytes."""
    dumps = [
        replace(one, record=replace(one.record, step=step, bytes=size), size=size)
        for one, (_, step, size) in zip(a_series(*(h[0] for h in history)), history, strict=True)
        if one.record is not None
    ]
    plain = a_dump(number=99)
    for known in (dumps, [*dumps, plain], [plain, *dumps]):
        base, step = base_of(known, full_every)
        assert (base.number if base is not None else 0, step) == made


def test_an_increment_is_made_where_the_whole_dump_is_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "directory_of", lambda *_: tmp_path)
    settings = cast(RemoteConfig, SimpleNamespace(dump=SimpleNamespace(full_every=14)))
    Series(tmp_path).add(b"one\n")
    here = a_dump(format=SERIES, number=1, text_sha256=hashlib.sha256(b"one\n").hexdigest())
    name, step, old = kept_base(settings, "db", [replace(here, name="0")])
    assert old is not None
    assert (name, step, old.text(0)) == ("0", 1, b"one\n")
    old.close()
    assert kept_base(settings, "db", a_series(0)) == ("", 0, None)
    assert kept_base(settings, "db", []) == ("", 0, None)
