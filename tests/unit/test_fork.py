"""A copy of this process that runs a function: what it shares with us, and what not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ntt_backup.process.pipeline import Fork, wait_for
from tests.helpers.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("alone")


def outcome(body: Callable[[], int]) -> tuple[int | None, str, str]:
    """The exit status of a copy that runs body, its stdout, its stderr."""
    child = Fork(body, "test")
    said = b""
    while (data := child.read()) != b"":
        said += data or b""
        wait_for(reading=[child.stdout_fd], timeout=PATIENCE)
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


def wait_named(pid: int, name: str) -> None:
    """Until it is in its own life: it takes its name when it has cut itself off."""
    while Path(f"/proc/{pid}/comm").read_text().strip() != name:
        os.sched_yield()
