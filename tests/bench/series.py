"""What an increment of a series of dumps takes, beside the least that what is new in it takes.

A text like that of pg_dump is made of rows, and written as a whole dump. Then 1 % of them, chosen
at random, are deleted, changed where they stand, changed and moved (as PostgreSQL does where a page
has no room: to the end, or to any page that has some), or added. The floor is that of a program
that reads the whole dump only once, and knows of it what came so far: the random bytes of names
that it has not seen, those of microseconds, and which rows they are. Start it as `python -m
tests.bench.series`.

With --url an empty database is given such rows, and pg_dump of it is measured, day by day, until
the next dump is whole: 1 % of the rows are marked in batches, as by a run, and the table is
vacuumed after each dump.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from math import log2
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from ntt_backup.catalog.connection import connect
from ntt_backup.catalog.schema import init_db
from ntt_backup.dump import pg_programs
from ntt_backup.dump.series import KeptBase, Writer

_SHARE: Final = 100
_AT_ONCE: Final = 500
_PIECE: Final = 1 << 16
_MICROSECONDS: Final = 10**6
# Random bytes of a name, and of a time.
_NAME: Final = 32
_TIME: Final = log2(_MICROSECONDS) / 8
_BEGUN: Final = datetime(2026, 3, 2, tzinfo=UTC)
_DAYS: Final = 13
_BATCH: Final = 100
_INSERT: Final = """
    insert into public.blobs (blobid, size, created_at)
    select encode(sha256(random()::text::bytea), 'hex'), (random() * 1000000)::int,
        timestamptz '2026-03-02' + interval '1 s' * (n / 10.0 + random())
    from generate_series(1, %s) as n
"""
_CHOOSE: Final = """
    select array_agg(blobid) from (
        select blobid, row_number() over (order by random()) as n
        from public.blobs
        where remote_copied is not true order by n limit %s
    ) as chosen group by n / %s
"""
_MARK: Final = """
    update public.blobs set remote_copied = true, remote_last_checked = clock_timestamp()
    where blobid = any(%s)
"""


class _Rows:
    """Makes rows of a catalog's table, each second a few."""

    def __init__(self) -> None:
        self._chance = random.Random(5)

    def made(self, number: int) -> str:
        """Returns what stays of a row."""
        links = self._chance.choice((1, 1, 1, 2))
        return f"{self._chance.randbytes(_NAME).hex()}\t{links}\t{self._time(number // 10)}"

    def line(self, made: str, second: int | None) -> bytes:
        """Returns a row that was copied at some second, or is pending, as pg_dump writes it."""
        copied = "f\t\\N" if second is None else f"t\t{self._time(second)}"
        line = f"{made}\t{copied}\n".encode()
        return b"\0" + len(line).to_bytes(4, "little") + line

    def _time(self, second: int) -> str:
        micro = self._chance.randrange(_MICROSECONDS)
        return f"{_BEGUN + timedelta(seconds=second, microseconds=micro):%Y-%m-%d %H:%M:%S.%f}+00"


def measure(count: int, home: Path, *, copied: bool) -> Table:
    """Writes a whole dump and its increments into home. copied: all rows were copied once."""
    rows, chance = _Rows(), random.Random(7)
    made = [rows.made(number) for number in range(count)]
    before = [
        rows.line(one, 600 + number // 10 if copied else None) for number, one in enumerate(made)
    ]
    full, whole_s, base = _whole(home, _joined(before))
    changed = sorted(chance.sample(range(count), count // _SHARE))
    new = {
        number: rows.line(made[number], count + turn // 10) for turn, number in enumerate(changed)
    }
    left = [line for number, line in enumerate(before) if number not in new]
    added = [rows.line(rows.made(count + number), None) for number in range(len(changed))]
    share = 1 / _SHARE
    which = -(share * log2(share) + (1 - share) * log2(1 - share)) * count / 8
    anywhere = sorted(
        (chance.random() * count if number in new else number, new.get(number, line))
        for number, line in enumerate(before)
    )
    # Of half of them the name comes before the row that it was removed from.
    unseen = (_NAME + _TIME) / 2
    cases = {
        "deleted": (left, which),
        "changed in place": (
            [new.get(number, line) for number, line in enumerate(before)],
            len(changed) * _TIME + which,
        ),
        "changed, moved to the end": (
            left + list(new.values()),
            len(changed) * _TIME + which,
        ),
        "changed, moved anywhere": (
            [line for _, line in anywhere],
            len(changed) * (_TIME + unseen) + 2 * which,
        ),
        "new": (before + added, len(changed) * (_NAME + _TIME)),
    }
    rows_are = f"{count:,} rows, {'all' if copied else 'none'} copied"
    table = Table(title=_title(rows_are, full / count, whole_s), title_justify="left")
    for column in ("1 % of the rows", "bytes a row", "of a whole dump", "floor", "CPU"):
        table.add_column(column, justify="right" if table.columns else "left")
    for name, (lines, floor) in cases.items():
        size, seconds = _write(base, _joined(lines), home / "increment")
        shares = (f"{part / full:.2%}" for part in (size, floor))
        table.add_row(name, f"{size / len(changed):.1f}", *shares, f"{seconds:.1f} s")
    return table


def measure_server(url: str, count: int, home: Path) -> Table:
    """Makes a catalog, and writes a whole dump and its increments into home."""
    with connect(url, "bench") as conn:
        init_db(conn, "remote")
        conn.execute(_INSERT, (count,))
        conn.execute("vacuum analyze public.blobs")
        program = pg_programs.find(None, conn.info.server_version).pg_dump
        argv = [str(program), "-Fc", "--compress=0", f"--dbname={url}"]

        def dumped() -> Iterator[bytes]:
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
                while child.stdout is not None and (piece := child.stdout.read(_PIECE)):
                    yield piece
            assert child.returncode == 0

        full, whole_s, base = _whole(home, dumped())
        title = _title(f"{count:,} rows", full / count, whole_s)
        table = Table(title=title, title_justify="left")
        for column in ("1 % marked, day", "bytes a row", "of a whole dump", "CPU"):
            table.add_column(column, justify="right")
        for day in range(1, _DAYS + 1):
            chosen = conn.execute(_CHOOSE, (count // _SHARE, _BATCH)).fetchall()
            for (batch,) in chosen:
                conn.execute(_MARK, (batch,))
            size, seconds = _write(base, dumped(), home / "increment")
            cells = (f"{size * _SHARE / count:.1f}", f"{size / full:.2%}", f"{seconds:.1f} s")
            table.add_row(str(day), *cells)
            conn.execute("vacuum public.blobs")
    return table


def _title(rows: str, size: float, seconds: float) -> str:
    return f"{rows}: {size:.1f} bytes a row, {seconds:.1f} s of CPU"


def _joined(lines: list[bytes]) -> Iterator[bytes]:
    return (b"".join(lines[at : at + _AT_ONCE]) for at in range(0, len(lines), _AT_ONCE))


def _whole(home: Path, text: Iterable[bytes]) -> tuple[int, float, KeptBase]:
    """Writes a whole dump; returns its bytes, seconds of CPU, and the dump for increments."""
    size, seconds = _write(None, text, home / "whole")
    return size, seconds, KeptBase(home / "whole", size, 1)


def _write(base: KeptBase | None, text: Iterable[bytes], to: Path) -> tuple[int, float]:
    """Writes a dump of a text into a file; returns its bytes and the seconds of CPU."""
    writer, begun = Writer(base), time.process_time()
    with to.open("wb") as file:
        for piece in text:
            file.write(writer.add(piece))
        file.write(writer.end())
    return to.stat().st_size, time.process_time() - begun


def main() -> int:
    """Writes dumps of made up catalogs, and their increments."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.series", description=main.__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--url", help="of an empty database, which is filled")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    with tempfile.TemporaryDirectory() as name:
        if options.url:
            console.print(measure_server(options.url, options.rows, Path(name)))
            return 0
        for copied in (False, True):
            console.print(measure(options.rows, Path(name), copied=copied))
    return 0


if __name__ == "__main__":
    sys.exit(main())
