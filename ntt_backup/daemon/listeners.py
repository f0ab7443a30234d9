"""A run's listeners are told of its events, and of its state at a moment.

What a run does is heard by listeners: the log, the screen, and whatever else an operator has
switched on. Each hears every event once, in order, and the state a few times a second. The run
waits for none of them, so a listener that has much to do, or may block, does its work in a process
of its own (`ListenerProcess`): metrics, notices.

What the pipe to such a process does not take is kept, up to a bound, and what is more is dropped;
of the states one a second is passed on. The process may hang or die: the run goes on and says so
once. On its pipe a line is the target's name, a tab, and a message.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from ntt_backup import events
from ntt_backup.daemon.progress import RunState
from ntt_backup.events import Event, Warning
from ntt_backup.process.child import ChildProcess
from ntt_backup.process.memory import collect_often
from ntt_backup.process.messages import Message, ProcessEnded, decode
from ntt_backup.process.spawn import PIPE_BYTES, wait_for, write

Heard = tuple[str, Event | RunState]
Body = Callable[[Iterator[Heard]], object]

_STATE_SECONDS: Final = 1.0
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.05


class StateMessage(Message):
    """A run's state, on its way to another process. state: `RunState.fields`."""

    state: dict[str, Any]


class Listener:
    """A consumer of the events and states of one run. By default it ignores them."""

    def event(self, event: events.Event) -> None:
        """Handles an event."""

    def refresh(self, state: RunState) -> None:
        """Handles the present state of the run."""

    def close(self) -> None:
        """Ends the listener: no more events follow."""

    def hear(self) -> Iterable[events.Event]:
        """Returns the listener's own events since the last call, for all listeners."""
        return ()


class Listeners:
    """Tells several listeners, in their order. Those with events of their own are the last."""

    def __init__(self, all_of_them: Iterable[Listener]) -> None:
        self._all = list(all_of_them)

    def event(self, event: events.Event) -> None:
        for one in self._all:
            one.event(event)

    def refresh(self, state: RunState) -> None:
        for one in self._all:
            one.refresh(state)
        for said in [said for one in self._all for said in one.hear()]:
            self.event(said)

    def close(self) -> None:
        """Closes all listeners, the last one first. Its last events are told to the others."""
        while self._all:
            one = self._all.pop()
            one.close()
            for said in one.hear():
                self.event(said)


class ListenerProcess(ChildProcess):
    """One process that hears of the runs of all targets that are asked for by `of`.

    body: what it does with the target's name and the event or state, as they come; they end with
    the runs, and then it must return within `patience` seconds. By `child.tell_parent` it can have
    an event logged. It has no descriptor of ours, and no signal ends it but SIGKILL. The process is
    forked when there is something to hear, so that a run that may not begin starts none.
    """

    def __init__(self, name: str, body: Body, *, patience: float = _END_SECONDS) -> None:
        super().__init__()
        self.dropped = 0
        self._name = name
        self._body = body
        self._patience = patience
        self._open = 0
        self._forked = False
        self._kept = b""
        self._words: list[Event] = []

    def of(self, target: str) -> Listener:
        """Returns a listener for the runs of a target. The process ends when all are closed."""
        self._open += 1
        return _OfTarget(self, target)

    def pass_on(self, target: str, message: Message) -> None:
        """Sends a message to the process, or drops it if too many messages wait already."""
        if not self._forked:
            self._forked = True
            self.begin(partial(_hear, self._body), f"ntt-{self._name}")
        if self._process is None:
            return
        line = f"{target}\t".encode() + message.encode()
        if len(self._kept) + len(line) <= PIPE_BYTES:
            self._kept += line
        else:
            if not self.dropped:
                self._warn("is too slow, and does not hear of all that happens")
            self.dropped += 1
        self._flush()

    def hear(self) -> Iterator[Event]:
        """Yields the events of the process, and warnings about the process."""
        for message in self.read_messages():
            match message:
                case Event():
                    yield message
                case ProcessEnded(status=status, detail=detail):
                    last = "".join(f": {line}" for line in detail.splitlines()[-1:])
                    died = status is not None
                    self._warn((f"died (status {status})" if died else "cannot be started") + last)
        words, self._words = self._words, []
        yield from words

    def release(self) -> None:
        """Ends the process when the last of its listeners is closed, after it got all messages."""
        self._open -= 1
        if self._open or self._process is None:
            return
        deadline = time.monotonic() + self._patience
        while self._flush() and (left := deadline - time.monotonic()) > 0:
            wait_for(writing=[self._process.stdin_fd], timeout=left)
        self._process.close_stdin()
        while self.running and (left := deadline - time.monotonic()) > 0:
            # What it leaves behind may keep its pipes open.
            wait_for(reading=self.fds, timeout=min(left, _LOOK_SECONDS))
            self._words += [one for one in self.read_messages() if isinstance(one, Event)]
        self.discard()

    def _flush(self) -> bool:
        """Writes as much as the pipe takes, and returns whether messages are left."""
        try:
            while self._process and self._kept:
                if not (written := write(self._process.stdin_fd, self._kept)):
                    break
                self._kept = self._kept[written:]
        except BrokenPipeError:  # `hear` tells of its end.
            self._kept = b""
        return bool(self._kept)

    def _warn(self, what: str) -> None:
        self._words.append(Warning(reason=f"the process for {self._name} {what}"))


class _OfTarget(Listener):
    """Tells the process of the runs of one target."""

    def __init__(self, process: ListenerProcess, target: str) -> None:
        self._process = process
        self._target = target
        self._next_state = 0.0

    def event(self, event: events.Event) -> None:
        self._process.pass_on(self._target, event)

    def refresh(self, state: RunState) -> None:
        now = time.monotonic()
        if now >= self._next_state:
            self._next_state = now + _STATE_SECONDS
            self._process.pass_on(self._target, StateMessage(state=state.fields))

    def hear(self) -> Iterator[Event]:
        return self._process.hear()

    def close(self) -> None:
        self._process.release()


def _hear(body: Body) -> int:
    # The end of stdin is its end: whoever stops a whole group of processes means the run.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    collect_often()

    def messages() -> Iterator[Heard]:
        with os.fdopen(0, "rb", closefd=False) as lines:
            for line in lines:
                target, _, encoded = line.partition(b"\t")
                match decode(encoded):
                    case StateMessage(state=state):
                        yield target.decode(), RunState.of(state)
                    case Event() as event:
                        yield target.decode(), event

    body(messages())
    return 0
