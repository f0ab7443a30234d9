"""A blob directory is opened level by level: through no symlink, on one file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ntt_backup.blobdir.descriptors import open_file
from ntt_backup.blobdir.layout import BlobDirectory
from ntt_backup.receiver import read_session
from ntt_backup.receiver.read_session import BlobError

BLOBID = "3f07" + "0" * 60


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[BlobDirectory]:
    (tmp_path / "by-hash").mkdir()
    fd = os.open(tmp_path / "by-hash", os.O_RDONLY)
    directory = BlobDirectory(fd, os.fstat(fd).st_dev)
    yield directory
    directory.close()
    os.close(fd)


@pytest.mark.parametrize("level", ["3f", "3f/07"])
def test_open_blob_says_eloop_for_a_symlink_in_the_place_of_a_directory(
    blobs: BlobDirectory, tmp_path: Path, level: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "07").mkdir(parents=True)
    (elsewhere / "07" / BLOBID).touch()
    (elsewhere / BLOBID).touch()
    place = tmp_path / "by-hash" / level
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(elsewhere)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)) as caught:
        blobs.open_blob(BLOBID)
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, level)


def test_open_blob_says_exdev_for_a_directory_on_another_file_system(
    blobs: BlobDirectory, tmp_path: Path
) -> None:
    (tmp_path / "by-hash" / "3f").mkdir()
    other = BlobDirectory(blobs.fd, device=os.stat("/proc").st_dev)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
        other.directory("3f")
    assert len(os.listdir("/proc/self/fd")) == before


def test_directory_makes_what_is_missing_and_keeps_no_more_open_than_it_may(
    blobs: BlobDirectory, tmp_path: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        blobs.directory(f"{number % 7:02x}/{number:02x}", make=True)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert len(list((tmp_path / "by-hash").glob("??/??"))) == 40


def test_what_is_no_file_is_not_opened_as_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("file")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fd = open_file(directory, "file")
        assert os.read(fd, 9) == b"content"
        os.close(fd)
        for name in ("directory", "fifo", "link", "none"):
            with pytest.raises(OSError, match=name):
                open_file(directory, name)
    finally:
        os.close(directory)


def test_an_error_while_a_blob_is_read_is_one_of_the_blob(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    status = SimpleNamespace(st_size=7)
    blobs = cast(BlobDirectory, SimpleNamespace(open_blob=lambda _: (fd, status)))
    with pytest.raises(BlobError), read_session._OpenedBlob(blobs, bytes(32)):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
