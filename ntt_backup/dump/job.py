"""A dump of the catalog's database goes from pg_dump straight to the remote, if there is need.

Blobs can be restored without the catalog, since their names are their hashes; what other programs
keep in its database cannot. A dump made here and copied later needs room for a copy, and a second
job that somebody forgets. So pg_dump writes into the job's own ssh, and what arrives is believed
when four things are true: pg_dump ended well, the remote's SHA-256 of what is on its disk is that
of what pg_dump wrote, pg_restore can read the table of contents in those same bytes, and that lists
the data of `blobs`. Nothing has to be read back for this.

Where nobody but us has changed anything in the database since the last dump, none is made, for a
week at most; the remote is asked which that is, not a memory of ours. Directory format, which
pg_dump can write with several jobs, needs a directory: a local copy. It works on one table a job,
and the catalog is one large table.

The targets of a daemon share one pg_dump: what it wrote waits here for each of them (see `spool`).
Daemons of several hosts take turns for a target, by an advisory lock, and count what another one of
them has made, as far as they can prove that: where they have one signing key, and then one dump an
interval is made.

`check` rehearses a dump without its rows and without a trace. What looks like a dump that can be
made, a pg_dump that is new enough, says little: the job once failed at a table of another program
that it may not read, and at a directory on the remote that was another account's. So pg_dump dumps
all that is no row, pg_restore reads that, and the remote writes into `pgdump/`. What only the rows
would show, privileges and policies, the catalog is asked in one query.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from ntt_backup import events, rollback_detection
from ntt_backup.catalog import connection, history, privileges, selection
from ntt_backup.catalog.history import DatabaseState
from ntt_backup.catalog.identities import identified
from ntt_backup.catalog.listed_files import listed_files
from ntt_backup.client.remote_errors import explain_gone
from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.dump import pg_programs, record, retention
from ntt_backup.dump.events import DumpComplete, DumpSkipped, DumpStart, DumpWaits
from ntt_backup.dump.pg_programs import Programs
from ntt_backup.dump.places_file import PlacesWriter
from ntt_backup.dump.record import DumpRecord, Stored
from ntt_backup.dump.retention import Retention
from ntt_backup.dump.series import Form, kept_base
from ntt_backup.dump.spool import NoSpool, Spool, Spooled
from ntt_backup.dump.store import (
    DUMPS,
    list_dumps,
    open_dumps,
    publish_dump,
    remove_dumps,
    restorable,
)
from ntt_backup.errors import BackupError, CatalogError, DumpFailed, DumpImpossible
from ntt_backup.filestore.contract import FileStore, NewFile
from ntt_backup.filestore.pins import pins_that_count
from ntt_backup.formatting import many, moment, size
from ntt_backup.objects.bucket import DEAD_SECONDS
from ntt_backup.packstore import marker
from ntt_backup.wire.stored_names import MAX_DUMPS, PLACES

_BLOBS: Final = re.compile(rb"^\d+; \d+ \d+ TABLE DATA \S+ blobs ", re.MULTILINE)
_OWN_TABLE: Final = re.compile(rb"^\d+; \d+ \d+ TABLE ntt_backup (\S+) ", re.MULTILINE)
_OWN_DATA: Final = re.compile(rb"^\d+; \d+ \d+ TABLE DATA ntt_backup (\S+) ", re.MULTILINE)

# While another host dumps.
_SOON_SECONDS: Final = 300.0

Emit = Callable[[events.Event], None]


@dataclass(frozen=True, slots=True)
class NewestDump:
    """Tells of the newest dump of a target.

    Attributes:
        tells: Whether it has a blob that was copied. One that has none does not tell what a restore
            must bring back.
        age_s: The seconds since pg_dump was started for it, where targets or hosts share it; else
            0.
    """

    tells: bool
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is known of a target before a dump is made.

    Attributes:
        reason: Why a dump is due, as `due` returns it.
        dumps: All that lie on the target.
        of_host: Those of this host.
        ours: Those of this host, and of this database and target.
        known: Those of `ours` that can be restored.
        copied: Whether any blob is copied.
    """

    reason: str
    dumps: list[Stored]
    of_host: list[Stored]
    ours: list[Stored]
    known: list[Stored]
    copied: bool


@dataclass(frozen=True, slots=True)
class _Content:
    """What pg_dump writes, or has written for several targets.

    Attributes:
        pieces: Its output. An empty piece says that there is none yet.
        begun: When it was started.
        program: Its version.
        state: Of the database just before.
        copied: Whether any blob was copied to the target before.
    """

    pieces: Generator[bytes, None, None]
    begun: datetime
    program: str
    state: DatabaseState
    copied: bool


def dump(
    settings: RemoteConfig,
    emit: Emit,
    *,
    force: bool = False,
    whole: bool = False,
    patient: bool = False,
    beside: bool = False,
    shared: Sequence[str] = (),
    every: float = 0.0,
) -> NewestDump:
    """Makes a dump if it is time to, and not where the last one is as good as a new one.

    Args:
        settings: of the run.
        emit: takes each event.
        force: make a dump whether or not anything has changed.
        whole: make a whole dump, not an increment.
        patient: the caller tries again after an outage, which is not noted for `status`.
        beside: blobs are copied meanwhile.
        shared: the targets that take one dump from this machine; see `spool`.
        every: the seconds from one dump to the next, where hosts take turns; 0 where they do not.

    Returns:
        What is known of the newest dump.

    Raises:
        DumpImpossible: This machine or this key cannot make any.
        BackupError: After it was noted for `status`.
    """
    job = _Job(settings, emit, beside=beside, shared=tuple(shared))
    try:
        with ExitStack() as stack:
            if every:
                turn = stack.enter_context(job.connect())
                if not history.lock_work(turn, "dumps", settings.target):
                    # Another host makes one at this moment.
                    return NewestDump(tells=True, age_s=max(0.0, every - _SOON_SECONDS))
            return job.run(force=force or whole, whole=whole, every=every)
    except BackupError as error:
        if not (patient and error.retryable):
            job.note("", None, str(error))
        raise


def due(
    known: list[Stored],
    fingerprint: str,
    now: datetime,
    max_age_s: float,
    *,
    force: bool,
    copied: bool,
) -> str:
    """Returns why a dump is due now, as `DumpStart.reason` has it; "" where none is.

    Args:
        known: The dumps of this database for this target that can be restored, oldest first.
        fingerprint: The fingerprint of the database, "" where the database has none.
        now: The current time.
        max_age_s: The age of the newest dump, in seconds, from which a dump is due in any case.
        force: Whether the user asked for a dump.
        copied: Whether any blob is copied.
    """
    if not known:
        return "first"
    last = known[-1]
    if force:
        return "asked"
    if not fingerprint or last.record is None or last.record.fingerprint != fingerprint:
        return "changed"
    if copied and not last.record.copied:
        return "marked"
    # A clock that was ahead when the last one was made must not stop dumps for as long.
    age = abs(now - last.begun)
    return "old" if age >= timedelta(seconds=max_age_s) else ""


def _age_elsewhere(known: Sequence[Stored]) -> float:
    """Returns the age in seconds of the newest dump if another host has made it, else infinity."""
    if not known or known[-1].record is None or known[-1].record.host == socket.gethostname():
        return math.inf
    # A clock that was ahead there must not stop dumps for as long.
    return max(1.0, abs(_seconds_since(known[-1].begun)))


class _Job:
    """One dump, from the look at earlier ones to the removal of those no longer wanted."""

    def __init__(
        self, settings: RemoteConfig, emit: Emit, *, beside: bool, shared: tuple[str, ...]
    ) -> None:
        self._settings = settings
        self._emit = emit
        self._beside = beside
        self._shared = shared
        self._application = application_name("dump")
        self._keys = SigningKeys.of(settings)
        self._begun = datetime.now(UTC)
        self._clock = time.monotonic()
        self._told: set[str] = set()

    def run(self, *, force: bool, whole: bool, every: float) -> NewestDump:
        with self.connect() as conn:
            state = history.database_state(conn)
            self._settings = identified(conn, self._settings)
        found = pg_programs.find(self._settings.dump.bin, state.server_version)
        with closing(open_dumps(self._settings)) as store:
            plan = self._look(store, state, force=force)
            if not plan.reason:
                self._note_good(plan.known[-1])
                self._emit(DumpSkipped(name=plan.known[-1].name))
                return NewestDump(plan.copied)
            age = _age_elsewhere(plan.known)
            if plan.reason in ("changed", "old") and age < every:
                return NewestDump(plan.copied, age)
            if lost := rollback_detection.lost_key(self._settings, self._keys):
                self._warn(lost)
            self._emit(DumpStart(reason=plan.reason, program=found.version))
            if not self._shared:
                # What a daemon for several targets has left, which is no more.
                young = self._begun - timedelta(seconds=self._settings.dump.interval)
                Spool(self._settings.catalog.url).clear_old(young)
                self._send(store, plan, self._content(found, state, plan), found, whole=whole)
                return NewestDump(plan.copied)
        # The connection to the target would not live as long as pg_dump takes.
        with (
            self._waiting(found, state, plan) as content,
            closing(open_dumps(self._settings)) as store,
        ):
            plan = self._look(store, state, force=True)
            self._send(store, plan, content, found, whole=whole)
        return NewestDump(content.copied, max(0.0, _seconds_since(content.begun)))

    def _look(self, store: FileStore, state: DatabaseState, *, force: bool) -> _Plan:
        """Returns what is on the target, and why a dump is due.

        Raises:
            BackupError: The disk of the target is not mounted.
        """
        settings, dumps = self._settings, list_dumps(store)
        with self.connect() as conn:
            ledger = history.noted_dumps(conn, settings.target, MAX_DUMPS)
        of_host = retention.of_host(dumps, self._keys, ledger)
        ours = record.of_catalog(of_host, settings.target, state.database)
        names = [one.name for one in of_host if one.whole]
        for missed in rollback_detection.compare(settings, {("dump", ""): names}):
            self._warn(str(missed))
        known = restorable(retention.signed(ours, self._keys))
        last = known[-1].record if known else None
        copied = store.placed and last is not None and last.copied
        if not copied:
            with self.connect() as conn:
                copied = selection.any_copied(conn, settings.target)
        if copied and not store.placed:
            # By-hash is also missing at the start of a target's life. Once blobs were copied, the
            # cause is a disk that is not mounted.
            place, but = settings.remote.blobs, ", but the catalog has blobs copied to it"
            packs = settings.remote.packs
            raise marker.gone(place, but) if packs else explain_gone(f"{place} is missing{but}")
        # The first blobs of a target's life may have been copied since the run has begun.
        copied = copied and (bool(known) or not self._beside)
        age = settings.dump.max_age
        reason = due(known, state.fingerprint, self._begun, age, force=force, copied=copied)
        return _Plan(reason, dumps, of_host, ours, known, copied)

    def _content(self, found: Programs, state: DatabaseState, plan: _Plan) -> _Content:
        """Returns the content of a dump for this target alone; pg_dump is started with its use."""
        pieces = self._pg_dump(found, self._options(found))
        return _Content(pieces, self._begun, found.version, state, plan.copied)

    @contextmanager
    def _waiting(self, found: Programs, state: DatabaseState, plan: _Plan) -> Iterator[_Content]:
        """Yields the content of the dump that waits on this machine, which is made if need be.

        The dump is this target's once the context ends without an error. Where this machine has no
        room for it, the content is that of `_content`.
        """
        spool, target = Spool(self._settings.catalog.url), self._settings.target
        with ExitStack() as stack:
            try:
                one, pieces = stack.enter_context(
                    spool.dump_for(
                        target,
                        lambda there: self._usable(there, found, state, plan),
                        lambda: self._fill(spool, found, plan),
                    )
                )
            except NoSpool as error:
                self._warn(
                    f"no dump of the catalog can wait on this machine for its targets: {error};"
                    " this target makes one of its own. Make room there, or set XDG_CACHE_HOME"
                )
                yield self._content(found, state, plan)
            else:
                of_spool = replace(state, server=one.server, fingerprint=one.fingerprint)
                copied = plan.copied and target in one.copied
                yield _Content(pieces, one.begun, one.program, of_spool, copied)

    def _usable(self, one: Spooled, found: Programs, state: DatabaseState, plan: _Plan) -> bool:
        """Returns whether a dump that waits is what this target would get from pg_dump now.

        One that is younger than `dump.interval` is: more often no dump is made.
        """
        settings = self._settings.dump
        same = (one.database, one.server, one.program, one.series, one.options) == (
            state.database,
            state.server,
            found.version,
            settings.mode == "series",
            self._options(found),
        )
        newer = not plan.known or plan.known[-1].begun < one.begun.replace(microsecond=0)
        tells = not plan.copied or self._settings.target in one.copied
        young = 0 <= _seconds_since(one.begun) < settings.interval
        unchanged = bool(one.fingerprint) and one.fingerprint == state.fingerprint
        return same and newer and tells and (young or unchanged)

    def _fill(self, spool: Spool, found: Programs, plan: _Plan) -> Spooled:
        """Makes the dump that waits for all targets."""
        state, begun, clock = self._state(), datetime.now(UTC), time.monotonic()
        copied = [self._settings.target] if plan.copied else []
        for name in set(self._shared) - {self._settings.target}:
            # The columns of another target may still be missing.
            with suppress(CatalogError), self.connect() as conn:
                copied += [name] if selection.any_copied(conn, name) else []
        options = self._options(found)
        one = Spooled(
            name=secrets.token_hex(4),
            begun=begun,
            database=state.database,
            server=state.server,
            program=found.version,
            options=options,
            series=self._settings.dump.mode == "series",
            fingerprint=state.fingerprint,
            targets=self._shared,
            copied=tuple(sorted(copied)),
        )
        with closing(self._pg_dump(found, options)) as pieces:
            made = spool.make(one, pieces)
        took = time.monotonic() - clock
        self._emit(DumpWaits(targets=len(self._shared), bytes=made.file_bytes, duration_s=took))
        return made

    def _options(self, found: Programs) -> tuple[str, ...]:
        """Returns the options of pg_dump."""
        dump = self._settings.dump
        # What is compressed changes as a whole, wherever a row did.
        series = dump.mode == "series"
        compress = ("--compress=0",) if series else pg_programs.best_compression(found)
        return (*compress, *(f"--exclude-table-data={one}" for one in dump.exclude_table_data))

    def _state(self) -> DatabaseState:
        with self.connect() as conn:
            return history.database_state(conn)

    def connect(self) -> connection.Connection:
        return connection.connect(self._settings.catalog.url, self._application)

    def _send(
        self, store: FileStore, plan: _Plan, content: _Content, found: Programs, *, whole: bool
    ) -> None:
        """Sends a dump, and removes those past retention."""
        settings, database = self._settings, content.state.database
        number = record.next_number(plan.of_host)
        name = record.name_of(content.begun, secrets.token_hex(4))
        with closing(Form.of(settings, database, plan.known, whole=whole)) as form:
            made = self._make(store, name, content, found, number, form)
            form.keep(name)
        strangers = record.of_catalog(plan.dumps, settings.target, database)
        self._prune(store, name, made, plan.ours, len(strangers) - len(plan.ours))

    def _make(
        self,
        store: FileStore,
        name: str,
        content: _Content,
        found: Programs,
        number: int,
        form: Form,
    ) -> DumpRecord:
        upload, state = store.write(name), content.state
        places: NewFile | None = None
        try:
            head = self._pour(content.pieces, upload, form)
            written, digest = upload.finish()
            _require_ours(pg_programs.read_head(found.pg_restore, head, "--list"))
            places, places_bytes, places_sha256 = self._send_places(store, name)
            took = max(time.monotonic() - self._clock, _seconds_since(content.begun))
            made = DumpRecord(
                format=form.format,
                number=number,
                target=self._settings.target,
                database=state.database,
                server_version=state.server,
                program=content.program,
                host=socket.gethostname(),
                bytes=written,
                sha256=digest.hex(),
                fingerprint=state.fingerprint,
                duration_s=round(took, 3),
                base=form.base,
                step=form.step,
                text_bytes=form.text_bytes,
                text_sha256=form.text_sha256,
                copied=content.copied,
                head_bytes=len(head),
                head_sha256=hashlib.sha256(head).hexdigest(),
                excluded=self._settings.dump.exclude_table_data,
                places_bytes=places_bytes,
                places_sha256=places_sha256,
            ).signed(name, self._keys)
            publish_dump(store, upload, name, made, places)
        except BaseException:
            upload.discard()
            raise
        finally:
            if places is not None:
                places.discard()
        return made

    def _send_places(self, store: FileStore, name: str) -> tuple[NewFile | None, int, str]:
        """Sends the places file of a dump, where files go by their paths.

        Returns:
            The file, which has no name yet, its size and its SHA-256; None, 0 and "" for no file.
        """
        if not self._settings.by_path:
            return None, 0, ""
        file = store.write(name + PLACES)
        try:
            writer = PlacesWriter(file.add)
            with self.connect() as conn:
                for listed in listed_files(conn):
                    writer.add(listed)
            writer.finish()
            written, digest = file.finish()
        except BaseException:
            file.discard()
            raise
        return file, written, digest.hex()

    @staticmethod
    def _pour(pieces: Generator[bytes, None, None], upload: NewFile, form: Form) -> bytes:
        """Sends what form makes of pg_dump's output; returns the beginning of that."""
        head = bytearray()
        with closing(pieces):
            for data in pieces:
                if not data:
                    upload.poll()
                    continue
                head += data[: max(0, pg_programs.HEAD_BYTES - len(head))]
                upload.add(form.add(data))
        upload.add(form.end())
        return bytes(head)

    def _pg_dump(self, found: Programs, options: Sequence[str]) -> Generator[bytes, None, None]:
        url, patience = self._settings.catalog.url, self._settings.run.receipt_timeout
        return pg_programs.dumped(found, url, self._application, patience, *options)

    def _prune(
        self, store: FileStore, name: str, made: DumpRecord, ours: list[Stored], strangers: int
    ) -> None:
        """Removes dumps past retention, and records the new one, which is good in any case."""
        if strangers:
            self._warn(
                f"{many(strangers, 'dump')} of this catalog on the remote are not known"
                " to be of this host: none of them is removed, and none comes back unasked."
                " `ntt-backup-remote dumps` lists them, and removes them with --remove"
            )
        if odd := retention.doubts(ours, self._keys):
            last = max(odd)
            self._warn(
                f"{many(len(odd), 'doubtful dump')} on the target: never removed by the retention,"
                f" nor counted by it. The newest is {last}: {odd[last]}."
                " `ntt-backup-remote dumps --remove NAME` removes one"
            )
        # Another host may be giving one its name: the record lies there before the content.
        young = timedelta(seconds=DEAD_SECONDS)
        coming = [one for one in ours if one.size is None and abs(self._begun - one.begun) < young]
        rule = Retention.of(self._settings.dump)
        stay = retention.staying(ours, name, datetime.now(UTC), rule, self._keys)
        kept = {*stay, *(one.name for one in coming)}
        kept |= {one.name for one in ours if pins_that_count(one.pins, DUMPS, self._keys)}
        kept |= {made.base, *(one.base for one in ours if one.name in kept)}
        # The newest first: at no moment an increment is there without its base.
        past = [one.name for one in reversed(ours) if one.name not in kept]
        try:
            pruned = remove_dumps(store, past)
        except BackupError as error:
            self._warn(f"dumps past retention are still on the remote: {error}")
            pruned = 0
        self.note(name, made, "")
        rollback_detection.record(self._settings, "dump", name, key=self._keys.name)
        took = time.monotonic() - self._clock
        self._emit(
            DumpComplete(
                name=name,
                bytes=made.bytes,
                sha256=made.sha256,
                base=made.base,
                text_bytes=made.text[0],
                duration_s=took,
                mb_per_s=made.bytes / 1e6 / max(took, 1e-3),
                kept=len(ours) + 1 - pruned,
                pruned=pruned,
            )
        )

    def _warn(self, reason: str) -> None:
        if reason not in self._told:  # The target is looked at twice.
            self._told.add(reason)
            self._emit(events.Warning(reason=reason))

    def _note_good(self, last: Stored) -> None:
        """Notes that the last dump is as good as a new one, where the last attempt has failed.

        Otherwise `status` would show that failure until the next dump is made.
        """
        with suppress(CatalogError):
            with self.connect() as conn:
                failed = any(one.error for one in history.last_dumps(conn, self._settings.target))
            if failed:
                self.note(last.name, last.record, "")

    def note(self, name: str, made: DumpRecord | None, error: str) -> None:
        """Writes into the catalog what `status` shows. It may be away: then only the log knows."""
        with suppress(CatalogError), self.connect() as conn:
            history.record_dump(
                conn,
                self._settings.target,
                self._begun,
                name=name,
                bytes=made.bytes if made is not None else 0,
                sha256=made.sha256 if made is not None else "",
                error=error,
            )


def rehearse(settings: RemoteConfig, *, remote_too: bool) -> tuple[str, str]:
    """Checks that a dump can be made, and describes it.

    Returns:
        The program that will make the dump and the expected size; and a warning where the existing
        dumps do not tell which blobs must be restored, else "".

    Raises:
        DumpFailed: A run would end with the exit code of this error.
        CatalogError: The catalog does not answer.
        DumpImpossible: No dump can be made, and nobody relies on dumps.
    """
    application = application_name("check")
    said = warning = ""
    try:
        with connection.connect(settings.catalog.url, application) as conn:
            found = pg_programs.find(settings.dump.bin, conn.info.server_version)
            privileges.require_dumpable(conn)
            database = conn.info.dbname
            copied = selection.any_copied(conn, settings.target)
            ledger = history.noted_dumps(conn, settings.target, MAX_DUMPS)
        url, no_rows = settings.catalog.url, "--schema-only"
        child = pg_programs.start_pg_dump(found.pg_dump, url, application, no_rows)
        head, status = pg_programs.whole_output(child, settings.run.receipt_timeout)
        if status != 0:
            raise pg_programs.pg_dump_failed(status, child.stderr.text)
        pg_programs.read_head(found.pg_restore, head, "--list")
        if remote_too:
            with closing(open_dumps(settings)) as store:
                keys = SigningKeys.of(settings)
                dumps = retention.of_host(list_dumps(store), keys, ledger)
                ours = record.of_catalog(dumps, settings.target, database)
                known = restorable(retention.signed(ours, keys))
                said = _outlook(settings, database, known)
                warning = _too_old(known) if copied else ""
                store.try_out()
    except CatalogError:
        raise
    except BackupError as error:
        if isinstance(error, DumpImpossible) and not relied_on(settings):
            raise
        raise DumpFailed(
            f"the catalog cannot be dumped: {error.message}", detail=error.detail, hint=error.hint
        ) from error
    return f"{found.pg_dump}, version {found.version}{said}", warning


def _require_ours(listed: bytes) -> None:
    """Raises DumpFailed where a dump lacks the rows of blobs or of one of our own tables."""
    data = set(_OWN_DATA.findall(listed))
    if _BLOBS.search(listed) and data.issuperset(_OWN_TABLE.findall(listed)):
        return
    blobs, tables = "the dump does not hold the table blobs", "the dump lacks rows of our tables"
    raise DumpFailed(
        tables if _BLOBS.search(listed) else blobs,
        hint="does the user of catalog.url see the table that the backup uses? Does a pattern of"
        " dump.exclude_table_data match it?",
    )


def _seconds_since(begun: datetime) -> float:
    return (datetime.now(UTC) - begun).total_seconds()


def _too_old(known: list[Stored]) -> str:
    """Returns what is to be said where blobs were copied, and no dump knows of any."""
    if not known:
        return (
            "blobs were copied, but no dump of the catalog can be restored: `restore` and `drill`"
            " would not know what must come back; `ntt-backup-remote dump` makes one"
        )
    last = known[-1]
    if last.record is None or last.record.copied:
        return ""
    return (
        f"the newest dump, of {moment(last.begun)}, was begun before the first blob was copied: it"
        " does not tell what must come back; `ntt-backup-remote dump` makes another"
    )


def _outlook(settings: RemoteConfig, database: str, known: list[Stored]) -> str:
    """Tells of the newest dump, and what each mode would send, by the last dump of each kind."""

    def last(kind: Sequence[Stored]) -> str:
        return size(kind[-1].size or 0) if kind else "not known yet"

    if not known:
        return ""
    newest = f"; the newest is of {moment(known[-1].begun)}"
    whole = last([one for one in known if not one.base])
    part = last([one for one in known if one.base])
    said = f"{newest}; dump.mode full sends {whole} a dump, series {part}, by what was sent last"
    if settings.dump.mode == "series":
        base = kept_base(settings, database, known)
        said += f"; the next one is {f'an increment on {base.name}' if base else 'whole'}"
        if base is not None:
            base.close()
    return said


def relied_on(settings: RemoteConfig) -> bool:
    """Returns whether a dump that cannot be made is a failure: one was made, or dump.bin is set."""
    if settings.dump.bin is not None:
        return True
    try:
        with connection.connect(settings.catalog.url, application_name("dump")) as conn:
            return history.ever_made(conn, settings.target)
    except CatalogError:
        return True
