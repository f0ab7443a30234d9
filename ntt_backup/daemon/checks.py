"""A run that watches checks by itself: it scans, reconciles, verifies and drills (`[checks]`).

Each check is due when its last call is as old as `every`, whoever called it: the catalog has the
history. They are done one after the other by one process, of one host at a time for a target, which
an advisory lock ensures. What they find is handled as after the commands of the same names: rows
are registered, and blobs that the target lacks become pending, so the workers send them.

A check that reaches its `max_time` ends there. A scan and a `verify` go on where they ended, and
`reconcile` begins at another range each time. A drill that was cut short has proved nothing. The
process says that it lives while its counts change: one that hangs is killed (`side_jobs`).

At the start of a target's life there is nothing to compare: an empty target looks like a disk that
is not mounted, and a dump in which nothing is copied proves nothing. So all but `scan` wait for the
first blob, and the drill for a dump that has it.

A drill may be killed at any moment. It locks its directory and its database, and whoever checks
next removes those that nobody locks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ntt_backup.audit.object_locks import look_at_lock
from ntt_backup.audit.reconcile import SERIOUS, Comparison, reconcile
from ntt_backup.audit.scan import ScanResult, scan
from ntt_backup.audit.verify import Findings, Question, verify_remote
from ntt_backup.audit.verify_packs import verify_packs
from ntt_backup.catalog import connection, history, privileges
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.identities import identified
from ntt_backup.catalog.proofs import count_proofs, first_contact
from ntt_backup.catalog.range_locks import RANGES
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.catalog.selection import any_copied, estimated_bytes
from ntt_backup.config import Settings, application_name
from ntt_backup.config.sections import CheckSettings, DrillSettings
from ntt_backup.daemon.events import CheckComplete, CheckFailed, CheckStart
from ntt_backup.errors import SOME_FAILED, BackupError, CatalogUnavailable, ConfigError
from ntt_backup.events import Event
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.process.messages import JobOver
from ntt_backup.source.store import Store

Emit = Callable[[Event], None]
# While another host checks the target, or nothing is there to check.
_SOON_SECONDS: Final = 300.0
_SCRATCH: Final = "ntt-backup-drill-"
_DATABASE: Final = "ntt_backup_drill_"
_LIFE_SECONDS: Final = 60.0
_OF_DRILL: Final = "correct checks.drill.database"


class _TimeIsUp(Exception):
    """A check has reached its max_time."""


@dataclass(slots=True)
class Result:
    """What a check has found so far.

    Attributes:
        blobs: The blobs that were checked.
        bytes: The bytes of content that were read.
        wrong: The blobs that are lost or not right.
        changed: The blobs that were registered, or became pending.
        by_remote_hash: The blobs that are right by the word of the target alone.
        unchecked: The blobs that neither end can hash.
        exit_code: The exit code of the command of the same name.
        complete: Whether all was checked.
        doubts: What is said of these two in the history.
    """

    blobs: int = 0
    bytes: int = 0
    wrong: int = 0
    changed: int = 0
    by_remote_hash: int = 0
    unchecked: int = 0
    exit_code: int = 0
    complete: bool = True
    doubts: str = ""


def check_due(
    settings: Settings, emit: Emit, *, patient: bool, alive: Callable[[], None] = lambda: None
) -> JobOver:
    """Does each check that is due. A check that fails does not keep the others back.

    Args:
        settings: The settings.
        emit: Receives each event.
        patient: Whether an outage ends the work without counting as a failure.
        alive: Is called now and then while a check makes progress.

    Returns:
        Whether a check failed, and when the next one is due.
    """
    failed, waits = False, [min(settings.due_checks.values())]
    try:
        with connection.connect(
            settings.catalog.url, application_name("checks"), part=settings.part
        ) as conn:
            if not history.lock_work(conn, "checks", settings.target):
                return JobOver(failed=False, again_s=_SOON_SECONDS)
            if "drill" in settings.checks.scheduled:
                _remove_what_is_left(settings.checks.drill)
            # The newest comes first.
            calls = reversed(history.last_checks(conn, settings.target))
            last = {one.command: one.ended_at for one in calls}
            for name, every in settings.due_checks.items():
                if (wait := _due_in(last.get(name), every)) > 0:
                    waits.append(wait)
                    continue
                try:
                    if _is_too_early(conn, settings, name):
                        waits.append(_SOON_SECONDS)
                    else:
                        _do(conn, settings, name, emit, alive)
                except BackupError as error:
                    # A drill has a database of its own.
                    if patient and error.retryable and error.hint != _OF_DRILL:
                        raise
                    emit(CheckFailed(command=name, **error.fields))
                    failed = True
    except BackupError as error:
        if patient and error.retryable:
            return JobOver.of_outage(error)
        emit(CheckFailed(command="", **error.fields))
        failed = True
    return JobOver(failed=failed, again_s=min(waits))


def _due_in(ended: datetime | None, every: float) -> float:
    """Returns the seconds until a check is due that ended at a time, if it was ever done."""
    # A clock that was ahead must not stop the checks for as long.
    return max(0.0, every - abs((datetime.now(UTC) - ended).total_seconds())) if ended else 0.0


def _is_too_early(conn: Connection, settings: Settings, name: str) -> bool:
    """Returns whether nothing is copied that a check could find; for a drill, by all dumps."""
    if name == "scan":
        return False
    if not any_copied(conn, settings.target):
        return True
    if name != "drill":
        return False
    from ntt_backup.dump.store import list_dumps, open_dumps

    with closing(open_dumps(identified(conn, settings))) as store:
        records = [dump.record for dump in list_dumps(store)]
    if not records:
        # The first one may be on its way, and nothing be copied in it.
        return not (settings.run.skip_pgdump or history.ever_made(conn, settings.target))
    return not any(one is not None and one.copied for one in records)


def _do(
    conn: Connection, settings: Settings, name: str, emit: Emit, alive: Callable[[], None]
) -> None:
    """Does one check, tells of it, and notes it in the history."""
    needs = _NEEDS.get(name, name)
    verify_schema(conn, settings.target, privileges.of(needs, packs=settings.remote.packs))
    emit(CheckStart(command=name))
    limits: CheckSettings = getattr(settings.checks, name, CheckSettings())
    began = told = time.monotonic()
    found = Result()

    def tick() -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= _LIFE_SECONDS:
            told = now
            alive()
        if limits.max_time is not None and now - began >= limits.max_time:
            raise _TimeIsUp

    try:
        _CHECKS[name](conn, settings, found, tick)
    except _TimeIsUp:
        found.complete = False
    lasted = time.monotonic() - began
    cut = "" if found.complete else f"checks.{name}.max_time or max_bytes was reached"
    history.note_check(
        conn,
        settings.target,
        name,
        lasted=lasted,
        exit_code=found.exit_code,
        blobs=found.blobs,
        bytes=found.bytes,
        wrong=found.wrong,
        detail="; ".join(filter(None, [found.doubts, cut])),
    )
    fields = asdict(found)
    del fields["doubts"]
    emit(CheckComplete(command=name, **fields, duration_s=lasted))


def _scan(conn: Connection, settings: Settings, found: Result, tick: Callable[[], None]) -> None:
    def progress(done: ScanResult) -> None:
        found.blobs, found.bytes = done.registered + done.known, 0
        found.changed, found.exit_code = done.registered, done.exit_code
        tick()

    progress(scan(conn, Store.of(settings.source), on_progress=progress))


def _reconcile(
    conn: Connection, settings: Settings, found: Result, tick: Callable[[], None]
) -> None:
    def progress(seen: Comparison) -> None:
        found.blobs, found.changed = seen.rows, seen.requeued
        found.wrong = sum(seen.differences[what] for what in SERIOUS)
        found.exit_code = seen.exit_code
        tick()

    seen = reconcile(
        conn,
        settings,
        apply=True,
        first=secrets.randbelow(RANGES) if settings.checks.reconcile.max_time else 0,
        on_wait=tick,
        on_progress=progress,
        on_difference=lambda what, name, remark: None,
        on_outage=_raise,
    )
    found.changed = seen.requeued


def _verify(conn: Connection, settings: Settings, found: Result, tick: Callable[[], None]) -> None:
    limits = settings.checks.verify
    question = Question(max_duration=limits.max_time, max_bytes=limits.max_bytes, workers=1)
    # Without the store the remote would be taken at its word. It is tried again as after any error.
    Store.of(settings.source).probe()
    before = None

    def progress(seen: Findings) -> None:
        nonlocal before
        found.blobs, found.bytes, found.changed = seen.checked, seen.bytes, seen.requeued
        found.wrong, found.exit_code = len(seen.wrong), seen.exit_code
        found.by_remote_hash, found.unchecked = seen.by_remote_hash, seen.unchecked
        found.doubts = seen.doubts
        now = seen.checked, seen.unchecked, seen.bytes, seen.requeued
        if now != before:
            before = now
            with suppress(_TimeIsUp):  # It ends by itself.
                tick()

    verify = verify_packs if settings.remote.packs else verify_remote
    seen = verify(conn, settings, question, on_progress=progress, on_outage=_raise)
    progress(seen)
    found.complete = seen.complete
    if settings.remote.kind == "s3":
        # Whoever renews the locks does that from another machine. Their end is an alert here, too.
        with suppress(BackupError):
            look_at_lock(settings, open_bucket(settings.remote))


def _policy(conn: Connection, settings: Settings, found: Result, tick: Callable[[], None]) -> None:
    policy = settings.policy
    assert policy.copies is not None  # Else this is not scheduled.
    # The daemon of each target counts, and one count is for all of them.
    age = policy.every / 2
    count = count_proofs(conn, settings.targets, policy.proved, old_s=age)
    found.blobs = count.blobs
    found.wrong = sum(one.blobs for one in count.short(policy.copies))
    if count.broken(policy.copies, first_contact(conn, settings.target)):
        found.exit_code = SOME_FAILED


def _drill(conn: Connection, settings: Settings, found: Result, tick: Callable[[], None]) -> None:
    from ntt_backup.restore.drill import drill

    limits, settings = settings.checks.drill, identified(conn, settings)
    # It has proved nothing before its end.
    found.exit_code = SOME_FAILED
    digits = 0
    if limits.max_bytes is not None:
        left = estimated_bytes(conn, settings.target)
        while left > limits.max_bytes and digits < 8:
            digits += 1
            left /= 16
    try:
        with _scratch(limits) as (directory, url):
            seen = drill(
                settings.model_copy(
                    update={"catalog": settings.catalog.model_copy(update={"url": url})}
                ),
                directory / "blobs",
                "",
                1,
                digits=digits,
                on_wait=tick,
                on_dump=lambda dump: tick(),
                on_restored=lambda done: tick(),
                on_proof=lambda proof: tick(),
                on_outage=_raise,
                on_warning=lambda text: None,
                bwlimit=None,
                lost=connection.database_name(settings.catalog.url),
            )
    except CatalogUnavailable as error:
        # Not the catalog's, which the run waits for.
        raise CatalogUnavailable(error.message, detail=error.detail, hint=_OF_DRILL) from error
    found.blobs, found.bytes = seen.proof.right, seen.proof.bytes
    found.wrong = len(seen.restored.wrong) + seen.proof.lost + seen.proof.wrong
    found.exit_code, found.complete = seen.exit_code, not digits


@contextmanager
def _scratch(limits: DrillSettings) -> Iterator[tuple[Path, str]]:
    """Yields a new directory, and the URL of a new database; removes both, and nothing else.

    Raises:
        ConfigError: The directory cannot be made.
    """
    try:
        directory, lock = _new_directory(limits.scratch)
    except OSError as error:
        raise ConfigError(
            f"cannot make a directory in {limits.scratch}",
            detail=error.strerror or str(error),
            hint="correct checks.drill.scratch, or let this user write there",
        ) from error
    try:
        with connection.new_database(limits.database, _DATABASE) as url:
            yield directory, url
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _new_directory(parent: Path) -> tuple[Path, int]:
    """Returns a new directory, and the descriptor that locks it."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
        # Another check may have taken it for one that is left, before it was locked.
        if (lock := _locked(directory)) is not None:
            return directory, lock


def _locked(directory: Path) -> int | None:
    """Returns a descriptor that locks a directory of this user; None where that is not possible."""
    with suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if status.st_uid == os.geteuid() and os.path.samestat(status, directory.stat()):
                return fd
        except OSError:
            pass
        os.close(fd)
    return None


def _remove_what_is_left(limits: DrillSettings) -> None:
    """Removes directories and databases of drills that were killed."""
    for directory in limits.scratch.glob(f"{_SCRATCH}*"):
        if (lock := _locked(directory)) is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
    with suppress(BackupError):
        connection.drop_left_databases(limits.database, _DATABASE)


def _raise(error: BackupError, _seconds: float) -> None:
    """Ends a check by an outage: the side job itself waits for the end of outages."""
    raise error


_CHECKS: Final[dict[str, Callable[[Connection, Settings, Result, Callable[[], None]], None]]] = {
    "scan": _scan,
    "reconcile": _reconcile,
    "verify": _verify,
    "drill": _drill,
    "policy": _policy,
}
_NEEDS: Final = {"reconcile": "reconcile --apply", "policy": "a note of the count of proofs"}
