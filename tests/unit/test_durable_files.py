"""What a command says it has written is on the disk by then: its content first, then its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from ntt_backup.cli.app import cli
from ntt_backup.config.command_settings import CatalogConfig
from ntt_backup.snapshot.last_take import note_failure
from tests.helpers.blobs import noise, put
from tests.helpers.file_system import inode

Write = Callable[[Path], object]


def by_command(*words: str) -> Write:
    """What runs a command; {} in its words stands for the directory that it writes into."""

    def write(place: Path) -> None:
        argv = [word.replace("{}", str(place)) for word in words]
        done = CliRunner().invoke(cli, argv, catch_exceptions=False)
        assert done.exit_code == 0, done.output

    return write


def a_pack(place: Path) -> None:
    store = place.parent / "store"
    put(store, noise(5000))
    by_command("pack", "{}/file", "--from", str(store))(place)


def a_failed_take(place: Path) -> None:
    settings = CatalogConfig.model_validate(
        {"log": {"jsonl": place / "log"}, "snapshots": {"etc": {"paths": ["/etc"]}}}
    )
    note_failure(settings, "etc", f"failed at {datetime.now(UTC)}")


WRITERS: dict[str, Write] = {
    "install-service": by_command(
        "install-service", "--root", "{}", "--program", "/usr/bin/ntt-backup-remote"
    ),
    "install-receiver": by_command("install-receiver", "--write", "{}/file"),
    "man": by_command("man", "--to", "{}"),
    "pack": a_pack,
    "last take": a_failed_take,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_written_is_durable_before_the_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    # With each sync, what had its final name by then.
    synced: dict[tuple[int, int], set[tuple[int, int]]] = {}
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        named = {inode(path) for path in place.rglob("*") if path.name[0] != "."}
        synced.setdefault(inode(fd), set()).update(named)

    monkeypatch.setattr(os, "fsync", noted)
    WRITERS[name](place)
    written = list(place.rglob("*"))
    assert any(path.is_file() for path in written)
    for path in written:
        if path.is_file():
            assert inode(path) in synced, f"{path} has its name, and its content may be lost"
            assert inode(path) not in synced[inode(path)], f"{path} had its name before that"
        assert inode(path) in synced[inode(path.parent)], f"the name of {path} may be lost"
        assert path.name[0] != "."
