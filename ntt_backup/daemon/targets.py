"""One daemon serves several targets by a coordinator for each, in a process of its own.

The parent sends nothing and decides nothing about a run. It starts the coordinators, shows and
passes on what they tell, hands its signals to them, and starts those again that die, end by an
error, or say nothing for too long: what systemd does for one. Systemd sees the parent alone, so it
tells of all together.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Final

from ntt_backup.client.backoff import Backoff
from ntt_backup.config import Settings, refuse, shared_files
from ntt_backup.daemon import coordinator
from ntt_backup.daemon.event_log import EventLog
from ntt_backup.daemon.reload import changed_targets, start_needed
from ntt_backup.daemon.run_state import Listener, Listeners, RunState, StateMessage
from ntt_backup.daemon.signals import SignalInbox
from ntt_backup.daemon.supervised_target import SupervisedTarget, SystemdWord
from ntt_backup.daemon.systemd import Systemd
from ntt_backup.errors import BackupError, ConfigError, worst
from ntt_backup.events import Event
from ntt_backup.objects import s3
from ntt_backup.process.fork import Fork
from ntt_backup.process.messages import Fatal
from ntt_backup.process.pipeline import Child, wait_for

# What a coordinator loads while its remote answers.
_LOADED_LATER: Final = ("log_lines", "preflight", "run_history", "run_jobs")
_LOOK_SECONDS: Final = 1.0
_STDOUT: Final = 1
_STDERR: Final = 2


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
    for one in settings.values():
        if one.remote.kind == "s3":
            s3.load(one.remote)
    run_id = str(uuid.uuid4())
    logs = [EventLog(one.log, run_id, name) for name, one in settings.items()]
    with SignalInbox().installed() as inbox:
        targets = []
        for log, (name, one) in zip(logs, settings.items(), strict=True):
            heard = listeners(name)
            targets.append(
                SupervisedTarget(
                    name,
                    partial(_fork, one, watch, partial(reread, name)),
                    Backoff.of(one.run),
                    Listeners(heard),
                    Listeners([log, *heard]),
                    watch=watch,
                    socket=one.control.socket,
                )
            )
        try:
            return _serve(targets, inbox, lambda: _reread(targets, logs, reread, names), turn_to)
        finally:
            for target in targets:
                target.close()


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
            return worst(target.code for target in targets)
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
    logs: Sequence[EventLog],
    reread: Callable[[str], Settings],
    names: Callable[[], Sequence[str]],
) -> None:
    """Opens the log of each target where its settings, read anew, have it, and tells which targets
    are new in the settings or gone from them.
    """
    for target, log in zip(targets, logs, strict=True):
        with suppress(ConfigError):  # Its coordinator tells of it.
            log.reopen(reread(target.name).log)
    with suppress(ConfigError):  # Each coordinator tells of it.
        if changed := changed_targets([target.name for target in targets], names()):
            targets[0].announce(start_needed(changed))


def _fork(settings: Settings, watch: bool, reread: Callable[[], Settings], *, again: bool) -> Child:
    return Fork(partial(_coordinate, settings, watch, reread, again), f"ntt-{settings.target}")


def _coordinate(
    settings: Settings, watch: bool, reread: Callable[[], Settings], again: bool
) -> int:
    """Is the process of one coordinator."""
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
        )
    except BackupError as error:
        Fatal.of(error).write(_STDOUT)
        return error.exit_code


class _Telling:
    """Tells the parent of a run."""

    def event(self, event: Event) -> None:
        event.write(_STDOUT)

    def refresh(self, state: RunState) -> None:
        StateMessage(state=state.fields).write(_STDOUT)

    def close(self) -> None:
        """Does nothing: the end of the process says it."""
