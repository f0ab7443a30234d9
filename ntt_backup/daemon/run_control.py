"""A running daemon does what is asked of it: pause, resume, another limit, now, stop, reload.

Settings are read again while a run works, as far as that is safe. What says only how much, when or
how often takes effect at once. What the workers, a lock or a connection were made with needs a new
start: that is told by name, and the old value holds until then. Where the settings are wrong, all
old ones hold.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from ntt_backup import events
from ntt_backup.client.throttle import Limit
from ntt_backup.config import Settings
from ntt_backup.config.bandwidth_timetable import Timetable, limit_text, parse_timetable
from ntt_backup.daemon.control_socket import ControlSocket, RunReport
from ntt_backup.daemon.events import (
    Asked,
    BandwidthLimit,
    Paused,
    Resumed,
    SettingsRead,
    SettingsRefused,
)
from ntt_backup.daemon.progress import RunProgress
from ntt_backup.daemon.side_jobs import SideJob
from ntt_backup.daemon.signals import SignalInbox
from ntt_backup.daemon.workers import WorkerPool
from ntt_backup.errors import BackupError, ConfigError
from ntt_backup.process.spawn import wait_for

_LOOK_SECONDS: Final = 1.0
# Tables, and keys of tables, whose new values take effect at once.
_LIVE: Final = (
    "log",
    "dump",
    "checks",
    "policy",
    "snapshots",
    "run.bwlimit",
    "run.poll_interval",
    "run.skip_pgdump",
)


class RunControl(RunReport):
    """The report of a run that serves the control socket while the coordinator waits.

    A run goes on without the socket, and tries again to make it.
    """

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        workers: WorkerPool,
        jobs: Mapping[str, SideJob],
        progress: RunProgress,
        inbox: SignalInbox,
        emit: Callable[[events.Event], None],
    ) -> None:
        super().__init__(run_id, settings.run.workers)
        self._settings = settings
        self._workers = workers
        self._limit: Limit = workers.limit
        self._jobs = jobs
        self._progress = progress
        self._inbox = inbox
        self._emit = emit
        self._rate = self._limit.rate
        self._socket: ControlSocket | None = None
        # When to look again whether it stands, and why it does not.
        self._look_at = 0.0
        self._trouble = ""
        self._stops = False
        self._hurried = False
        # Of settings that were read again; and whether another limit was asked for.
        self._timetable: Timetable | None = None
        self._asked_for = False

    def wait(self, fds: Iterable[int], seconds: float) -> frozenset[int]:
        """Returns those of the descriptors that can be read within some seconds.

        The method serves the control socket meanwhile, and creates the socket again if somebody has
        removed it.
        """
        self.listen()
        asked = self._socket.fds if self._socket is not None else []
        ready = wait_for(reading=[*fds, *asked], timeout=seconds)
        if self._socket is not None and (len(asked) > 1 or not ready.isdisjoint(asked)):
            self._socket.serve()
        if self._stops:  # Only now, since the answer is sent.
            self._stops = False
            os.kill(os.getpid(), signal.SIGTERM)
        if self._timetable is not None and not self._asked_for:
            self._limit.follow(self._timetable)
        if self._limit.rate != self._rate:
            self._note_rate(None)
        return ready

    def time_left(self, seconds: float) -> Iterator[float]:
        """Yields the seconds that are left of a wait, until none are left.

        A stop ends the wait, and so does a user who asks to do the work now.
        """
        until, self._hurried = time.monotonic() + seconds, False
        while not (self._inbox.stops or self._hurried) and (left := until - time.monotonic()) > 0:
            yield left

    def adopt(self, settings: Settings) -> None:
        changed = settings.run.bwlimit != self._settings.run.bwlimit
        self._settings = settings
        self._timetable = settings.run.bwlimit or parse_timetable("off")
        if changed and self._asked_for:
            self._emit(
                events.Warning(
                    reason=f"the new run.bwlimit waits: {limit_text(self._limit.rate)}, which"
                    " somebody asked for, holds until `ntt-backup-remote bwlimit timetable`"
                )
            )
        self._workers.adopt(settings.run)

    @property
    def paused(self) -> bool:
        return self._limit.held

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def listen(self) -> None:
        """Makes the socket, unless it is there or was tried a moment ago."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        if self._socket is not None:
            if self._socket.stands:
                return
            self._socket.close()
            self._socket = None
        path = self._settings.control.socket
        assert path is not None  # The settings have a default that depends on others.
        try:
            self._socket = ControlSocket(path, self._answer)
            self._trouble = ""
        except BackupError as error:
            trouble, self._trouble = self._trouble, f"{error}; {error.hint}"
            if trouble != self._trouble:
                self._emit(events.Warning(reason=self._trouble))

    # --- what is asked ----------------------------------------------------------------------------

    def _answer(self, request: Mapping[str, Any], uid: int) -> Mapping[str, Any]:
        do, target = request["do"], self._settings.target
        if do == "state":
            jobs = {name: job.running for name, job in self._jobs.items()}
            return self.report(target, **self._bounds(), jobs=jobs).fields
        known: dict[str, Callable[[int], str]] = {
            "pause": self._pause,
            "resume": self._resume,
            "bwlimit": lambda uid: self._set_rate(request.get("rate"), uid),
            "stop": self._stop,
            "now": self._hurry,
        }
        if do not in known:
            raise ConfigError(
                f"this daemon does not know {do[:40]!r}",
                hint="it may be of an older version: start it again",
            )
        return {"done": known[do](uid), "target": target, **self._bounds()}

    def _bounds(self) -> dict[str, Any]:
        return {"paused": self._limit.held, "bwlimit": self._limit.rate}

    def _pause(self, uid: int) -> str:
        if self._limit.held:
            return "it was paused already"
        self._limit.held = True
        self._progress.hold(time.monotonic())
        self._emit(Paused(uid=uid))
        return "paused: nothing is sent until ntt-backup-remote resume"

    def _resume(self, uid: int) -> str:
        if not self._limit.held:
            return "it was not paused"
        self._limit.held = False
        self._emit(Resumed(uid=uid, duration_s=self._progress.go_on(time.monotonic())))
        return "resumed"

    def _set_rate(self, wanted: object, uid: int) -> str:
        self._asked_for = wanted != "timetable"
        if self._asked_for:
            self._limit.set(_one_rate(wanted))
        else:
            self._limit.follow(self._timetable)
        if self._limit.rate != self._rate:
            self._note_rate(uid)
        return f"{limit_text(self._rate)} for all workers together"

    def _note_rate(self, uid: int | None) -> None:
        self._rate = self._limit.rate
        self._emit(BandwidthLimit(bytes_per_s=self._rate, uid=uid))

    def _stop(self, uid: int) -> str:
        if self._inbox.stops:
            return "it is stopping already"
        self._emit(Asked(do="stop", uid=uid))
        self._stops = True
        if self._limit.held:
            return "it stops at once, since it is paused"
        return "it stops after what is in flight"

    def _hurry(self, uid: int) -> str:
        self._hurried = True
        self._workers.hurry()
        for job in self._jobs.values():
            job.hurry()
        self._emit(Asked(do="now", uid=uid))
        return "it looks for work, and does what is due, now"


def _one_rate(wanted: object) -> int | None:
    """Returns bytes per second; None for no limit. Raises ConfigError for an invalid rate."""
    try:
        timetable = parse_timetable(wanted)
    except ValueError:
        timetable = None
    if timetable is None or len(timetable.changes) > 1:
        raise ConfigError(
            f"{str(wanted)[:80]!r} is no rate",
            hint="needed is a rate such as 4MB/s from 1024 bytes a second on, `off` for none, or"
            " `timetable` for what run.bwlimit says",
        )
    return timetable.changes[0][1]


# --- settings that are read again ---------------------------------------------------------------


def read_again(
    old: Settings,
    load: Callable[[], Settings],
    try_out: Callable[[Settings], None],
    names: Callable[[], Collection[str]] | None = None,
) -> tuple[Settings, list[events.Event]]:
    """Reads the settings of a run again. Returns those that hold now, and events of the changes.

    Args:
        old: The settings that hold so far.
        load: Reads the settings. Raises ConfigError.
        try_out: Raises ConfigError for settings that cannot take effect.
        names: Returns the targets that a daemon started now would serve; None where somebody else
            looks at that.
    """
    try:
        new = load()
        now, later = _differences(old, new)
        if names is not None:
            later += changed_targets([new.target], names())
        holding = _merged(old, new)
        try_out(holding)
    except ConfigError as error:
        return old, [SettingsRefused(**error.fields)]
    return holding, [SettingsRead(changed=now), *([start_needed(later)] if later else [])]


def changed_targets(served: Collection[str], now: Collection[str]) -> list[str]:
    """Returns the targets that are new in the settings, and the targets that are gone."""
    return [
        *(f"target {name} (new)" for name in now if name not in served),
        *(f"target {name} (gone)" for name in served if name not in now),
    ]


def start_needed(changed: Iterable[str]) -> events.Warning:
    """Returns the event that names the changes that need a restart of the daemon."""
    return events.Warning(reason=f"a restart is needed for what has changed: {', '.join(changed)}")


def _differences(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Returns the changed keys that take effect now, and the changed keys that need a restart."""
    now: list[str] = []
    later: list[str] = []
    before, after = _flat(old), _flat(new)
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            live = key in _LIVE or key.partition(".")[0] in _LIVE
            (now if live else later).append(key)
    return now, later


def _flat(settings: Settings) -> dict[str, Any]:
    """Returns the settings by `table.key`."""
    tables = settings.model_dump(exclude={"target", "media"})
    # The same number means something else where it is not set: batches grow.
    tables["run"]["batch_size"] = settings.run.batch_size, settings.run.most_blobs
    flat = {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }
    return {**flat, "media": settings.media}


def _merged(old: Settings, new: Settings) -> Settings:
    """Returns the old settings with those new values that take effect now."""
    tables = {name: getattr(new, name) for name in _LIVE if "." not in name}
    keys = [name.removeprefix("run.") for name in _LIVE if name.startswith("run.")]
    run = old.run.model_copy(update={name: getattr(new.run, name) for name in keys})
    return old.model_copy(update={**tables, "run": run})
