"""A process beside the run hears what it does, for metrics, notices, and whatever may block.

The run never waits for it. What the pipe does not take is kept, up to a bound, and what is more is
dropped; of the states one a second is passed on. The process may hang or die: the run goes on and
says so once. On its pipe a line is the target's name, a tab, and a message.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from ntt_backup.daemon.child import EventChild
from ntt_backup.daemon.run_state import Listener, RunState, StateMessage
from ntt_backup.events import Event, Warning
from ntt_backup.process.fork import Fork
from ntt_backup.process.messages import Message, decode
from ntt_backup.process.pipeline import PIPE_BYTES, Child, wait_for, write

Heard = tuple[str, Event | RunState]
Body = Callable[[Iterator[Heard]], object]

_STATE_SECONDS: Final = 1.0
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.05


class ListenerProcess:
    """One process that hears of the runs of all targets that are asked for by `of`.

    body: what it does with the target's name and the event or state, as they come; they end with
    the runs, and then it must return within `patience` seconds. By `side_job.tell` it can have an
    event logged. It has no descriptor of ours, and no signal ends it but SIGKILL. The process is
    forked when there is something to hear, so that a run that may not begin starts none.
    """

    def __init__(self, name: str, body: Body, *, patience: float = _END_SECONDS) -> None:
        self.dropped = 0
        self._name = name
        self._body = body
        self._patience = patience
        self._open = 0
        self._forked = False
        self._process: Child | None = None
        self._child: EventChild | None = None
        self._rest = b""
        self._words: list[Event] = []

    def of(self, target: str) -> Listener:
        """Returns who tells it of the runs for a target. It ends when all those are closed."""
        self._open += 1
        return _OfTarget(self, target)

    def tell(self, target: str, message: Message) -> None:
        """Passes a message on, or drops it where too many wait already."""
        if not self._forked:
            self._fork()
        if self._process is None:
            return
        line = f"{target}\t".encode() + message.encode()
        if len(self._rest) + len(line) <= PIPE_BYTES:
            self._rest += line
        else:
            if not self.dropped:
                self._warn("is too slow, and does not hear of all that happens")
            self.dropped += 1
        self._flush()

    def hear(self) -> Iterator[Event]:
        """Yields what is to be logged of it: its own events, and that it is not well."""
        if (child := self._child) is not None:
            for message in child.hear():
                if isinstance(message, Event):
                    yield message
            if child.ended:
                self._child = self._process = None
                status = child.reap()
                last = (child.detail.splitlines() or [""])[-1]
                self._warn(f"died (status {status})" + (f": {last}" if last else ""))
        words, self._words = self._words, []
        yield from words

    def release(self) -> None:
        """Ends the process when the last of its listeners is closed: it gets what is left."""
        self._open -= 1
        if self._open or self._process is None or self._child is None:
            return
        deadline = time.monotonic() + self._patience
        while self._flush() and (left := deadline - time.monotonic()) > 0:
            wait_for(writing=[self._process.stdin_fd], timeout=left)
        self._process.close_stdin()
        while not self._child.ended and (left := deadline - time.monotonic()) > 0:
            # What it leaves behind may keep its pipes open.
            wait_for(reading=self._child.fds, timeout=min(left, _LOOK_SECONDS))
            self._words += [one for one in self._child.hear() if isinstance(one, Event)]
        self._child.kill()
        self._process.release()
        self._child = self._process = None

    def _fork(self) -> None:
        self._forked = True
        try:
            self._process = Fork(partial(_hear, self._body), f"ntt-{self._name}")
        except OSError as error:
            self._warn(f"cannot be started: {error}")
        else:
            self._child = EventChild(self._process)

    def _flush(self) -> bool:
        """Writes what the pipe takes, and returns whether some is left."""
        try:
            while self._process and self._rest:
                if not (written := write(self._process.stdin_fd, self._rest)):
                    break
                self._rest = self._rest[written:]
        except BrokenPipeError:  # `hear` tells of its end.
            self._rest = b""
        return bool(self._rest)

    def _warn(self, what: str) -> None:
        self._words.append(Warning(reason=f"the process for {self._name} {what}"))


class _OfTarget:
    """See `run_state.Listener` and `run_state.Speaks`."""

    def __init__(self, process: ListenerProcess, target: str) -> None:
        self._process = process
        self._target = target
        self._next_state = 0.0

    def event(self, event: Event) -> None:
        self._process.tell(self._target, event)

    def refresh(self, state: RunState) -> None:
        now = time.monotonic()
        if now >= self._next_state:
            self._next_state = now + _STATE_SECONDS
            self._process.tell(self._target, StateMessage(state=state.fields))

    def hear(self) -> Iterator[Event]:
        return self._process.hear()

    def close(self) -> None:
        self._process.release()


def _hear(body: Body) -> int:
    # The end of stdin is its end: whoever stops a whole group of processes means the run.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    with os.fdopen(0, "rb", closefd=False) as lines:
        body(_messages(lines))
    return 0


def _messages(lines: Iterator[bytes]) -> Iterator[Heard]:
    for line in lines:
        target, _, encoded = line.partition(b"\t")
        match decode(encoded):
            case StateMessage(state=state):
                yield target.decode(), RunState.of(state)
            case Event() as event:
                yield target.decode(), event
