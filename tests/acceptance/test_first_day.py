"""The first day with a remote as Debian installs it: `check` says in words what will not work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import Sshd


@pytest.fixture
def new(env: Environment, postgres: Postgres) -> Environment:
    """Default settings, a few blobs in the store, and a remote directory that is empty."""
    env.write_config(run={"skip_pgdump": False}, dump={"bin": str(postgres.programs)})
    env.fill(12)
    env.call("init-db", expect=0)
    return env


def steps(env: Environment) -> dict[str, dict[str, Any]]:
    """The steps of `check` by name. None failed, so the exit code is 0."""
    done = env.call("check", "--json", expect=0)
    return {step["name"]: step for step in json.loads(done.stdout)["steps"]}


def drill(env: Environment, url: str, *, code: int) -> str:
    scratch = env.root / "scratch"
    done = env.call("drill", "--scratch", str(scratch), "--database", url)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_remote_without_blake3_is_verified_by_what_the_store_has(
    new: Environment, remote: Sshd, database_url: str
) -> None:
    if remote.kind != "docker":
        pytest.skip("only the remote in a container is known to have no BLAKE3")

    before = steps(new)
    ran = new.call("run")
    verified = new.call("verify")
    said = drill(new, database_url, code=0)
    after = steps(new)

    assert before["restore"]["verdict"] == "ok"
    assert "no BLAKE3" in before["restore"]["text"]
    assert "nothing is copied yet" in before["drill"]["text"]
    assert before["dump"]["verdict"] == "ok"
    assert ran.returncode == 0, ran.stdout
    assert verified.returncode == 0, verified.stderr
    new.call("verify", "--download", expect=0)
    assert "PROVED" in said
    assert after["dump"]["verdict"] == "ok"
    assert after["drill"]["verdict"] == "ok"
    assert "PROVED" in after["drill"]["text"]


@pytest.mark.long
def test_a_remote_without_python_is_told_of_before_the_first_blob(
    new: Environment, startup: Path, database_url: str
) -> None:
    startup.write_text("PATH=/opt/bare\n")
    before = steps(new)["restore"]
    first = new.call("run")
    new.put(b"one more")
    second = new.call("run")
    refused = {
        command: new.call(*command.split()).returncode
        for command in ("verify", "reconcile", f"restore --to {new.root / 'back'}")
    }
    startup.unlink()
    proved = drill(new, database_url, code=0)

    assert before["verdict"] == "warning"
    for words in ("verify, reconcile, restore, drill", "end with 5", "install python3", "rsync -a"):
        assert words in before["text"]
    assert (first.returncode, second.returncode) == (0, 0)
    assert "the remote has no python3" in first.stdout
    assert "the remote has no python3" not in second.stdout
    assert refused == dict.fromkeys(refused, 5)
    assert "PROVED" in proved
