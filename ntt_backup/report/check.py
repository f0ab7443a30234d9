"""`check` looks at all that the preflight does, and at what no run need wait for.

Of the work beside the workers that is whether the catalog can be dumped, and the sets be taken; and
of the way back, whether what is sent could come back. A remote may take blobs for years that none
of our commands can read there: sending by `tar` needs no Python, reading does. Such a finding is a
warning and never an error: the blobs are plain files, which other programs can restore, and a check
that fails would stop the backup itself.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ntt_backup import __version__, rollback_detection
from ntt_backup.audit.object_locks import known_lock, look_at_lock
from ntt_backup.catalog import connection, history, ledger, selection
from ntt_backup.catalog.foreign_query import open_query
from ntt_backup.catalog.history import CheckRun, noted_dumps
from ntt_backup.catalog.listed_files import shown_path
from ntt_backup.client.bootstrap import Banner
from ntt_backup.client.receiver_connection import ReceiverConnection
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config import RemoteConfig, Settings, StoreConfig, application_name
from ntt_backup.config.bandwidth_timetable import describe_limit
from ntt_backup.config.sealing import require_sealing
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.daemon.event_log import EventLog
from ntt_backup.daemon.preflight import CheckStep, Preflight, guarded
from ntt_backup.dump.job import rehearse
from ntt_backup.dump.retention import of_host
from ntt_backup.dump.store import list_dumps, open_dumps
from ntt_backup.errors import (
    SOME_FAILED,
    BackupError,
    CatalogError,
    DumpImpossible,
    SourceError,
    Unsupported,
)
from ntt_backup.filestore.contract import ReadableStore
from ntt_backup.filestore.open import open_packs, open_store
from ntt_backup.formatting import duration, many, moment
from ntt_backup.model import StoredPack
from ntt_backup.objects.bucket import still
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.names import PackKey
from ntt_backup.process.messages import Done, RemoteProbed
from ntt_backup.process.pid_lock import pid_lock
from ntt_backup.process.spawn import version_of
from ntt_backup.report import notices
from ntt_backup.rollback_detection import Kind, Newest
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.versions import names_of_host
from ntt_backup.source.paths import checked_path
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.probe import LINGERS
from ntt_backup.upload.worker_main import PROBE, Remote
from ntt_backup.wire import messages
from ntt_backup.wire.stored_names import MAX_DUMPS

_KINDS: Final = {
    "ssh": "by ssh",
    "sftp": "by sftp",
    "file": "a directory of this machine",
    "s3": "a bucket",
}
# What a receiver must allow, with the commands that need it.
_NEEDED: Final = {
    "list": "reconcile, restore and drill",
    "get": "restore, drill and verify --download",
    "verify": "verify",
}
_NEEDED_FOR_PACKS: Final = {"get": "reconcile, restore, drill, mount and verify --download"}
_QUERY_SECONDS: Final = 60.0
_READERS: Final = "verify, reconcile, restore, drill and snapshot"
NOT_LOOKED: Final = (
    "could not check whether the newest dump, versions and pack are on the target: {}"
)


def check(settings: Settings) -> Iterator[CheckStep]:
    """Yields every step as it is done; none raises, and nothing is changed on either side."""
    yield guarded("log", lambda: _log(settings))
    yield guarded("lock", lambda: _lock(settings))
    yield guarded("target", lambda: _target(settings))
    if (limit := settings.run.bwlimit) is not None:
        yield CheckStep(describe_limit(limit, datetime.now()), name="bandwidth")
    if settings.pack.recipients or settings.remote.packs:
        yield guarded("sealing", lambda: _sealing(settings))

    spec = SessionSpec.of(settings, f"check-{os.getpid()}", "check", sends=True)
    remote = Remote(settings.run.strategy, spec, Store.of(settings.source))

    def ask(word: bytes) -> RemoteProbed | Done:
        if word == PROBE:
            remote.begin_probe()
        return remote.answer(word)

    if settings.metrics.wanted:
        from ntt_backup.report import metrics  # It loads the client of Prometheus.

        yield guarded("metrics", lambda: CheckStep(*metrics.check(settings)))
    if settings.notify.wanted:
        yield guarded("notices", lambda: CheckStep(*notices.check(settings)))
    preflight = Preflight(settings, check=True)
    try:
        yield from preflight.steps(ask)
    finally:
        remote.end_probe(go_on=False)
        preflight.close()
    if remote.lingers:
        yield CheckStep(warning=LINGERS, name="login")
    if settings.catalog.from_ is not None:
        yield guarded("query", lambda: listed_by_query(settings))
    yield guarded("versions", lambda: _versions(settings.remote.kind))
    reached = preflight.strategy is not None
    yield guarded("dump", lambda: _dump(settings, reached=reached))
    if reached and settings.remote.runs_receiver:
        yield guarded("restore", lambda: remote_reads(settings))
    yield guarded("drill", lambda: last_drill(settings))
    yield guarded("signing", lambda: signing_key(settings))
    if reached:
        yield guarded("newest", lambda: newest_known(settings))
        if settings.remote.kind == "s3":
            yield guarded("locks", lambda: object_locks(settings))
    if settings.snapshots:
        yield guarded("snapshots", lambda: snapshots(settings, reached=reached))


def listed_by_query(settings: StoreConfig) -> CheckStep:
    """Takes one row of the query that lists files, and looks for its file. Raises BackupError."""
    assert settings.catalog.from_ is not None
    root = settings.source.root
    try:
        with open_query(settings.catalog.from_, application_name("check")) as query:
            path = query.first_path(_QUERY_SECONDS)
    except TimeoutError:
        said = f"the query of catalog.from gives no row within {duration(_QUERY_SECONDS)}"
        return CheckStep(warning=f"{said}; a pass over it waits longer, see docs/stores.md")
    if path is None:
        return CheckStep(warning="the query of catalog.from gives no path: has it no rows yet?")
    shown, why = shown_path(path), f"there is no such file in {root}"
    try:
        if os.path.lexists(root / checked_path(path, root)):
            return CheckStep(f"the query of catalog.from gives paths, such as {shown}")
    except ValueError as error:
        why = str(error)
    said = f"the query of catalog.from gives a path that cannot be read, {shown}: {why}"
    return CheckStep(warning=f"{said}; correct source.root or the query")


def _log(settings: Settings) -> CheckStep:
    EventLog(settings.log, "check", settings.target).close()
    path = settings.log.jsonl
    disk = os.statvfs(path.parent)
    if disk.f_blocks and not disk.f_bavail:
        return CheckStep(warning=f"{path}: its disk is full, and events are lost: free space")
    return CheckStep(str(path))


def _lock(settings: Settings) -> CheckStep:
    with pid_lock(settings.lock.file):
        return CheckStep(f"{settings.lock.file} is free")


def _target(settings: Settings) -> CheckStep:
    remote = settings.remote
    idle = ", ".join(f"remote.{name}" for name in remote.idle)
    warnings = [f"without effect for {remote.kind}: {idle}"] if idle else []
    if remote.kind == "file":
        with suppress(OSError):
            if Path(remote.path).stat().st_dev == settings.source.root.stat().st_dev:
                warnings.append(
                    f"{remote.path} and {settings.source.root} are on one file system: a broken"
                    " disk takes both; is the target's disk mounted?"
                )
    server = f" at {remote.endpoint}" if remote.kind == "s3" and remote.endpoint else ""
    place = f"{settings.target} is {remote.url} ({_KINDS[remote.kind]}{server})"
    return CheckStep(place, warning="; ".join([place, *warnings]) if warnings else "")


def _sealing(settings: Settings) -> CheckStep:
    """Says whom packs are sealed for, and whether they can be."""
    if not settings.pack.recipients:
        return CheckStep("nothing is sealed: pack.recipients is empty")
    if not settings.recipients:
        return CheckStep(warning="pack.recipients has no effect: remote.layout is files")
    require_sealing(settings.recipients)
    said = f"packs and dumps are sealed for {many(len(settings.recipients), 'recipient')}"
    if (file := settings.pack.identity_file) is None:
        return CheckStep(said)
    return CheckStep(warning=f"{said}; who has this machine can open them all, by {file}")


def _versions(kind: str) -> CheckStep:
    ours = [f"ntt-backup {__version__}", f"Python {platform.python_version()}"]
    if kind in ("ssh", "file"):
        ours.append(version_of(["tar", "--version"]) or "tar of unknown version")
    if kind in ("ssh", "sftp"):
        ours.append(version_of(["ssh", "-V"]) or "ssh of unknown version")
    return CheckStep(", ".join(ours))


def _dump(settings: Settings, *, reached: bool) -> CheckStep:
    if settings.run.skip_pgdump:
        return CheckStep("the catalog is not dumped (run.skip_pgdump)")
    try:
        text, warning = rehearse(settings, remote_too=reached)
        return CheckStep(text, warning=f"{warning} ({text})" if warning else "")
    except CatalogError as error:
        return CheckStep(warning=f"whether the catalog can be dumped is not known: {error}")
    except DumpImpossible as error:
        return CheckStep(warning=f"the catalog will not be dumped: {error}; {error.hint}")


def snapshots(settings: Settings, *, reached: bool) -> CheckStep:
    """Checks that this user can read the paths of the sets, and the repository on the target.

    Raises:
        SourceError: A path is missing, or may not be read.
        BackupError: The repository cannot be read.
    """
    from ntt_backup.snapshot.retention import life
    from ntt_backup.snapshot.versions import versions

    for name, wanted in settings.snapshots.items():
        for path in wanted.paths:
            # The effective ids: a capability to read counts.
            if not os.access(path, os.R_OK, effective_ids=True):
                raise SourceError(
                    f"{path} of the snapshot set {name} is missing, or may not be read",
                    hint="mount its disk, allow this user to read it, or correct its paths",
                    exit_code=SOME_FAILED,
                )
    said = many(len(settings.snapshots), "set")
    if not reached:
        return CheckStep(f"{said} can be read here")
    with closing(open_store(settings, SNAPSHOTS)) as repository:
        whole = sum(one.whole for name in settings.snapshots for one in versions(repository, name))
    by_hand = sorted(settings.snapshots.keys() - settings.scheduled.keys())
    hand = f"; a run takes none of {', '.join(by_hand)}: `every` is not set" if by_hand else ""
    text = f"{said}, {many(whole, 'version')} on the target{hand}"
    renewed = (known := known_lock(settings)) is not None and known.renewed
    if (
        settings.remote.kind == "s3"
        and not renewed
        and (lock := open_bucket(settings.remote).protection().lock_days)
    ):
        lives = {name: life(wanted).days for name, wanted in settings.snapshots.items()}
        if short := [f"{name} ({days})" for name, days in lives.items() if days > lock]:
            warning = (
                f"{text}; the bucket's object lock ends after {many(lock, 'day')}, and versions are"
                f" needed for longer (days): {', '.join(short)}; make it longer, renew it by"
                " `ntt-backup-remote protect`, or make full_every and keep_* shorter"
            )
            return CheckStep(warning=warning)
    return CheckStep(text)


def object_locks(settings: Settings) -> CheckStep:
    """Says until when the objects of a bucket are locked, and warns where that is soon.

    The result is noted for `status`. Raises BackupError if the bucket cannot be asked.
    """
    bucket = open_bucket(settings.remote)
    told = bucket.protection()
    if told.lock != "on":
        return CheckStep(f"object lock is {told.lock or 'not told by the bucket'}")
    days = many(told.lock_days, "day")
    later = f"what arrives is locked for {days}" if told.lock_days else "what arrives is not locked"
    lock = look_at_lock(settings, bucket)
    if lock is None:
        return CheckStep(f"no lock is seen (that needs s3:GetObjectRetention); {later}")
    now = datetime.now(UTC)
    verb = "end" if lock.until > now else "have ended:"
    text = f"object locks {verb} {moment(lock.until)}; {later}"
    renew = "renew them: `ntt-backup-remote protect --for 90d`"
    return CheckStep(text, warning=f"{text}; {renew}" if lock.ends_soon(now) else "")


def remote_reads(settings: Settings) -> CheckStep:
    """Starts a receiver as `restore` does, and says which commands can read the remote."""
    try:
        spec = SessionSpec.of(settings, f"check-{os.getpid()}", "read")
        receiver = ReceiverConnection(spec, messages.to_client(messages.READING))
    except Unsupported as error:
        where = settings.remote.where
        return CheckStep(
            warning=f"{_READERS} will not work and end with {Unsupported.exit_code}: {error};"
            " install python3 (3.8 or newer, with all of its standard library) on the remote."
            f" Without it only other programs bring the blobs back: rsync -a {where}/by-hash/"
            " DIRECTORY"
        )
    receiver.abort()
    return of_banner(receiver.banner, packs=settings.remote.packs)


def of_banner(banner: Banner, *, packs: bool = False) -> CheckStep:
    """Returns the step for what a receiver says of itself. packs: blobs lie in packs there."""
    needed = _NEEDED_FOR_PACKS if packs else _NEEDED
    text = f"Python {banner.python} on the remote"
    by = "" if banner.checking == "blake3" else f" by the program {banner.checking}"
    text += f", BLAKE3{by}" if banner.can_hash else ", no BLAKE3"
    if lacking := [word for word in needed if word not in banner.allowed]:
        commands = "; ".join(f"{needed[word]} need `{word}`" for word in lacking)
        return CheckStep(
            warning=f"{text}; --allow in the line of our key in the remote's authorized_keys lacks"
            f" {', '.join(lacking)}: {commands}. Add it, or have another key at hand that may read",
        )
    of_store = "" if banner.can_hash or packs else " (verify: what the store here has)"
    return CheckStep(f"{text}: verify, restore and drill can read there{of_store}")


def last_drill(settings: Settings) -> CheckStep:
    """Reports the last drill, with a warning if it has not proved that everything comes back."""
    try:
        with connection.connect(
            settings.catalog.url, application_name("check"), part=settings.part
        ) as conn:
            checks = history.last_checks(conn, settings.target)
            copied = selection.any_copied(conn, settings.target)
    except CatalogError as error:
        return CheckStep(warning=f"when the last drill was is not known: {error}")
    return of_drills([one for one in checks if one.command == "drill"], copied=copied)


def of_drills(drills: Sequence[CheckRun], *, copied: bool) -> CheckStep:
    """Returns the step for the last drills, the newest first. copied: Whether any blob is."""
    if not drills:
        none = "no drill has proved yet that all can be restored: `ntt-backup-remote drill`"
        return CheckStep(none if copied else "nothing is copied yet: nothing to restore")
    last = drills[0]
    if last.exit_code == 0:
        return CheckStep(f"the last drill, of {moment(last.ended_at)}: PROVED")
    proved = [one for one in drills if one.exit_code == 0]
    before = f"the last one that did: {moment(proved[0].ended_at)}" if proved else "none ever did"
    detail = f" ({last.detail})" if last.detail else ""
    return CheckStep(
        warning=f"the last drill, of {moment(last.ended_at)}, ended with {last.exit_code}{detail}:"
        f" NOT PROVED; {before}; look at what it says: `ntt-backup-remote drill`",
    )


def signing_key(settings: Settings) -> CheckStep:
    """Says which key signs dumps, versions and packs, and warns where there is none."""
    keys = SigningKeys.of(settings)
    if not keys:
        return CheckStep(warning=keys.missing_key)
    said = f"key {keys.name} in {keys.path}; keep a copy off this host and off the target"
    return CheckStep(said, warning=keys.problem)


def look(settings: RemoteConfig) -> list[Newest]:
    """Returns the newest dump, versions and pack that this host knows and the target lacks.

    The result is noted for `status`. Raises BackupError if the target cannot be listed.
    """
    known = rollback_detection.recorded(settings)
    away: list[Newest] = []
    if any(one.kind == "dump" for one in known):
        with closing(open_dumps(settings)) as store:
            found = list_dumps(store)
        keys, ledger = SigningKeys.of(settings), _ledger(settings)
        # Without both, nothing tells which dumps are of this host.
        dumps = found if ledger is None and not keys else of_host(found, keys, ledger or ())
        names = [one.name for one in dumps if one.whole]
        away += rollback_detection.compare(settings, {("dump", ""): names})
    if any(one.kind == "version" for one in known):
        with closing(open_store(settings, SNAPSHOTS)) as repository:
            away += missed_versions(settings, repository)
    if settings.remote.packs and (lost := _lost_pack(settings)) is not None:
        pack, at = lost
        place = settings.remote.url
        away.append(Newest(settings.target, place, "pack", "", pack.key, at, missed=pack.key))
    return away


def missed_versions(
    settings: RemoteConfig, repository: ReadableStore, of_set: str = ""
) -> list[Newest]:
    """Returns the newest versions, of a set or of all, that this host knows and the target lacks.

    The result is noted for `status`.
    """
    origins = Origins.of(settings)
    known = [one.of for one in rollback_detection.recorded(settings) if one.kind == "version"]
    there: dict[tuple[Kind, str], list[str]] = {
        ("version", of): names_of_host(repository, of, origins)
        for of in known
        if of_set in ("", of)
    }
    return rollback_detection.compare(settings, there)


def _ledger(settings: RemoteConfig) -> frozenset[tuple[str, str]] | None:
    """Returns the dumps that the catalog has noted; None where it cannot be asked."""
    application = application_name("check")
    with suppress(CatalogError), connection.connect(settings.catalog.url, application) as conn:
        return noted_dumps(conn, settings.target, MAX_DUMPS)
    return None


def _lost_pack(settings: RemoteConfig) -> tuple[StoredPack, datetime] | None:
    """Returns the newest pack in the catalog, and when it was sealed, if the target has lost it.

    A target that has another object in its place has lost it. None also if the catalog cannot be
    asked.
    """
    with suppress(CatalogError):
        with connection.connect(settings.catalog.url, application_name("check")) as conn:
            last = ledger.newest_pack(conn, settings.target)
        if last is None:
            return None
        key = last[0].key
        with closing(open_packs(settings)) as store:
            there = None if PackKey.read(key) is None else store.stat(key)
        same = there is not None and there.size == last[0].size
        if there is None or not same or still(there, last[0].checksum) is False:
            return last
    return None


def newest_known(settings: RemoteConfig) -> CheckStep:
    """Says whether the target has the newest dump, versions and pack of this host."""
    try:
        found = look(settings)
    except BackupError as error:
        return CheckStep(warning=NOT_LOOKED.format(error))
    if found:
        return CheckStep(warning="; ".join(map(str, found)))
    known = rollback_detection.recorded(settings)
    if not known:
        return CheckStep("this host has recorded no dump and no snapshot yet")
    last = max(known, key=lambda one: one.at)
    return CheckStep(f"nothing is missing; the last {last.kind} was stored {moment(last.at)}")
