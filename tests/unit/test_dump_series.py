"""Dumps as a series: cut by content, increments on a whole dump, and what is kept and needed."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.config import RemoteConfig
from ntt_backup.dump import series as series_module
from ntt_backup.dump.record import PLAIN, SERIES, Stored
from ntt_backup.dump.series import (
    _HEAD,
    _START,
    MOST,
    Cutter,
    Form,
    KeptBase,
    NewBase,
    Writer,
    _compress,
    base_of,
    kept_base,
    replay,
)
from ntt_backup.dump.store import BaseUnusable, DumpText, needed_by
from ntt_backup.dump.toc import DumpDamaged
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
        self.kept = directory / "0"
        self._cutter = cutter

    def add(self, text: bytes, *, piece: int = 1000) -> int:
        """The size of one more dump."""
        old = KeptBase(self.kept, len(self.files[0]), 1) if self.files else None
        writer = Writer(old, Cutter(**self._cutter))
        parts = [writer.add(text[at : at + piece]) for at in range(0, len(text), piece)]
        self.files.append(b"".join([*parts, writer.end()]))
        if old is None:
            self.kept.write_bytes(self.files[0])
        else:
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


# --- increments -----------------------------------------------------------------------------------


def a_block(frame: bytes, size: int, *, first: int = 0, count: int = 0) -> bytes:
    return _HEAD.pack(*_START, 0, first, count, len(frame), size) + frame


def a_whole_dump(*segments: bytes) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return b"".join(a_block(compress(one), len(one)) for one in segments)


def content_without_end() -> list[bytes]:
    """A frame that states a terabyte."""
    stated = b"\x28\xb5\x2f\xfd\xc0\xa8" + (1 << 40).to_bytes(8, "little")
    return [a_block(stated + b"\x29\0\0hello", MOST)]


def a_window_of_two_gibibytes() -> list[bytes]:
    stated = b"\x28\xb5\x2f\xfd\x80\xa8" + MOST.to_bytes(4, "little")
    return [a_block(stated + b"\x02\0\x10a" * 40, MOST)]


def as_much_as_may_be() -> list[bytes]:
    """The longest segments, frames and dictionaries."""
    longest = [random.Random(n).randbytes(MOST) for n in range(2)] * 3
    dictionary = zstandard.ZstdCompressionDict(
        b"".join(longest[:4]), dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
    frame = zstandard.ZstdCompressor(level=1, dict_data=dictionary).compress(longest[0])
    again = [a_block(frame, MOST, first=first, count=4) for first in (0, 2)]
    return [a_whole_dump(*longest), b"".join(again)]


def far_ahead() -> list[bytes]:
    """Bytes that pass over a gigabyte."""
    frame = zstandard.ZstdCompressor().compress(b"row")
    return [a_whole_dump(bytes(MOST)) * 256, a_block(frame, 3, first=255, count=1)]


REFUSED = "decompression error: Frame requires too much memory for decoding"
MEASURE = """
import resource, sys
from tests.unit import test_dump_series as t
files = getattr(t, sys.argv[1])()
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    base, *rest = [[file] for file in files]
    made = sum(map(len, t.replay(*rest, t.replay(base)) if rest else t.replay(base)))
except t.DumpDamaged as error:
    made = error
print(made, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sep=";")
"""


@pytest.mark.parametrize(
    ("made", "end"),
    [
        (content_without_end, "a segment has another length"),
        (a_window_of_two_gibibytes, REFUSED),
        (as_much_as_may_be, str(2 * MOST)),
        (far_ahead, "3"),
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


def another_order(old: list[bytes], at: set[int]) -> list[bytes]:
    return sorted(old)


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (one_percent_updated, 0.01),
        (one_percent_deleted, 0.01),
        (one_percent_moved_near, 0.01),
        (one_percent_updated_and_moved_to_the_end, 0.015),
        # Some segments of the fifty until the places are found again.
        (a_third_deleted_and_some, 0.05),
        (half_as_much_inserted, 0.01),
        (two_of_three_ends_of_segments_deleted, 0.01),
        (another_order, 1.1),
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
    except DumpDamaged:
        return


def test_a_form_says_how_pg_dump_is_called_and_sums_what_comes(tmp_path: Path) -> None:
    text = b"".join(rows(100))
    plain, series = Form(series=False), Form(series=True, new=NewBase(tmp_path / "new"))
    assert (plain.format, plain.add(text), plain.end()) == (PLAIN, text, b"")
    assert series.format == SERIES
    made = series.add(text) + series.end()
    assert decompressed(made) == text
    for one in (plain, series):
        assert (one.text_bytes, one.text_sha256) == (len(text), hashlib.sha256(text).hexdigest())
    series.keep("1")
    series.close()
    kept = tmp_path / "new" / "1"
    assert kept.read_bytes() == made
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept, kept.parent)] == [0o600, 0o700]
    for name, left in ((None, "1"), ("2", "2")):
        again = Form(series=True, new=NewBase(tmp_path / "new"))
        again.end()
        if name is not None:
            again.keep(name)
        again.close()
        assert [path.name for path in kept.parent.iterdir()] == [left]


# --- the whole dump on this machine ---------------------------------------------------------------


def test_a_last_dump_that_is_damaged_here_makes_the_next_one_larger_and_no_worse(
    tmp_path: Path,
) -> None:
    old, series = b"".join(rows(20_000)), Series(tmp_path, size=1 << 15, most=1 << 17)
    full = series.add(old)
    data = bytearray(series.files[0])
    data[len(data) // 2] ^= 1
    series.kept.write_bytes(data)
    new = b"".join(one_percent_deleted(rows(20_000), set(range(0, 20_000, 100))))
    assert full / 100 < series.add(new) < full / 10
    assert series.text(1) == new


def test_a_file_that_is_not_the_whole_dump_is_not_used(tmp_path: Path) -> None:
    series = Series(tmp_path)
    series.add(b"one\n")
    (whole,) = series.files
    for data, size in ((whole, 1), (whole[:-1], len(whole)), (bytes(99), 99), (b"", 1)):
        series.kept.write_bytes(data)
        with pytest.raises(ValueError, match="not what was sent"):
            KeptBase(series.kept, size, 1)
    series.kept.write_bytes(whole)
    found = KeptBase(series.kept, len(whole), 1)
    assert found.text(0, 1) == b"one\n"
    os.truncate(series.kept, 1)
    assert found.text(0, 1) is None
    Form(series=True, old=found).close()
    with pytest.raises(ValueError, match="closed file"):
        found.text(0, 1)


def test_what_a_killed_dump_left_here_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    for name in (".new-1", ".new-2", "last"):
        (tmp_path / name).write_bytes(b"left")
    new = NewBase(tmp_path)
    assert len(list(tmp_path.glob(".new-*"))) == 1
    new.close()
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

    ends: list[tuple[type[Full], Callable[[NewBase], None]]] = [
        (Full, lambda new: new.add(b"frame")),
        (FullAtItsEnd, lambda new: new.keep("1")),
        (FullAtItsEnd, lambda new: None),
    ]
    for kind, end in ends:
        new, file = NewBase(tmp_path), kind()
        with monkeypatch.context() as patched:
            assert new._file is not None
            new._file.close()
            patched.setattr(new, "_file", file)
            end(new)
            new.close()
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
    old = [b"row\n", b"two\n", b"three\n", b"four\n", b"five\n"]
    frame, base = zstandard.ZstdCompressor().compress(b"row\n"), a_whole_dump(*old)
    size, flipped = len(frame), bytearray(_compress(b"row\n" * 9, b""))
    flipped[-1] ^= 1

    def back(*numbers: int, data: bytes = frame, start: Sequence[int] = _START) -> bytes:
        return b"".join(replay([_HEAD.pack(*start, 0, *numbers) + data], replay([base])))

    assert back(0, 0, size, 4) == back(7, 0, size, 4) == b"row\n"
    for first, count in ((0, 1), (0, 4), (1, 4)):
        data = _compress(b"row\n", b"".join(old[first : first + count]))
        assert back(first, count, len(data), 4, data=data) == b"row\n"
    ahead, back_again = (a_block(frame, 4, first=first, count=1) for first in (2, 1))
    wrong: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((0, 0, size, 4), {"start": [_START[0] + 1, _START[1]]}),
        ((0, 0, size, 4), {"start": [_START[0], _START[1] + 1]}),
        ((0, 0, size, 3), {}),
        ((0, 0, size, 5), {}),
        ((0, 0, size - 1, 4), {"data": frame[:-1]}),
        ((0, 0, size + 1, 4), {}),
        ((0, 0, size + 1, 4), {"data": frame + b"x"}),
        ((0, 0, 2 * size, 4), {"data": frame * 2}),
        ((0, 0, len(flipped), 36), {"data": bytes(flipped)}),
        ((0, 0, 0, 0), {"data": b""}),
        ((0, 0, size, MOST + 1), {}),
        ((0, 0, 2 * MOST + 1, 4), {}),
        ((0, 5, size, 4), {}),
        ((2, 4, size, 4), {}),
        ((5, 1, size, 4), {}),
        (((1 << 32) - 1, 1, size, 4), {}),
        ((2, 1, size, 4), {"data": frame + back_again}),
    ]
    for numbers, options in wrong:
        with pytest.raises(DumpDamaged):
            back(*numbers, **options)
    with pytest.raises(DumpDamaged, match="fewer segments"):
        list(replay([ahead]))


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


def holding(files: dict[str, bytes]) -> MemoryStore:
    """A store with these files, whose names may be any."""
    store = MemoryStore()
    store.files = files
    return store


def made_of(one: Stored, file: bytes, text: bytes, **changes: Any) -> Stored:
    """A dump with this file. text: what pg_dump wrote."""
    assert one.record is not None
    values: dict[str, Any] = {
        "bytes": len(file),
        "sha256": hashlib.sha256(file).hexdigest(),
        "text_bytes": len(text),
        "text_sha256": hashlib.sha256(text).hexdigest(),
    }
    return replace(one, size=len(file), record=replace(one.record, **{**values, **changes}))


def test_a_dump_for_which_there_is_no_memory_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object) -> Iterator[bytes]:
        yield b"some"
        raise MemoryError

    monkeypatch.setattr("ntt_backup.dump.store.replay", without_memory)
    one = made_of(a_series(0)[0], b"", b"something")
    found = DumpText(holding({one.name: b""}), [one])
    assert list(found) == [b"some"]
    assert (found.damaged, found.why) == (one.name, "it takes too much memory")


@pytest.mark.parametrize(
    ("changed", "changes", "damaged", "why"),
    [
        ("", {}, "", ""),
        # A few kilobytes may make terabytes; those of a base that are passed over, too.
        ("1", {"text_bytes": 2000}, "2", "its content is longer than its record says"),
        ("2", {"text_bytes": 2000}, "2", "its content is longer than its record says"),
        ("2", {"text_sha256": "ab" * 32}, "2", "its SHA-256 differs from its record"),
        ("2", {"sha256": "ab" * 32}, "2", "its SHA-256 differs from its record"),
        ("1", {"sha256": "ab" * 32}, "1", "its SHA-256 differs from its record"),
    ],
)
def test_a_text_is_what_the_records_say(
    tmp_path: Path, changed: str, changes: dict[str, Any], damaged: str, why: str
) -> None:
    text, series = b"".join(rows(50)), Series(tmp_path, size=512, most=2048)
    series.add(text)
    series.add(text)
    needed = [
        made_of(one, file, text, **(changes if one.name == changed else {}))
        for one, file in zip(a_series(0, 1), series.files, strict=True)
    ]
    found = DumpText(holding(dict(zip("12", series.files, strict=True))), needed)
    assert text.startswith(b"".join(found))
    assert (found.damaged, found.why) == (damaged, why)


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
    one = made_of(a_series(0)[0], file, b"")
    found = DumpText(holding({one.name: file}), [one])
    assert b"".join(found) == b""
    assert (found.damaged, found.why) == (one.name, "it ends within its data")


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
    monkeypatch.setattr(series_module, "_directory", lambda *_: tmp_path)
    settings = cast(RemoteConfig, SimpleNamespace(dump=SimpleNamespace(full_every=14)))
    series = Series(tmp_path)
    series.add(b"one\n")
    here = a_dump(format=SERIES, number=1, bytes=len(series.files[0]))
    found = kept_base(settings, "db", [replace(here, name="0")])
    assert found is not None
    assert (found.name, found.step, found.text(0, 1)) == ("0", 1, b"one\n")
    found.close()
    assert kept_base(settings, "db", [replace(here, name="0", size=1)]) is None
    assert kept_base(settings, "db", a_series(0)) is None
    assert kept_base(settings, "db", []) is None
