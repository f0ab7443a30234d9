"""A lock is worth something only if the file still has its name when it is held."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.blobdir.partial import lock_file


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("anew", [False, True])
def test_lock_file_returns_no_file_that_was_published_before_the_lock_was_free(
    tmp_path: Path, directory: int, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    (tmp_path / "name").write_bytes(b"whole")
    take = fcntl.flock

    def just_after_its_holder_let_go(fd: int, how: int) -> None:
        if (tmp_path / "name").exists() and not (tmp_path / "placed").exists():
            (tmp_path / "name").rename(tmp_path / "placed")
            if anew:  # A third session was faster.
                (tmp_path / "name").touch()
        take(fd, how)

    monkeypatch.setattr(fcntl, "flock", just_after_its_holder_let_go)

    fd = lock_file(directory, "name", create=True)

    assert fd is not None
    assert os.path.samestat(os.fstat(fd), (tmp_path / "name").stat())
    assert not os.path.samestat(os.fstat(fd), (tmp_path / "placed").stat())
    os.ftruncate(fd, 0)
    assert (tmp_path / "placed").read_bytes() == b"whole"
    os.close(fd)


def test_lock_file_has_one_holder_at_a_time(tmp_path: Path, directory: int) -> None:
    first = lock_file(directory, "name", create=True)
    assert first is not None
    assert lock_file(directory, "name", create=True) is None
    os.close(first)
    second = lock_file(directory, "name", create=True)
    assert second is not None
    os.close(second)


def test_lock_file_refuses_a_fifo_and_a_file_with_two_names(tmp_path: Path, directory: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"")
    os.link(tmp_path / "file", tmp_path / "link")
    assert lock_file(directory, "fifo", create=True) is None
    assert lock_file(directory, "link", create=True) is None


def test_lock_file_makes_a_missing_file_only_when_asked(tmp_path: Path, directory: int) -> None:
    with pytest.raises(FileNotFoundError):
        lock_file(directory, "name", create=False)
    assert list(tmp_path.iterdir()) == []
