"""The JSONL log: whole lines, in the file that has the name; its trouble ends no backup. Of small
batches a quiet daemon logs little, and nothing is lost.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup import events
from ntt_backup.config import sections
from ntt_backup.config.sections import LogSettings
from ntt_backup.daemon import event_log
from ntt_backup.daemon.event_log import (
    SMALL_BLOBS,
    SMALL_BYTES,
    TOGETHER_SECONDS,
    BatchLines,
    EventLog,
)
from ntt_backup.errors import ConfigError
from ntt_backup.events import MarksLost
from tests.unit.sample_events import BATCH, ERROR

WARNING = events.Warning(reason="w")
STOPPING = events.Stopping(signal=15, within_s=None)
WORKER_STOP = events.WorkerStop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "backup.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[EventLog]:
    made = EventLog(LogSettings(jsonl=path), "run-1", "remote")
    yield made
    made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]


# --- lines ----------------------------------------------------------------------------------------


def test_a_line_begins_with_the_common_fields(log: EventLog, path: Path) -> None:
    log.event(events.BlobFailed(pid=77, worker=3, blobid="x", reason="missing", detail="gone"))
    (line,) = lines(path)
    timestamp = line.pop("timestamp")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(Z|\+00:00)", timestamp)
    assert list(line.items()) == [
        ("level", "warning"),
        ("event", "blob_failed"),
        ("run_id", "run-1"),
        ("target", "remote"),
        ("host", socket.gethostname()),
        ("pid", 77),
        ("worker", 3),
        ("blobid", "x"),
        ("reason", "missing"),
        ("detail", "gone"),
    ]


@pytest.mark.parametrize(
    ("level", "written"), [("warning", ["warning", "error"]), ("error", ["error"])]
)
def test_what_is_below_the_level_is_not_written(path: Path, level: str, written: list[str]) -> None:
    log = EventLog(LogSettings(jsonl=path, level=level), "run-1", "remote")
    for event in (WORKER_STOP, WARNING, ERROR):
        log.event(event)
    log.close()
    assert [line["level"] for line in lines(path)] == written


@given(st.text(st.characters(exclude_categories=())))
def test_whatever_is_said_is_one_line_of_ascii(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    log = EventLog(LogSettings(jsonl=path), "run", "remote")
    log.event(events.Warning(reason=text))
    log.close()
    assert path.read_bytes().count(b"\n") == 1
    assert [line["reason"] for line in lines(path)] == [text]


# --- files ----------------------------------------------------------------------------------------


def test_after_a_rename_lines_go_to_the_new_file_of_that_name(log: EventLog, path: Path) -> None:
    log.event(WARNING)
    rotated = path.with_suffix(".1")
    path.rename(rotated)
    log.event(STOPPING)
    path.write_text("")  # logrotate's `create`
    log.event(WORKER_STOP)
    assert [line["event"] for line in lines(rotated)] == ["warning"]
    assert [line["event"] for line in lines(path)] == ["worker_stop"]


@pytest.mark.parametrize("how", ["owner", "directory", "mode"])
def test_no_symlink_of_another_user_is_written_through(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A directory of the service's user is none of root's, who may run a command by hand."""
    path.parent.mkdir()
    precious = path.parent.parent / "precious"
    precious.touch()  # Nothing in it tells that it is no log of ours.
    path.symlink_to(precious)
    if how == "mode":
        path.parent.chmod(0o775)
    elif how == "owner" and os.geteuid() == 0:
        os.lchown(path, 12345, 12345)
    elif os.geteuid() == 0:
        os.chown(path.parent, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="another user may have put"):
        EventLog(LogSettings(jsonl=path), "run-1", "remote")
    assert precious.read_bytes() == b""


def test_a_symlink_that_takes_the_name_of_the_log_gets_no_line(
    log: EventLog, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.event(WARNING)
    precious = path.parent / "precious"
    precious.touch()
    path.unlink()
    path.symlink_to(precious)
    path.parent.chmod(0o777)
    log.event(WARNING)
    assert precious.read_bytes() == b""
    assert "symlink" in capsys.readouterr().err


def test_a_symlink_of_ones_own_leads_to_the_log(path: Path) -> None:
    path.parent.mkdir(0o755)
    path.symlink_to("elsewhere")
    made = EventLog(LogSettings(jsonl=path), "run-1", "remote")
    made.event(WARNING)
    made.event(WARNING)
    made.close()
    assert len(lines(path.parent / "elsewhere")) == 2


def test_a_new_file_that_is_still_root_s_loses_no_line(
    log: EventLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """logrotate makes it, and gives it away a moment later."""
    log.event(ERROR)
    old = path.with_suffix(".1")
    path.rename(old)
    path.touch()

    def refuse(_: Path) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(event_log, "_open", refuse)
        log.event(ERROR)
        assert len(old.read_text().splitlines()) == 2
        patch.setattr(event_log, "_HANDED_OVER_SECONDS", -1.0)
        log.event(ERROR)  # It stays somebody else's: told on stderr.
        assert len(old.read_text().splitlines()) == 2
    log.event(ERROR)
    assert len(path.read_text().splitlines()) == 1


def test_a_log_that_is_copied_and_cut_goes_on_at_its_beginning(log: EventLog, path: Path) -> None:
    log.event(WARNING)
    os.truncate(path, 0)  # logrotate's `copytruncate`
    log.event(STOPPING)
    assert [line["event"] for line in lines(path)] == ["stopping"]


def test_a_log_that_finds_no_room_at_the_start_is_begun_once_there_is_some(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        log = EventLog(LogSettings(jsonl=path), "run", "remote")
        log.event(WARNING)
        log.event(STOPPING)
    assert capsys.readouterr().err.count("No space left") == 1
    log.event(WORKER_STOP)
    log.close()
    assert [line["event"] for line in lines(path)] == ["worker_stop"]


# --- trouble --------------------------------------------------------------------------------------


def test_a_full_disk_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(LogSettings(jsonl=Path("/dev/full")), "run", "remote")
    for _ in range(3):
        log.event(STOPPING)
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
    log.event(WARNING)
    log.event(events.Warning(reason="x" * file_limit))
    assert path.stat().st_size == file_limit
    log.event(STOPPING)
    log.event(STOPPING)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert capfd.readouterr().err.count("cannot write the log") == 1
    log.event(WORKER_STOP)
    log.event(STOPPING)
    first, torn, *rest = path.read_text().splitlines()
    assert json.loads(first)["event"] == "warning"
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
    assert [json.loads(line)["event"] for line in rest] == ["worker_stop", "stopping"]


def test_a_log_moves_to_a_file_that_can_be_written_and_to_no_other(
    log: EventLog, path: Path
) -> None:
    moved = path.with_name("moved.jsonl")
    log.event(STOPPING)
    log.reopen(LogSettings(jsonl=moved))
    with pytest.raises(ConfigError):
        log.reopen(LogSettings(jsonl=path / "below a file"))
    log.event(WORKER_STOP)
    assert [line["event"] for line in lines(path) + lines(moved)] == ["stopping", "worker_stop"]


def test_a_log_that_is_opened_anew_has_the_events_of_another_level(
    log: EventLog, path: Path
) -> None:
    log.reopen(LogSettings(jsonl=path, level="error"))
    log.event(STOPPING)
    with pytest.raises(ConfigError):
        log.reopen(LogSettings(jsonl=path / "below a file"))
    log.event(STOPPING)
    assert lines(path) == []
    log.reopen(LogSettings(jsonl=path))
    log.event(STOPPING)
    assert [line["event"] for line in lines(path)] == ["stopping"]


def test_the_first_small_batch_is_told_at_once_and_the_next_ones_are_summed_up() -> None:
    lines = BatchLines()
    assert list(lines.take(BATCH, 100.0)) == [BATCH]
    second = replace(BATCH, batch="0.2", attempt=2, answer_s=0.75)
    for nth, event in enumerate((second, replace(BATCH, batch="0.3"))):
        assert list(lines.take(event, 101.0 + nth)) == []
    assert list(lines.due(100.0 + TOGETHER_SECONDS - 1)) == []
    (told,) = lines.due(100.0 + TOGETHER_SECONDS)
    assert told == replace(
        BATCH, batch="0.3", batches=2, blobs=4, copied=2, failed=2, bytes=200, wire_bytes=300,
        duration_s=1.0, attempt=2, answer_s=0.5, mb_per_s=0.0002,
    )  # fmt: skip
    assert list(lines.due(1e9)) == list(lines.rest()) == []


def test_after_a_quiet_minute_a_batch_is_told_at_once_again() -> None:
    lines = BatchLines()
    for now in (0.0, TOGETHER_SECONDS, 2 * TOGETHER_SECONDS):
        assert list(lines.take(BATCH, now)) == [BATCH]


@pytest.mark.parametrize(
    "change", [{"blobs": SMALL_BLOBS + 1}, {"bytes": SMALL_BYTES + 1}, {"pack": "packs/aa/bb"}]
)
def test_a_larger_batch_is_told_by_itself_after_what_was_held_back(change: dict[str, Any]) -> None:
    lines, large = BatchLines(), replace(BATCH, batch="0.9", **change)
    list(lines.take(BATCH, 0.0))
    list(lines.take(replace(BATCH, batch="0.2"), 1.0))
    assert list(lines.take(large, 2.0)) == [replace(BATCH, batch="0.2"), large]
    assert list(lines.take(large, 3.0)) == [large]


def test_what_was_held_back_is_told_before_its_marks_are_lost() -> None:
    lines, lost = BatchLines(), MarksLost(pid=4711, worker=0, blobs=1, bytes=50)
    for event in (BATCH, replace(BATCH, worker=1)):
        assert list(lines.take(event, 0.0)) == [event]
        assert list(lines.take(replace(event, batch="0.2"), 1.0)) == []
    assert list(lines.take(lost, 2.0)) == [replace(BATCH, batch="0.2"), lost]
    assert list(lines.take(lost, 3.0)) == [lost]
    assert [one.worker for one in lines.rest()] == [1]


def test_workers_are_told_apart_and_the_end_tells_all() -> None:
    lines = BatchLines()
    other = replace(BATCH, worker=1)
    assert [*lines.take(BATCH, 0.0), *lines.take(other, 0.0)] == [BATCH, other]
    assert [*lines.take(BATCH, 1.0), *lines.take(other, 1.0), *lines.take(other, 2.0)] == []
    assert {one.worker: one.batches for one in lines.rest()} == {0: 1, 1: 2}
    assert list(lines.rest()) == []


# --- a log that others write, or whose directory is theirs ----------------------------------------

LOGURU = b'{"text": "done", "record": {"level": {"name": "INFO"}, "message": "done"}}\n'


def ours(target: str = "remote") -> bytes:
    head = f'{{"timestamp": "2026-11-28T10:00:00.000000Z", "level": "info", "target": "{target}"'
    return (
        head.replace('"target"', '"event": "progress", "run_id": "1", "target"').encode() + b"}\n"
    )


@pytest.mark.parametrize(
    "content",
    [
        LOGURU,
        b"2026-11-28 10:00:00 started",
        ours() + LOGURU + ours(),
        ours() + b'{"timestamp": "2026-11-28T10:00:00Z", "level": "info", "event": "copied"}\n',
        ours() * 60_000 + LOGURU,
    ],
)
def test_a_log_with_a_line_of_another_program_is_refused_and_left_as_it_is(
    path: Path, content: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    before = path.stat()
    with pytest.raises(ConfigError, match="has lines of another program") as refused:
        EventLog(LogSettings(jsonl=path), "run-1", "remote")
    assert "NTT_BACKUP_LOG" in refused.value.hint
    assert path.read_bytes() == content
    assert (path.stat().st_mtime_ns, path.stat().st_mode) == (before.st_mtime_ns, before.st_mode)


@pytest.mark.parametrize(
    "content",
    [
        ours() + ours("offsite"),
        ours() + ours()[:50] + b"\n" + ours(),
        b'{"ti\n' + ours() + ours()[:100],
        bytes(100) + ours() + b"\n",
        bytes(4096),
        ours() * 60_000,
    ],
)
def test_lines_of_other_targets_cut_lines_and_zeros_are_no_lines_of_others(
    path: Path, content: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    log = EventLog(LogSettings(jsonl=path), "run-1", "remote")
    log.event(WARNING)
    log.close()
    assert path.read_bytes().startswith(content)


def test_a_log_does_not_move_to_that_of_another_program(log: EventLog, path: Path) -> None:
    theirs = path.with_name("theirs.jsonl")
    theirs.write_bytes(LOGURU)
    with pytest.raises(ConfigError, match="has lines of another program"):
        log.reopen(LogSettings(jsonl=theirs))
    log.event(WARNING)
    assert (len(lines(path)), theirs.read_bytes()) == (1, LOGURU)


def test_a_file_of_another_program_that_takes_the_name_gets_no_line(
    log: EventLog, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.rename(path.with_suffix(".1"))
    path.write_bytes(LOGURU)
    log.event(WARNING)
    assert path.read_bytes() == LOGURU
    assert "is no event of ntt-backup" in capsys.readouterr().err


def test_notes_about_targets_are_not_beside_a_log_in_var_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "SERVICE_HOME", tmp_path)
    assert LogSettings(jsonl=Path("/var/log/ntt/backup-remote.jsonl")).notes == tmp_path
    assert LogSettings(jsonl=Path("/srv/log/a.jsonl")).notes == Path("/srv/log")
    monkeypatch.setattr(sections, "SERVICE_HOME", tmp_path / "none")
    assert LogSettings(jsonl=Path("/var/log/a.jsonl")).notes == Path("/var/log")
