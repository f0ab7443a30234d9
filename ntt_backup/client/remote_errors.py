"""Errors of the remote, told by the messages of its tools, become errors of ours.

mkdir, tar, cp and sync have exit status 1 for everything; the reason is in their messages, which
are those of the C library in the C locale. There are three kinds: errors that stop a run (full,
read-only, no permission, a broken disk, a missing program), temporary ones (out of resources), and
all others, which concern one batch.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ntt_backup.blobdir.layout import read_marker
from ntt_backup.errors import (
    AnotherTarget,
    BackupError,
    BatchRejected,
    ConfigError,
    RemoteCannotStore,
    RemoteUnreachable,
)
from ntt_backup.name_hash import SHOWN

# The characters that are shown of a long message, and how many of them precede the reason.
_SHOWN: Final = 300
_BEFORE: Final = 100


@dataclass(frozen=True, slots=True)
class ErrorCase:
    """An error and the pattern, in lowercase, by which it is recognized.

    better: the pattern of a line that is shown instead; alone such a line explains nothing.
    """

    pattern: str
    error: type[BackupError]
    message: str
    hint: str = ""
    better: str = ""


_CASES: Final = (
    ErrorCase(
        r"cannot be replaced: .*(permission denied|operation not permitted)",
        BatchRejected,
        "a file on the remote has the name of a blob, and may not be replaced",
        "look at its owner and mode on the remote, and at lsattr (chattr +i)",
    ),
    ErrorCase(
        r"on another file system|cross-device link",
        RemoteCannotStore,
        "by-hash on the remote is not one file system",
        "mount the disk at remote.path itself: a batch is made durable by syncing one file system",
    ),
    ErrorCase(
        r"no space left|disk quota exceeded",
        RemoteCannotStore,
        "the remote is full",
        "free space or inodes on the remote (df, df -i), or raise the quota; nothing is lost",
    ),
    ErrorCase(
        r"read-only file system",
        RemoteCannotStore,
        "the remote's file system is read-only",
        "remount it for writing; under systemd a local remote.path must be in ReadWritePaths",
    ),
    ErrorCase(
        r"permission denied|operation not permitted",
        RemoteCannotStore,
        "the remote account may not write below remote.path",
        "where blobs were copied before, is its disk mounted? Else give it the directory"
        " remote.path (chown), or set remote.path to one that it owns",
    ),
    ErrorCase(
        r"input/output error|structure needs cleaning",
        RemoteCannotStore,
        "the remote's disk reports errors",
        "look at the kernel log of the machine that has the disk before anything else",
    ),
    ErrorCase(
        r"cannot allocate memory|resource temporarily unavailable|too many open files|cannot fork"
        r"|terminated|killed",
        RemoteUnreachable,
        "the remote is short of resources",
    ),
    ErrorCase(
        r"stale file handle|transport endpoint is not connected|remote i/o error|host is down"
        r"|timed out|no such device|no route to host|network is unreachable"
        r"|software caused connection abort",
        RemoteUnreachable,
        "the remote's disk is unreachable",
        "it may be a network file system whose server does not answer",
    ),
    ErrorCase(
        r": (command )?not found",
        RemoteCannotStore,
        "a program is missing on the remote",
        "the tar strategy needs sh, tar and the core utilities in the PATH of the remote account",
    ),
)


def explain_root(text: str) -> BackupError:
    """Returns the error for a message about remote.path itself."""
    error = explain_batch(text)
    if not isinstance(error, BatchRejected):
        return error
    return RemoteCannotStore(
        "remote.path cannot be used",
        detail=text,
        hint="create it once where it belongs (mkdir -p); it is never created for you, because a"
        " missing directory may mean a disk that is not mounted",
    )


def explain_gone(text: str) -> BackupError:
    """Returns the error for a remote.path that has disappeared, which is an outage."""
    return RemoteUnreachable(
        "remote.path is gone",
        detail=text,
        hint="is its disk mounted? by-hash is only created again while nothing is copied yet",
    )


def explain_another(expected: str, marker: str) -> BackupError:
    """Returns the error for a target with another marker than that of the expected identity."""
    found = ""
    with suppress(ValueError):
        found = read_marker(marker.encode()).identity
    return AnotherTarget(expected, found)


def other_names(ours: str, theirs: str) -> ConfigError:
    """Returns the error for a target whose names are of another hash than those of the store."""
    return ConfigError(
        f"the names of blobs on the target are {SHOWN[theirs]}, and source.hash is {ours}",
        hint="correct source.hash, or name another directory as the target; where nothing was"
        " copied to it yet, remove its marker (.ntt-target.json, format.json). An installed"
        " receiver of an earlier version has to be copied again",
    )


def explain_batch(text: str) -> BackupError:
    """Returns the error for a message about a batch; BatchRejected if it is of no other kind."""
    said = text.lower()
    for case in _CASES:
        if found := re.search(case.pattern, said):
            return case.error(case.message, detail=_around(text, found.start()), hint=case.hint)
    return BatchRejected("the remote refused a batch", detail=text)


def _around(text: str, place: int) -> str:
    """Returns the part of text around a place: tar has a message for each file."""
    start = max(0, place - _BEFORE)
    end = start + _SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
