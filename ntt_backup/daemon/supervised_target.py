"""A parent of several targets starts, hears and ends the coordinator of each, and restarts it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from ntt_backup import events
from ntt_backup.client.backoff import Backoff
from ntt_backup.daemon.child import RESTARTS, ChildProcess, Restarts
from ntt_backup.daemon.control.control_socket import ControlSocket
from ntt_backup.daemon.events import Asked, TargetRestart
from ntt_backup.daemon.run_state import Listeners, RunState, StateMessage
from ntt_backup.errors import BackupError, ConfigError, WaitsToStart
from ntt_backup.format import duration, printable
from ntt_backup.process.messages import Fatal, Message, ProcessEnded
from ntt_backup.process.pipeline import Child

# As WatchdogSec of the unit; a coordinator feeds the watchdog every few seconds.
HANG_SECONDS: Final = 180.0


class Fork(Protocol):
    """Starts a coordinator. Raises OSError where that cannot be."""

    def __call__(self, *, again: bool) -> Child: ...


class SystemdWord(Message):
    """Holds what a coordinator would tell systemd, were it alone. text: as sd_notify(3) has it."""

    text: str


class SupervisedTarget(ChildProcess):
    """The coordinator of one target.

    heard: those who are told what it says, which it has logged itself; own: they and the log, for
    what happens to it. socket: where its control socket is; the parent answers there while the
    coordinator waits to be started again. due: when it is started, in monotonic seconds; None: it
    runs, or will not be started any more. ready: it need not be waited for at the
    start of the daemon. code: the exit code of its last end. Without watch it is started again only
    if it dies, a bounded number of times.
    """

    def __init__(
        self,
        name: str,
        fork: Fork,
        backoff: Backoff,
        heard: Listeners,
        own: Listeners,
        *,
        watch: bool,
        socket: Path | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._path = socket
        self._socket: ControlSocket | None = None
        self._reason = ""
        self.due: float | None = 0.0
        self.ready = False
        self.status = "starting"
        self.code = 0
        self._fork = fork
        self._heard = heard
        self._own = own
        self._watch = watch
        self._asked = 0
        self._hangs = False
        self._restarts = Restarts(backoff, None if watch else RESTARTS)

    @property
    def busy(self) -> bool:
        """Returns whether it runs, or will be started."""
        return self.running or self.due is not None

    @property
    def fds(self) -> list[int]:
        """Returns the descriptors that become readable when there is something to hear or serve."""
        return super().fds if self._socket is None else [*super().fds, *self._socket.fds]

    def turn(self, now: float) -> None:
        """Starts it if that is due, hears what it says, and ends it if it hangs. now: monotonic
        seconds.
        """
        if self._socket is not None:
            self._socket.serve()
        if self.due is not None and self.due <= now:
            self._start(now)
        for message in self.read_messages():
            if isinstance(message, ProcessEnded):
                self._end(message, now)
            else:
                self._take(message, now)
        if self.running and now - self._alive > HANG_SECONDS and not self._hangs:
            self._hangs = True
            self._last_line = f"it gave no sign of life for {duration(HANG_SECONDS)}"
            self.kill()

    def hang_up(self) -> None:
        """Passes a SIGHUP on, if it can be ready for one; else it is only about to begin."""
        if self.running and self._spoke:
            self.send_signal(signal.SIGHUP)

    def announce(self, event: events.Event) -> None:
        """Logs an event of the daemon itself, and tells the listeners."""
        self._own.event(event)

    def stop(self, signum: int) -> None:
        """Passes a SIGINT or SIGTERM on. It is not started again."""
        self._asked = signum
        if self.due is not None:
            self.due = None
            self.code = 128 + signum
            self._close_socket()
        self.send_signal(signum)

    def close(self) -> None:
        """Kills the coordinator, if it still runs, and closes its listeners."""
        self.discard()
        self._close_socket()
        self._own.close()

    def _start(self, now: float) -> None:
        self._close_socket()
        self.due = None
        self._started = self._alive = now
        self._spoke = self._said_goodbye = self._hangs = False
        self._last_line = self._reason = ""
        self.begin(lambda: self._fork(again=self._restarts.count > 0))

    def _take(self, message: Message | bytes, now: float) -> None:
        self._spoke = True
        match message:
            case bytes():
                self._last_line = printable(message.decode("utf-8", "backslashreplace"))
                with suppress(OSError):
                    print(f"{self.name}: {self._last_line}", file=sys.stderr, flush=True)
            case SystemdWord(text=text):
                self._take_word(text, now)
            case StateMessage(state=state):
                self._own.refresh(RunState.of(state))
            case Fatal():
                self._said_goodbye = True
                self._own.event(events.Error(pid=self.pid, **message.error.fields))
            case events.Event():
                if isinstance(message, events.Error):
                    self._reason = events.with_detail(message.message, message.detail)
                self._said_goodbye |= isinstance(message, events.RunStop)
                self._heard.event(message)

    def _take_word(self, text: str, now: float) -> None:
        word, _, value = text.partition("=")
        if word == "WATCHDOG":
            self._alive = now
        elif word == "READY":
            self.ready = True
        elif word == "STATUS":
            self.status = value

    def _end(self, ended: ProcessEnded, now: float) -> None:
        """Takes in that it has ended, and says whether and when it is started again."""
        status = ended.status
        if status is None:
            self._last_line = ended.detail
        self.ready = True
        died = not self._said_goodbye or status is None or status < 0
        self.code = 1 if died or status is None else status
        self.status = f"ended with exit code {self.code}"
        if self._asked and died:
            self.code = 128 + self._asked
        if self._asked or not (died or (self._watch and self.code in range(1, 8))):
            return
        if self.code == ConfigError.exit_code:
            return
        wait = self._restarts.next_wait(now - self._started)
        if wait is None:
            text = f"the coordinator of the target {self.name} died {RESTARTS + 1} times"
            hint = "the reason is in the log, in the target_restart events before this"
            self._own.event(events.Error(exit_code=1, message=text, detail="", hint=hint))
            return
        self.due = now + wait
        self._open_socket(wait)
        self._own.event(
            TargetRestart(
                pid=ended.pid,
                status=status,
                detail=self._last_line if died else "",
                attempt=self._restarts.count,
                wait_s=wait,
            )
        )

    # --- while it waits to be started again -------------------------------------------------------

    def _open_socket(self, wait_s: float) -> None:
        """Answers in the coordinator's place. Where that cannot be, the daemon goes on."""
        at = datetime.now().astimezone() + timedelta(seconds=wait_s)
        why = self._reason or self._last_line
        self._waits = f"the daemon starts again at {at:%H:%M:%S}"
        self._waits += f", after the error: {why}" if why else ""
        if self._path is not None:
            with suppress(BackupError):
                self._socket = ControlSocket(self._path, self._answer)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _answer(self, request: Mapping[str, Any], uid: int) -> Mapping[str, Any]:
        """Answers what the control socket is asked. Raises WaitsToStart for all but `now`."""
        if request["do"] == "now":
            self.due = 0.0
            self._own.event(Asked(do="now", uid=uid))
            return {"done": "it starts now", "target": self.name}
        raise WaitsToStart(
            self._waits, hint="`ntt-backup-remote now` starts it at once, once the cause is fixed"
        )
