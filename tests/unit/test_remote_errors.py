"""The errors that the words of the remote's tools mean: some stop, some pass, some split."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ntt_backup.client.remote_errors import explain_batch, explain_root
from ntt_backup.errors import BackupError, BatchRejected, RemoteCannotStore, RemoteUnreachable

STOPS = [
    "tar: ab/cd/x: Cannot write: No space left on device",
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
    "Killed",
]
SPLITS = [
    "./ab/cd/x: a directory stands in its place",
    "mkdir: cannot create directory '/srv/by-hash/ab': Not a directory",
    "tar: ab/cd/x: Cannot open: File name too long",
    "",
]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, RemoteCannotStore) for text in STOPS),
        *((text, RemoteUnreachable) for text in PASSES),
    ],
)
@pytest.mark.parametrize("explain", [explain_batch, explain_root])
def test_a_trouble_of_the_whole_remote_is_no_batchs_fault(
    explain: Callable[[str], BackupError], text: str, kind: type[BackupError]
) -> None:
    error = explain(text)
    assert type(error) is kind
    assert error.detail == text
    assert error.hint or kind is RemoteUnreachable


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
def test_other_words_reject_the_batch_or_the_path(text: str) -> None:
    assert type(explain_batch(text)) is BatchRejected
    assert explain_batch(text).detail == text
    assert type(explain_root(text)) is RemoteCannotStore
    assert "mkdir -p" in explain_root(text).hint


def test_a_mount_point_that_may_not_be_written_is_no_advice_to_give_it_away() -> None:
    error = explain_batch("EACCES: Permission denied: by-hash")
    assert error.hint.startswith("where blobs were copied before, is its disk mounted?")


def test_a_missing_path_is_not_a_missing_program() -> None:
    error = explain_root("sh: 1: cd: can't cd to /srv/backup: No such file or directory")
    assert error.message == "remote.path cannot be used"
