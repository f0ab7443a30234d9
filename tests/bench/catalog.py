"""What a large catalog costs: rows are made, then claimed and marked, as by workers that send at
once.

No file and no remote is touched, so all of the time is the catalog's. Give it a scratch database
that may be filled, such as one of a server of its own:

    python -m tests.bench.catalog --url postgresql:///scratch --rows 10000000 --seconds 120

Rows are made once, where the database has no table blobs yet. Says for claims and marks how long
one took (median, 99 of 100, the longest), how many blobs went a second, how many rows vacuum has
still to clean up, and what a blob cost: WAL in bytes, CPU of the server's processes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.ranges import claim_order
from ntt_backup.catalog.schema import init_db
from ntt_backup.upload.catalog_session import CatalogSession

TARGET = "remote"
_WINDOW = 4  # batches that are under way, as with run.window
# Sizes as they are in production: many small ones, half of the bytes in the largest 0.7 %.
_FILL = """
    insert into blobs (blobid, size)
    select md5(n::text) || md5((-n)::text),
        (array[500, 5000, 50000, 500000, 5000000, 40000000])
            [width_bucket(n %% 10000, array[0, 2780, 7500, 9070, 9690, 9930])]
    from generate_series(1, %s::bigint) as n
"""


def fill(url: str, rows: int) -> None:
    """Make the rows, and the indexes after them, which is much faster."""
    with connect(url, "bench") as conn:
        if conn.execute("select to_regclass('blobs')").fetchone() != (None,):
            return
        init_db(conn, TARGET)
        partial = conn.execute(
            "select pg_get_indexdef('idx_blobs_remote_pending'::regclass)"
        ).fetchall()[0][0]
        conn.execute("alter table blobs drop constraint blobs_pkey")
        conn.execute("drop index idx_blobs_remote_pending")
        conn.execute(_FILL.replace("%%", "%").replace("%s", str(rows)).encode())
        conn.execute("alter table blobs add primary key (blobid)")
        conn.execute(partial.encode())
        conn.execute("vacuum analyze blobs")


def work(task: tuple[str, int, int, float, int]) -> dict[str, Any]:
    """One worker: claim, and mark what was claimed a window before, until the time is over."""
    url, worker, workers, seconds, size = task
    claims: list[float] = []
    marks: list[float] = []
    session = CatalogSession(url, "bench", TARGET, claim_order(worker, workers), listen=False)
    server = session._conn.info.backend_pid
    before = _cpu(server)
    under_way: deque[list[Any]] = deque()
    deadline = time.monotonic() + seconds
    blobs = 0
    while True:
        began = time.monotonic()
        taken = session.claims.take(size) if began < deadline else []
        claims.append(time.monotonic() - began)
        if taken:
            under_way.append(taken)
        elif not under_way:
            if began < deadline and session.claims.searching:
                continue
            break
        if len(under_way) > _WINDOW or not taken:
            batch = under_way.popleft()
            began = time.monotonic()
            session.ledger.record([blob for blob, _ in batch], [])
            marks.append(time.monotonic() - began)
            blobs += len(batch)
            busy = {index for taken in under_way for _, index in taken}
            session.claims.release(session.claims.exhausted() - busy)
    cpu = _cpu(server) - before
    session.close()
    return {"claims": claims, "marks": marks, "blobs": blobs, "cpu": cpu}


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has had; 0 for one of another machine."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, workers: int, seconds: float, size: int) -> dict[str, Any]:
    """Let the workers go, and say what it cost."""
    with connect(url, "bench") as conn:
        wal = _wal(conn)
        began = time.monotonic()
        with Pool(workers) as pool:
            done = pool.map(work, [(url, one, workers, seconds, size) for one in range(workers)], 1)
        took = time.monotonic() - began
        wal = _wal(conn) - wal
        conn.execute("select pg_stat_force_next_flush()")
        (dead,) = conn.execute(
            "select n_dead_tup from pg_stat_user_tables where relid = 'blobs'::regclass"
        ).fetchall()[0]
    blobs = sum(one["blobs"] for one in done)
    return {
        "blobs": blobs,
        "blobs_per_s": round(blobs / took),
        "claim_ms": _spread([ms for one in done for ms in one["claims"]]),
        "mark_ms": _spread([ms for one in done for ms in one["marks"]]),
        "dead_rows": dead,
        "wal_bytes_per_blob": round(wal / max(blobs, 1)),
        "cpu_us_per_blob": round(sum(one["cpu"] for one in done) / max(blobs, 1) * 1e6, 1),
    }


def _wal(conn: Connection) -> int:
    return int(conn.execute("select pg_current_wal_lsn() - '0/0'").fetchall()[0][0])


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = [round(one * 1000, 1) for one in sorted(seconds)] or [0.0]
    return {
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "max": ordered[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.catalog", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    fill(asked.url, asked.rows)
    print(json.dumps(measure(asked.url, asked.workers, asked.seconds, asked.batch)))


if __name__ == "__main__":
    main()
