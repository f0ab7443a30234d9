"""`check` does what the job does, says what is wrong and what to do, and leaves nothing behind."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ntt_backup.catalog import selection
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.sshd import FULL_SIZE, Sshd, free_port
from tests.helpers.waiting import wait_until

STEPS = (
    "log",
    "lock",
    "target",
    "source",
    "catalog",
    "rights",
    "marks",
    "pending",
    "remote",
    "transfer",
    "clock",
    "space",
    "identity",
)
LAST_STEPS = ("versions", "dump", "drill", "signing", "newest")


def verdicts(output: str) -> dict[str, str]:
    """Step to verdict: ok, warning or FAILED."""
    found = re.findall(r"^(ok|warning|FAILED) +(\w+) ", output, re.MULTILINE)
    return {step: verdict for verdict, step in found}


def failed(output: str) -> dict[str, tuple[str, str]]:
    """Step that failed to what was said, and the hint in the line below it."""
    found = re.findall(r"^FAILED +(\w+) +(.*)\n {18}(\S.*)$", output, re.MULTILINE)
    return {step: (said, hint) for step, said, hint in found}


def test_a_working_setup_passes_every_step(env: Environment) -> None:
    env.fill(10)
    assert env.call("init-db").returncode == 0  # It makes the host key.

    done = env.call("check", expect=0)
    assert done.stderr == ""
    found = verdicts(done.stdout)
    # Whether the remote has BLAKE3 is for test_first_day.py.
    assert found.pop("restore") in ("ok", "warning")
    assert found == dict.fromkeys((*STEPS, *LAST_STEPS), "ok")
    assert list(env.remote.local.iterdir()) == []
    assert env.copied() == set()
    assert env.events() == []


def line(output: str, step: str) -> str:
    """What was said of a step."""
    return next(one for one in output.splitlines() if one[8:].startswith(f"{step} "))


def test_pending_blobs_that_cannot_be_sent_are_counted_by_reason(env: Environment) -> None:
    gone, *_, cut = sorted(env.fill(8, size=lambda _: 1000))
    env.path(gone).unlink()
    env.path(cut).write_bytes(b"short")
    env.query("update blobs set size = 1000 where blobid = %s", cut)

    done = env.call("check", expect=0)
    said = line(done.stdout, "pending")
    assert said.startswith("warning")
    assert "2 of 8 examined pending blobs cannot be sent: 1 missing, 1 wrong-size" in said
    assert gone in said
    assert "Failed blobs" in said
    # Those in the catalog without a size are as large as the one that has one.
    assert "about 8.0 kB pending (7 of 8 blobs have no size" in line(done.stdout, "space")


def test_a_search_for_pending_blobs_that_has_no_time_left_is_told(
    env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead entries of the index may stand before the first pending blob, by the million."""
    env.fill(3)
    monkeypatch.setattr(selection, "first_pending", lambda *_: None)
    done = env.call("check")
    assert re.search(r"(?m)^warning +pending +.*none was looked at", done.stdout), done.stdout
    assert "VACUUM" in done.stdout


def test_a_store_that_has_no_pending_blob_is_reported(env: Environment) -> None:
    for blobid in env.fill(3):
        env.path(blobid).unlink()
    env.put_in_store(b"another")

    done = env.call("check", expect=0)
    assert f"none of 3 examined pending blobs is in {env.store}" in line(done.stdout, "pending")


# --- each kind of failure


def no_log(env: Environment) -> None:
    (env.root / "file").touch()
    env.write_config(log={"jsonl": str(env.root / "file" / "log.jsonl")})


def no_store(env: Environment) -> None:
    env.write_config(source={"root": str(env.root / "nowhere")})


def empty_store(env: Environment) -> None:
    (env.root / "empty").mkdir()
    env.write_config(source={"root": str(env.root / "empty")})


def no_database(env: Environment) -> None:
    env.write_config(catalog={"url": f"{env.url} port={free_port()}"})


def no_table(env: Environment) -> None:
    env.query("drop table blobs")


def no_column(env: Environment) -> None:
    env.query("alter table blobs drop column remote_copy_failed")


def no_sshd(env: Environment) -> None:
    env.write_config(remote={"port": free_port()})


def no_host_key(env: Environment) -> None:
    (env.root / "known_hosts").touch()
    env.write_config(remote={"known_hosts": str(env.root / "known_hosts")})


def no_directory(env: Environment) -> None:
    env.remote.local.rmdir()


def no_scratch_space(env: Environment) -> None:
    env.write_config(run={"strategy": "tar"})
    (env.remote.local / ".ntt-incoming").touch()


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_unusable_staging_directory_fails_check_and_run_alike(
    env: Environment, command: str
) -> None:
    env.fill(3)
    no_scratch_space(env)
    done = env.run(command, expect=6)
    assert ".ntt-incoming" in done.stdout


@pytest.mark.parametrize(
    ("broken", "step", "code"),
    [
        (no_log, "log", 2),
        (no_store, "source", 2),
        (empty_store, "source", 2),
        (no_database, "catalog", 4),
        (no_table, "catalog", 4),
        (no_column, "catalog", 4),
        (no_sshd, "remote", 5),
        (no_host_key, "remote", 5),
        (no_directory, "remote", 6),
    ],
)
def test_a_failed_step_has_its_exit_code_and_a_hint(
    env: Environment, broken: Callable[[Environment], None], step: str, code: int
) -> None:
    env.fill(10)
    broken(env)

    done = env.call("check")

    assert done.returncode == code, done.stdout
    assert [name for name, verdict in verdicts(done.stdout).items() if verdict == "FAILED"] == [
        step
    ]
    said, hint = failed(done.stdout)[step]
    assert said
    assert hint
    assert done.stderr == ""
    if env.remote.local.is_dir():
        assert list(env.remote.local.iterdir()) == []


@pytest.mark.docker
def test_a_full_remote_shows_in_the_trial_transfer(env: Environment, remote: Sshd) -> None:
    env.remote = remote.full_directory()
    env.write_config(remote={"path": env.remote.path})
    env.fill(10)
    filled = remote.run(f"head -c {FULL_SIZE} /dev/zero >{env.remote.path}/ballast; true")
    assert filled.returncode == 0

    done = env.call("check", expect=6)
    ((said, hint),) = failed(done.stdout).values()
    assert "full" in said
    assert hint
    assert env.litter() == ["ballast"]


def test_all_that_is_wrong_is_shown_and_the_first_gives_the_exit_code(env: Environment) -> None:
    env.fill(10)
    for broken in (no_log, no_store, no_database, no_sshd):
        broken(env)

    done = env.call("check", expect=2)
    assert failed(done.stdout).keys() == {"log", "source", "catalog", "remote"}


# --- a remote that hangs


@pytest.mark.long
def test_hanging_remote_storage_is_reported(env: Environment, remote: Sshd, startup: Path) -> None:
    """The login works, the transfer waits for ever: as with a network file system that is away."""
    env.fill(10)
    env.write_config(remote={"connect_timeout": 5}, run={"strategy": "tar"})
    tools = remote.directory("tools")
    sync = tools.local / "sync"
    sync.write_text("#!/bin/sh\nsleep 60\n")
    sync.chmod(0o755)
    startup.write_text(f"PATH={tools.path}:$PATH\n")

    done = env.call("check", expect=5)
    said, hint = failed(done.stdout)["transfer"]
    assert "waited" in said
    assert hint
    assert list(env.remote.local.iterdir()) == []


# --- what is left of it


@pytest.mark.parametrize("strategy", ["tar", "stream"])
def test_a_check_that_is_killed_leaves_nothing_on_the_remote(
    env: Environment, link: Link, strategy: str
) -> None:
    """Nor does the preflight of a run, which is the same."""
    env.fill(10)
    env.write_config(run={"strategy": strategy})
    env.through(env.sshd.through(link.port))
    link.throttle(100_000)  # A trial on a fast link is over before it is seen.
    with env.running("check"):
        wait_until(lambda: env.litter(), "the trial's directory")
        env.kill_all(random.Random(1))
    wait_until(lambda: env.litter() == [], "the remote to tidy up")


def test_hints_can_be_pasted(env: Environment) -> None:
    env.fill(3)
    env.query("drop schema ntt_backup cascade")
    line = f"ntt-backup-remote --config {env.config} init-db"
    check, run, status = (env.run(command) for command in ("check", "run", "status"))
    assert (check.returncode, run.returncode, status.returncode) == (4, 4, 4)
    assert line in check.stdout
    assert line in run.stdout
    assert line in env.events("error")[0]["hint"]
    assert line in status.stderr
