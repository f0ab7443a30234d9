"""What a large catalog costs: rows are made, then claimed and marked, as by workers that send at
once.

No file and no remote is touched, so all of the time is the catalog's. Give it a scratch database on
this machine that may be filled, such as one of a server of its own:

    python -m tests.bench.catalog --url postgresql:///scratch --rows 42000000 --workers 1,2,4

Rows are made once, where the database has no table blobs yet; `--dead` then has so many of them
marked, evenly at the beginnings of all ranges, as a run leaves them that vacuum has not come after.
What is asked now and then is measured once: `init-db` for another target, to which all is copied,
and once more with nothing to do; `status`, `run --dry-run`, and a worker of that other target, who
finds nothing. Claims, searches (all claims up to one that finds something) and marks are measured
for a time (median, 99 of 100, the longest; CPU of the server's backends and of our own processes,
in microseconds a blob), for each number of workers.
`by_hand` has the floors, in turns with claims, before all other work: the plainest SELECT of as
many rows by the same index, at the same place in the other half of the blobids, and the plainest
UPDATE. So each meets pages that are as fresh. That matters, since the first change of a page after
a checkpoint writes the whole page to the WAL, and a SELECT that prunes a page changes it, too.
`--checkpoint 100` makes a checkpoint before every hundredth turn. `claim_to_select` has the claim's
times by those of the SELECT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.range_locks import RANGES, Claims, claim_order, prefix_ranges, whole_of
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.stats import pending_estimate, quick_totals
from ntt_backup.model import Blob
from ntt_backup.upload.catalog_session import CatalogSession

TARGET = "remote"
_DONE = "done"  # A target that has everything.
_WINDOW = 4  # batches that are under way, as with run.window
_DRY_RUN_MS = 1000
# Sizes as they are in production: many small ones, half of the bytes in the largest 0.7 %.
_FILL = """
    insert into blobs (blobid, size)
    select md5(n::text) || md5((-n)::text),
        (array[500, 5000, 50000, 500000, 5000000, 40000000])
            [width_bucket(n % 10000, array[0, 2780, 7500, 9070, 9690, 9930])]
    from generate_series({}, {}) as n
"""
_MARK_FIRST = """
    update blobs set remote_copied = true
    where blobid in (
        select blobid from blobs
        where (remote_copied is false or remote_copied is null) and blobid >= '{}' and blobid < '{}'
        order by blobid limit {}
    )
"""
_PLAIN_UPDATE = """
    update blobs set remote_copied = true, remote_last_checked = now(), remote_copy_failed = false
    where blobid between %s and %s
"""
_PLAIN_SELECT = """
    select blobid, size from blobs
    where (remote_copied is false or remote_copied is null) and blobid >= %s
    order by blobid limit %s
"""

Times = list[tuple[float, float, float]]


class Clock:
    """Takes the time, and the CPU time of a backend and of this process, of each call."""

    def __init__(self, backend: int, *names: str) -> None:
        gc.freeze()  # As a worker does: else a collection takes 10 ms, once in 130 claims.
        self._backend = backend
        self.times: dict[str, Times] = {name: [] for name in names}

    def take(self, name: str, call: Callable[[], Any]) -> Any:
        before = self._now()
        answer = call()
        after = self._now()
        wall, server, client = (b - a for a, b in zip(before, after, strict=True))
        self.times[name].append((wall, server, client))
        return answer

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), _cpu(self._backend), time.process_time()


def fill(url: str, rows: int) -> None:
    """Makes the rows on all cores, and the indexes after them, which is much faster."""
    with _connect(url) as conn:
        if conn.execute("select to_regclass('blobs')").fetchone() != (None,):
            return
        init_db(conn, TARGET)
        pending = conn.execute(
            "select pg_get_indexdef('idx_blobs_remote_pending'::regclass)"
        ).fetchall()[0][0]
        conn.execute("alter table blobs drop constraint blobs_pkey")
        conn.execute("drop index idx_blobs_remote_pending")
        shares = os.cpu_count() or 1
        cuts = [one * rows // shares for one in range(shares + 1)]
        _at_once(url, [_FILL.format(a + 1, b) for a, b in pairwise(cuts)])
        conn.execute("alter table blobs add primary key (blobid) with (fillfactor = 70)")
        conn.execute(pending.encode())
        conn.execute("vacuum analyze blobs")
        conn.execute("checkpoint")


def kill(url: str, dead: int) -> None:
    """Has the first pending rows of each range marked: their entries in the index of what is
    pending stay there, dead.
    """
    with _connect(url) as conn:
        _at_once(
            url,
            [_MARK_FIRST.format(one.lo, one.hi or "g", dead // RANGES) for one in prefix_ranges()],
        )
        conn.execute("checkpoint")


def behind(url: str, count: int) -> tuple[float, float]:
    """Marks every row, inserts some behind the dead entries, and claims these.

    Returns:
        The seconds; and those of the plainest SELECT of the same rows. Each has its own copy.
    """
    with _connect(url) as conn:
        conn.execute("alter table blobs set (autovacuum_enabled = off)")
    _at_once(url, [_MARK_FIRST.format(one.lo, one.hi or "g", "all") for one in prefix_ranges()])
    with _connect(url) as conn:
        conn.execute("checkpoint")
        conn.execute(_FILL.format(-count, -1).encode())
    # Whoever walks dead entries first marks them for all others.
    name = str(conninfo_to_dict(url)["dbname"])
    copies = [f"{name}_plain", f"{name}_claims"]
    with connect(make_conninfo(url, dbname="postgres"), "bench") as conn:
        for copy in copies:
            conn.execute(f'create database "{copy}" template "{name}"'.encode())
        conn.execute("checkpoint")
    plain, claims = (make_conninfo(url, dbname=copy) for copy in copies)
    with _connect(plain) as conn:
        conn.execute("set enable_seqscan = off")
        conn.execute("set enable_bitmapscan = off")
        floor = _seconds(lambda: conn.execute(_PLAIN_SELECT, ("", count)).fetchall())
    began = time.monotonic()
    session = CatalogSession(claims, "bench", TARGET, claim_order(0, 1), listen=False)
    found = 0
    while found < count:
        found += len(session.claims.take(count))
    session.close()
    return round(time.monotonic() - began, 2), floor


def _connect(url: str) -> Connection:
    """Returns a session in which the table and its index can be named without their schema."""
    conn = connect(url, "bench")
    _find_by_name(conn)
    return conn


def _find_by_name(conn: Connection) -> None:
    conn.execute("select set_config('search_path', %s, false)", [conn.search_path])


def _at_once(url: str, statements: Sequence[str]) -> None:
    with Pool(os.cpu_count()) as pool:
        pool.starmap(_execute, [(url, one) for one in statements], 1)


def _execute(url: str, statement: str) -> None:
    with _connect(url) as conn:
        conn.execute("set synchronous_commit = off")
        conn.execute("set enable_seqscan = off")
        conn.execute(statement.encode())


def now_and_then(url: str) -> dict[str, float]:
    """Measures what is done once a run, or by hand, in seconds."""
    with _connect(url) as conn:
        column = f"alter table blobs add if not exists {_DONE}_copied bool default true"
        conn.execute(column.encode())

        def idle() -> None:
            claims = Claims(conn, _DONE, range(RANGES))
            while claims.take(1000) or claims.searching or claims.any_pending() is not False:
                pass

        calls: dict[str, Callable[[], object]] = {
            "init_db": lambda: init_db(conn, _DONE),
            "init_db_again": lambda: init_db(conn, _DONE),
            "status": lambda: quick_totals(conn, TARGET),
            "dry_run": lambda: pending_estimate(conn, TARGET, _DRY_RUN_MS),
            "idle": idle,
        }
        return {f"{name}_s": _seconds(call) for name, call in calls.items()}


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return round(time.monotonic() - began, 3)


def work(task: tuple[str, int, int, float, int]) -> tuple[int, dict[str, Times]]:
    """One worker: claims, and marks what was claimed a window before, until the time is over;
    returns how many blobs, and the times.
    """
    url, worker, workers, seconds, size = task
    session = CatalogSession(url, "bench", TARGET, claim_order(worker, workers), listen=False)
    clock = Clock(session._conn.info.backend_pid, "claim", "search", "mark")
    under_way: deque[list[tuple[Blob, int]]] = deque()
    deadline = time.monotonic() + seconds
    blobs = 0
    searched: Times = []
    while True:
        taken = []
        if time.monotonic() < deadline:
            taken = clock.take("claim", partial(session.claims.take, size))
            searched.append(clock.times["claim"][-1])
        if taken:
            under_way.append(taken)
            walls, servers, clients = map(sum, zip(*searched, strict=True))
            clock.times["search"].append((walls, servers, clients))
            searched = []
        elif not under_way:
            if time.monotonic() < deadline and session.claims.searching:
                continue
            break
        if len(under_way) > _WINDOW or not taken:
            batch = under_way.popleft()
            stored = [Blob(blob.blobid, blob.size) for blob, _ in batch]
            clock.take("mark", partial(session.ledger.record, stored, []))
            blobs += len(batch)
            busy = {index for taken in under_way for _, index in taken}
            session.claims.release(session.claims.exhausted() - busy)
    session.close()
    return blobs, clock.times


def by_hand(url: str, size: int, turns: int, checkpoint: int) -> dict[str, Any]:
    """Measures claims in turns with the plainest SELECT and UPDATE of as many rows, while nobody
    else works.

    A claim that goes on with another range has no such statements beside it: they would walk over
    the dead entries at the beginning of that range.
    """
    session = CatalogSession(url, "bench", TARGET, claim_order(1, 2), listen=False)
    conn = session._conn
    _find_by_name(conn)
    clock = Clock(conn.info.backend_pid, "claim", "select", "update")
    for turn in range(turns):
        if checkpoint and turn % checkpoint == 0:
            conn.execute("checkpoint")
        taken = clock.take("claim", partial(session.claims.take, size))
        if len({whole_of(index) for _, index in taken}) == 1:
            first, last = taken[0][0].blobid, taken[-1][0].blobid
            far = [f"{int(first[0], 16) ^ 8:x}{first[1:]}", size]
            plain: list[tuple[str, Callable[[], Any]]] = [
                ("select", partial(_rows, conn, _PLAIN_SELECT, far)),
                ("update", partial(conn.execute, _PLAIN_UPDATE, [first, last])),
            ]
            # In changing order, so that a claim and a SELECT come after the same statements.
            for name, call in plain if turn % 2 else reversed(plain):
                clock.take(name, call)
    session.close()
    costs = {name: _costs(times, len(times) * size) for name, times in clock.times.items()}
    claim, select = costs["claim"], costs["select"]
    ratios = {f"{one}_ratio": round(claim[one] / select[one], 2) for one in ("p50_ms", "p99_ms")}
    return {"turns": turns, "checkpoint": checkpoint, **costs, "claim_to_select": ratios}


def _rows(conn: Connection, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    return conn.execute(query.encode(), values, binary=True, prepare=True).fetchall()


def measure(url: str, workers: int, seconds: float, size: int) -> dict[str, Any]:
    """Lets the workers go, and says what it cost."""
    with _connect(url) as conn:
        wal = _wal(conn)
        began = time.monotonic()
        with Pool(workers) as pool:
            done = pool.map(work, [(url, one, workers, seconds, size) for one in range(workers)], 1)
        took = time.monotonic() - began
        wal = _wal(conn) - wal
    blobs = sum(some for some, _ in done)
    return {
        "workers": workers,
        "blobs": blobs,
        "blobs_per_s": round(blobs / took),
        "claim": _costs((one for _, times in done for one in times["claim"]), blobs),
        "search": _costs((one for _, times in done for one in times["search"]), blobs),
        "mark": _costs((one for _, times in done for one in times["mark"]), blobs),
        "wal_bytes_per_blob": round(wal / max(blobs, 1)),
    }


def _costs(times: Iterable[tuple[float, float, float]], blobs: int) -> dict[str, float]:
    measured = list(times)
    if not measured:
        raise SystemExit("bench: no blob is pending any more; take more rows, or fewer seconds")
    walls, servers, clients = zip(*measured, strict=True)
    ordered = sorted(walls)
    spread = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {
        **{f"{name}_ms": round(ordered[nth] * 1e3, 1) for name, nth in spread.items()},
        "server_us_per_blob": round(sum(servers) / max(blobs, 1) * 1e6, 2),
        "client_us_per_blob": round(sum(clients) / max(blobs, 1) * 1e6, 2),
    }


def _cpu(pid: int) -> float:
    """Returns the seconds of CPU that a process has had; 0 for one of another machine."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return 0.0


def _wal(conn: Connection) -> int:
    return int(conn.execute("select pg_current_wal_lsn() - '0/0'").fetchall()[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.catalog", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dead", type=int, default=0)
    parser.add_argument(
        "--behind", type=int, default=0, help="only: mark all, and claim so many new ones behind"
    )
    parser.add_argument("--workers", default="4", help="one or more numbers: 1,2,4")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--turns", type=int, default=1000, help="of claims and floors, by hand, at most"
    )
    parser.add_argument(
        "--checkpoint", type=int, default=0, help="one before every Nth turn; 0: none"
    )
    asked = parser.parse_args()
    found: dict[str, Any] = {"rows": asked.rows, "dead": asked.dead, "batch": asked.batch}
    found["fill_s"] = _seconds(lambda: fill(asked.url, asked.rows))
    if asked.behind:
        found["behind_s"], found["plain_select_s"] = behind(asked.url, asked.behind)
        print(json.dumps(found | now_and_then(asked.url), indent=1))
        return
    if asked.dead:
        found["kill_s"] = _seconds(lambda: kill(asked.url, asked.dead))
    found |= now_and_then(asked.url)
    # Half of the pending is for what comes then, and no claim is to reach the half of the SELECTs.
    turns = min(asked.turns, (asked.rows - asked.dead) // (4 * asked.batch))
    found["by_hand"] = by_hand(asked.url, asked.batch, turns, asked.checkpoint)
    found["work"] = [
        measure(asked.url, int(one), asked.seconds, asked.batch) for one in asked.workers.split(",")
    ]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
