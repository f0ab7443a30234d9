"""The system calls of a receiver, in the order in which strace saw them.

with RemoteReceiver(root, trace("-y", "-e", "trace=write,fsync")) as receiver:
    ...
seen = Events(tmp_path / "trace")
assert seen.first("write", "content") < seen.first("fsync", "content")
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.receiver_driver import forced_command

_LINE = re.compile(r"^\d+ +(<\.\.\. )?(\w+)")

Trace = Callable[..., list[str]]


@pytest.fixture
def trace(root: Path, tmp_path: Path) -> Trace:
    """The start of a command that runs the receiver under strace.

    options are strace's; allow: what the receiver may do.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True)
    if tried.returncode != 0:
        pytest.skip(f"no ptrace here: {tried.stderr.decode()[-100:]}")

    def command(*options: str, allow: str = "put,replace") -> list[str]:
        receiver = forced_command("--root", str(root), "--allow", allow)
        return ["strace", "-f", "-o", str(tmp_path / "trace"), *options, *receiver]

    return command


class Events:
    """Begins and ends of system calls in the order strace saw them."""

    def __init__(self, trace: Path) -> None:
        self.lines = trace.read_text().splitlines()

    def first(self, call: str, text: str, after: int = -1, ended: bool = True) -> int:
        """The line where the first such call after that line ends, or begins."""
        return next(at for at in self._all(call, text, ended) if at > after)

    def last(self, call: str, text: str, before: int, ended: bool = True) -> int:
        return max(at for at in self._all(call, text, ended) if at < before)

    def count(self, call: str, text: str, after: int, before: int) -> int:
        return sum(after < at < before for at in self._all(call, text, ended=True))

    def _all(self, call: str, text: str, ended: bool) -> Iterator[int]:
        begun: dict[str, bool] = {}
        for at, line in enumerate(self.lines):
            match = _LINE.match(line)
            if match is None or match[2] != call:
                continue
            thread = line.split()[0]
            if match[1]:  # The end of a call that began above.
                if ended and begun.pop(thread, False):
                    yield at
                continue
            if text in line:
                unfinished = line.endswith("<unfinished ...>")
                begun[thread] = unfinished
                if not ended or not unfinished:
                    yield at
