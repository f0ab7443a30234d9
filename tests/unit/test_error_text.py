"""What the remote's tools say when they cannot store: what stops, what passes, what splits."""

from __future__ import annotations

import pytest

from ntt_backup.client.error_text import explain_batch, explain_root
from ntt_backup.errors import BackupError, BatchRejected, RemoteCannotStore, RemoteUnreachable

STOPS = [
    "tar: ab/cd/x: Cannot write: No space left on device",
    "mkdir: cannot create directory '/srv/by-hash/ab': No space left on device",
    "tar: ab/cd/x: Cannot open: Disk quota exceeded",
    "mkdir: can't create directory 'ab': Read-only file system",
    "mv: cannot move 'a' to 'b': Permission denied",
    "tar: ab: Cannot change mode to rwxr-xr-x: Operation not permitted",
    "sync: error syncing '/srv': Input/output error",
    "tar: ab: Cannot open: Structure needs cleaning",
    "sh: 1: tar: not found",
    "sh: tar: command not found",
]
PASSES = [
    "sh: 1: Cannot fork",
    "tar: Cannot fork: Resource temporarily unavailable",
    "tar: ab: Cannot open: Too many open files in system",
    "cp: memory exhausted: Cannot allocate memory",
    "tar: ab: Cannot open: Stale file handle",
    "tar: ab: Cannot open: Transport endpoint is not connected",
    "Terminated",
    "Killed",
]
SPLITS = [
    "./ab/cd/x: a directory stands in its place",
    "mkdir: cannot create directory '/srv/by-hash/ab': Not a directory",
    "tar: This does not look like a tar archive",
    "tar: ab/cd/x: Cannot open: File name too long",
    "",
]


@pytest.mark.parametrize("text", STOPS)
@pytest.mark.parametrize("explain", [explain_batch, explain_root])
def test_what_concerns_the_whole_remote_stops_the_run(explain: object, text: str) -> None:
    assert callable(explain)
    error: BackupError = explain(text)
    assert type(error) is RemoteCannotStore
    assert (error.exit_code, error.retryable) == (6, False)
    assert error.hint
    assert error.detail == text


@pytest.mark.parametrize("text", PASSES)
@pytest.mark.parametrize("explain", [explain_batch, explain_root])
def test_what_passes_by_itself_is_waited_for(explain: object, text: str) -> None:
    assert callable(explain)
    error: BackupError = explain(text)
    assert type(error) is RemoteUnreachable
    assert error.retryable
    assert error.detail == text


def test_of_many_complaints_those_that_say_why_are_shown() -> None:
    before = "tar: ab: Cannot change mode: Whatever " * 10
    after = "tar: cd/ef/x: Cannot open: No such file or directory " * 10
    error = explain_batch(f"{before}tar: cd: Cannot mkdir: No space left on device {after}")
    assert error.message == "the remote is full"
    assert "tar: cd: Cannot mkdir: No space left on device" in error.detail
    assert len(error.detail) <= 310
    first = explain_batch(f"tar: ab: Cannot mkdir: Disk quota exceeded {after}")
    assert first.detail.startswith("tar: ab: Cannot mkdir: Disk quota exceeded tar: cd/ef/x")


@pytest.mark.parametrize("text", SPLITS)
def test_the_rest_is_the_batchs_own_trouble(text: str) -> None:
    error = explain_batch(text)
    assert type(error) is BatchRejected
    assert error.detail == text


@pytest.mark.parametrize("text", SPLITS)
def test_the_same_words_about_the_path_mean_that_it_cannot_be_used(text: str) -> None:
    error = explain_root(text)
    assert type(error) is RemoteCannotStore
    assert "mkdir -p" in error.hint


def test_a_path_that_is_missing_is_not_a_missing_program() -> None:
    error = explain_root("sh: 1: cd: can't cd to /srv/backup: No such file or directory")
    assert error.message == "remote.path cannot be used"
