"""`--json`: one object for a program, and nothing else on the standard output."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres


def object_of(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["target"] == "remote"
    return found


def test_each_command_of_the_first_day_tells_a_program_what_it_did(
    env: Environment, postgres: Postgres
) -> None:
    env.query("drop index idx_blobs_remote_pending")
    env.put_in_store(b"content")
    env.write_config(dump={"bin": str(postgres.programs)})

    made = object_of(env.call("init-db", "--json"))
    scanned = object_of(env.call("scan", "--json"))
    checked = object_of(env.call("check", "--json"))
    planned = object_of(env.call("run", "--dry-run", "--json"))
    ran = object_of(env.run("run", "--json"))
    dumped = object_of(env.call("dump", "--json"))
    skipped = object_of(env.call("dump", "--json"))

    assert any("build the index" in step for step in made["done"])
    assert made["not_yet"] == []
    assert (scanned["registered"], scanned["bytes"], scanned["strays"]) == (1, 7, {})
    assert checked["exit_code"] == 0
    assert {one["verdict"] for one in checked["steps"]} <= {"ok", "warning"}
    assert (planned["blobs"], planned["exact"]) == (1, True)
    assert (ran["copied"], ran["failed"], ran["outcome"], ran["exit_code"]) == (1, 0, "done", 0)
    assert (dumped["event"], skipped["event"]) == ("dump_complete", "dump_skipped")
    assert dumped["name"] == skipped["name"]


def test_a_failed_step_of_a_check_has_its_hint_and_exit_code(env: Environment) -> None:
    env.fill(1)
    env.write_config(remote={"path": "/nowhere"})

    found = object_of(env.call("check", "--json"), code=6)

    assert found["exit_code"] == 6
    first = next(one for one in found["steps"] if one["verdict"] == "failed")
    assert first["error"]["exit_code"] == 6
    assert first["error"]["hint"]


def test_what_is_read_back_and_each_command_of_snapshots_name_the_target(env: Environment) -> None:
    """The target is a directory, which needs no session of ssh."""
    env.fill_both(1)
    env.settings["remote"] = {"url": f"file://{env.remote.local}"}
    env.write_config()
    back, few = str(env.root / "back"), ("--json", "--quiet")
    (env.root / "file").write_bytes(b"content")

    restored = object_of(env.call("restore", back, "--workers", "1", *few))
    taken = object_of(env.call("snapshot", "take", "set", str(env.root / "file"), *few))
    (listed,) = object_of(env.call("snapshot", "list", "--json"))["versions"]
    shown = object_of(env.call("snapshot", "show", "set", "--json"))
    verified = object_of(env.call("snapshot", "verify", *few))
    # A process of its own, since it may write nowhere else from then on.
    brought = object_of(env.run("snapshot", "restore", "set", "--to", back, *few))
    kept = object_of(env.call("snapshot", "forget", "set", "--keep-last", "1", "--json"))

    assert restored["restored"] == brought["files"] == verified["versions"] == 1
    assert taken["version"] == listed["version"] == shown["version"]
    assert kept["removed"] is False
