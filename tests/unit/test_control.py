"""The control socket: for its user alone, and no peer holds up the run. What a run tells there is
bounded, and of this moment.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup import events
from ntt_backup.config import CatalogConfig
from ntt_backup.daemon import control_socket as control
from ntt_backup.daemon.control_socket import ControlSocket, DaemonReport, RunReport, ask
from ntt_backup.daemon.progress import RunProgress, RunState
from ntt_backup.errors import BackupError, ConfigError, NotRunning
from ntt_backup.process.spawn import wait_for
from tests.unit.sample_events import DIED, OUTAGE, OUTAGE_END


def answer(request: Mapping[str, Any], uid: int) -> Mapping[str, Any]:
    if request["do"] == "fail":
        raise ConfigError("no", detail="because", hint="do that")
    return {"done": "heard", "heard": request, "uid": uid}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@contextmanager
def serving(path: Path) -> Iterator[ControlSocket]:
    """A daemon that does nothing else."""
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            wait_for(reading=made.fds, timeout=0.05)
            made.serve()

    with closing(ControlSocket(path, answer)) as made:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield made
        finally:
            ended.set()
            thread.join()


def settings(path: Path) -> CatalogConfig:
    return CatalogConfig(target="vault", control={"socket": path})


def said_to(path: Path, data: bytes) -> bytes:
    """What the daemon answers to these bytes, until it ends the connection."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(path))
        said = b""
        with suppress(ConnectionError):  # It has heard enough.
            peer.sendall(data)
        with suppress(ConnectionError):
            while piece := peer.recv(65536):
                said += piece
        return said


def test_a_request_is_answered_with_what_was_asked_by_whom(path: Path) -> None:
    with serving(path):
        said = ask(settings(path), "state", rate="4MB")
    heard = {"do": "state", "rate": "4MB"}
    assert said == {"done": "heard", "heard": heard, "uid": os.geteuid()}


def test_what_the_daemon_refuses_is_its_error(path: Path) -> None:
    with serving(path), pytest.raises(BackupError) as refused:
        ask(settings(path), "fail")
    assert refused.value.fields == ConfigError("no", detail="because", hint="do that").fields


def test_it_is_for_its_user_alone_and_goes_with_the_daemon(path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(ControlSocket(path, answer)):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert not path.exists()


def test_another_users_request_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(path):
        monkeypatch.setattr(control, "peer_uid", lambda _: os.geteuid() + 1)
        monkeypatch.setattr(control, "believed", lambda _: {os.geteuid() + 1})
        with pytest.raises(BackupError, match="its own user"):
            ask(settings(path), "state")


@pytest.mark.parametrize("me", [0, 4711])
def test_another_users_program_is_not_asked(
    path: Path, me: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: me)
    monkeypatch.setattr(control, "peer_uid", lambda _: 4712)
    with socket.socket(socket.AF_UNIX) as hostile:
        hostile.bind(str(path))
        hostile.listen()
        with pytest.raises(ConfigError, match="a program of the user 4712"):
            ask(settings(path), "state")


@pytest.mark.parametrize(
    ("above", "believed"),
    [
        ({}, True),
        ({"/run": (0, 0o1777)}, False),
        ({"/run": (0, 0o775)}, False),
        ({"/run": (4713, 0o755)}, False),
        ({"/run": (4712, 0o755)}, True),
        ({"/": (0, 0o757)}, False),
    ],
)
def test_root_believes_the_owner_of_a_directory_that_no_other_user_could_have_made(
    above: dict[str, tuple[int, int]], believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"/": (0, 0o755), "/run": (0, 0o755), "/run/ntt": (4712, 0o777), **above}

    def stat(self: Path) -> SimpleNamespace:
        owner, mode = places[str(self)]
        return SimpleNamespace(st_uid=owner, st_mode=mode)

    with monkeypatch.context() as patched:  # pytest itself asks for files.
        patched.setattr(os, "geteuid", lambda: 0)
        patched.setattr(Path, "stat", stat)
        found = control.believed(Path("/run/ntt/daemon.sock"))
    assert found == ({0, 4712} if believed else {0})


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\n",
        b"[]\n",
        b'{"do": 1}\n',
        b'{"do": "state"}\n{"do": "state"}\n',
        b"[" * 4000 + b"\n",
        b'"\xff"\n',
        b"x" * 100_000,
    ],
)
def test_nonsense_is_told_so_and_cut_off(path: Path, nonsense: bytes) -> None:
    with serving(path):
        said = said_to(path, nonsense)
        # What is still on its way when the connection ends takes the answer along.
        assert not said or json.loads(said)["ok"] is False
        assert ask(settings(path), "state")["heard"] == {"do": "state"}


def test_silent_peers_hold_up_nobody_and_are_cut_off(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_PATIENCE_SECONDS", 0.2)
    with serving(path):
        peers = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        for peer in peers:
            peer.settimeout(60)
            peer.connect(str(path))
        assert ask(settings(path), "state")["heard"] == {"do": "state"}
        for peer in peers:
            with peer:
                assert peer.recv(1) == b""


def test_a_peer_that_does_not_read_its_answer_holds_up_nobody(path: Path) -> None:
    def much(request: Mapping[str, Any], _uid: int) -> Mapping[str, Any]:
        return {"much": "x" * 10**7}

    with closing(ControlSocket(path, much)) as made, socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.sendall(b'{"do": "state"}\n')
        made.serve()
        assert len(made.fds) == 1


def test_the_socket_of_a_dead_daemon_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunning, match="no daemon runs for target vault"):
        ask(settings(path), "state")
    with serving(path):
        assert ask(settings(path), "state")["uid"] == os.geteuid()


def test_the_socket_of_a_living_one_is_left_alone(path: Path) -> None:
    with serving(path):
        with pytest.raises(ConfigError, match="another daemon listens"):
            ControlSocket(path, answer)
        assert ask(settings(path), "state")["uid"] == os.geteuid()


def test_nothing_else_is_replaced_or_followed(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is no socket"):
        ControlSocket(path, answer)
    assert path.is_symlink()
    assert not elsewhere.exists()


def test_a_path_longer_than_a_socket_may_have_serves_as_well(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 200)
    directory.mkdir()
    with serving(directory / "s"):
        assert ask(settings(directory / "s"), "state")["heard"] == {"do": "state"}
        with pytest.raises(ConfigError, match="another daemon listens"):
            ControlSocket(directory / "s", answer)
    assert [*directory.iterdir()] == []


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (b"[1]\n", "no JSON object"),
        (b"{}\n", "of another version"),
        (b'{"ok": false, "message": ""}\n', "of another version"),
        (b'{"ok": true, "done": 5}\n', "of another version"),
        (b"[" * 100_000, "does not answer"),
        (b'{"ok": false, "message": "\\u001b[2J", "exit_code": "x", "other": 1}\n', "^[^\x1b]+$"),
    ],
)
def test_an_answer_that_is_no_daemons_is_an_error(path: Path, says: bytes, error: str) -> None:
    with socket.socket(socket.AF_UNIX) as hostile:
        hostile.bind(str(path))
        hostile.listen()

        def answer_once() -> None:
            connection, _ = hostile.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(says)

        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(BackupError, match=error):
            ask(settings(path), "state")
        thread.join()


# --- what a run tells of itself -------------------------------------------------------------------


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def report(clock: Clock) -> RunReport:
    return RunReport("run-1", 2, clock)


def told(report: RunReport) -> dict[str, Any]:
    """The report, as a program reads it."""
    made = report.report("vault", paused=False, bwlimit=None, jobs={"dump": False})
    fields: dict[str, Any] = json.loads(json.dumps(made.fields))
    assert DaemonReport.of(fields).fields == made.fields
    return fields


def sent(count: int) -> RunState:
    fields: dict[str, Any] = {**RunProgress(0.0, 2).state(0.0).fields, "sent": count}
    return RunState.of(fields)


def test_before_the_workers_start_there_is_a_state_already(report: RunReport) -> None:
    found = told(report)
    assert found["run_id"] == "run-1"
    assert found["started_at"] == "2027-01-15T08:00:00Z"
    assert [one["state"] for one in found["state"]["workers"]] == ["starting", "starting"]


def test_who_is_away_is_known_since_the_first_word_of_it(report: RunReport, clock: Clock) -> None:
    report.event(replace(OUTAGE, worker=1))
    clock.now += 60
    report.event(replace(OUTAGE, worker=1))
    report.event(replace(OUTAGE, what="preflight"))
    first, second = told(report)["outages"]
    since = "2027-01-15T08:00:00Z"
    assert first == {"what": "remote", "worker": 1, "since": since, "reason": OUTAGE.why}
    assert (second["worker"], second["since"]) == (None, "2027-01-15T08:01:00Z")
    report.event(replace(OUTAGE_END, what="preflight"))
    report.event(replace(DIED, worker=1))
    assert told(report)["outages"] == []


def test_the_last_lines_are_kept_and_no_progress(report: RunReport) -> None:
    for number in range(30):
        report.event(events.Warning(reason=f"no {number} " + "x" * 1000))
        report.event(sent(0).event())
    recent = told(report)["recent"]
    assert len(recent) == 20
    assert recent[-1][:2] == ["2027-01-15T08:00:00Z", "warning"]
    assert recent[-1][2].startswith("warning: no 29 x")
    assert len(recent[-1][2]) == 500


def test_each_minute_has_its_bytes_and_the_last_hour_is_kept(
    report: RunReport, clock: Clock
) -> None:
    for total in (10, 30, 25, 27):  # 25: five bytes have to be sent again.
        report.refresh(sent(total))
        clock.now += 15
    assert told(report)["minutes"] == [[1_800_000_000, 32]]
    for _ in range(100):
        report.refresh(sent(27))
        clock.now += 60
    minutes = told(report)["minutes"]
    assert len(minutes) == 60
    assert minutes[-1] == [1_800_000_060 + 99 * 60, 0]
