"""A command and the daemon take versions: alone for a set, on the target of the settings.

A run takes a version of each set that has `every`, once the last is as old as that. When that was
taken the target is asked, not a memory of ours: a version of this host that was taken by hand
counts, and so does one of another host whose key is known; one that was lost does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ntt_backup import rollback_detection
from ntt_backup.catalog.identities import identified_if_known
from ntt_backup.config import RemoteConfig
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.dump.retention import Retention
from ntt_backup.errors import BackupError, LockHeld
from ntt_backup.events import Event, Warning
from ntt_backup.filestore.local_cache import directory_for
from ntt_backup.filestore.open import open_store
from ntt_backup.process.messages import JobOver
from ntt_backup.process.pid_lock import pid_lock
from ntt_backup.snapshot.events import (
    SnapshotComplete,
    SnapshotFailed,
    SnapshotProgress,
    SnapshotStart,
)
from ntt_backup.snapshot.last_take import keep, last, noting
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.retention import expire
from ntt_backup.snapshot.take.last_version import open_copies
from ntt_backup.snapshot.take.new_version import Report, Taken, take
from ntt_backup.snapshot.take.walk import SnapshotSet, of_settings, without
from ntt_backup.snapshot.versions import last_begun, names_of_host

_SHOWN: Final = 20
# Another take of a set is at work: then its version is looked for.
_SOON_SECONDS: Final = 300.0

Emit = Callable[[Event], None]


def take_version(
    settings: RemoteConfig,
    set: SnapshotSet,
    *,
    full: bool = False,
    paranoid: bool = False,
    report: Report = Report(),  # noqa: B008  It is frozen.
) -> Taken:
    """Makes a version of a set, and applies the retention of the set.

    Versions that the retention in the settings does not keep are removed afterwards. A failed
    removal is reported as a problem. See `take`.

    Raises:
        LockHeld: Something else changes the set.
    """
    settings = identified_if_known(settings, "snapshot")
    remote, now = settings.remote, datetime.now(UTC)
    copies_of_all = directory_for("snapshots", remote)
    own = [copies_of_all.parent]
    if remote.kind == "file":  # Else each version would have those before it.
        own.append(Path(remote.path) / "snapshots")
    with (
        set_lock(settings, set.name),
        noting(settings, set.name) as note,
        open_copies(copies_of_all / set.name) as copies,
        closing(open_store(settings, SNAPSHOTS)) as repository,
    ):
        keys = SigningKeys.of(settings)
        origins = copies.origins(keys, settings.target)
        if lost := rollback_detection.lost_key(settings, keys):
            report.problem(f"set {set.name}", lost)
        names = names_of_host(repository, set.name, origins)
        for missed in rollback_detection.compare(settings, {("version", set.name): names}):
            report.problem(f"set {set.name}", str(missed))
        taken = take(
            repository,
            without(set, own),
            copies=copies,
            origins=origins,
            now=now,
            full=full,
            paranoid=paranoid,
            report=report,
        )
        note(taken)
        rollback_detection.record(settings, "version", taken.version, set.name, keys.name)
        if (named := settings.snapshots.get(set.name)) is not None:
            try:
                rule, every = Retention.of(named), named.every
                gone = expire(
                    repository, set.name, rule, now, origins, every=every, problem=report.problem
                ).gone
                taken.forgotten = len(gone)
                rollback_detection.removed(
                    settings, "version", [one.name for one in gone], set.name
                )
            except BackupError as error:
                report.problem("versions past retention", f"still on the target: {error}")
        return taken


@contextmanager
def set_lock(settings: RemoteConfig, name: str) -> Iterator[None]:
    """Holds the lock of a set on this host. Raises LockHeld where something else changes it."""
    file = settings.lock.file.with_stem(f"{settings.lock.file.stem}-snapshot-{name}")
    with pid_lock(file, f"another take or forget of {name} is running", hint=""):
        yield


def due_in(last: datetime | None, every: float, now: datetime) -> float:
    """Returns the seconds until a set is due whose newest version was begun at a time, if any."""
    # A clock that was ahead when the last one was taken must not stop them for as long.
    age = abs((now - last).total_seconds()) if last is not None else every
    return max(0.0, every - age)


def take_due(settings: RemoteConfig, emit: Emit, *, patient: bool = False) -> JobOver:
    """Takes a version of each set that is due. A failed set does not keep the others back.

    Args:
        settings: The settings.
        emit: Receives each event.
        patient: Whether an outage of the remote ends the work without counting as a failure.

    Returns:
        Whether a set failed or lacks files that could not be read, and when the next set is due.
    """
    failed, dues = False, []
    settings = identified_if_known(settings, "snapshot")
    for name, every in settings.scheduled.items():
        began, wait, known = time.monotonic(), every, last(settings, name)
        try:
            with noting(settings, name):
                with closing(open_store(settings, SNAPSHOTS)) as repository:
                    now = datetime.now(UTC)
                    begun = last_begun(repository, name, now, Origins.of(settings))
                left = due_in(begun, every, now)
                if not left:
                    failed |= not _take(settings, name, emit)
                elif known.error:  # The target has a version that is young enough.
                    keep(settings, name, replace(known, failed_at=None, error=""))
                wait = left or max(0.0, every - (time.monotonic() - began))
        except LockHeld as error:
            emit(Warning(reason=f"no snapshot of {name} is taken: {error}"))
            wait = min(every, _SOON_SECONDS)
        except BackupError as error:
            if patient and error.retryable:
                keep(settings, name, known)
                return JobOver.of_outage(error, failed=failed)
            failed = True
            emit(SnapshotFailed(set=name, **error.fields))
        dues.append(time.monotonic() + wait)
    # The sets behind the first one took their time.
    again_s = max(0.0, min(dues) - time.monotonic()) if dues else None
    return JobOver(failed=failed, again_s=again_s)


def _take(settings: RemoteConfig, name: str, emit: Emit) -> bool:
    """Takes a version; returns whether all could be read."""
    emit(SnapshotStart(set=name))
    report = _Reporter(settings, name, emit)
    made = take_version(
        settings,
        of_settings(name, settings.snapshots[name]),
        report=Report(report.progress, report.problem),
    )
    fields = asdict(made)
    del fields["skipped"]
    emit(SnapshotComplete(**fields))
    return made.exit_code == 0


class _Reporter:
    """Reports the progress of a take and the first of its problems."""

    def __init__(self, settings: RemoteConfig, name: str, emit: Emit) -> None:
        self._name = name
        self._step = settings.log.progress_interval
        self._before = last(settings, name).bytes
        self._emit = emit
        self._began = time.monotonic()
        self._next = self._began + self._step
        self._problems = 0

    def progress(self, files: int, bytes_: int, read: int, stored: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._step
        eta_s = None
        if 0 < bytes_ < self._before:
            eta_s = round((now - self._began) * (self._before - bytes_) / bytes_, 1)
        name = self._name
        self._emit(SnapshotProgress(set=name, files=files, read=read, stored=stored, eta_s=eta_s))

    def problem(self, path: str, why: str) -> None:
        self._problems += 1
        if self._problems <= _SHOWN:
            self._emit(Warning(reason=f"snapshot of {self._name}: {path}: {why}"))
        elif self._problems == _SHOWN + 1:
            self._emit(Warning(reason=f"snapshot of {self._name}: there is more, not shown"))
