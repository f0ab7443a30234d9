"""Coordinators of several hosts share one catalog: what one core of its server gives them.

Each host is a process in a network namespace, behind a link of 100 MB/s without delay, and claims
and marks a part of the blobids as a worker does; no blob is read or sent. The server has one core
to itself, and the hosts together another one: the server's core is full where `server` is near 1,
and where `hosts` is, the hosts' core is what is measured.

    chrt -r 1 python -m tests.bench.coordinators --hosts 1,2,4,8,16

Needs root and two cores.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from contextlib import ExitStack
from multiprocessing import Pool
from pathlib import Path
from statistics import median
from typing import Any, Final

from ntt_backup.process import postgres
from tests.bench.catalog import Times, fill, work
from tests.bench.lab import SHAPES, free_port, network
from tests.bench.listed_files import make_database, server_below
from tests.bench.slots import slot

_DATABASE: Final = "shared"
_NEW_NETWORK: Final = 0x40000000
_SERVER, _HOSTS = 0, 1

Task = tuple[str, tuple[str, int, int, float, int]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.coordinators", description=__doc__)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--hosts", default="1,2,4,8,16", help="one or more numbers")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--disk", type=Path, default=Path("/dev/shm"), metavar="DIR")
    given = parser.parse_args()
    counts = [int(one) for one in given.hosts.split(",")]
    shape = SHAPES["fast"]
    assert shape is not None
    with ExitStack() as stack:
        slots = [stack.enter_context(slot(given.disk)) for _ in range(max(counts))]
        home, server = stack.enter_context(server_below(given.disk))
        make_database(server, _DATABASE)
        fill(server.url_of(_DATABASE), given.rows)
        for one in slots:
            network(one, shape)
        port = free_port()
        with (home / "data" / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.231.0.0/16 trust\n")
        server.stop()
        server.start("listen_addresses=*", f"port={port}", "synchronous_commit=on")
        assert server.process is not None
        os.sched_setaffinity(server.process.pid, {_SERVER})
        user = postgres.SUPERUSER
        print(f"{'hosts':>6}{'blobs/s':>9}{'claims/s':>10}{'marks/s':>9}", end="")
        print(f"{'claim ms':>10}{'mark ms':>9}{'server':>8}{'hosts':>7}")
        for count in counts:
            tasks: list[Task] = []
            for nth, one in enumerate(slots[:count]):
                url = f"host=10.231.{one.number}.1 port={port} dbname={_DATABASE} user={user}"
                task = (url, nth, count, given.seconds, given.batch)
                tasks.append((one.namespace, task))
            began = time.monotonic()
            with Pool(count) as pool:
                done = pool.map(_on_host, tasks, 1)
            print(_row(count, done, time.monotonic() - began), flush=True)


def _on_host(task: Task) -> tuple[int, dict[str, Times]]:
    namespace, what = task
    os.sched_setaffinity(0, {_HOSTS})
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    return work(what)


def _row(count: int, done: list[tuple[int, dict[str, Times]]], took: float) -> str:
    times: dict[str, list[Any]] = {
        name: [one for _, found in done for one in found[name]] for name in ("claim", "mark")
    }
    every = times["claim"] + times["mark"]
    server, hosts = (sum(one[nth] for one in every) / took for nth in (1, 2))
    claims, marks = (len(times[name]) / took for name in ("claim", "mark"))
    waits = [median(one[0] for one in times[name]) * 1e3 for name in ("claim", "mark")]
    blobs = sum(some for some, _ in done) / took
    return (
        f"{count:6}{blobs:9.0f}{claims:10.1f}{marks:9.1f}{waits[0]:10.1f}{waits[1]:9.1f}"
        f"{server:8.2f}{hosts:7.2f}"
    )


if __name__ == "__main__":
    main()
