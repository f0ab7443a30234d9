"""The JSONL log: whole lines, in the file that has the name, and never the end of a backup."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.daemon.event_log import EventLog
from ntt_backup.errors import ConfigError
from ntt_backup.format import level_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "backup.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[EventLog]:
    made = EventLog(path, "run-1")
    yield made
    made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]


def is_open(path: Path) -> bool:
    """Whether this process has the file open."""
    return any(fd.exists() and fd.samefile(path) for fd in Path("/proc/self/fd").iterdir())


# --- lines ----------------------------------------------------------------------------------------


def test_a_line_begins_with_when_what_and_who(log: EventLog, path: Path) -> None:
    log.emit("batch_complete", {"worker": 3, "pid": 77, "copied": 5})
    (line,) = lines(path)
    assert list(line) == [
        "timestamp",
        "level",
        "event",
        "run_id",
        "host",
        "pid",
        "worker",
        "copied",
    ]
    assert line["host"] == socket.gethostname()
    assert (line["level"], line["event"], line["run_id"]) == ("info", "batch_complete", "run-1")
    assert (line["pid"], line["worker"], line["copied"]) == (77, 3, 5)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(Z|\+00:00)", line["timestamp"])


def test_what_the_coordinator_says_itself_has_its_pid(log: EventLog, path: Path) -> None:
    log.emit("run_start", {})
    assert lines(path)[0]["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("event", "level"),
    [
        ("run_start", "info"),
        ("progress", "info"),
        ("blob_failed", "warning"),
        ("outage", "warning"),
        ("worker_restart", "warning"),
        ("worker_stall", "warning"),
        ("error", "error"),
    ],
)
def test_levels_say_what_deserves_a_look(event: str, level: str) -> None:
    assert level_of(event) == level


@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.none(), max_size=5))
def test_whatever_is_said_is_one_line_of_ascii(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    said = {f"x_{name}": value for name, value in fields.items()}
    log = EventLog(path, "run")
    log.emit("warning", said)
    log.close()
    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    line = json.loads(data.decode("ascii"))
    assert {name: line[name] for name in said} == said


def test_lines_are_added_to_what_is_there(path: Path) -> None:
    for run in ("first", "second"):
        log = EventLog(path, run)
        log.emit("run_start", {})
        log.close()
    assert [line["run_id"] for line in lines(path)] == ["first", "second"]


# --- files ----------------------------------------------------------------------------------------


def test_directories_are_made(log: EventLog, path: Path) -> None:
    assert path.exists()


def test_after_a_rename_lines_go_to_the_new_file_of_that_name(log: EventLog, path: Path) -> None:
    log.emit("run_start", {})
    rotated = path.with_suffix(".1")
    path.rename(rotated)
    log.emit("progress", {})
    path.write_text("")  # logrotate's `create`
    log.emit("run_stop", {})
    assert [line["event"] for line in lines(rotated)] == ["run_start"]
    assert [line["event"] for line in lines(path)] == ["run_stop"]


def test_after_a_rename_the_next_line_makes_the_file_anew(log: EventLog, path: Path) -> None:
    path.rename(path.with_suffix(".1"))
    log.emit("progress", {})
    assert [line["event"] for line in lines(path)] == ["progress"]


def test_a_log_that_is_copied_and_cut_goes_on_at_its_beginning(log: EventLog, path: Path) -> None:
    log.emit("run_start", {})
    os.truncate(path, 0)  # logrotate's `copytruncate`
    log.emit("progress", {})
    assert [line["event"] for line in lines(path)] == ["progress"]


def test_reopening_lets_go_of_the_file(log: EventLog, path: Path) -> None:
    log.emit("run_start", {})
    assert is_open(path)
    log.reopen()
    log.reopen()
    assert not is_open(path)
    log.emit("progress", {})
    assert [line["event"] for line in lines(path)] == ["run_start", "progress"]


@pytest.mark.parametrize("place", ["directory", "below a file"])
def test_a_log_that_cannot_be_opened_is_told_at_the_start(tmp_path: Path, place: str) -> None:
    path = tmp_path if place == "directory" else tmp_path / "file" / "log.jsonl"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        EventLog(path, "run")
    assert str(path) in caught.value.message
    assert "NTT_LOG_JSON" in caught.value.hint


def test_a_log_that_finds_no_room_at_the_start_is_begun_once_there_is_some(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        log = EventLog(path, "run")
        log.emit("run_start", {})
        log.emit("progress", {})
    assert capsys.readouterr().err.count("No space left") == 1
    log.emit("run_stop", {})
    log.close()
    assert [line["event"] for line in lines(path)] == ["run_stop"]


# --- trouble --------------------------------------------------------------------------------------


def test_a_directory_that_vanishes_is_told_once_and_lines_go_on_when_it_is_back(
    log: EventLog, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = path.parent.with_name("moved")
    path.parent.rename(moved)
    log.emit("progress", {})
    log.emit("progress", {})
    assert capsys.readouterr().err.count("cannot write the log") == 1
    moved.rename(path.parent)
    log.emit("run_stop", {})
    assert lines(path)[-1]["event"] == "run_stop"


def test_a_full_disk_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(Path("/dev/full"), "run")
    for _ in range(3):
        log.emit("progress", {})
    log.close()
    said = capsys.readouterr().err
    assert said.count("cannot write the log /dev/full") == 1
    assert "No space left" in said


@pytest.fixture
def file_limit() -> Iterator[int]:
    """Files of this process may not grow beyond so many bytes; Python ignores the signal for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_was_torn_by_a_full_disk_spoils_no_other(
    log: EventLog, path: Path, file_limit: int, capfd: pytest.CaptureFixture[str]
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    log.emit("run_start", {})
    log.emit("progress", {"filling": "x" * file_limit})
    assert path.stat().st_size == file_limit
    log.emit("progress", {"dropped": 1})
    log.emit("progress", {"dropped": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert capfd.readouterr().err.count("cannot write the log") == 1
    log.emit("run_stop", {})
    log.emit("after", {})
    first, torn, *rest = path.read_text().splitlines()
    assert json.loads(first)["event"] == "run_start"
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
    assert [json.loads(line)["event"] for line in rest] == ["run_stop", "after"]
