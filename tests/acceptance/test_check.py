"""`check` does what the job does, says what is wrong and what to do, and leaves nothing behind."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.sshd import FULL_SIZE, Sshd, free_port

STEPS = (
    "log",
    "lock",
    "source",
    "catalog",
    "rights",
    "pending",
    "remote",
    "transfer",
    "clock",
    "space",
)
LAST_STEPS = ("versions", "dump")


def verdicts(output: str) -> dict[str, str]:
    """Step to verdict: ok, warning or FAILED."""
    found = re.findall(r"^(ok|warning|FAILED) +(\w+) ", output, re.MULTILINE)
    return {step: verdict for verdict, step in found}


def failed(output: str) -> dict[str, tuple[str, str]]:
    """Step that failed to what was said, and the hint in the line below it."""
    found = re.findall(r"^FAILED +(\w+) +(.*)\n {18}(\S.*)$", output, re.MULTILINE)
    return {step: (said, hint) for step, said, hint in found}


def test_a_working_setup_passes_every_step(site: Site) -> None:
    site.fill(10)

    done = site.call("check")

    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert verdicts(done.stdout) == dict.fromkeys((*STEPS, *LAST_STEPS), "ok")
    assert list(site.remote.local.iterdir()) == []
    assert site.copied() == set()
    assert site.events() == []


def line(output: str, step: str) -> str:
    """What was said of a step."""
    return next(one for one in output.splitlines() if one[8:].startswith(f"{step} "))


def test_pending_blobs_that_cannot_be_sent_are_counted_by_reason(site: Site) -> None:
    gone, *_, cut = sorted(site.fill(8, size=lambda _: 1000))
    site.path(gone).unlink()
    site.path(cut).write_bytes(b"short")
    site.query("update blobs set size = 1000 where blobid = %s", cut)

    done = site.call("check")

    assert done.returncode == 0, done.stdout
    said = line(done.stdout, "pending")
    assert said.startswith("warning")
    assert "2 of 8 pending blobs looked at cannot be sent: 1 missing, 1 wrong-size" in said
    assert gone in said
    assert "Failed blobs" in said
    # Those in the catalog without a size are as large as the one that has one.
    assert "about 8.0 kB pending (7 of 8 blobs have no size" in line(done.stdout, "space")


def test_a_store_that_has_no_pending_blob_is_reported(site: Site) -> None:
    for blobid in site.fill(3):
        site.path(blobid).unlink()
    site.put_in_store(b"another")

    done = site.call("check")

    assert done.returncode == 0, done.stdout
    assert f"none of 3 pending blobs looked for is in {site.store}" in line(done.stdout, "pending")


# --- each kind of failure


def no_log(site: Site) -> None:
    (site.root / "file").touch()
    site.write_config(log={"jsonl": str(site.root / "file" / "log.jsonl")})


def no_store(site: Site) -> None:
    site.write_config(source={"root": str(site.root / "nowhere")})


def empty_store(site: Site) -> None:
    (site.root / "empty").mkdir()
    site.write_config(source={"root": str(site.root / "empty")})


def no_database(site: Site) -> None:
    site.write_config(catalog={"url": f"{site.url} port={free_port()}"})


def no_table(site: Site) -> None:
    site.query("drop table blobs")


def no_column(site: Site) -> None:
    site.query("alter table blobs drop column remote_copy_failed")


def no_sshd(site: Site) -> None:
    site.write_config(remote={"port": free_port()})


def no_host_key(site: Site) -> None:
    (site.root / "known_hosts").touch()
    site.write_config(remote={"known_hosts": str(site.root / "known_hosts")})


def no_directory(site: Site) -> None:
    site.remote.local.rmdir()


def no_scratch_space(site: Site) -> None:
    site.write_config(run={"strategy": "tar"})
    (site.remote.local / ".ntt-incoming").touch()


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_unusable_staging_directory_fails_check_and_run_alike(site: Site, command: str) -> None:
    site.fill(3)
    no_scratch_space(site)
    done = site.run(command)
    assert done.returncode == 6, done.stdout
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
    site: Site, broken: Callable[[Site], None], step: str, code: int
) -> None:
    site.fill(10)
    broken(site)

    done = site.call("check")

    assert done.returncode == code, done.stdout
    assert [name for name, verdict in verdicts(done.stdout).items() if verdict == "FAILED"] == [
        step
    ]
    said, hint = failed(done.stdout)[step]
    assert said
    assert hint
    assert done.stderr == ""
    if site.remote.local.is_dir():
        assert list(site.remote.local.iterdir()) == []


@pytest.mark.docker
def test_a_full_remote_shows_in_the_trial_transfer(site: Site, remote: Sshd) -> None:
    site.remote = remote.full_directory()
    site.write_config(remote={"path": site.remote.path})
    site.fill(10)
    filled = remote.run(f"head -c {FULL_SIZE} /dev/zero >{site.remote.path}/ballast; true")
    assert filled.returncode == 0

    done = site.call("check")

    assert done.returncode == 6, done.stdout
    ((said, hint),) = failed(done.stdout).values()
    assert "full" in said
    assert hint
    assert site.litter() == ["ballast"]


def test_all_that_is_wrong_is_shown_and_the_first_gives_the_exit_code(site: Site) -> None:
    site.fill(10)
    for broken in (no_log, no_store, no_database, no_sshd):
        broken(site)

    done = site.call("check")

    assert done.returncode == 2, done.stdout
    assert failed(done.stdout).keys() == {"log", "source", "catalog", "remote"}


# --- a remote that hangs


def test_hanging_remote_storage_is_reported(site: Site, remote: Sshd, startup: Path) -> None:
    """The login works, the transfer waits for ever: as with a network file system that is away."""
    site.fill(10)
    site.write_config(remote={"connect_timeout": 5}, run={"strategy": "tar"})
    tools = remote.directory("tools")
    sync = tools.local / "sync"
    sync.write_text("#!/bin/sh\nsleep 60\n")
    sync.chmod(0o755)
    startup.write_text(f"PATH={tools.path}:$PATH\n")

    done = site.call("check")

    assert done.returncode == 5, done.stdout
    said, hint = failed(done.stdout)["transfer"]
    assert "waited" in said
    assert hint
    assert list(site.remote.local.iterdir()) == []


# --- what is left of it


@pytest.mark.parametrize("strategy", ["tar", "stream"])
def test_a_check_that_is_killed_leaves_nothing_on_the_remote(
    site: Site, link: Link, strategy: str
) -> None:
    """Nor does the preflight of a run, which is the same."""
    site.fill(10)
    site.write_config(run={"strategy": strategy})
    site.through(site.sshd.through(link.port))
    with site.running("check"):
        wait_until(lambda: site.litter(), "the trial's directory")
        site.kill_all(random.Random(1))
    wait_until(lambda: site.litter() == [], "the remote to tidy up")


def test_hints_can_be_pasted(site: Site) -> None:
    site.fill(3)
    site.query("drop schema ntt_backup cascade")
    line = f"ntt-backup-remote --config {site.config} init-db"
    check, run, status = (site.run(command) for command in ("check", "run", "status"))
    assert (check.returncode, run.returncode, status.returncode) == (4, 4, 4)
    assert line in check.stdout
    assert line in run.stdout
    assert line in site.events("error")[0]["hint"]
    assert line in status.stderr
