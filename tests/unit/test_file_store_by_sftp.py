"""What a server by SFTP does wrong becomes an error that says so, or an outage; never a receipt."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import SFTP, Sftp, explain_ssh, transport_to
from ntt_backup.config.sections import RemoteSettings, RunSettings
from ntt_backup.errors import (
    BackupError,
    ConfigError,
    NameTaken,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
)
from ntt_backup.filestore.by_sftp import FileStoreBySftp
from ntt_backup.filestore.contract import FileMissing, checksum
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.packstore import marker
from ntt_backup.upload.strategies import packs_probe
from tests.helpers import sftp_server
from tests.helpers.waiting import PATIENCE

LOW, HIGH = "00" * 8, "01" * 8
NAME = f"packs/wide/{LOW}-{HIGH}-{'a' * 32}.tar"
OTHER = f"packs/wide/{LOW}-{HIGH}-{'b' * 32}.tar"
TRIAL = "packs/trial-0"
CONTENT = os.urandom(100_000)


@dataclass
class Direct:
    """A transport to a server on this machine that is told what to do wrong."""

    fault: str = ""
    connect_timeout: float = PATIENCE
    hint: str = ""

    def argv(self, remote_command: str) -> list[str]:
        assert remote_command == SFTP
        return [sys.executable, "-S", sftp_server.__file__, self.fault]

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def explain(self, status: int | None, stderr: str) -> BackupError:
        return explain_ssh(status, stderr)


Open = Callable[..., FileStoreBySftp]


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., SessionSpec]:
    root = tmp_path / "root"
    root.mkdir()

    def make(fault: str = "", connect_timeout: float = PATIENCE, **run: Any) -> SessionSpec:
        settings = RunSettings(**{"stall_timeout": PATIENCE, "receipt_timeout": PATIENCE, **run})
        way = Direct(fault, connect_timeout)
        return SessionSpec(way, str(root), "0" * 12, "run", "packs", settings)

    return make


@pytest.fixture
def opened(spec: Callable[..., SessionSpec]) -> Iterator[Open]:
    stores: list[FileStoreBySftp] = []

    def make(*args: Any, **more: Any) -> FileStoreBySftp:
        stores.append(FileStoreBySftp(spec(*args, **more), PACK_AREA))
        return stores[-1]

    yield make
    for store in stores:
        store.abort()


def put(store: FileStoreBySftp, name: str = NAME, *, look: bool = False) -> None:
    """Stores CONTENT as a session of packs does."""
    file = store.write(name, look=look)
    try:
        file.add(CONTENT)
        file.commit()
        assert file.settled
        stored = file.result()
        assert (stored.name, stored.size) == (name, len(CONTENT))
        assert stored.checksum == checksum(sha256(CONTENT).digest())
    finally:
        file.discard()


def files(tmp_path: Path) -> dict[str, bytes]:
    root = tmp_path / "root"
    found = [one for one in root.rglob("*") if one.is_file()]
    return {str(one.relative_to(root)): one.read_bytes() for one in found}


@pytest.mark.parametrize("fault", ["", "plain", "weak", "short"])
def test_a_pack_is_stored_listed_and_read(opened: Open, tmp_path: Path, fault: str) -> None:
    store = opened(fault)
    assert marker.make(store) == marker.read(opened())
    put(store)
    put(store, OTHER)
    assert files(tmp_path).keys() == {"format.json", NAME, OTHER}
    assert [one.name for one in store.list("packs/")] == [NAME, OTHER]
    assert [one.size for one in store.list(NAME)] == [len(CONTENT)]
    assert store.fetch(NAME, 5, 70_000) == CONTENT[5:70_005]
    assert store.fetch(NAME, 99_999, 5) == CONTENT[99_999:]
    assert store.fetch(NAME, 200_000, 5) == b""
    assert store.progress.sent > store.progress.added >= 200_000 > store.progress.unsent == 0
    assert store.prove(NAME) == ""
    path = tmp_path / "root" / NAME
    assert [one.stat().st_mode & 0o777 for one in (path, path.parent)] == [0o600, 0o700]
    (path.parent.parent / "trial-0").write_bytes(b"")
    assert store.remove([TRIAL, TRIAL]) == 1
    with pytest.raises(FileMissing):
        store.fetch(TRIAL, 0, 1)


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("fault", ["", "weak"])
def test_a_name_that_is_taken_is_ours_where_the_content_is_the_same(
    opened: Open, tmp_path: Path, look: bool, fault: str
) -> None:
    """An earlier answer was lost; or somebody else has put something else there."""
    store = opened(fault)
    put(store)
    before = (tmp_path / "root" / NAME).stat().st_ino
    put(store, look=look)
    assert (tmp_path / "root" / NAME).stat().st_ino == before
    for other in (CONTENT[:-1], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])):
        (tmp_path / "root" / NAME).write_bytes(other)
        with pytest.raises(NameTaken):
            put(opened(fault), look=look)
        assert files(tmp_path) == {NAME: other}


def test_what_was_renamed_before_the_connection_was_lost_is_found_again(
    opened: Open, tmp_path: Path
) -> None:
    with pytest.raises(RemoteUnreachable, match="lost"):
        put(opened("lost"))
    assert files(tmp_path) == {NAME: CONTENT}
    put(opened(), look=True)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("full", RemoteCannotStore, "the remote is full"),
        ("broken", RemoteCannotStore, "refuses a pack"),
        ("denied", RemoteDenied, "may not write"),
        ("smaller", RemoteCannotStore, "not what was sent"),
        ("cut", RemoteUnreachable, "lost"),
        ("strange", ProtocolViolation, "violates"),
    ],
)
def test_what_is_not_stored_is_not_told_as_stored(
    opened: Open, tmp_path: Path, fault: str, kind: type[BackupError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        put(opened(fault))
    assert type(caught.value) is kind
    assert NAME not in files(tmp_path)


def test_a_root_that_is_missing_is_an_outage(opened: Open, tmp_path: Path) -> None:
    """Its disk is not mounted, and is not filled beside it."""
    (tmp_path / "root").rmdir()
    with pytest.raises(RemoteUnreachable, match="gone"):
        put(opened())
    assert not (tmp_path / "root").exists()


def test_a_file_that_cannot_be_read_is_told(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "root" / NAME).mkdir(parents=True)
    store = opened()
    assert store.stat(NAME) is None
    with pytest.raises(RemoteDenied, match="cannot be read"):
        store.fetch(NAME, 0, 1)
    with pytest.raises(NameTaken):
        put(store)
    put(store, OTHER)  # The connection goes on.


@pytest.mark.parametrize("fault", ["endless", "many"])
def test_a_listing_must_end(opened: Open, tmp_path: Path, fault: str) -> None:
    (tmp_path / "root" / "packs").mkdir()
    (tmp_path / "root" / NAME[: NAME.rindex("/")]).mkdir()
    store = opened(fault)
    store.area = PACK_AREA._replace(most=500)
    with pytest.raises(ProtocolViolation, match="does not end"):
        list(store.list())


def test_more_than_was_asked_for_is_not_taken(opened: Open) -> None:
    put(opened())
    with pytest.raises(ProtocolViolation, match="more bytes"):
        opened("long").fetch(NAME, 0, 1000)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [("silent", RemoteUnreachable, "not answer"), ("noisy", RemoteDenied, "Welcome to this")],
)
def test_what_speaks_no_sftp_is_told(
    opened: Open, fault: str, kind: type[BackupError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        opened(fault, connect_timeout=2.0 if fault == "silent" else PATIENCE)


def test_what_a_dead_sender_left_is_removed_after_a_day(opened: Open, tmp_path: Path) -> None:
    packs = tmp_path / "root" / "packs"
    packs.mkdir()
    for name, age in ((".incoming-old", 90_000), (".incoming-new", 80_000), ("old", 90_000)):
        (packs / name).write_bytes(b"")
        os.utime(packs / name, (time.time() - age,) * 2)
    put(opened())
    assert files(tmp_path).keys() == {NAME, "packs/.incoming-new", "packs/old"}


@pytest.mark.parametrize(
    ("fault", "weak"),
    [("", []), ("plain", ["no fsync"]), ("weak", ["no fsync", "a rename overwrites"])],
)
def test_a_check_says_what_the_server_lacks(
    spec: Callable[..., SessionSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    weak: list[str],
) -> None:
    monkeypatch.setattr(packs_probe, "connect_packs", lambda spec: FileStoreBySftp(spec, PACK_AREA))
    probe = packs_probe.PacksByConnectionProbe(spec(fault))
    with closing(probe):
        probe.connect()
        assert not probe.facts().placed
        assert (probe.facts().free_bytes == 1 << 40) == (not weak)
        said = probe.try_out()
        assert [one for one in ("no fsync", "a rename overwrites") if one in said] == weak
        assert "not append-only" in said
        assert [*(tmp_path / "root").iterdir()] == []
        probe.make_place()
        assert probe.facts().placed


def test_a_target_by_sftp_runs_no_command() -> None:
    remote = RemoteSettings(url="sftp://box@backup.example.org:23/backup")
    assert (remote.layout, remote.where) == ("packs", "box@backup.example.org:/backup")
    way = transport_to(remote)
    assert isinstance(way, Sftp)
    argv = way.argv(SFTP)
    assert argv[:2] == ["ssh", "-s"]
    assert argv[-3:] == ["--", "box@backup.example.org", "sftp"]
    with pytest.raises(ConfigError, match="cannot use a target by sftp"):
        way.argv("exec python3")
