"""The command line: what each command answers, on which stream, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.environment import Environment

# --- help and mistakes ----------------------------------------------------------------------------


def loaded_by(*command: str) -> set[str]:
    """The modules that Python has loaded at the end of a command, its own included."""
    code = "import sys; from ntt_backup.cli import app; app.main(); print(*sys.modules)"
    argv = [sys.executable, "-c", code, *command]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    found = set(said.splitlines()[-1].split())
    assert "ntt_backup.cli.app" in found
    return found


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        ("--help", {"asyncio", "ntt_backup.config", "psycopg", "pydantic", "rich"}),
        (
            "status --help",
            {"ntt_backup.client.transport", "ntt_backup.daemon.coordinator", "structlog"},
        ),
        ("install-receiver --write /dev/null", {"psycopg", "rich"}),
        # Into a pipe, to the log, and to an end by its lock: the first worker is forked after that,
        # and before what speaks to the catalog is loaded.
        ("run", {"paramiko", "psycopg", "pygments", "rich"}),
    ],
)
def test_a_command_loads_nothing_that_only_others_need(
    env: Environment, command: str, unwanted: set[str]
) -> None:
    env.write_config(lock={"file": str(env.root / "missing" / "lock")})
    assert not unwanted & loaded_by("--config", str(env.config), *command.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-command"], "no-such-command"),
        (["--no-such-option", "run"], "--no-such-option"),
        (["run", "--workers"], "--workers"),
        (["run", "--workers", "0"], "--workers"),
        (["run", "--workers", "many"], "--workers"),
        (["run", "--batch-size", "-1"], "--batch-size"),
        (["run", "--batch-bytes", "1,5GB"], "--batch-bytes"),
        (["run", "--strategy", "pigeon"], "--strategy"),
        (["run", "--bwlimit", "fast"], "--bwlimit"),
        (["run", "extra"], "extra"),
        (["run", "--once", "--watch"], "one of --once and --watch"),
        (["verify", "--local", "--download"], "one of --local and --download"),
        (
            ["run", "--target", "x"],
            "--target stands before the command: ntt-backup-remote",
        ),
        (["bench", "link", "--config=x"], "--config stands before the command"),
        (["status", "-v"], "-v stands before the command: ntt-backup-remote -v ... status"),
        (
            ["--workers", "4", "run"],
            "--workers stands after the command: demo, drill,",
        ),
        (["restore", "--to", "back", "--tier", "bulk"], "--thaw DAYS"),
        (["restore", "--catalog", "--thaw", "3"], "--catalog cannot be combined"),
        (["requeue", "--reason", "boredom"], "--reason"),
        (["requeue", "--reason", "remote-missing"], "remote-rejected"),
        (["install-receiver"], "--print"),
        (["verify", "--sample", "1"], "--sample"),
        (["verify", "--sample", "0%"], "--sample"),
        (["verify", "--older-than", "soon"], "--older-than"),
        (["verify", "--prefix", "G"], "--prefix"),
        (["restore"], "--to DIR"),
        (["restore", "--to", "one", "two"], "--to DIR"),
        (["restore", "--to", "one", "--catalog"], "--to"),
        (["--target", "Nowhere!", "run"], "Nowhere!"),
        (["--target", "elsewhere", "run"], "elsewhere"),
        (["--target", "all", "check"], "this command takes one"),
        (["--config", "/nonexistent.toml", "run"], "/nonexistent.toml"),
    ],
)
def test_a_wrong_command_line_is_refused_and_nothing_is_done(
    env: Environment, args: list[str], said: str
) -> None:
    result = env.call(*args, expect=2)
    assert said in result.stderr
    assert result.stdout == ""
    assert not env.log.exists()


def test_a_misspelt_variable_is_reported(env: Environment) -> None:
    env.environ["NTT_WORKRES"] = "3"
    result = env.call("status", expect=0)
    assert "NTT_WORKRES has no effect; did you mean NTT_WORKERS?" in result.stderr


# --- unforeseen -----------------------------------------------------------------------------------


def test_a_traceback_is_shown_only_for_unforeseen_errors_with_v(env: Environment) -> None:
    """A library that is broken stands for all that nobody has thought of."""
    (env.root / "sitecustomize.py").write_text("import json; json.dumps = None")
    inherited = os.environ.get("PYTHONPATH", "")
    env.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(env.root), inherited)))
    quiet, verbose = (env.run(*flags, "status", "--json") for flags in ([], ["-v"]))
    env.write_config(catalog={"url": "postgresql:///no_such_database?host=/nonexistent"})
    foreseen = env.run("-v", "status")
    assert (foreseen.returncode, "Traceback" in foreseen.stderr) == (4, False)
    assert (quiet.returncode, verbose.returncode) == (1, 1)
    assert "unforeseen TypeError: " in quiet.stderr
    assert "hint: " in quiet.stderr
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in verbose.stderr


@pytest.mark.parametrize("closed", [pytest.param(">&-", marks=pytest.mark.long), "<&- >&- 2>&-"])
def test_closed_streams_do_not_disturb_a_command(env: Environment, closed: str) -> None:
    """As some daemons and cron jobs start their children."""
    env.put_in_store(b"a blob")
    for command in ("scan", "status", "run"):
        program = ["sh", "-c", f'exec "$@" {closed}', "sh", *env.argv(command)]
        done = subprocess.run(program, env=env.environment(), capture_output=True, text=True)
        assert done.returncode == 0, (command, done)
        assert done.stderr == "" or command == "scan"
    env.assert_complete()


def test_a_scan_continues_where_stderr_cannot_be_written(env: Environment) -> None:
    blobid = env.put_in_store(b"a blob")
    (env.store / "stray").touch()
    done = _complaining_to_a_full_disk(env, "scan")
    assert done.returncode == 0
    assert "not registered: 1 stray," in done.stdout
    assert env.query("select blobid from blobs") == [(blobid,)]


@pytest.mark.parametrize("mistake", [["--target", "elsewhere", "status"], ["status", "--extra"]])
def test_an_error_has_its_exit_code_where_stderr_cannot_be_written(
    env: Environment, mistake: list[str]
) -> None:
    assert _complaining_to_a_full_disk(env, *mistake).returncode == 2


def _complaining_to_a_full_disk(env: Environment, *args: str) -> subprocess.CompletedProcess[str]:
    with open("/dev/full", "w") as full:
        return env.run(*args, stderr=full)


@pytest.mark.parametrize(
    ("command", "unbuffered"),  # which many a service and container has
    [("--help", ""), ("status", "1"), ("status --json", ""), ("status --json", "1")],
)
def test_a_full_disk_under_stdout_is_reported_in_one_line(
    env: Environment, command: str, unbuffered: str
) -> None:
    env.environ["PYTHONUNBUFFERED"] = unbuffered
    with open("/dev/full", "w") as full:
        done = env.run(*command.split(), stdout=full)
    assert done.returncode == 1
    assert done.stderr == "cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("command", ["--help", "status --json"])
def test_a_closed_pipe_ends_a_command_in_silence(env: Environment, command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = env.run(*command.split(), stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["status", "run"])
def test_letters_outside_the_output_encoding_are_escaped(env: Environment, command: str) -> None:
    store = env.root / "\u0441\u043a\u043b\u0430\u0434"
    (store / "00").mkdir(parents=True)
    env.write_config(source={"root": str(store)})
    env.query("insert into ntt_backup.failures values ('remote', 'x', '\u0441\u043a')")
    env.query("insert into blobs (blobid, remote_copy_failed) values ('x', true)")
    env.environ["PYTHONIOENCODING"] = "latin-1"
    result = env.run(*command.split(), expect=0)
    assert "\\u0441\\u043a" in result.stdout


# --- the commands ---------------------------------------------------------------------------------


def test_a_run_still_sends_where_neither_log_nor_output_can_be_written(env: Environment) -> None:
    """Log and output on one full disk, as with `>> /var/log/backup 2>&1` in a crontab."""
    env.write_config(log={"jsonl": "/dev/full"})
    blobid = env.put(b"a blob")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            env.argv("run"), env=env.environment(), stdout=full, stderr=full, check=False
        )
    assert done.returncode == 0
    assert env.copied() == {blobid}


def test_scan_writes_strays_to_a_file_and_registers_none(env: Environment) -> None:
    blobid = env.put_in_store(b"a blob")
    (env.path(blobid).parent / "notes.txt").write_text("not a blob")
    (env.store / "lost+found").mkdir()
    found = env.root / "strays"
    found.write_text("of an earlier scan\n")
    env.call("scan", "--strays", str(found), expect=0)
    assert [row[0] for row in env.query("select blobid from blobs")] == [blobid]
    env.query("delete from blobs")
    env.environ["NTT_GRACE"] = "1h"
    said = env.call("scan", expect=0).stdout
    assert said.startswith("registered 1 blob, 1 of them without a size yet (changed within source")
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    assert any("notes.txt" in line["path"] for line in lines)
    assert len(lines) == 2


def test_a_continued_scan_adds_to_the_file_of_strays(env: Environment) -> None:
    """It holds what was met before the interruption too."""
    env.put_in_store(b"a blob")
    for directory in ("00/00", "ff/ff"):
        (env.store / directory).mkdir(parents=True, exist_ok=True)
        (env.store / directory / "stray").touch()
    found = env.root / "strays"
    env.call("scan", "--strays", str(found), expect=0)
    both = found.read_text().splitlines()
    assert len(both) == 2
    found.write_text(both[0] + "\n")
    env.query("update ntt_backup.scans set directory = '88/88', finished_at = null")
    env.call("scan", "--strays", str(found), expect=0)
    assert found.read_text().splitlines() == both


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null/strays", "/tmp"])
def test_strays_that_cannot_be_written_end_the_scan(env: Environment, place: str) -> None:
    env.put_in_store(b"a blob")
    (env.store / "stray").touch()
    result = env.call("scan", "--strays", place, expect=2)
    assert f"cannot write {place}: " in result.stderr
    assert "unforeseen" not in result.stderr


def test_status_has_one_line_for_each_row_without_a_terminal(env: Environment) -> None:
    why = "pg_dump is older than the server: " + "/a/long/path" * 20
    env.query("insert into ntt_backup.dumps values ('remote', now(), now(), '', 0, '', %s)", why)
    assert any(line.endswith(why) for line in env.call("status").stdout.splitlines())


def test_status_exact_estimates_nothing(env: Environment) -> None:
    env.put(b"one")
    result = env.call("status", "--exact", "--json", expect=0)
    assert json.loads(result.stdout) == env.status()
    assert json.loads(result.stdout)["estimated"] == []
    assert "about" not in env.call("status").stdout


def test_every_run_reports_failed_blobs_until_they_are_requeued(env: Environment) -> None:
    """Also by a quiet one: a timer's mail is all that its owner sees."""
    env.put(b"good")
    missing = env.put(b"missing")
    env.path(missing).unlink()

    first = env.run("run", "--quiet")
    assert (first.returncode, first.stdout) == (7, "")
    assert "1 blob is still failed" in first.stderr
    assert "some failed: 1 copied, 1 failed" in first.stderr

    env.put(b"more")
    for flags in (["--quiet"], []):
        later = env.run("run", *flags, expect=0)
        assert "1 blob is still failed: " in later.stderr + later.stdout
    told = env.events("still_failed")
    assert [(event["level"], event["blobs"]) for event in told] == [("warning", 1)] * 3

    env.call("requeue", expect=0)
    env.put_in_store(b"missing")
    last = env.run("run", "--quiet")
    assert (last.returncode, last.stdout, last.stderr) == (0, "", "")


# --- the receiver for a forced command ------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_the_program_without_a_traceback(
    env: Environment, signum: int
) -> None:
    (env.root / "psycopg.py").write_text(f"import os\nos.kill(os.getpid(), {int(signum)})\n")
    env.environ["PYTHONPATH"] = os.pathsep.join([str(env.root), *filter(None, sys.path)])
    stopped = env.run("status")
    assert stopped.returncode in (128 + signum, -signum)
    assert stopped.stdout == ""
    assert stopped.stderr.strip() in ("", "interrupted")
