"""A guest in the log directory of other programs: it changes, rotates and removes what it made."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import structlog

from ntt_backup import events
from ntt_backup.config.sections import LogSettings
from ntt_backup.daemon.event_log import EventLog, make_log
from tests.helpers.environment import Environment
from tests.helpers.machine import CHECKOUT
from tests.helpers.waiting import wait_until

THEIRS, OURS = 14711, 14712
NAMES = ("enum", "backup", "backup-chll", "orchestrator", "verify")
LINE = '{"text": "done", "record": {"level": {"name": "INFO"}, "message": "done"}}\n'
ROTATION = CHECKOUT / "systemd" / "logrotate.d" / "ntt-backup-remote"

# A log loads it for its first line; the other account could not read it below root's home.
assert structlog
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other accounts")


@pytest.fixture
def directory() -> Iterator[Path]:
    """The log directory of another account, 0755, with five of its logs.

    It is not below the directory of pytest, which no other account may enter.
    """
    with tempfile.TemporaryDirectory(prefix="ntt-guest-") as name:
        above = Path(name)
        above.chmod(0o755)
        made = above / "ntt"
        made.mkdir(mode=0o755)
        for index, log in enumerate(NAMES):
            path = made / f"{log}.jsonl"
            path.write_text(LINE * (index + 1))
            path.chmod(0o600 + 0o11 * index)
            os.chown(path, THEIRS, THEIRS)
        os.chown(made, THEIRS, THEIRS)
        yield made


def state(directory: Path) -> dict[str, tuple[int, int, int, int, str]]:
    """What must stay of the directory and of their logs."""
    found = {}
    for path in (directory, *(directory / f"{name}.jsonl" for name in NAMES)):
        at = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        kept = (at.st_mode, at.st_uid, at.st_gid, at.st_ino)
        found[path.name] = (*kept, hashlib.sha256(content).hexdigest())
    return found


@contextmanager
def account(uid: int, work: Callable[[int], None]) -> Iterator[None]:
    """An account that does its work again and again; a failure of it fails the test."""
    told, stop = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(stop)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            for index in range(1_000_000):
                work(index)
                # The other end is closed when it is to stop.
                if select.select([told], [], [], 0.001)[0]:
                    break
            status = 0
        finally:
            os._exit(status)
    os.close(told)
    try:
        yield
    finally:
        os.close(stop)
        _, status = os.waitpid(pid, 0)
    assert status == 0


@as_root
def test_a_log_is_rotated_in_a_directory_of_another_account_without_a_loss(
    directory: Path, tmp_path: Path
) -> None:
    if shutil.which("logrotate") is None:
        pytest.skip("logrotate is not installed")
    before = state(directory)
    log = directory / "backup-remote.jsonl"
    assert make_log(log, OURS, OURS) == "made"
    assert make_log(log, OURS, OURS) == "unchanged"
    at = log.stat()
    assert (at.st_uid, at.st_gid, at.st_mode & 0o777) == (OURS, THEIRS, 0o640)
    rotation = tmp_path / "rotation"
    rotation.write_text(ROTATION.read_text().replace("/var/log/ntt", str(directory)))
    argv = ["logrotate", "-f", "-s", str(tmp_path / "state"), str(rotation)]

    opened: list[EventLog] = []

    def tell(index: int) -> None:
        if not opened:
            opened.append(EventLog(LogSettings(jsonl=log), "run-1", "remote"))
        opened[0].event(events.Warning(reason=str(index)))

    def theirs(_: int) -> None:
        with (directory / "copier.jsonl").open("a") as file:
            file.write(LINE)

    with account(OURS, tell), account(THEIRS, theirs):
        for _ in range(3):
            wait_until(lambda: log.stat().st_size > 20_000, "lines in the new file")
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        wait_until(lambda: log.stat().st_size > 20_000, "lines in the last file")
    old = [log.with_name(f"{log.name}.{suffix}") for suffix in ("3.gz", "2.gz", "1")]
    reasons = []
    for path in (*old, log):
        text = subprocess.run(["zcat", "-f", path], capture_output=True, text=True, check=True)
        reasons += [int(json.loads(line)["reason"]) for line in text.stdout.splitlines()]
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (OURS, 0o640)
    assert reasons == list(range(len(reasons)))
    assert state(directory) == before
    assert {LINE} == set((directory / "copier.jsonl").read_text().splitlines(keepends=True))


@as_root
@pytest.mark.parametrize("owner", [THEIRS, OURS])
def test_a_log_of_another_program_under_our_name_is_neither_given_away_nor_rotated(
    directory: Path, tmp_path: Path, owner: int
) -> None:
    """An earlier program had a log of this name; the service may even run as its account."""
    log = directory / "backup-remote.jsonl"
    log.write_text(LINE)
    os.chown(log, owner, owner)
    before = (log.read_bytes(), log.stat())
    assert make_log(log, OURS, OURS, [THEIRS]).startswith("kept, since it is another program's")
    if shutil.which("logrotate") is not None:
        rotation = tmp_path / "rotation"
        rotation.write_text(ROTATION.read_text().replace("/var/log/ntt", str(directory)))
        argv = ["logrotate", "-f", "-s", str(tmp_path / "state"), str(rotation)]
        assert subprocess.run(argv, capture_output=True, check=False).returncode == 1
    after = log.stat()
    assert log.read_bytes() == before[0]
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_mtime_ns) == (
        before[1].st_ino,
        before[1].st_mode,
        owner,
        before[1].st_mtime_ns,
    )
    assert sorted(path.name for path in directory.iterdir() if "remote" in path.name) == [log.name]


@as_root
def test_a_log_moves_to_another_account_with_the_service(directory: Path) -> None:
    log = directory / "backup-remote.jsonl"
    make_log(log, OURS, OURS)
    assert make_log(log, THEIRS, THEIRS, [OURS]) == "given to the account of the service"
    assert (log.stat().st_uid, log.stat().st_gid) == (THEIRS, THEIRS)
    # An operator has set the account by a drop-in of his own: only a start of the unit tells it.
    with closing(EventLog(LogSettings(jsonl=log), "run-1", "remote")) as opened:
        opened.event(events.Warning(reason="one"))
    assert make_log(log, OURS, OURS) == f"kept, since it belongs to the account {THEIRS}"
    assert make_log(log, OURS, OURS, of_any=True) == "given to the account of the service"


@as_root
def test_no_log_is_made_where_others_could_lead_root_elsewhere(directory: Path) -> None:
    """The owner of the directory has put a symlink into it, for a directory that root only has."""
    precious = directory.parent / "precious"
    precious.mkdir(mode=0o700)
    (directory / "deeper").symlink_to(precious)
    done = make_log(directory / "deeper" / "backup-remote.jsonl", OURS, OURS)
    assert done.startswith(f"not made, since others may change {directory}")
    (directory / "backup-remote.jsonl").symlink_to(precious / "log")
    done = make_log(directory / "backup-remote.jsonl", OURS, OURS)
    assert done == "kept, since it is a symlink"
    assert list(precious.iterdir()) == []


# --- their environment ----------------------------------------------------------------------------


def test_their_environment_leads_no_line_into_their_log(env: Environment) -> None:
    env.fill(5)
    theirs = env.root / "orchestrator.jsonl"
    theirs.write_text(LINE)
    env.environ["NTT_LOG_JSON"] = str(theirs)
    env.environ |= {"NTT_IMAGE_ROOT": "/data/img", "NTT_RAW_ROOT": "/data/raw"}
    refused = env.run("run", expect=2)
    assert "error: the log" in refused.stderr + refused.stdout
    assert "has lines of another program" in refused.stderr + refused.stdout
    assert theirs.read_text() == LINE
    assert env.copied() == set()
    # The name that is ours alone wins.
    env.environ["NTT_BACKUP_LOG"] = str(env.log)
    env.finish()
    assert theirs.read_text() == LINE
    assert env.events("run_stop")


def test_the_former_name_of_the_variable_still_leads_to_the_log(env: Environment) -> None:
    env.fill(5)
    log = env.root / "another.jsonl"
    env.environ["NTT_LOG_JSON"] = str(log)
    assert "set NTT_BACKUP_LOG instead" in env.run("run", expect=0).stderr
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "run_stop"
    # With lines of its own it is still a log.
    env.finish()
