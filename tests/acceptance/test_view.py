"""What a person sees of a run on a terminal, and what its log says of the same moments."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.environment import Environment, wait_until

ROWS, COLUMNS = 24, 80


@dataclass
class Screen:
    """A command that runs in a terminal of its own. text: all that it has drawn, in its order."""

    process: subprocess.Popen[bytes]
    text: str = ""

    def shows(self, pattern: str) -> bool:
        return re.search(pattern, self.text) is not None


@contextmanager
def on_screen(env: Environment, *args: str) -> Iterator[Screen]:
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environ = {**env.environment(), "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    screen = Screen(
        subprocess.Popen(env.argv(*args), env=environ, stdin=slave, stdout=slave, stderr=slave)
    )
    os.close(slave)

    def read() -> None:
        data = b""
        with suppress(OSError):  # How a terminal says that nobody has it open any more.
            while piece := os.read(master, 65_536):
                data += piece
                text = data.decode("utf-8", "replace")
                screen.text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        reader.join()
        os.close(master)


@pytest.fixture
def one_large_batch(env: Environment) -> Environment:
    """3 MB that two workers send as one batch each, over some seconds."""
    env.write_config(run={"workers": 2, "batch_size": 1000, "bwlimit": "500kB"})
    env.fill(300, size=lambda chance: chance.randrange(20_000))
    return env


@pytest.mark.parametrize("strategy", ["stream", "tar"])
def test_bar_share_and_time_left_move_while_no_batch_is_answered(
    one_large_batch: Environment, strategy: str
) -> None:
    env = one_large_batch
    env.write_config(run={"strategy": strategy}, log={"progress_interval": 0.1})
    with env.locked_catalog() as release, on_screen(env, "run") as screen:
        left = r"[1-9]\d?%, about [^,]* left, 0 of 300 blobs"
        wait_until(lambda: screen.shows(left), "share and time left")
        wait_until(lambda: screen.shows(r"[\d.]+ MB sent in"), "content that was sent")
        assert env.events("batch_complete") == []
        release()
        assert screen.process.wait(60) == 0
    assert screen.shows(r"100%, 300 of 300 blobs|done: 300 copied, 0 failed")
    told = env.events("progress")
    assert all(line["copied"] > 0 or line["bytes"] == 0 for line in told)
    assert any(line["pending"] == 300 and line["eta_s"] for line in told)
    assert not any(line["estimated"] for line in told if line["pending"] is not None)


def test_a_burst_of_a_daemon_ends_at_all_with_nothing_left(env: Environment) -> None:
    env.write_config(run={"poll_interval": 0.1}, log={"progress_interval": 0.1})
    env.fill_slowly(100, rate="500kB")
    with on_screen(env, "run", "--watch") as screen:
        wait_until(lambda: screen.shows(r"\b100%, 100 of 100 blobs"), "the end of the first burst")
        wait_until(lambda: _last(env)["active_workers"] == 0, "the log's word")
        assert (_last(env)["pending"], _last(env)["eta_s"]) == (0, 0)
        env.fill(40, seed=2, size=lambda chance: chance.randrange(10_000, 30_000))
        wait_until(lambda: screen.shows(r"\b100%, 40 of 40 blobs"), "the end of the second burst")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.process.wait(60) == 143
    assert not re.search(r"100%, about", screen.text)


def _last(env: Environment) -> dict[str, Any]:
    """What the log said last of the run's progress."""
    return env.events("progress")[-1]
