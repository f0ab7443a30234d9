"""The PID lock: one holder at a time, no stale locks, no tricks with what stands in its place."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ntt_backup.errors import ConfigError
from ntt_backup.process.pid_lock import pid_lock

HOLDER = """
import sys, time
from pathlib import Path
from ntt_backup.process.pid_lock import pid_lock
with pid_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    argv = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_the_file_names_the_holder_while_it_is_held_and_nobody_afterwards(path: Path) -> None:
    with pid_lock(path):
        assert path.read_text() == f"{os.getpid()}\n"
    assert path.read_text() == ""


def test_a_dead_holder_leaves_nothing_that_holds(path: Path) -> None:
    with hold(path) as other:
        other.kill()
    assert path.read_text() == f"{other.pid}\n"
    with pid_lock(path):
        assert path.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("content", [b"root:x:0:0:root:/root:/bin/sh\n", b"1\n" * 9, b"\0" * 99])
def test_a_file_that_holds_something_else_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="holds something else") as caught, pid_lock(path):
        pytest.fail("locked")
    assert str(path) in caught.value.message
    assert "lock.file (NTT_LOCK_FILE)" in caught.value.hint
    assert path.read_bytes() == content


def test_children_do_not_inherit_the_lock(path: Path) -> None:
    with pid_lock(path):
        child = subprocess.Popen(["sleep", "600"])
    try:
        with pid_lock(path):
            pass
    finally:
        child.kill()
        child.wait()


def test_where_no_file_can_be_made_for_want_of_room_room_is_to_be_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ConfigError, match="No space left") as caught, pid_lock(path):
        pytest.fail("locked")
    assert caught.value.hint.startswith(f"free space or inodes in {path.parent}")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.symlink_to("elsewhere"), "symlink"),
        (lambda path: path.symlink_to("/etc/hostname"), "symlink"),
        (Path.mkdir, ""),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/null"), "symlink"),
    ],
    ids=["a dangling symlink", "a symlink", "a directory", "a FIFO", "a device"],
)
def test_what_is_no_regular_file_is_refused(
    path: Path, make: Callable[[Path], object], why: str
) -> None:
    make(path)
    with pytest.raises(ConfigError) as caught, pid_lock(path):
        pytest.fail("locked")
    assert str(path) in caught.value.message
    assert why in str(caught.value)
    assert caught.value.hint == "set lock.file (NTT_LOCK_FILE) to a file of its own"
    assert not (path.parent / "elsewhere").exists()


def test_a_directory_that_is_missing_is_to_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, pid_lock(tmp_path / "missing" / "lock"):
        pytest.fail("locked")
    assert "missing/lock" in caught.value.message
    assert caught.value.hint.startswith(f"create the directory {tmp_path}/missing")
    assert "lock.file (NTT_LOCK_FILE)" in caught.value.hint
    assert not (tmp_path / "missing").exists()


ANOTHER_USER = """
import os, sys
from pathlib import Path
from ntt_backup.errors import ConfigError
from ntt_backup.process.pid_lock import pid_lock
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    with pid_lock(Path(sys.argv[1])):
        print("locked")
except ConfigError as error:
    print(error.message, error.detail, error.hint, sep="\\n")
"""


@pytest.mark.parametrize("where", ["/etc/passwd", "/etc/ntt-backup.lock"])
def test_where_we_may_not_write_nothing_is_to_be_removed(where: str) -> None:
    argv = [sys.executable, "-c", ANOTHER_USER, where]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [
        f"the lock file {where} cannot be opened",
        "Permission denied",
        "set lock.file (NTT_LOCK_FILE) to a path where this user may write,"
        " or run as the user whose file it is",
    ]
