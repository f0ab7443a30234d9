"""A command and the daemon take a version so: alone for its set, on the target of the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ntt_backup import newest
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import HostKeys
from ntt_backup.dump.retention import Retention
from ntt_backup.errors import BackupError
from ntt_backup.filestore.open import open_store
from ntt_backup.objects.cache import directory_for
from ntt_backup.process.pid_lock import pid_lock
from ntt_backup.snapshot.forget import expire
from ntt_backup.snapshot.last_take import noting
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.snapshot.take.copies import open_copies
from ntt_backup.snapshot.take.new_version import Report, Taken, take
from ntt_backup.snapshot.take.sets import SnapshotSet, without
from ntt_backup.snapshot.versions import names_of_host


def take_version(
    settings: RemoteConfig,
    set: SnapshotSet,
    *,
    full: bool = False,
    paranoid: bool = False,
    report: Report = Report(),  # noqa: B008  It is frozen.
) -> Taken:
    """Makes a version of a set; see `take`. Versions that its retention in the settings does not
    keep are removed then; where they cannot be, that is a problem to report. Raises LockHeld.
    """
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
        how = {"full": full, "paranoid": paranoid}
        keys = HostKeys.of(settings)
        if lost := newest.lost_key(settings, keys):
            report.problem(f"set {set.name}", lost)
        names = names_of_host(repository, set.name, copies.origins(keys, settings.target))
        for missed in newest.compare(settings, {("version", set.name): names}):
            report.problem(f"set {set.name}", str(missed))
        taken = take(
            repository,
            without(set, own),
            copies=copies,
            now=now,
            keys=keys,
            target=settings.target,
            report=report,
            **how,
        )
        note(taken)
        newest.record(settings, "version", taken.version, set.name, keys.name)
        if (named := settings.snapshots.get(set.name)) is not None:
            try:
                gone = expire(
                    repository,
                    set.name,
                    Retention.of(named),
                    now,
                    copies.origins(keys, settings.target),
                    every=named.every,
                    problem=report.problem,
                ).gone
                taken.forgotten = len(gone)
                newest.removed(settings, "version", [one.name for one in gone], set.name)
            except BackupError as error:
                report.problem("versions past retention", f"still on the target: {error}")
        return taken


@contextmanager
def set_lock(settings: RemoteConfig, name: str) -> Iterator[None]:
    """Holds the lock of a set on this host. Raises LockHeld where something else changes it."""
    file = settings.lock.file.with_stem(f"{settings.lock.file.stem}-snapshot-{name}")
    with pid_lock(file, f"another take or forget of {name} is running", hint=""):
        yield
