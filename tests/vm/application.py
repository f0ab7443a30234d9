"""The application in the source: stores blobs, and tells which are there and which are marked.

Runs in the guest by the Python of our package. Each line is a JSON object: `stored` lists blobs
whose file is synced and whose row is committed, `copied` lists blobs that are marked as copied,
`failed` counts those that are marked as failed. A line on stdin ends the storing; the telling goes
on.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from pathlib import Path

import psycopg
from blake3 import blake3

_STORE = Path("/srv/store")
_SIZES = (10, 1_000, 1_000, 5_000, 5_000, 20_000, 200_000)
_LARGE = 3_000_000
# Else a slow remote would never catch up.
_MOST_PENDING = 200
_COUNTS = """
    select count(*) filter (where remote_copied is not true),
        count(*) filter (where remote_copy_failed)
    from blobs
"""


def _store(count: int, chance: random.Random) -> list[tuple[str, int]]:
    """Store blobs, and sync them."""
    stored = []
    for _ in range(count):
        size = _LARGE if chance.random() < 0.003 else chance.randrange(chance.choice(_SIZES))
        content = chance.randbytes(size)
        blobid = blake3(content).hexdigest()
        path = _STORE / blobid[:2] / blobid[2:4] / blobid
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)
        stored.append((blobid, size))
    os.sync()
    return stored


def main() -> None:
    chance, storing = random.Random(), True
    while True:
        try:
            conn = psycopg.connect("dbname=copyjob", autocommit=True)
            break
        except psycopg.OperationalError:
            time.sleep(0.1)
    told: set[str] = set()
    while True:
        if storing and select.select([sys.stdin], [], [], 0)[0]:
            storing = False
        said: dict[str, object] = {}
        pending, failed = conn.execute(_COUNTS).fetchone() or (0, 0)
        if storing and pending < _MOST_PENDING:
            blobs = _store(chance.randrange(1, 12), chance)
            with conn.cursor() as cursor:
                cursor.executemany(
                    "insert into blobs (blobid, size) values (%s, %s) on conflict do nothing", blobs
                )
            said["stored"] = [blobid for blobid, _ in blobs]
        rows = conn.execute("select blobid from blobs where remote_copied").fetchall()
        copied = {blobid for (blobid,) in rows} - told
        told |= copied
        print(json.dumps({**said, "copied": sorted(copied), "failed": failed}), flush=True)
        time.sleep(chance.uniform(0.1, 0.5))


if __name__ == "__main__":
    main()
