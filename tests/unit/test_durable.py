"""A file that is written durably: whole, synced before it has its name, through nobody's link."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from ntt_backup.process.durable import durable_file, write_durably


def test_the_content_is_synced_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a" / "b" / "file"
    seen: list[str] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        synced = Path(os.readlink(f"/proc/self/fd/{fd}"))
        seen.append(f"{'file' if synced.name.startswith('.file.') else synced} {path.exists()}")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_durably(path, b"content", 0o640)
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert seen[0] == "file False"
    assert sorted(seen[1:]) == [f"{one} True" for one in (tmp_path, tmp_path / "a", path.parent)]


def test_no_directory_that_is_made_may_be_written_to_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_durably(tmp_path / "a" / "b" / "c" / "file", b"content")
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert [stat.S_IMODE(one.stat().st_mode) for one in made] == [0o755] * 3


@pytest.mark.parametrize("fails", ["rename", "fsync", "fchmod"])
def test_what_fails_leaves_the_former_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, full)
        with pytest.raises(OSError, match="No space"):
            write_durably(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_written_to_its_end_gets_no_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with suppress(KeyboardInterrupt), durable_file(tmp_path / "file") as file:
        file.write(b"after")
        raise KeyboardInterrupt
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"before")]


def test_a_link_in_the_way_is_replaced_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"theirs")
    (tmp_path / "file").symlink_to(victim)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".other.guessed").symlink_to(victim)
    write_durably(tmp_path / "file", b"ours")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "other", b"ours")
    assert (tmp_path / ".other.guessed").is_symlink()
    assert victim.read_bytes() == b"theirs"
    assert (tmp_path / "file").read_bytes() == b"ours"
    assert not (tmp_path / "file").is_symlink()


def test_a_name_that_exists_is_kept_where_that_is_wanted(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", b"first", replace=False)
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "file", b"second", replace=False)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"first")]
