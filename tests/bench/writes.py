"""What a disk that turns has to write in each layout, as ext4 wrote it, and how long that takes.

    python -m tests.bench.writes --blobs 60000 --more 10000

A target on a new ext4 whose writes and flushes are logged below the file system (`tests/power`): a
first backup, then more blobs. The time is that of a model, so no other work on the machine counts.

The model: one head, 7,200 turns a minute. Between two flushes requests are sorted in groups of 128.
A request more than 64 KiB away from the end of the last one costs a seek (1 ms, and 13 ms more for
the whole stroke, as the root of the distance) and half a turn; then 180 MB/s. A flush costs a turn.
Needs root, FUSE and loop devices.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.helpers.postgres_server import Postgres
from tests.power.crashes import Log, Record
from tests.power.disks import REMOTE, Disk, lacking
from tests.power.kinds import now
from tests.power.machine import Catalog, Program
from tests.power.play import server

_TURN_S: Final = 60 / 7200
_BYTES_A_SECOND: Final = 180e6
_NEAR: Final = 64 << 10
_GROUP: Final = 128
_FLUSH: Final = 2


class Cost(NamedTuple):
    """What a disk did: writes, bytes, seeks, and the seconds of the model."""

    writes: int
    bytes: int
    seeks: int
    seconds: float


def cost(records: Sequence[Record], size: int) -> Cost:
    """Returns what these writes and flushes cost on a disk of a size in bytes."""
    seeks, seconds, head = 0, 0.0, 0
    waiting: list[Record] = []

    def serve() -> None:
        nonlocal seeks, seconds, head
        for one in sorted(waiting, key=lambda one: one.offset):
            distance = abs(one.offset - head)
            if distance > _NEAR:
                seeks += 1
                seconds += 0.001 + 0.013 * math.sqrt(distance / size) + _TURN_S / 2
            seconds += one.length / _BYTES_A_SECOND
            head = one.offset + one.length
        waiting.clear()

    writes = [one for one in records if one.kind != _FLUSH]
    for one in records:
        if one.kind == _FLUSH:
            serve()
            seconds += _TURN_S
        else:
            waiting.append(one)
            if len(waiting) == _GROUP:
                serve()
    serve()
    return Cost(len(writes), sum(one.length for one in writes), seeks, seconds)


def play(work: Path, postgres: Postgres, layout: str, options: argparse.Namespace) -> list[Cost]:
    """Returns what a first backup and another one cost in a layout."""
    home = work / layout
    home.mkdir()
    catalog = Catalog(postgres, f"writes_{layout}")
    disk = Disk("ext4", options.size << 30, home, work, flush_us=0)
    disk.start()
    try:
        program = Program(home, catalog, disk.mnt / REMOTE)
        program.configure({"remote": {"layout": layout}})
        del program.tables["run"]["batch_size"]
        program.configure({})
        program("init-db")
        chance, marks = random.Random(options.seed), [now()]
        for count in (options.blobs, options.more):
            blobs = [chance.randbytes(chance.randrange(100, 5000)) for _ in range(count)]
            catalog.register(dict(map(program.put, blobs)))
            marks[-1] = now()
            program("run")
            time.sleep(options.settle)  # ext4 writes its inodes in place later.
            marks.append(now())
        if len(catalog.copied()) != options.blobs + options.more:
            raise RuntimeError("not everything was copied")
    finally:
        disk.stop()
    log = Log(disk.logged)
    return [
        cost(log.records[log.until(begin) : log.until(end)], options.size << 30)
        for begin, end in pairwise(marks)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blobs", type=int, default=60_000)
    parser.add_argument("--more", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=100, help="of the disk, in GiB")
    parser.add_argument("--settle", type=float, default=40, help="seconds after each backup")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), help="on ext4 or xfs")
    options = parser.parse_args()
    if why := lacking():
        print(f"cannot be measured here: {why}", file=sys.stderr)
        return 1
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ntt-writes-", dir=options.work) as name:
        work = Path(name)
        work.chmod(0o755)
        with server(work / "server") as postgres:
            for layout in ("files", "packs"):
                costs = play(work, postgres, layout, options)
                for what, one in zip((options.blobs, options.more), costs, strict=True):
                    print(
                        f"{layout}, {what:,} blobs: {one.writes:,} writes,"
                        f" {one.bytes / 1e6:.0f} MB, {one.seeks:,} seeks, {one.seconds:.2f} s",
                        flush=True,
                    )
                found[layout] = [one._asdict() for one in costs]
    more = [found[layout][1]["seconds"] for layout in ("packs", "files")]
    found["ratio"] = round(more[0] / more[1], 3)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
