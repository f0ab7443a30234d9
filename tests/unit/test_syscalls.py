"""Which file systems one syncfs makes durable."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ntt_backup.blobdir import descriptors
from ntt_backup.blobdir.descriptors import can_syncfs

LIBC = ctypes.CDLL(None, use_errno=True)
# What is tested here must not say by itself whether it is tested.
pytestmark = pytest.mark.skipif(
    not hasattr(LIBC, "syncfs") or LIBC.syncfs(-1) == 0 or ctypes.get_errno() != errno.EBADF,
    reason="this system has no syncfs",
)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_linux", lambda: (5, 8))


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /mnt/pool rw,nosuid - fuse.mergerfs a:b rw,user_id=0
32 22 0:28 / /mnt/nas rw master:3 propagate_from:2 - cifs //nas/share rw
34 22 0:30 / /mnt/host rw - virtiofs backup rw
35 22 0:31 / /volume1/evidence rw - ecryptfs /volume1/@evidence@ rw,ecryptfs_cipher=aes
33 22 0:29 /sub\\040dir /mnt/b rw - btrfs /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("number", "reaches"),
    [
        ((254, 0), True),
        ((0, 26), False),
        ((0, 28), False),
        ((0, 30), False),
        ((0, 31), False),
        ((0, 29), True),
        ((0, 99), True),
    ],
)
def test_syncfs_is_not_used_where_it_does_not_reach_the_disk(
    tmp_path: Path, number: tuple[int, int], reaches: bool
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    assert can_syncfs(os.makedev(*number), str(table)) is reaches


def test_syncfs_is_not_used_where_a_filter_forbids_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(_: int) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1

    assert can_syncfs(1, str(tmp_path / "missing"))
    monkeypatch.setattr(descriptors, "_SYNCFS", forbidden)
    assert not can_syncfs(1, str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("version", "tells"), [((), False), ((5, 7), False), ((5, 8), True), ((6, 1), True)]
)
def test_syncfs_is_not_used_where_the_kernel_keeps_errors_to_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, ...], tells: bool
) -> None:
    monkeypatch.setattr(descriptors, "_linux", lambda: version)
    assert can_syncfs(1, str(tmp_path / "missing")) == tells


def test_a_syncfs_that_takes_anything_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(descriptors, "_SYNCFS", lambda _: 0)
    assert not can_syncfs(1, str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("name", "release", "version"),
    [
        ("Linux", "5.8.0-generic", (5, 8)),
        ("Linux", "6.12", (6, 12)),
        ("Linux", "odd", ()),
        ("Darwin", "23.1.0", ()),
    ],
)
def test_the_version_of_the_kernel_is_read_on_linux_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, release: str, version: tuple[int, ...]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(sysname=name, release=release))
    assert descriptors._linux() == version
