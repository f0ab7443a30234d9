"""The supervisor of several targets starts a coordinator for each, and starts it again.

The parent sends nothing and decides nothing about a run. It starts the coordinators, shows and
passes on what they tell, hands its signals to them, and starts those again that die, end by an
error, or say nothing for too long: what systemd does for one. Systemd sees the parent alone, so it
tells of all together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from typing import Any, Final

from ntt_backup import events
from ntt_backup.client.backoff import RESTARTS, Backoff, Restarts
from ntt_backup.config import Settings, refuse, shared_files
from ntt_backup.daemon import coordinator
from ntt_backup.daemon.control_socket import ControlSocket
from ntt_backup.daemon.event_log import EventLog
from ntt_backup.daemon.events import Asked, TargetRestart
from ntt_backup.daemon.listeners import Listener, Listeners, StateMessage
from ntt_backup.daemon.progress import RunState
from ntt_backup.daemon.run_control import changed_targets, start_needed
from ntt_backup.daemon.signals import SignalInbox
from ntt_backup.daemon.systemd import Systemd
from ntt_backup.errors import BackupError, ConfigError, WaitsToStart, mildest, worst
from ntt_backup.events import Event
from ntt_backup.formatting import duration, printable
from ntt_backup.objects import s3
from ntt_backup.process.child import ChildProcess
from ntt_backup.process.memory import collect_often
from ntt_backup.process.messages import Fatal, Message, ProcessEnded
from ntt_backup.process.spawn import wait_for

# As WatchdogSec of the unit; a coordinator feeds the watchdog every few seconds.
HANG_SECONDS: Final = 180.0
# What a coordinator loads while its remote answers.
_LOADED_LATER: Final = ("preflight", "run_history")
_LOOK_SECONDS: Final = 1.0
_STDOUT: Final = 1
_STDERR: Final = 2


class SystemdWord(Message):
    """A message to systemd, as a single coordinator would send it. text: see sd_notify(3)."""

    text: str


class SupervisedTarget(ChildProcess):
    """The coordinator of one target.

    due: when the coordinator is started, in monotonic seconds; None: it runs, or is not started any
    more. ready: it need not be waited for at the start of the daemon. code: the exit code of its
    last end.

    Args:
        settings: Of the target. The parent answers at the control socket while the coordinator
            waits to be started again.
        coordinate: The coordinator's process, told whether another one ran before.
        log: Of what happens to the coordinator, which logs all else by itself.
        heard: Those who are told of both.
        watch: Whether the coordinator is started again without a limit, also after an error.
    """

    def __init__(
        self,
        settings: Settings,
        coordinate: Callable[[bool], int],
        log: EventLog,
        heard: Sequence[Listener],
        *,
        watch: bool,
    ) -> None:
        super().__init__()
        self.name = settings.target
        self.media = settings.media
        self._settings = settings
        self._socket: ControlSocket | None = None
        self._reason = ""
        self.due: float | None = 0.0
        self.ready = False
        self.status = "starting"
        self.code = 0
        self._coordinate = coordinate
        self.log = log
        self._heard = Listeners(heard)
        self.own = Listeners([log, *heard])
        self._watch = watch
        self._asked = 0
        self._hangs = False
        self._restarts = Restarts(Backoff.of(settings.run), None if watch else RESTARTS)

    @property
    def busy(self) -> bool:
        """Whether the coordinator runs, or will be started."""
        return self.running or self.due is not None

    @property
    def fds(self) -> list[int]:
        return super().fds if self._socket is None else [*super().fds, *self._socket.fds]

    def turn(self, now: float) -> None:
        """Starts the coordinator if that is due, reads its messages, kills it if it hangs."""
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
        """Passes a SIGHUP on, unless the coordinator is only about to begin."""
        if self.running and self._spoke:
            self.send_signal(signal.SIGHUP)

    def stop(self, signum: int) -> None:
        """Passes a SIGINT or SIGTERM on. The coordinator is not started again."""
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
        self.own.close()

    def _start(self, now: float) -> None:
        self._close_socket()
        self.due = None
        self._started = self._alive = now
        self._spoke = self._said_goodbye = self._hangs = False
        self._last_line = self._reason = ""
        again = self._restarts.count > 0
        self.begin(partial(self._coordinate, again), f"ntt-{self.name}")

    def _take(self, message: Message | bytes, now: float) -> None:
        self._spoke = True
        match message:
            case bytes():
                self._last_line = printable(message.decode("utf-8", "backslashreplace"))
                with suppress(OSError):
                    print(f"{self.name}: {self._last_line}", file=sys.stderr, flush=True)
            case SystemdWord(text=text):
                word, _, value = text.partition("=")
                if word == "WATCHDOG":
                    self._alive = now
                elif word == "READY":
                    self.ready = True
                elif word == "STATUS":
                    self.status = value
            case StateMessage(state=state):
                self.own.refresh(RunState.of(state))
            case Fatal():
                self._said_goodbye = True
                self.own.event(events.Error(pid=self.pid, **message.error.fields))
            case events.Event():
                if isinstance(message, events.Error):
                    self._reason = events.with_detail(message.message, message.detail)
                self._said_goodbye |= isinstance(message, events.RunStop)
                self._heard.event(message)

    def _end(self, ended: ProcessEnded, now: float) -> None:
        """Handles the end of the coordinator, and decides whether and when another one starts."""
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
            self.own.event(events.Error(exit_code=1, message=text, detail="", hint=hint))
            return
        self.due = now + wait
        self._open_socket(wait)
        self.own.event(
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
        """Opens the control socket in the coordinator's place. Without it the daemon goes on."""
        at = datetime.now().astimezone() + timedelta(seconds=wait_s)
        why = self._reason or self._last_line
        self._waits = f"the daemon starts again at {at:%H:%M:%S}"
        self._waits += f", after the error: {why}" if why else ""
        path = self._settings.control.socket
        assert path is not None  # The settings have a default that depends on others.
        with suppress(BackupError):
            self._socket = ControlSocket(path, self._answer)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _answer(self, request: Mapping[str, Any], uid: int) -> Mapping[str, Any]:
        """Answers what the control socket is asked. Raises WaitsToStart for all but `now`."""
        if request["do"] == "now":
            self.due = 0.0
            self.own.event(Asked(do="now", uid=uid))
            return {"done": "it starts now", "target": self.name}
        raise WaitsToStart(
            self._waits, hint="`ntt-backup-remote now` starts it at once, once the cause is fixed"
        )


def run(
    settings: Mapping[str, Settings],
    *,
    watch: bool,
    listeners: Callable[[str], Sequence[Listener]],
    reread: Callable[[str], Settings],
    names: Callable[[], Sequence[str]],
    turn_to: Callable[[str], None],
) -> int:
    """Does what `coordinator.run` does, for each target by its name; returns the worst exit code.

    listeners: those of a target. reread: reads a target's settings anew, for a coordinator that is
    started again, too. names: returns the targets that a daemon started now would serve. turn_to:
    is called with a target before anything is done or told of it. Raises ConfigError before
    anything is started.
    """
    refuse(shared_files(settings))
    # Once, and not by each of the copies.
    for module in _LOADED_LATER:
        import_module(f"ntt_backup.daemon.{module}")
    if any(one.remote.kind == "s3" for one in settings.values()):
        s3.load()
    if watch:
        collect_often()
    run_id = str(uuid.uuid4())
    logs = [EventLog(one.log, run_id, name) for name, one in settings.items()]
    with SignalInbox().installed() as inbox:
        targets = [
            SupervisedTarget(
                one,
                partial(_coordinate, one, watch, partial(reread, name), tuple(settings)),
                log,
                listeners(name),
                watch=watch,
            )
            for log, (name, one) in zip(logs, settings.items(), strict=True)
        ]
        try:
            return _serve(targets, inbox, lambda: _reread(targets, reread, names), turn_to)
        finally:
            for target in targets:
                target.close()


def _code(targets: Sequence[SupervisedTarget]) -> int:
    """Returns the exit code of all. Of media that take turns, the mildest one counts."""
    codes: dict[tuple[str, ...], list[int]] = {}
    for target in targets:
        codes.setdefault(target.media or (target.name,), []).append(target.code)
    return worst(map(mildest, codes.values()))


def _serve(
    targets: Sequence[SupervisedTarget],
    inbox: SignalInbox,
    reread: Callable[[], None],
    turn_to: Callable[[str], None],
) -> int:
    systemd = Systemd()
    stops = 0
    while True:
        for target in targets:
            turn_to(target.name)
            target.turn(time.monotonic())
        if not any(target.busy for target in targets):
            return _code(targets)
        if all(target.ready for target in targets):
            systemd.ready()
        # A coordinator that hangs is started again here, and is no reason to disturb the others.
        if systemd.watchdog(alive=True):
            systemd.status("; ".join(f"{target.name}: {target.status}" for target in targets))
        due = [target.due - time.monotonic() for target in targets if target.due is not None]
        wait_for(
            reading=[inbox.fd, *(fd for target in targets for fd in target.fds)],
            timeout=max(0.0, min([_LOOK_SECONDS, *due])),
        )
        inbox.drain()
        if inbox.take_hangup():
            with systemd.reloading():
                reread()
                for target in targets:
                    target.hang_up()
        if inbox.stops > stops:
            if not stops:
                systemd.stopping()
            stops = inbox.stops
            for target in targets:
                target.stop(inbox.first_stop)


def _reread(
    targets: Sequence[SupervisedTarget],
    reread: Callable[[str], Settings],
    names: Callable[[], Sequence[str]],
) -> None:
    """Reads all settings again, reopens the logs, and names new and missing targets."""
    for target in targets:
        with suppress(ConfigError):  # Its coordinator tells of it.
            target.log.reopen(reread(target.name).log)
    with suppress(ConfigError):  # Each coordinator tells of it.
        if changed := changed_targets([target.name for target in targets], names()):
            targets[0].own.event(start_needed(changed))


def _coordinate(
    settings: Settings,
    watch: bool,
    reread: Callable[[], Settings],
    targets: Sequence[str],
    again: bool,
) -> int:
    # What anything else prints becomes lines between the messages, which the parent prints.
    os.dup2(_STDOUT, _STDERR)
    if again:
        with suppress(ConfigError):  # Those hold that the daemon began with.
            settings = reread()
    try:
        return coordinator.run(
            settings,
            watch=watch,
            listeners=[_Telling()],
            systemd=Systemd(lambda text: SystemdWord(text=text).write(_STDOUT)),
            reread=reread,
            targets=targets,
        )
    except BackupError as error:
        Fatal.of(error).write(_STDOUT)
        return error.exit_code


class _Telling(Listener):
    """Tells the parent of a run."""

    def event(self, event: Event) -> None:
        event.write(_STDOUT)

    def refresh(self, state: RunState) -> None:
        StateMessage(state=state.fields).write(_STDOUT)
