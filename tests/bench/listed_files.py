"""What files that go by their paths cost, beside blobs whose names are hashes.

    python -m tests.bench.listed_files register --rows 42000000 --disk DIRECTORY
    python -m tests.bench.listed_files send --files 100000 --rounds 3

`register` makes a table of an application with so many rows, and copies what a query gives into an
empty catalog: all of them, then nothing new, then all rows again. `send` copies so many small files
to a directory, in turns: by their paths with `run`, which registers and reads them first; and by
their names with `scan` and `run`. The time and the CPU are of our processes, without PostgreSQL's.
A second run with nothing new follows each. A server of its own is made below DIRECTORY.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psycopg
from blake3 import blake3

from ntt_backup.audit.register import register_files
from ntt_backup.catalog.connection import connect
from ntt_backup.catalog.origin_passes import Registration
from ntt_backup.catalog.schema import init_db
from ntt_backup.config import StoreConfig
from ntt_backup.demo.processes import Interrupts
from tests.helpers.postgres_server import Postgres

_SETTINGS: Final = ("synchronous_commit=off", "shared_buffers=512MB", "max_wal_size=8GB")
_READER: Final = "bench_reader"
_QUERY: Final = "select id as key, path, size, sum as checksum from files"
_TABLE: Final = (
    "create table files (id bigint generated always as identity primary key, path text,"
    " size bigint, sum text)"
)
_SIZES: Final = (200, 900, 2000, 5000, 9000, 20_000)


class Cost(NamedTuple):
    """Seconds of wall time and of CPU."""

    wall: float
    cpu: float

    def plus(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)


@contextmanager
def server_below(disk: Path) -> Iterator[tuple[Path, Postgres]]:
    """Gives a new directory below a directory, and a server of PostgreSQL in it."""
    home = Path(tempfile.mkdtemp(prefix="ntt-bench-", dir=disk))
    home.chmod(0o711)
    sockets = home / "sockets"
    sockets.mkdir()
    sockets.chmod(0o777)
    server = Postgres(home, Interrupts(), _SETTINGS, sockets)
    try:
        server.start()
        yield home, server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def url_of(server: Postgres, database: str, user: str = "postgres") -> str:
    """Returns the connection string of a database of a server."""
    return psycopg.conninfo.make_conninfo(server.url_of(database), user=user)


def make_database(server: Postgres, name: str) -> None:
    """Makes an empty database."""
    with psycopg.connect(url_of(server, "postgres"), autocommit=True) as conn:
        conn.execute(psycopg.sql.SQL("create database {}").format(psycopg.sql.Identifier(name)))


def _make_application(server: Postgres, fill: str) -> None:
    """Makes the database of an application. fill: the statement that fills its table."""
    make_database(server, "application")
    with psycopg.connect(url_of(server, "application"), autocommit=True) as conn:
        conn.execute(f"create role {_READER} login".encode())
        conn.execute(_TABLE)
        conn.execute(fill.encode())
        conn.execute(f"grant select on files to {_READER}".encode())
        conn.execute("vacuum analyze files")


def register(rows: int, disk: Path) -> None:
    fill = (
        "insert into files (path, size, sum) select 'uploads/' || left(md5(i::text), 2) || '/' ||"
        " md5(i::text) || '.bin', 1000 + i % 10000, encode(sha256(i::text::bytea), 'hex')"
        f" from generate_series(1, {rows}) as i"
    )
    with server_below(disk) as (_, server):
        _make_application(server, fill)
        make_database(server, "catalog")
        given = {"url": url_of(server, "application", _READER), "query": _QUERY}
        settings = StoreConfig.model_validate(
            {"catalog": {"from": given}, "source": {"root": "/srv"}}
        )
        with connect(url_of(server, "catalog"), "bench") as conn:
            init_db(conn, "remote")
            for what, whole in (("all", False), ("nothing new", False), ("all again", True)):
                began, cpu = time.monotonic(), time.process_time()
                done: Registration = register_files(conn, settings, whole=whole)
                took = time.monotonic() - began
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(
                    f"{what}: {done.rows:,} rows, {done.registered:,} new, in {took:.1f} s"
                    f" ({done.rows / took:,.0f} a second), {time.process_time() - cpu:.1f} s of our"
                    f" CPU, {memory} MiB at most",
                    flush=True,
                )


def send(files: int, rounds: int, disk: Path) -> None:
    with server_below(disk) as (home, server):
        listing = _make_files(home, files)
        _make_application(server, "select 1")
        with (
            psycopg.connect(url_of(server, "application"), autocommit=True) as conn,
            conn.cursor().copy("copy files (path, size) from stdin") as into,
        ):
            for row in listing:
                into.write_row(row)
        costs: dict[str, list[Cost]] = {"by hash": [], "by path": []}
        for nth in range(rounds):
            for kind, found in costs.items():
                cost, again = _copy(home, server, kind, nth)
                found.append(cost)
                print(
                    f"{kind}: {cost.wall:.2f} s, {cost.cpu / files * 1e6:.1f} us of CPU a file;"
                    f" nothing new: {again.wall:.2f} s",
                    flush=True,
                )
        for name in Cost._fields:
            by_path, by_hash = (
                median(getattr(one, name) for one in costs[kind]) for kind in ("by path", "by hash")
            )
            print(f"{name}: by path is {by_path / by_hash:.2f} of by hash")


def _make_files(home: Path, count: int) -> list[tuple[str, int]]:
    chance, listing = random.Random(1), []
    for nth in range(count):
        content = chance.randbytes(chance.choice(_SIZES))
        blobid = blake3(content).hexdigest()
        path = f"{nth // 1000:04}/{nth}.bin"
        for place in (
            home / "by-hash" / blobid[:2] / blobid[2:4] / blobid,
            home / "files" / path,
        ):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        listing.append((path, len(content)))
    return listing


def _copy(home: Path, server: Postgres, kind: str, nth: int) -> tuple[Cost, Cost]:
    """Returns what it costs to register and copy all, and what a second run costs."""
    by_path, name = kind == "by path", f"{kind.replace(' ', '_')}_{nth}"
    make_database(server, name)
    target = home / f"target-{name}"
    target.mkdir()
    tables: dict[str, dict[str, object]] = {
        "catalog": {"url": url_of(server, name)},
        "source": {"root": str(home / ("files" if by_path else "by-hash")), "grace": 0},
        "remote": {"url": target.as_uri()},
        "run": {"workers": 2, "skip_pgdump": True},
        "log": {"jsonl": str(home / f"{name}.jsonl")},
        "lock": {"file": str(home / f"{name}.lock")},
        "host": {"key_file": str(home / "host.key")},
    }
    if by_path:
        url = url_of(server, "application", _READER)
        tables["catalog.from"] = {"url": url, "query": _QUERY}
    config = write_settings(home / f"{name}.toml", tables)
    call(config, "init-db")
    cost = call(config, "run") if by_path else call(config, "scan").plus(call(config, "run"))
    again = call(config, "run")
    shutil.rmtree(target)
    return cost, again


def write_settings(config: Path, tables: Mapping[str, Mapping[str, object]]) -> Path:
    """Writes the file of the settings, and returns its path."""
    config.write_text(
        "".join(
            f"[{table}]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            for table, values in tables.items()
        )
    )
    return config


def call(config: Path, *command: str) -> Cost:
    """Calls a command of the program, and returns what it and all that it starts cost."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    argv = [sys.executable, "-m", "ntt_backup", "--config", str(config), *command]
    subprocess.run(argv, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.monotonic() - began, cpu)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.listed_files",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["register", "send"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path("/dev/shm"), metavar="DIRECTORY")
    given = parser.parse_args()
    if given.what == "register":
        register(given.rows, given.disk)
    else:
        send(given.files, given.rounds, given.disk)
    return 0


if __name__ == "__main__":
    sys.exit(main())
