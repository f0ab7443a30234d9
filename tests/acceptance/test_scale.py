"""Very many rows: a run looks only at what is pending, and its memory does not grow with them."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE, wait_until

ROWS = 300_000
MEMORY_KIB = 100 * 1024
SESSIONS = "from pg_stat_activity where application_name like 'ntt-backup-remote/%'"


@pytest.fixture
def large(env: Environment) -> Environment:
    """An environment with a few thousand blobs, none of them in the catalog yet."""
    for number in range(3000):
        env.put_in_store(number.to_bytes(2) * 50)
    return env


def _insert_rows(env: Environment, columns: str, values: str) -> None:
    """ROWS rows, their blobids made of SHA-256; built without indexes, which is much faster."""
    primary, partial = (
        env.query("select pg_get_indexdef(%s::regclass)", name)[0][0]
        for name in ("blobs_pkey", "idx_blobs_remote_pending")
    )
    env.query("alter table blobs drop constraint blobs_pkey")
    env.query("drop index idx_blobs_remote_pending")
    env.query(
        f"insert into blobs (blobid, size{columns}) select encode(sha256(n::text::bytea), 'hex'),"
        f" n %% 50000{values} from generate_series(1, %s) as n",
        ROWS,
    )
    env.query(primary)
    env.query("alter table blobs add primary key using index blobs_pkey")
    env.query(partial)
    env.query("vacuum analyze blobs")


def test_with_nothing_pending_a_run_reads_nothing(large: Environment) -> None:
    """Nearly all is copied, the rest failed: neither is looked at row by row."""
    env = large
    _insert_rows(env, ", remote_copied, remote_copy_failed", ", n %% 1000 > 0, n %% 1000 = 0")
    place = f"{env.remote.path}/by-hash/00/00"
    made = env.sshd.run(f"mkdir -p {place} && touch {place}/{'0' * 64}")
    assert made.returncode == 0
    before = _scans(env)
    # The sentence at the end of a run counts the rows of a table of this size.
    env.run("run", "-q", expect=0)
    # One row tells that the catalog is not empty.
    assert _scans(env) == (before[0] + 1, before[1] + 1)
    (stop,) = env.events("run_stop")
    assert (stop["copied"], stop["failed"]) == (0, 0)
    assert env.events("worker_start") == []


def _scans(env: Environment) -> tuple[int, int]:
    """Sequential scans of the catalog, and rows they read, once all sessions have told theirs."""
    wait_until(lambda: env.query(f"select count(*) {SESSIONS}") == [(0,)], "the sessions to end")
    return env.query(
        "select seq_scan, seq_tup_read from pg_stat_user_tables where relname = 'blobs'"
    )[0]


def test_memory_does_not_grow_with_what_is_pending(large: Environment) -> None:
    env = large
    _insert_rows(env, "", "")
    env.register([path.name for path in env.store.rglob("*") if path.is_file()])
    peaks: dict[int, int] = {}
    env.write_config(run={"max_failed_share": 1})
    with env.running("run", "--workers", "3") as run:

        def enough() -> bool:
            for pid in [run.pid, *(line["pid"] for line in env.events("worker_start"))]:
                peaks[pid] = max(peaks.get(pid, 0), _peak_kib(pid))
            return len(peaks) == 4 and len(env.events("batch_complete")) >= 30

        wait_until(enough, "30 batches, and all workers at work")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    assert len(peaks) == 4
    assert all(0 < peak < MEMORY_KIB for peak in peaks.values()), peaks
    assert 0 < len(env.copied()) < 3000
    env.assert_nothing_half()
    pending = env.query("select count(*) from blobs where remote_copy_failed is not true")
    stop = env.events("run_stop")[-1]
    assert stop["failed"] == ROWS + 3000 - pending[0][0]
    assert env.query("select distinct reason from ntt_backup.failures") == [("missing",)]


def _peak_kib(pid: int) -> int:
    """The most memory that the process ever had; 0 where it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0
