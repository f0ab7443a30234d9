"""Several processes each do a part of one work, and tell their parent how far they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ntt_backup.errors import BackupError, WorkerFailed
from ntt_backup.process.fork import Fork
from ntt_backup.process.pipeline import wait_for

Message = dict[str, Any]
Body = Callable[[], Iterator[Message]]


def run_helpers(
    bodies: Sequence[Body], name: str, raises: type[BackupError] = BackupError
) -> Iterator[Message]:
    """Runs each body in a process of its own; yields what they yield, none of it empty. Raises what
    one of them raises, as an error of that class, and ends the others.

    A body has no descriptors of this process.
    """
    with ExitStack() as stack:
        helpers: list[_Helper] = []
        for body in bodies:
            helper = _Helper(partial(_be_helper, body), name)
            stack.callback(helper.release)
            stack.callback(helper.kill)
            helpers.append(helper)
        while helpers:
            wait_for(reading=[fd for one in helpers for fd in one.fds], timeout=None)
            for helper in list(helpers):
                for message in helper.hear():
                    if "message" in message:
                        raise raises(**message)
                    if message:
                        yield message
                    else:
                        helpers.remove(helper)


class _Helper(Fork):
    """Its messages are lines of JSON: those of the body, and an empty one at the end."""

    def __init__(self, body: Callable[[], int], name: str) -> None:
        super().__init__(body, name)
        self._said = b""

    def hear(self) -> Iterator[Message]:
        """Yields its messages that have come."""
        self.drain_stderr()
        data = self.read()
        if data == b"":
            status = self.wait(1.0)
            last = self.stderr.text.splitlines()[-1:] or [f"it ended with status {status}"]
            raise WorkerFailed("a process that helps died", detail=last[0])
        *lines, self._said = (self._said + (data or b"")).split(b"\n")
        yield from map(json.loads, lines)


def _be_helper(body: Body) -> int:
    with os.fdopen(1, "wb", closefd=False) as output:
        try:
            for message in body():
                output.write(json.dumps(message).encode() + b"\n")
                output.flush()
        except BackupError as error:
            output.write(json.dumps(error.fields).encode() + b"\n")
        else:
            output.write(b"{}\n")
    return 0
