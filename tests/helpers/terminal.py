"""A command runs in a terminal of its own, and what it draws is read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.helpers.environment import Environment

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
