"""Logins that leave something behind, and questions whose asker dies: every wait has an end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.remote_shell import ask
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Transport
from ntt_backup.config.sections import RunSettings
from ntt_backup.dump.record import Stored
from ntt_backup.dump.store import DUMPS, fetch_dump, list_dumps
from ntt_backup.errors import RemoteDenied, RemoteUnreachable
from ntt_backup.filestore.by_shell import FileStoreByShell
from ntt_backup.filestore.open import connect
from ntt_backup.upload.strategies import STRATEGIES
from ntt_backup.upload.strategies.probe import Probe
from ntt_backup.upload.strategies.tar_probe import ScratchDirectory
from ntt_backup.wire import messages
from ntt_backup.wire.messages import BLAKE3, WHOLE
from tests.contract.dumps import NAME, send_dump
from tests.contract.harness import Harness, Machine, settle, takes
from tests.helpers.waiting import PATIENCE, wait_until

FOR_EVER = 100_000.0
RUN = RunSettings(stall_timeout=PATIENCE, receipt_timeout=PATIENCE)


@pytest.fixture
def leaving(machine: Machine, tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    """A machine whose login leaves a process behind, which has what the login has open."""
    pids = tmp_path / "pids"
    pids.touch()

    def make(process: str) -> Machine:
        return replace(machine, startup=f"{process} &\necho $! >>{pids}")

    yield make
    for pid in pids.read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose end is waited for is waited for longer than any test lasts."""
    monkeypatch.setattr("ntt_backup.client.channel._CLOSE_SECONDS", FOR_EVER)


def spec_of(harness: Harness, transport: Transport, run: RunSettings = RUN) -> SessionSpec:
    return SessionSpec(transport, harness.path, "0123456789ab", "run", "0", run)


def probed(harness: Harness, transport: Transport) -> Probe:
    """A probe that has done all it can."""
    probe = STRATEGIES[harness.strategy].probe(spec_of(harness, transport))
    probe.facts()
    probe.try_out()
    probe.close()
    return probe


# --- a process that a login leaves behind ---------------------------------------------------------


def test_a_session_ends_beside_what_the_login_left(
    local: Harness, leaving: Callable[[str], Machine], waits_for_ever: None
) -> None:
    session = local.open(transport=leaving("sleep 1000"))
    session.put(local.batch("b", b"content"))
    settle(session)
    session.close()
    assert not (local.remote_dir / ".ntt-incoming").exists()


def test_a_reader_ends_beside_what_the_login_left(
    local: Harness, leaving: Callable[[str], Machine], waits_for_ever: None
) -> None:
    machine = leaving("sleep 1000")
    session = ReadSession(spec_of(local, machine))
    assert session.names(bytes(32), b"\xff" * 32, most=1).names == []
    session.close()


def test_a_probe_says_that_the_connection_lingers(
    local: Harness, leaving: Callable[[str], Machine], waits_for_ever: None
) -> None:
    assert probed(local, leaving("sleep 1000")).lingers
    assert [path.name for path in local.remote_dir.iterdir()] == ["by-hash"]


def test_the_catalogs_dumps_are_asked_for_beside_what_the_login_left(
    local: Harness, leaving: Callable[[str], Machine], waits_for_ever: None
) -> None:
    run = RunSettings(strategy=local.strategy, receipt_timeout=80_000)
    store = connect(spec_of(local, leaving("sleep 1000"), run), DUMPS)
    assert (list_dumps(store), store.placed) == ([], True)
    record = send_dump(store, b"content")
    (found,) = list_dumps(store)
    assert (found.name, found.size, found.record) == (NAME, 7, record)
    assert b"".join(fetch_dump(store, found)) == b"content"
    store.close()


def test_a_dump_is_fetched_beside_noise_on_stderr(
    local: Harness, leaving: Callable[[str], Machine]
) -> None:
    machine = leaving("(while :; do echo noise; sleep 0.01; done) >&2")
    (local.remote_dir / "pgdump").mkdir()
    (local.remote_dir / "pgdump" / NAME).write_bytes(b"content")
    machine.tool("tail", 'sleep 1; exec /usr/bin/tail "$@"')
    run = RunSettings(strategy=local.strategy)
    store = connect(spec_of(local, machine, run), DUMPS)
    assert b"".join(fetch_dump(store, Stored(NAME, 7, None))) == b"content"
    store.close()


# --- a directory that goes with the connection ----------------------------------------------------


def lodge(harness: Harness, transport: Transport) -> ScratchDirectory:
    stem = ".ntt-check-0123456789ab"
    return ScratchDirectory(transport, harness.path, stem, f"{harness.path}/{stem}.run")


def scratch(harness: Harness) -> list[str]:
    return [
        path.name for path in harness.remote_dir.iterdir() if path.name.startswith(".ntt-check-")
    ]


@pytest.mark.parametrize("strategy", ["tar"])  # The same by each.
def test_a_scratch_directory_goes_when_its_maker_is_gone(over_ssh: Harness) -> None:
    lodging = lodge(over_ssh, over_ssh.transport)
    assert scratch(over_ssh) == [".ntt-check-0123456789ab.run"]
    lodging.abort()
    wait_until(lambda: not scratch(over_ssh), "the scratch directory to go")


@pytest.mark.parametrize("strategy", ["tar"])  # The same by each.
def test_a_scratch_directory_that_cannot_be_removed_is_told_of(
    local: Harness, machine: Machine
) -> None:
    machine.tool("sleep", ":")
    machine.tool("rm", "echo 'rm: no' >&2; exit 1")
    lodging = lodge(local, machine)
    with pytest.raises(RemoteDenied) as caught:
        lodging.close()
    assert "the removal of a scratch directory" in caught.value.message


# --- a key behind a forced command ----------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["tar"])  # The same by each.
def test_a_receiver_that_nobody_asked_for_is_named(local: Harness, machine: Machine) -> None:
    """It is no shell, and says what looks like noise to whoever wanted one."""
    banner = "printf '\\nNTT-RECEIVE 1 version=1 allow=put\\n'; cat >/dev/null; printf '\\001\\377'"
    forced = replace(machine, startup=f"{banner}; exit 1")
    for question in (
        lambda: ask(forced, "echo", {}, doing="a first word", timeout=PATIENCE),
        lambda: local.open(transport=forced),
        lambda: lodge(local, forced),
        lambda: FileStoreByShell(spec_of(local, forced), DUMPS).list(),
    ):
        with pytest.raises(RemoteDenied) as caught:
            question()
        assert "forced command" in caught.value.message
        assert "shell" in caught.value.hint
        assert str(caught.value).isprintable()


# --- signs of life --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["tar"])  # The same by each.
def test_a_client_that_works_for_long_between_two_questions_is_heard(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = replace(machine, recording=tmp_path / "sent")
    session = ReadSession(spec_of(local, recorded, RunSettings()))
    session.show_life()
    monkeypatch.setattr("ntt_backup.client.channel._SIGN_SECONDS", 0.0)
    session.show_life()
    assert session.names(bytes(32), b"\xff" * 32, most=1).names == []
    session.close()
    ping = messages.PING.frame(bytes(8))
    assert (tmp_path / "sent").read_bytes().count(ping) == 1


def receiver_that(machine: Machine, allow: str, *lines: str) -> None:
    """Puts a receiver in place that greets, is ready, and then does as the lines of Python say."""
    project = Path(__file__).resolve().parents[2]
    program = machine.tools / "receiver.py"
    greeting = (
        "import os, time",
        "from ntt_backup.wire.framing import *",
        "from ntt_backup.wire.messages import *",
        f"line = b'NTT-RECEIVE 1 hash=sha256 allow={allow}'",
        "os.write(1, b'\\n%s sum=%s\\n' % (line, banner_sum(line).encode()))",
        "os.write(1, READY.frame({'placed': 1}))",
    )
    program.write_text("\n".join([*greeting, *lines, ""]))
    machine.tool("python3", f"PYTHONPATH={project} exec {sys.executable} {program}")


@pytest.mark.parametrize("strategy", ["tar"])  # The same by each.
def test_a_receiver_that_only_shows_signs_of_life_is_not_read_for_ever(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver_that(machine, "list", "while True: os.write(1, BUSY.frame()); time.sleep(0.01)")
    session = ReadSession(spec_of(local, machine))
    takes(monkeypatch, PATIENCE / 2)
    with pytest.raises(RemoteUnreachable) as caught:
        session.names(bytes(32), b"\xff" * 32, most=1)
    assert "signs of life" in caught.value.detail


@pytest.mark.parametrize("strategy", ["tar"])  # The same by each.
def test_a_remote_has_as_long_for_the_hash_of_a_large_blob_as_a_slow_disk_takes(
    local: Harness, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver_that(
        machine,
        "list,verify",
        "for _ in range(50): os.write(1, BUSY.frame()); time.sleep(0.01)",
        "os.write(1, SUMS.frame([(WHOLE, bytes(12))]))",
        "os.read(0, 1 << 16)",
    )
    session = ReadSession(spec_of(local, machine))
    takes(monkeypatch, PATIENCE / 2)
    session.ask_sums(BLAKE3, bytes(32), [bytes(32)])
    assert session.sums(1 << 40) == [(WHOLE, bytes(12))]
    session.abort()
