"""A snapshot's version is mounted by FUSE: the tree as it was taken, and nothing stays behind."""

from __future__ import annotations

import errno
import os
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.errors import MountImpossible, RemoteUnreachable
from ntt_backup.mount import kernel
from ntt_backup.mount.packs_or_snapshot import Mounted, mount_version
from ntt_backup.snapshot.format.entry import FILE, HARD_LINK, SYMLINK, Entry
from ntt_backup.snapshot.origins import NOBODY
from tests.helpers.memory_store import MemoryStore
from tests.helpers.mounts import ended, mount_point, servers
from tests.helpers.snapshots import VERSION, directory, put_version
from tests.helpers.waiting import wait_until

ODD = os.fsdecode(b"odd \xff")
TIME = 1_600_000_000_123_456_789


@pytest.fixture
def repository() -> MemoryStore:
    file = Entry("srv/file", FILE, 0o640, 7, 8, TIME, size=3_000_000)
    file.xattrs["user.note"] = b64encode(b"a\0b").decode()
    return put_version(
        MemoryStore(),
        [
            directory("srv"),
            (file, [(8192, b"begin"), (2_999_999, b"!")]),
            (Entry(f"srv/{ODD}", FILE, 0o600, size=3), [(0, b"odd")]),
            (Entry("srv/link", SYMLINK, 0o777, target="file"), ()),
            (Entry("srv/other", HARD_LINK, target="srv/file"), ()),
        ],
    )


def mount(repository: MemoryStore, at: Path) -> Mounted:
    def open_store() -> MemoryStore:
        repository.closed = False
        return repository

    return mount_version(open_store, "etc", at, NOBODY, scratch=Path("/var/tmp"))


@pytest.fixture
def at() -> Iterator[Path]:
    with mount_point(kernel.require_fuse) as at:
        yield at


def test_a_version_is_shown_as_it_was_taken(repository: MemoryStore, at: Path) -> None:
    others = servers()
    assert mount(repository, at) == Mounted("etc", VERSION, 5, 3_000_003, "unknown")
    (server,) = servers() - others
    assert sorted(os.listdir(at / "srv")) == sorted(["file", ODD, "link", "other"])
    file = at / "srv/file"
    status = file.stat()
    assert (status.st_mode, status.st_uid, status.st_gid) == (0o100640, 7, 8)
    assert status.st_mtime_ns == TIME
    content = bytes(8192) + b"begin" + bytes(2_999_999 - 8197) + b"!"
    assert file.read_bytes() == (at / "srv/other").read_bytes() == content
    assert (at / "srv" / ODD).read_bytes() == b"odd"
    assert os.readlink(at / "srv/link") == "file"
    assert {one: os.getxattr(file, one) for one in os.listxattr(file)} == {"user.note": b"a\0b"}
    assert not (at / "srv/none").exists()
    with pytest.raises(OSError, match="Read-only"):
        (at / "new").touch()
    with pytest.raises(MountImpossible, match="mounted"):
        mount(repository, at)
    subprocess.run(["umount", at], check=True)
    wait_until(ended(server), "the end of the process that showed the tree")
    assert list(at.iterdir()) == []


def test_what_cannot_be_fetched_is_an_error_and_no_wrong_byte(
    repository: MemoryStore, at: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    away.touch()

    def before(verb: str, name: str) -> None:
        if away.exists() and "pack-" in name:
            raise RemoteUnreachable("away")

    repository.before = before
    mount(repository, at)
    with pytest.raises(OSError) as failed:  # noqa: PT011
        (at / "srv" / ODD).read_bytes()
    assert failed.value.errno == errno.EIO
    away.unlink()
    assert (at / "srv" / ODD).read_bytes() == b"odd"
