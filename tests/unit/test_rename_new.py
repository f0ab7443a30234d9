"""A rename that replaces nothing, a sync that is repeated, with the system's calls and without."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ntt_backup.blobdir import descriptors


@pytest.fixture
def names(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A directory by its descriptor and its path, with a file `old`."""
    (tmp_path / "old").write_bytes(b"ours")
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd, tmp_path
    os.close(fd)


def refusing(number: int) -> Callable[..., int]:
    """A system call that fails."""

    def call(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return call


def without_renameat2(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    monkeypatch.setattr(descriptors, "_RENAMEAT2", refusing(number))
    monkeypatch.setattr(descriptors, "_missing", set())


def without_links(monkeypatch: pytest.MonkeyPatch, number: int = errno.EPERM) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)


def without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a libc that is older than it."""
    monkeypatch.setattr(descriptors, "_RENAMEAT2", None)
    monkeypatch.setattr(descriptors, "_missing", set())


WAYS: dict[str, list[Callable[[pytest.MonkeyPatch], None]]] = {
    "by the kernel": [],
    "by a link": [without_renameat2],
    "by a link, without the call": [without_the_call],
    "by a look before": [without_renameat2, without_links],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_new_name_is_never_given_over_another_file(
    names: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    fd, root = names
    for change in WAYS[way]:
        change(monkeypatch)

    descriptors.rename_new(fd, b"old", fd, b"new")
    assert {one.name for one in root.iterdir()} == {"new"}
    assert (root / "new").read_bytes() == b"ours"

    (root / "old").write_bytes(b"other")
    with pytest.raises(FileExistsError):
        descriptors.rename_new(fd, b"old", fd, b"new")
    assert (root / "old").read_bytes() == b"other"
    assert (root / "new").read_bytes() == b"ours"
    with pytest.raises(FileNotFoundError):
        descriptors.rename_new(fd, b"none", fd, b"newer")


def test_a_symlink_is_renamed_and_not_followed(
    names: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, root = names
    without_renameat2(monkeypatch)
    (root / "link").symlink_to("old")

    descriptors.rename_new(fd, b"link", fd, b"new")

    assert (root / "new").is_symlink()
    assert not (root / "old").is_symlink()


@pytest.mark.parametrize(
    ("number", "kept"), [(errno.ENOSYS, True), (errno.EINVAL, True), (errno.EPERM, False)]
)
def test_a_missing_call_is_remembered_where_it_is_missing_everywhere(
    names: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, number: int, kept: bool
) -> None:
    without_renameat2(monkeypatch, number)

    descriptors.rename_new(names[0], b"old", names[0], b"new")

    assert ("renameat2" in descriptors._missing) is kept


def test_an_error_that_is_not_about_the_call_is_raised(
    names: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, root = names
    without_renameat2(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        descriptors.rename_new(fd, b"old", fd, b"new")
    without_renameat2(monkeypatch)
    without_links(monkeypatch, errno.EACCES)
    with pytest.raises(PermissionError):
        descriptors.rename_new(fd, b"old", fd, b"new")
    assert {one.name for one in root.iterdir()} == {"old"}


def test_an_interrupted_sync_is_repeated_and_a_failed_one_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [errno.EINTR, errno.EINTR, errno.EIO]

    def call(_: int) -> int:
        ctypes.set_errno(answers.pop(0))
        return -1

    monkeypatch.setattr(descriptors, "_SYNCFS", call)

    with pytest.raises(OSError, match="Input/output"):
        descriptors.syncfs(3)
    assert answers == []


@pytest.mark.parametrize(("number", "told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_directory_that_cannot_be_synced_by_itself_is_no_error(
    monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)

    with pytest.raises(OSError, match="Input/output") if told else nullcontext():
        descriptors.sync_directory(3)


def test_a_directory_is_synced(names: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    descriptors.sync_directory(names[0])

    assert synced == [names[0]]


def test_an_error_is_one_line_with_the_name_that_it_is_about() -> None:
    said = descriptors.error_line(OSError(errno.ENOSPC, "full", b"a\xff"))
    assert said == "ENOSPC: No space left on device: a\udcff"
    assert descriptors.error_line(OSError(errno.EIO, "")) == "EIO: Input/output error"
    assert descriptors.error_line(OSError(9999, "")) == "9999: Unknown error 9999"
