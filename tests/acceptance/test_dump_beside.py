"""A dump is made beside the blobs, once for all targets of a daemon, and each target takes it."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
from pathlib import Path

import pytest

from ntt_backup.config import Settings, load
from ntt_backup.dump import job, spool
from ntt_backup.dump.job import NewestDump
from ntt_backup.errors import DumpFailed, RemoteCannotStore, RemoteUnreachable
from ntt_backup.events import Event
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE, wait_until

TARGETS = ("remote", "usb", "pool")


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A file with a line for each pg_dump that was started."""
    return tmp_path / "calls"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file exists, no pg_dump ends."""
    return tmp_path / "gate"


@pytest.fixture
def dumping(
    env: Environment,
    postgres: Postgres,
    tmp_path: Path,
    calls: Path,
    gate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Environment:
    """Three directories as targets, and a pg_dump that notes its calls and waits at the gate."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = (
        f"#!/bin/sh\nreal={postgres.programs}/pg_dump\n"
        'case "$*" in *--version*|*nonexistent*|*--schema-only*) exec "$real" "$@";; esac\n'
        f'echo call >>{calls}\n"$real" "$@" || exit\n'
        f"while [ -e {gate} ]; do sleep 0.05; done\n"
    )
    (programs / "pg_dump").write_text(script)
    (programs / "pg_dump").chmod(0o755)
    (programs / "pg_restore").symlink_to(postgres.programs / "pg_restore")
    for name in TARGETS:
        (env.root / name).mkdir()
    env.settings["remote"] = {"url": f"file://{env.root}/remote"}
    env.write_config(
        run={"skip_pgdump": False, "poll_interval": 0.2},
        dump={"bin": str(programs)},
        lock={"file": str(env.root / "lock-{target}")},
        **{f"targets.{name}": {"url": f"file://{env.root}/{name}"} for name in TARGETS[1:]},
    )
    for name in TARGETS[1:]:
        env.call("--target", name, "init-db", expect=0)
    cache = tmp_path / "cache"
    env.environ = {"XDG_CACHE_HOME": str(cache)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return env


def sums(env: Environment, target: str) -> list[str]:
    """The SHA-256 of each dump on a target, in the order of their names."""
    found = sorted((env.root / target / "pgdump").glob("*.dump"))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in found]
    records = [json.loads(Path(f"{path}.json").read_text()) for path in found]
    assert [one["sha256"] for one in records] == digests
    assert {one["target"] for one in records} <= {target}
    return digests


def waiting(tmp_path: Path) -> list[str]:
    """The dumps that wait on this machine."""
    return [path.name for path in (tmp_path / "cache").rglob("*.spool")]


def make(
    env: Environment, target: str, said: list[Event], shared: tuple[str, ...] = TARGETS
) -> NewestDump:
    settings = load(Settings, file=env.config, environ={}, target=target)
    return job.dump(settings, said.append, shared=shared, beside=True)


def await_copied(env: Environment, target: str, blobids: set[str]) -> None:
    query = f"select blobid from blobs where {target}_copied"
    wait_until(lambda: {one for (one,) in env.query(query)} == blobids, f"the blobs on {target}")


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_the_first_blobs_do_not_wait_for_a_dump(
    dumping: Environment, gate: Path, calls: Path
) -> None:
    gate.touch()
    blobids = set(dumping.fill(20))
    with dumping.running("run") as run:
        dumping.await_copied(blobids)
        assert dumping.events("dump_complete") == []
        gate.unlink()
        assert run.wait(PATIENCE) == 0, dumping.output()
    names = [one["event"] for one in dumping.events()]
    assert names.index("batch_complete") < names.index("dump_complete")
    # In the first one nothing is copied: it does not tell what must come back.
    assert [one["reason"] for one in dumping.events("dump_start")] == ["first", "marked"]
    assert count(calls) == 2


@pytest.mark.parametrize("mode", ["full", pytest.param("series", marks=pytest.mark.long)])
def test_three_targets_take_one_dump(
    dumping: Environment, gate: Path, calls: Path, tmp_path: Path, mode: str
) -> None:
    dumping.write_config(dump={"mode": mode})
    gate.touch()
    blobids = set(dumping.fill(20))
    with dumping.running("--target", "all", "run", "--watch") as run:
        for name in TARGETS:
            await_copied(dumping, name, blobids)
        dumping.await_event("dump_start", 3)
        assert dumping.events("dump_complete") == []
        gate.unlink()
        dumping.await_event("dump_complete", 3)
        # The last one that has it removes it, after it has said so.
        wait_until(lambda: waiting(tmp_path) == [], "the dump that waited to be removed")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, dumping.output()
    assert count(calls) == 1
    (digest,) = sums(dumping, "remote")
    assert [sums(dumping, name) for name in TARGETS] == [[digest]] * 3
    (waits,) = dumping.events("dump_waits")
    assert waits["targets"] == 3
    assert waiting(tmp_path) == []
    done = dumping.call("--target", "usb", "dumps", "--json", expect=0)
    (row,) = json.loads(done.stdout)["dumps"]
    assert (row["restorable"], row["origin"]) == (True, "this host")


def test_a_target_that_is_cut_off_holds_up_neither_the_blobs_nor_the_dump_of_others(
    dumping: Environment, gate: Path, calls: Path
) -> None:
    others = ("remote", "usb")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        dumping.settings["targets.pool"] = {"url": f"ssh://127.0.0.1:{port}/away"}
        dumping.write_config()
        gate.touch()
        blobids = set(dumping.fill(20))
        with dumping.running("--target", "all", "run", "--watch") as run:
            for name in others:
                await_copied(dumping, name, blobids)
            dumping.await_event("dump_start", 2)
            assert dumping.events("dump_complete") == []
            gate.unlink()
            dumping.await_event("dump_complete", 2)
            later = {dumping.put(b"later")}
            for name in others:
                await_copied(dumping, name, blobids | later)
            run.send_signal(signal.SIGTERM)
            assert run.wait(PATIENCE) == 143, dumping.output()
    assert count(calls) == 1
    assert {one["target"] for one in dumping.events("dump_complete")} == set(others)
    assert {one["target"] for one in dumping.events("outage")} == {"pool"}
    assert sums(dumping, "remote") == sums(dumping, "usb")


def test_a_target_that_comes_back_takes_the_dump_that_waits(
    dumping: Environment, calls: Path, tmp_path: Path
) -> None:
    dumping.fill(5)
    said: list[Event] = []
    away = dumping.root / "pool"
    away.rename(dumping.root / "unplugged")
    make(dumping, "remote", said)
    make(dumping, "usb", said)
    with pytest.raises(RemoteCannotStore):
        make(dumping, "pool", said)
    assert (count(calls), len(waiting(tmp_path))) == (1, 1)
    (dumping.root / "unplugged").rename(away)
    dumping.fill(5, seed=2)  # What is newer than the dump waits for the next interval.
    found = make(dumping, "pool", said)
    assert found.age_s > 0
    assert (count(calls), waiting(tmp_path)) == (1, [])
    assert sums(dumping, "pool") == sums(dumping, "usb") == sums(dumping, "remote")
    # All have it: what changed since is dumped anew.
    make(dumping, "usb", said)
    assert count(calls) == 2


def test_a_cut_link_repeats_the_copy_of_its_target_alone(
    dumping: Environment, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumping.fill(5)
    said: list[Event] = []

    def cut(*_: object) -> None:
        raise RemoteUnreachable("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(job, "publish_dump", cut)
        with pytest.raises(RemoteUnreachable):
            make(dumping, "usb", said)
    assert sums(dumping, "usb") == []
    for name in TARGETS:
        make(dumping, name, said)
    assert sums(dumping, "pool") == sums(dumping, "usb") == sums(dumping, "remote")
    assert count(calls) == 1


def test_what_nobody_takes_any_more_is_removed(
    dumping: Environment, calls: Path, tmp_path: Path
) -> None:
    dumping.fill(5)
    said: list[Event] = []
    make(dumping, "remote", said)
    dumping.fill(5, seed=2)
    make(dumping, "usb", said, shared=())
    assert len(waiting(tmp_path)) == 1  # It is young.
    (path,) = (tmp_path / "cache").rglob("spool/*/*.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "begun": "2020-01-01T00:00:00Z"}))
    dumping.fill(5, seed=3)
    make(dumping, "usb", said, shared=())
    assert waiting(tmp_path) == []
    assert count(calls) == 3


def test_what_waits_is_compared_before_a_target_trusts_it(
    dumping: Environment, calls: Path, tmp_path: Path
) -> None:
    dumping.fill(5)
    said: list[Event] = []
    make(dumping, "remote", said)
    (path,) = (tmp_path / "cache").rglob("*.spool")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DumpFailed, match="is damaged"):
        make(dumping, "usb", said)
    assert (sums(dumping, "usb"), waiting(tmp_path)) == ([], [])
    make(dumping, "usb", said)
    assert (len(sums(dumping, "usb")), count(calls)) == (1, 2)


def test_without_room_each_target_makes_a_dump_of_its_own(
    dumping: Environment, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumping.fill(5)
    monkeypatch.setattr(spool, "_LEAVE_FREE", 1 << 60)
    monkeypatch.setattr(spool, "_SHARE", 1)
    said: list[Event] = []
    for name in TARGETS[:2]:
        make(dumping, name, said)
        assert len(sums(dumping, name)) == 1
    assert waiting(tmp_path) == []
    warnings = [str(one.line) for one in said if one.kind == "warning"]
    assert len(warnings) == 2
    assert all("of the disk are left; this target makes one of its own" in one for one in warnings)


def test_a_maker_that_is_killed_leaves_the_dump_to_the_next(
    dumping: Environment, gate: Path, calls: Path, tmp_path: Path
) -> None:
    dumping.fill(5)
    gate.touch()
    with dumping.running("--target", "remote,usb", "run", "--watch") as run:
        wait_until(lambda: count(calls) == 1, "pg_dump")
        run.kill()
        run.wait(PATIENCE)
    wait_until(lambda: dumping.processes() == {}, "the end of all it started")
    gate.unlink()
    said: list[Event] = []
    make(dumping, "usb", said)
    assert (count(calls), len(waiting(tmp_path))) == (2, 1)
    assert len(sums(dumping, "usb")) == 1


def test_rows_of_tables_can_be_left_out_and_a_restore_says_so(
    dumping: Environment, database_url: str
) -> None:
    dumping.fill(3)
    for table in ("cache_of_paths", "kept"):
        dumping.query(f"create table {table} as select 'x' as path")
    dumping.write_config(dump={"exclude_table_data": ["cache_*"]})
    dumping.call("dump", expect=0)
    dumping.write_config(catalog={"url": database_url})
    done = dumping.call("restore", "--catalog", expect=0)
    assert "the dump has no rows of tables that match cache_*" in done.stderr
    dumping.url = database_url
    assert dumping.query("select count(*) from cache_of_paths") == [(0,)]
    assert dumping.query("select count(*) from kept") == [(1,)]
    assert dumping.query("select count(*) from blobs") == [(3,)]


def test_daemons_of_two_hosts_make_one_dump_an_interval(
    dumping: Environment, gate: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = set(dumping.fill(5))
    dumping.run("run", "--skip-pgdump", expect=0)
    dumping.call("dump", expect=0)
    dumping.query("create table of_others ()")
    gate.touch()
    here = load(Settings, file=dumping.config, environ={})
    said: list[Event] = []
    other = dumping.root / "other.jsonl"
    with dumping.running("run", "--watch"):
        wait_until(lambda: count(calls) == 2, "a second pg_dump")
        # Whoever finds another host at work looks again soon.
        found = job.dump(here, said.append, beside=True, every=3600.0)
        assert found == NewestDump(tells=True, age_s=3300.0)
        elsewhere = {"NTT_LOCK_FILE": str(dumping.root / "lock-2"), "NTT_BACKUP_LOG": str(other)}
        dumping.environ |= elsewhere
        with dumping.running("run", "--watch"):
            wait_until(lambda: other.exists() and "worker_start" in other.read_text(), "another")
            await_copied(dumping, "remote", first | set(dumping.fill(5, seed=2)))
            gate.unlink()
            dumping.await_event("dump_complete")
    assert "dump_start" not in other.read_text()

    dumping.query("create table of_others_too ()")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    newest = job.dump(here, said.append, beside=True, every=3600.0)
    assert newest.tells
    assert 0 < newest.age_s < 3600
    assert (said, count(calls)) == ([], 2)
    assert job.dump(here, said.append, beside=True, every=newest.age_s / 2).tells
    assert count(calls) == 3
