"""Subprocesses: never waited for without end, never outliving us, never filling our memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ntt_backup.errors import SourceError
from ntt_backup.process.spawn import (
    PIPE_BYTES,
    TAIL_BYTES,
    Child,
    Fork,
    Tail,
    output_of,
    wait_for,
    write,
)
from tests.helpers.processes import has_ended
from tests.helpers.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("alone")
Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a shell script as a Child; whatever still runs is killed at the end."""
    children: list[Child] = []

    def make(script: str, **options: object) -> Child:
        children.append(Child(["/bin/sh", "-c", script], **options))  # type: ignore[arg-type]
        return children[-1]

    yield make
    for child in children:
        child.kill()


def read_all(child: Child) -> bytes:
    said = b""
    while True:
        wait_for(reading=[child.stdout_fd], timeout=PATIENCE)
        data = child.read()
        if data == b"":
            return said
        said += data or b""


# --- stderr ---------------------------------------------------------------------------------------


def test_only_the_end_of_stderr_is_kept(start: Start) -> None:
    child = start("yes 0123456789 | head -n 100000 >&2; echo the end >&2")
    assert child.wait(PATIENCE) == 0
    assert child.stderr.text.endswith("0123456789\nthe end")
    assert len(child.stderr.text) <= TAIL_BYTES


def test_stderr_that_is_no_text_is_still_shown() -> None:
    tail = Tail()
    tail.add(b" bad \xff byte\n")
    assert tail.text == "bad \\xff byte"


# --- pipes ----------------------------------------------------------------------------------------


def test_writing_never_waits_and_says_how_much_the_pipe_took(start: Start) -> None:
    child = start("exec sleep 600")
    data = memoryview(bytes(4 * PIPE_BYTES))
    taken = 0
    while count := write(child.stdin_fd, data[taken:]):
        taken += count
    assert 0 < taken < len(data)
    assert not wait_for(writing=[child.stdin_fd], timeout=0)


def test_writing_to_a_process_that_has_ended_is_told(start: Start) -> None:
    child = start("exit 0")
    child.wait(PATIENCE)
    with pytest.raises(BrokenPipeError):
        write(child.stdin_fd, b"x")


def test_no_descriptor_of_ours_is_inherited(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w"):
        said = read_all(start("ls -l /proc/self/fd"))
    assert b"secret" not in said


# --- waiting and ends -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM)]
)
def test_the_status_is_that_of_the_program(start: Start, script: str, status: int) -> None:
    child = start(script)
    assert child.wait(PATIENCE) == status
    assert child.status == status
    assert child.kill() == status


@pytest.mark.parametrize("where", ["", ">&2"])
def test_a_flood_of_output_does_not_keep_a_program_from_ending(start: Start, where: str) -> None:
    assert start(f"yes | head -c 20000000 {where}").wait(PATIENCE) == 0


def test_kill_ends_a_program_that_ignores_every_request(start: Start) -> None:
    child = start("trap '' TERM INT HUP; echo ready; while :; do sleep 600; done")
    wait_for(reading=[child.stdout_fd], timeout=PATIENCE)
    assert child.kill() == -signal.SIGKILL
    assert has_ended(child.pid)


PARENT = """
import time
from ntt_backup.process.spawn import Child
child = Child(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent_however_that_dies(signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        parent.send_signal(signum)
        parent.wait(PATIENCE)
        wait_until(lambda: has_ended(pid), "the child to end")


def test_waiting_sees_whichever_is_ready_and_nothing_else(start: Start) -> None:
    quiet, loud = start("exec sleep 600"), start("echo here; exec sleep 600")
    both = [quiet.stdout_fd, loud.stdout_fd]
    assert wait_for(reading=both, timeout=PATIENCE) == {loud.stdout_fd}
    assert wait_for(reading=[quiet.stdout_fd], timeout=0) == frozenset()
    assert wait_for(reading=both, writing=[quiet.stdin_fd], timeout=PATIENCE) == {
        loud.stdout_fd,
        quiet.stdin_fd,
    }


# --- short commands -------------------------------------------------------------------------------


def test_output_of_is_what_it_says_on_stderr_where_it_prints_nothing() -> None:
    assert output_of(["sh", "-c", "echo OpenSSH_9 >&2"], PATIENCE) == "OpenSSH_9"


def test_a_signal_that_comes_while_a_child_is_started_is_not_lost() -> None:
    """Python drops what a handler raises in the callbacks around a fork."""
    program = (
        "import os, signal, sys\n"
        "from ntt_backup.process.spawn import Child\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "os.register_at_fork(after_in_parent=lambda: None)\n"
        "Child(['sleep', '600'])\n"
        "sys.exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (9, b"")


def test_a_child_does_not_inherit_signals_that_were_held() -> None:
    blocked = output_of(["grep", "SigBlk", "/proc/self/status"], PATIENCE)
    assert int(blocked.split()[1], 16) == 0


def test_output_of_a_command_that_is_not_there_names_it() -> None:
    with pytest.raises(SourceError) as caught:
        output_of(["/nowhere/program"], PATIENCE)
    assert "/nowhere/program is not installed" in caught.value.message
    assert "apt-get install" in caught.value.hint


def test_a_command_that_cannot_be_started_is_an_error_of_ours(tmp_path: Path) -> None:
    """No memory, no process left, no right to execute it: nothing that a traceback explains."""
    program = tmp_path / "program"
    program.touch(mode=0o644)
    with pytest.raises(SourceError) as caught:
        output_of([str(program)], PATIENCE)
    assert f"{program} cannot be started" in caught.value.message
    assert caught.value.detail == "Permission denied"


def test_output_of_a_command_that_hangs_is_what_it_said_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is over when it has spoken, however long a busy machine takes for that."""
    read, clock, jumped = Child.read, time.monotonic, 0.0

    def over(child: Child) -> bytes | None:
        nonlocal jumped
        if data := read(child):
            jumped = PATIENCE
        return data

    monkeypatch.setattr(Child, "read", over)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + jumped)
    assert output_of(["sh", "-c", "echo begun; exec sleep 600"], PATIENCE) == "begun"


# --- forks: what they share with us, and what not -----------------------------------------------


def wait_named(pid: int, name: str) -> None:
    """Until it is in its own life: it takes its name when it has cut itself off."""
    while Path(f"/proc/{pid}/comm").read_text().strip() != name:
        os.sched_yield()


def outcome(body: Callable[[], int]) -> tuple[int | None, str, str]:
    """The exit status of a copy that runs body, its stdout, its stderr."""
    child = Fork(body, "test")
    said = read_all(child)
    status = child.wait(PATIENCE)
    child.release()
    return status, said.decode(), child.stderr.text


def test_a_fork_runs_a_function_and_ends_with_its_result() -> None:
    def body() -> int:
        os.write(1, b"said")
        os.write(2, b"complained")
        return 7

    assert outcome(body) == (7, "said", "complained")


def test_an_error_in_a_fork_is_told_and_does_not_return_to_the_parent() -> None:
    def body() -> int:
        raise SystemExit("broken")

    status, said, complained = outcome(body)
    assert (status, said) == (1, "")
    assert complained.endswith("SystemExit: broken")


def test_a_fork_has_no_descriptor_but_its_pipes(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(fd, True)

    def body() -> int:
        os.write(1, " ".join(os.listdir("/proc/self/fd")).encode())
        return 0

    _, said, _ = outcome(body)
    os.close(fd)
    # The fourth is the directory that is being listed.
    assert set(said.split()) == {"0", "1", "2", "3"}


def test_a_fork_does_not_keep_the_signal_handlers_of_its_parent() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = Fork(lambda: len(os.read(0, 1)), "test")
        wait_named(child.pid, "test")
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(PATIENCE) == -signal.SIGTERM
        child.release()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_fork_leads_a_session_and_has_its_name() -> None:
    child = Fork(lambda: len(os.read(0, 1)), "ntt-worker 12")
    wait_named(child.pid, "ntt-worker 12")
    assert os.getsid(child.pid) == child.pid
    assert child.status is None
    assert child.kill() == -signal.SIGKILL


def test_a_process_with_threads_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = len(os.listdir("/proc/self/fd"))
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(OSError, match="several threads"):
            Fork(lambda: 0, "test")
    finally:
        end.set()
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


# --- capabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("capable", "held"), [(False, 0), (True, 1 << 2)])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a capability to a process")
def test_a_program_gets_no_capability_unless_it_reads_for_us(capable: bool, held: int) -> None:
    """As systemd gives CAP_DAC_READ_SEARCH to the service: this process has it, ssh has not."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    ours = (
        "from ntt_backup.process.spawn import start\n"
        f"child = start(['grep', 'CapEff', '/proc/self/status'], capable={capable})\n"
        "said = child.output(60).decode()\n"
        "held = open('/proc/self/status').read().partition('CapEff:')[2].split()[0]\n"
        "print(held, said.split()[1])"
    )
    argv = ["setpriv", "--reuid=14712", "--clear-groups", "--no-new-privs"]
    argv += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--"]
    done = subprocess.run([*argv, sys.executable, "-c", ours], capture_output=True, check=True)
    assert [int(word, 16) for word in done.stdout.split()] == [1 << 2, held]
