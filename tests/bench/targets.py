"""Whether a target is as fast in a daemon with two others as alone, while one of them is cut off.

    python -m tests.bench.targets --blobs 20000 --size 13000 --rounds 3

Two remotes, each behind a link of its own (12 MB/s, 28 ms, in a network namespace: needs root), and
a third one whose port accepts connections and never answers. In turns a daemon sends the same store
to the first remote alone, to the second alone, and to all three; each daemon also makes a dump of
the catalog, one for all targets. The time is that from the start of the daemon until the catalog
has the last blob of a target as copied. CPU is that of all processes, PostgreSQL's and the link's
too: where it nears that of two cores, it is the machine that is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import psycopg

from tests.bench.contender import PROJECT
from tests.bench.cpu import counted
from tests.bench.lab import ALIAS, HOST, Lab, lab
from tests.bench.listed_files import call, make_database, server_below, url_of, write_settings
from tests.bench.stores import Recipe, Store, cached
from tests.helpers.postgres_server import Postgres

_CUT: Final = "cut"
_LOOK_SECONDS: Final = 0.1
_MOST_SECONDS: Final = 900.0
_MASTER: Final = "with_all_rows"


def measure(blobs: int, size: int, rounds: int, disk: Path) -> None:
    with ExitStack() as stack:
        cpu = stack.enter_context(counted())
        labs = {name: stack.enter_context(lab("slow", disk)) for name in ("one", "two")}
        store = cached(Recipe("small", blobs=blobs, each=size), disk)
        home, server = stack.enter_context(server_below(disk))
        nobody = stack.enter_context(socket.socket())
        nobody.bind((HOST, 0))
        nobody.listen(1)
        bench = _Bench(home, server, labs, store, nobody.getsockname()[1])
        bench.register()
        times: dict[tuple[str, str], list[float]] = {}
        for nth in range(rounds):
            for targets in (["one"], ["two"], ["one", "two", _CUT]):
                used, began = cpu.seconds(), time.monotonic()
                found = bench.run(nth, targets)
                busy = (cpu.seconds() - used) / (time.monotonic() - began)
                print(f"{' '.join(targets)}: {_shown(found)}; {busy:.2f} cores busy", flush=True)
                for name, seconds in found.items():
                    times.setdefault((name, str(len(targets))), []).append(seconds)
        for name in labs:
            alone, beside = (median(times[name, count]) for count in ("1", "3"))
            print(f"{name}: {beside:.2f} s beside the others, {beside / alone:.3f} of alone")


def _shown(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())


class _Bench:
    """The store, its catalog and the targets."""

    def __init__(
        self, home: Path, server: Postgres, labs: dict[str, Lab], store: Store, cut_port: int
    ) -> None:
        self._home = home
        self._server = server
        self._labs = labs
        self._store = store
        self._cut_port = cut_port

    def register(self) -> None:
        """Makes a database with all rows, which each daemon gets a copy of."""
        make_database(self._server, _MASTER)
        settings = self._settings("master", _MASTER, [*self._labs, _CUT])
        for name in (*self._labs, _CUT):
            call(settings, "--target", name, "init-db")
        call(settings, "--target", "one", "scan")

    def run(self, nth: int, targets: Sequence[str]) -> dict[str, float]:
        """Lets a daemon send all, and returns the seconds for each target that can be reached."""
        name = f"round_{nth}_{'_'.join(targets)}"
        with psycopg.connect(url_of(self._server, "postgres"), autocommit=True) as conn:
            conn.execute(f"create database {name} template {_MASTER}".encode())
        settings = self._settings(name, name, targets)
        environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
        environ["XDG_CACHE_HOME"] = str(self._home / name)
        argv = [sys.executable, "-m", "ntt_backup", "--config", str(settings)]
        argv += ["--target", targets[0] if len(targets) == 1 else "all", "run", "--watch"]
        waiting = [one for one in targets if one != _CUT]
        found: dict[str, float] = {}
        with psycopg.connect(url_of(self._server, name), autocommit=True) as conn:
            began = time.monotonic()
            with (self._home / f"{name}.out").open("wb") as out:
                daemon = subprocess.Popen(argv, env=environ, stdout=out, stderr=out)
            try:
                while waiting:
                    time.sleep(_LOOK_SECONDS)
                    took = time.monotonic() - began
                    if took > _MOST_SECONDS or daemon.poll() is not None:
                        said = (self._home / f"{name}.out").read_text()[-2000:]
                        raise SystemExit(f"the daemon ends, or copies nothing: {said}")
                    for one in list(waiting):
                        left = f"select from blobs where {one}_copied is not true limit 1"
                        if not conn.execute(left.encode()).fetchall():
                            found[one] = took
                            waiting.remove(one)
            finally:
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(60)
        for one in found:
            shutil.rmtree(self._labs[one].directory / name)
        return found

    def _settings(self, name: str, database: str, targets: Sequence[str]) -> Path:
        """Writes the settings of a daemon. name: also that of its directory on each remote."""
        tables: dict[str, dict[str, object]] = {
            "catalog": {"url": url_of(self._server, database)},
            "source": {"root": str(self._store.root), "grace": 0},
            "dump": {"bin": str(self._server.programs)},
            "log": {"jsonl": str(self._home / f"{name}.jsonl")},
            "lock": {"file": str(self._home / f"{name}-{{target}}.lock")},
            "control": {"socket": str(self._home / f"{name}-{{target}}.sock")},
            "host": {"key_file": str(self._home / "host.key")},
        }
        for one in targets:
            if one == _CUT:
                tables[f"targets.{one}"] = {"url": f"ssh://{HOST}:{self._cut_port}/away"}
                continue
            place = self._labs[one].directory / name
            place.mkdir(parents=True)
            tables[f"targets.{one}"] = {
                "host": ALIAS,
                "path": str(place),
                "ssh_config": str(self._labs[one].ssh_config),
                "known_hosts": str(self._labs[one].known_hosts),
            }
        return write_settings(self._home / f"{name}.toml", tables)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.targets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--blobs", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=13_000, help="the bytes of each blob")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path("/dev/shm"), metavar="DIRECTORY")
    given = parser.parse_args()
    measure(given.blobs, given.size, given.rounds, given.disk)
    return 0


if __name__ == "__main__":
    sys.exit(main())
