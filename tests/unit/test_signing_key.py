"""The signing key of this host: what it signs is known again, and nothing else is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import HostSettings
from ntt_backup.config.signing_key import (
    Origin,
    SigningKey,
    SigningKeys,
    key_file,
    make_signing_key,
)

DATA = b"what is signed"


def at(path: Path) -> CatalogConfig:
    return CatalogConfig(host=HostSettings(key_file=path))


def made(path: Path) -> SigningKeys:
    assert make_signing_key(path)
    return SigningKeys.of(at(path))


def test_what_a_host_signs_is_its_own_for_that_purpose_and_content_alone(tmp_path: Path) -> None:
    keys = made(tmp_path / "host.key")
    signature = keys.sign("dump", DATA)
    assert keys.origin("dump", DATA, signature) is Origin.OURS
    assert keys.origin("dump", DATA + b"!", signature) is Origin.FORGED
    assert keys.origin("manifest", DATA, signature) is Origin.FORGED
    assert keys.origin("dump", DATA, "") is Origin.UNKNOWN


def test_another_host_is_unknown_until_its_key_is_listed(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path / "a"), made(tmp_path / "b")
    signature = theirs.sign("dump", DATA)
    assert ours.origin("dump", DATA, signature) is Origin.UNKNOWN
    with (tmp_path / "a").open("a") as file:
        file.write((tmp_path / "b").read_text())
    both = SigningKeys.of(at(tmp_path / "a"))
    assert both.origin("dump", DATA, signature) is Origin.OURS
    assert both.name == ours.name != theirs.name
    assert both.sign("dump", DATA) == ours.sign("dump", DATA)


@given(signature=st.text() | st.from_regex(r"[0-9a-f]{16}:[0-9a-f]{64}", fullmatch=True))
def test_no_text_that_a_stranger_writes_is_a_signature(signature: str) -> None:
    keys = SigningKeys([SigningKey.of(bytes(32))], Path("k"))
    assert keys.origin("dump", DATA, signature) is not Origin.OURS
    named = f"{keys.name}:{signature[-64:]}"
    assert keys.origin("dump", DATA, named) is not Origin.OURS


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "host.key"
    before = os.umask(0)
    try:
        assert make_signing_key(path).startswith(f"made the host key {path}")
    finally:
        os.umask(before)
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_signing_key(path) == ""
    assert path.read_text() == text
    assert [one.name for one in path.parent.iterdir()] == ["host.key"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_roots_key_belongs_to_the_owner_of_its_directory(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12345, 54321)
    make_signing_key(home / "host.key")
    found = (home / "host.key").stat()
    assert (found.st_uid, found.st_gid) == (12345, 54321)


@pytest.mark.parametrize(
    "content",
    [b"", b"# only a comment\n", b"ntt-host-key-1 abc\n", b"\xff" * 100, b"x" * 100_000],
    ids=["empty", "comment", "short", "binary", "huge"],
)
def test_a_file_without_keys_gives_none_and_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "host.key"
    path.write_bytes(content)
    keys = SigningKeys.of(at(path))
    assert not keys
    assert keys.problem == f"{path} is not a file of host keys"
    assert keys.sign("dump", DATA) == ""


def test_a_file_that_is_missing_or_a_directory_is_a_problem_and_no_error(tmp_path: Path) -> None:
    assert SigningKeys.of(at(tmp_path / "no")).problem == f"there is no host key {tmp_path / 'no'}"
    assert "cannot be read" in SigningKeys.of(at(tmp_path)).problem
    assert make_signing_key(tmp_path / "host.key" / "below") != ""
    (tmp_path / "file").write_text("")
    assert make_signing_key(tmp_path / "file" / "key").startswith("warning: the host key")


def test_a_key_that_others_may_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "host.key"
    made(path)
    path.chmod(0o644)
    keys = SigningKeys.of(at(path))
    assert keys
    assert "chmod 600" in keys.problem


def test_the_key_lies_with_the_users_settings_where_nothing_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert key_file(CatalogConfig()) == tmp_path / "ntt-backup" / "host.key"
