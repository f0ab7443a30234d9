"""What `snapshots` takes: directories in two states, and what has changed between them."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ntt_backup.snapshot.format.manifest import ManifestReader
from tests.bench.contender import Failed

PAGE: Final = 8192
_ROWS: Final = 61
_TABLES: Final = 10
# Bytes of a row of pgbench_accounts, with its part of the index.
_ROW_BYTES: Final = 150
# A page's head, of which the first bytes are the place in the log; and what is not the same in all
# rows: so much that zstd shrinks such a table to a seventh.
_HEAD: Final = 24
_LSN: Final = 8
_CHANCE: Final = 14
_ROW: Final = struct.Struct(f"<{_CHANCE}sII84s26x")
_FILLER: Final = b" " * 84
# Two states may be made in the same second.
_RSYNC: Final = ("rsync", "-a", "--inplace", "--delete", "--modify-window=-1")


def pages(megabytes: int, *, stretch: bool) -> Callable[[Path], tuple[Path, ...]]:
    """Returns what makes a file of pages like a table's, and the same with 1 % of them changed."""

    def make(top: Path) -> tuple[Path, ...]:
        chance = random.Random(7)
        count = megabytes * 10**6 // PAGE
        if stretch:
            first = chance.randrange(count - count // 100)
            changed = set(range(first, first + count // 100))
        else:
            changed = set(chance.sample(range(count), count // 100))
        states = top / "before", top / "after"
        for state in states:
            state.mkdir(parents=True)
        with (states[0] / "table").open("wb") as one, (states[1] / "table").open("wb") as two:
            for number in range(count):
                page = _page(number, chance.randbytes(_ROWS * _CHANCE))
                one.write(page)
                if number in changed:
                    page[:_LSN] = chance.randbytes(_LSN)
                    page[_HEAD : _HEAD + _CHANCE] = chance.randbytes(_CHANCE)
                two.write(page)
        later = time.time() + 1
        os.utime(states[1] / "table", (later, later))
        return states

    return make


def _page(number: int, noise: bytes) -> bytearray:
    rows = (
        _ROW.pack(noise[row * _CHANCE : (row + 1) * _CHANCE], number * _ROWS + row, number, _FILLER)
        for row in range(_ROWS)
    )
    page = bytearray(_HEAD) + b"".join(rows)
    return page + bytes(PAGE - len(page))


def small_files(count: int) -> Callable[[Path], tuple[Path, ...]]:
    """Returns what makes so many files of up to some KB, in one state."""

    def make(top: Path) -> tuple[Path, ...]:
        return (tree_files(top, count),)

    return make


def tree_files(top: Path, count: int, leaves: int = 0, size: float = 7.3) -> Path:
    """Makes files of random bytes below top, in directories, of which a hundredth stands above the
    others. leaves: how many have files, by default one for a hundred files; size: the mean of the
    logarithms of the files' sizes, by default half of them are below 1.5 KB.
    """
    chance = random.Random(3)
    leaves = leaves or -(-count // 100)
    last = None
    for number in range(count):
        leaf = number * leaves // count
        directory = top / f"{leaf // 100:02}" / f"{leaf % 100:02}"
        if leaf != last:
            directory.mkdir(parents=True)
            last = leaf
        length = min(200_000, int(chance.lognormvariate(size, 1.6)))
        (directory / str(number)).write_bytes(chance.randbytes(length))
    return top


def database(megabytes: int) -> Callable[[Path], tuple[Path, ...]]:
    """Returns what makes the data directory of a PostgreSQL that does not run, with ten tables; and
    the same after 1 % of each was deleted, in one stretch, and vacuumed.
    """

    def make(top: Path) -> tuple[Path, ...]:
        rows = megabytes * 10**6 // _TABLES // _ROW_BYTES
        server = _Server(top / "server")
        states = top / "before", top / "after"
        columns = "aid int, bid int, abalance int, filler char(84)"
        names = [f"accounts_{number}" for number in range(_TABLES)]
        with server:
            for name in names:
                server.ask(f"create table {name} ({columns})")
                numbers = f"generate_series(1, {rows}) n"
                server.ask(f"insert into {name} select n, n / 100000, 0, '' from {numbers}")
                server.ask(f"alter table {name} add primary key (aid)")
                server.ask(f"vacuum freeze {name}")
        mirror(server.data, states[0])
        with server:
            for name in names:
                first, end = rows // 3, rows // 3 + rows // 100
                server.ask(f"delete from {name} where aid between {first} and {end}")
                server.ask(f"vacuum {name}")
        mirror(server.data, states[1])
        shutil.rmtree(server.data)
        return states

    return make


class _Server:
    """A PostgreSQL of the system's, by a user who may run it; it runs inside `with`."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True)
        installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
        if not installed:
            raise Failed("no PostgreSQL in /usr/lib/postgresql")
        self._programs = installed[0].parent
        self._home, self.data = home, home / "data"
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(home, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._run("initdb", "--auth=trust", "--no-sync", "-U", "bench", "-D", str(self.data))
        settings = f"listen_addresses=''\nunix_socket_directories='{home}'\nfsync=off\n"
        settings += "wal_level=minimal\nmax_wal_senders=0\nmax_wal_size=64MB\nmin_wal_size=32MB\n"
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.write(settings)

    def __enter__(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-l", str(self._home / "log"), "-w", "start")

    def __exit__(self, *_: object) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", "fast", "-w", "stop")

    def ask(self, sql: str) -> None:
        """Runs a statement."""
        self._run("psql", "-Xq", "-h", str(self._home), "-U", "bench", "-c", sql, "postgres")

    def _run(self, program: str, *argv: str) -> None:
        with (self._home / "said").open("w+") as said:
            done = subprocess.run(
                [str(self._programs / program), *argv],
                cwd=self._home,
                stdout=said,
                stderr=said,
                check=False,
                **self._as,
            )
        if done.returncode:
            raise Failed(f"{program}: {(self._home / 'said').read_text()}")


def mirror(state: Path, to: Path) -> None:
    """Makes a directory the same as a state; what is the same already is not touched."""
    to.mkdir(parents=True, exist_ok=True)
    subprocess.run([*_RSYNC, f"{state}/", str(to)], check=True)
    # What is taken next must not look as if it was still being written.
    time.sleep(0.1)


def different(state: Path, found: Path, ignored: Sequence[str] = ()) -> None:
    """Raises Failed where a directory differs from a state, but for files of the names ignored."""
    argv = ["diff", "-rq", "--no-dereference", *(f"--exclude={name}" for name in ignored)]
    argv += [str(state), str(found)]
    said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    if said:
        raise Failed(said)


def changed_super_blocks(manifest: Path, data: Path, states: Sequence[Path]) -> int:
    """Returns the bytes of the super blocks that hold what has changed between two states."""
    wanted: dict[tuple[int, int, int], int] = {}
    with manifest.open("rb") as file:
        for entry in ManifestReader(iter(lambda: file.read(1 << 20), b"")).entries():
            name = os.path.relpath(f"/{entry.path}", data)
            old, new = (state / name for state in states)
            if not old.is_file() or (new.is_file() and _same(old, new, 0, entry.size)):
                continue
            for extent in entry.extents:
                end = extent.start + extent.length
                for start in range(extent.start, end, entry.block or extent.length):
                    stop = min(end, start + (entry.block or extent.length))
                    if not new.is_file() or not _same(old, new, start, stop):
                        place = extent.version, extent.pack, extent.offset
                        wanted[place] = extent.stored
                        break
    return sum(wanted.values())


def _same(old: Path, new: Path, start: int, stop: int) -> bool:
    with old.open("rb") as one, new.open("rb") as other:
        one.seek(start)
        other.seek(start)
        return one.read(stop - start) == other.read(stop - start)
