"""The look at the place of a medium reads the disks of this machine, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ntt_backup.blobdir.layout import marker_text
from ntt_backup.daemon.medium import identity_at

ID = "0123456789abcdef" * 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "mnt" / "usb disk" / "backup"
    made.mkdir(parents=True)
    (made / ".ntt-target.json").write_bytes(marker_text(ID))
    return made


def mounts(tmp_path: Path, *points: tuple[Path, str]) -> Path:
    """A table of mounts: the root is a disk, and each point has a file system of that type."""
    table = tmp_path / "mountinfo"
    lines = [
        f"{nth} 1 8:{nth} / {str(point).replace(' ', chr(92) + '040')} rw - {kind} source rw\n"
        for nth, (point, kind) in enumerate([(Path("/"), "ext4"), *points])
    ]
    table.write_text("".join(lines))
    return table


def test_a_place_on_a_disk_is_read(tmp_path: Path, place: Path) -> None:
    (tmp_path / "link").symlink_to("mnt/../mnt/usb disk")
    table = mounts(tmp_path, (place.parent, "nfs4"), (place.parent, "xfs"))
    assert identity_at(str(place), table) == ID
    assert identity_at(str(tmp_path / "link" / "backup"), table) == ID
    assert identity_at(f"{tmp_path}/mnt//./usb disk/backup/", table) == ID
    for nothing in (place / "none", place / ".ntt-target.json" / "x", tmp_path):
        assert identity_at(str(nothing), table) == ""
    (place / ".ntt-target.json").write_text("{")
    assert identity_at(str(place), table) == "?"


@pytest.mark.parametrize("kind", ["nfs", "cifs", "fuse.sshfs", "autofs", "9p"])
def test_a_place_that_may_not_answer_is_not_touched(
    tmp_path: Path, place: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(place)
    table = mounts(tmp_path, (place.parent, kind))

    def touched(path: Path) -> Path:
        assert not path.is_relative_to(place.parent)
        return readlink(path)

    readlink = Path.readlink
    monkeypatch.setattr(Path, "readlink", touched)
    monkeypatch.setattr(os, "open", None)
    assert identity_at(str(place), table) is None
    assert identity_at(str(tmp_path / "link"), table) is None


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert identity_at(str(tmp_path / "a"), mounts(tmp_path)) is None
    assert identity_at("/", tmp_path / "missing") == ""
