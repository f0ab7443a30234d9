"""What it costs to check what lies on a target, beside the least that the work takes.

    python -m tests.bench.checks idle --names 1000000
    python -m tests.bench.checks prove --blobs 30000 --disk DIRECTORY --cold

`idle` is a day without news: `scan` and `reconcile` of so many names, of a store and a target on
this machine that agree, in directories of about 100; CPU of all processes, PostgreSQL's too, in
microseconds a name.

`prove` is `verify`, and `reconcile --adopt` of what nobody has marked, of so many blobs below 10 KB
on a target of this machine. Beside them, in turns: `b3sum` of the target's tree with one thread and
with all; a bare loop of Python (open, read, hash, close) over the same tree; and two such loops at
once, over the store, where each blob is hashed twice, and over the target: as much as a proof reads
and hashes. `--cold` drops the contents from the page cache before each; names stay in it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import psycopg

from tests.bench.cpu import Cpu, counted
from tests.bench.listed_files import call, make_database, server_below, url_of, write_settings
from tests.bench.stores import Recipe, make
from tests.helpers.postgres_server import Postgres

_DIRECTORIES: Final = 40  # Below each of 256.
_UNMARK: Final = "update blobs set remote_copied = null, remote_last_checked = null"
_LOOP: Final = """
import os, sys
from blake3 import blake3
root, times = sys.argv[1], int(sys.argv[2])
buffer, key = memoryview(bytearray(1 << 20)), bytes(32)
for path, names, files in os.walk(root):
    names.sort()
    directory = os.open(path, os.O_RDONLY)
    for name in sorted(files):
        fd = os.open(name, os.O_RDONLY, dir_fd=directory)
        count = os.readv(fd, [buffer])
        os.close(fd)
        blake3(buffer[:count], key=key).digest()
        if times == 2:
            blake3(buffer[:count]).digest()
    os.close(directory)
"""


def _settings(home: Path, server: Postgres) -> Path:
    make_database(server, "catalog")
    tables: dict[str, dict[str, object]] = {
        "catalog": {"url": url_of(server, "catalog")},
        "source": {"root": str(home / "store"), "grace": 0},
        "remote": {"url": (home / "target").as_uri()},
        "log": {"jsonl": str(home / "log.jsonl")},
        "lock": {"file": str(home / "lock")},
        "host": {"key_file": str(home / "host.key")},
    }
    return write_settings(home / "settings.toml", tables)


def idle(names: int, rounds: int, disk: Path) -> None:
    with counted() as cpu, server_below(disk) as (home, server):
        _make_names(home / "store", names)
        target = home / "target" / "by-hash"
        target.parent.mkdir()
        shutil.copytree(home / "store", target, copy_function=os.link)
        settings = _settings(home, server)
        call(settings, "init-db")
        call(settings, "scan")
        call(settings, "reconcile", "--adopt", "--trust-size")
        _query(server, "vacuum analyze blobs")
        found: dict[str, list[float]] = {"scan": [], "reconcile": []}
        for _ in range(rounds):
            for command, costs in found.items():
                used = cpu.seconds()
                with cpu.shares() as shares:
                    cost = call(settings, command)
                costs.append((cpu.seconds() - used) / names * 1e6)
                by = ", ".join(f"{name} {sum(one):.2f}" for name, one in sorted(shares.items()))
                print(f"{command}: {cost.wall:.1f} s, {costs[-1]:.2f} us a name; {by}", flush=True)
        both = sum(map(median, found.values()))
        print(f"both: {both:.2f} us a name; of 6.5 million {both * 6.5 / 60:.2f} minutes of a core")


def _make_names(root: Path, count: int) -> None:
    """Makes files of a few bytes, whose content nobody reads here."""
    chance = random.Random(1)
    for first in range(256):
        for second in range(_DIRECTORIES):
            (root / f"{first:02x}" / f"{second:02x}").mkdir(parents=True)
    for nth in range(count):
        above, below = f"{nth % 256:02x}", f"{nth // 256 % _DIRECTORIES:02x}"
        path = root / above / below / f"{above}{below}{chance.randbytes(30).hex()}"
        path.write_bytes(path.name.encode()[: nth % 64])


def prove(blobs: int, rounds: int, disk: Path, *, cold: bool) -> None:
    with counted() as cpu, server_below(disk) as (home, server):
        make(Recipe("small", blobs=blobs), home / "store")
        shutil.copytree(home / "store", home / "target" / "by-hash")
        subprocess.run(["sync", "-f", str(home)], check=True)
        settings = _settings(home, server)
        call(settings, "init-db")
        call(settings, "scan")
        call(settings, "reconcile", "--adopt")
        _query(server, "vacuum analyze blobs")
        target, store = str(home / "target" / "by-hash"), str(home / "store")
        b3sum = "find {} -type f -print0 | xargs -0 -n 5000 b3sum {} >/dev/null"

        def loops(*pairs: tuple[str, int]) -> None:
            argv = [[sys.executable, "-c", _LOOP, root, str(times)] for root, times in pairs]
            for one in [subprocess.Popen(one) for one in argv]:
                if one.wait():
                    raise SystemExit("the bare loop fails")

        def shell(text: str) -> None:
            subprocess.run(["sh", "-c", text], check=True)

        ways: dict[str, Callable[[], object]] = {
            "b3sum, one thread": lambda: shell(b3sum.format(target, "--num-threads 1")),
            "b3sum": lambda: shell(b3sum.format(target, "")),
            "bare loop": lambda: loops((target, 1)),
            "bare loops": lambda: loops((target, 1), (store, 2)),
            "verify": lambda: call(settings, "verify"),
            "adopt": lambda: call(settings, "reconcile", "--adopt"),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                if name == "adopt":
                    _query(server, _UNMARK)
                    _query(server, "vacuum analyze blobs")
                if cold:
                    _drop(home)
                seen[name].append(_measured(cpu, name, way))
        least = min(
            median(wall for wall, _ in seen[name]) for name in ("b3sum, one thread", "b3sum")
        )
        for name, found in seen.items():
            wall, used = (median(one) for one in zip(*found, strict=True))
            print(f"{name}: {wall:.2f} s ({wall / least:.2f} of b3sum), {used:.2f} s of CPU")


def _measured(cpu: Cpu, name: str, way: Callable[[], object]) -> tuple[float, float]:
    used, began = cpu.seconds(), time.monotonic()
    with cpu.shares() as shares:
        way()
    wall, used = time.monotonic() - began, cpu.seconds() - used
    by = ", ".join(f"{one} {sum(share):.2f}" for one, share in sorted(shares.items()))
    print(f"{name}: {wall:.2f} s, {used:.2f} s of CPU; {by}", flush=True)
    return wall, used


def _drop(home: Path) -> None:
    """Drops the contents of all blobs from the page cache."""
    for root in ("store", "target"):
        for path in (home / root).rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def _query(server: Postgres, text: str) -> None:
    with psycopg.connect(url_of(server, "catalog"), autocommit=True) as conn:
        conn.execute(text.encode())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.checks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["idle", "prove"])
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--blobs", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--disk", type=Path, default=Path("/dev/shm"), metavar="DIRECTORY")
    given = parser.parse_args()
    if given.what == "idle":
        idle(given.names, given.rounds, given.disk)
    else:
        prove(given.blobs, given.rounds, given.disk, cold=given.cold)
    return 0


if __name__ == "__main__":
    sys.exit(main())
