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

`check` rehearses a dump without its rows and without a trace. What looks like a dump that can be
made, a pg_dump that is new enough, says little: the job once failed at a table of another program
that it may not read, and at a directory on the remote that was another account's. So pg_dump dumps
all that is no row, pg_restore reads that, and the remote writes into `pgdump/`. What only the rows
would show, privileges and policies, the catalog is asked in one query.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from ntt_backup import events, newest
from ntt_backup.catalog import connection, history, privileges, selection
from ntt_backup.catalog.history import DatabaseState
from ntt_backup.client.error_text import explain_gone
from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.config.host_key import HostKeys
from ntt_backup.dump import pg_programs, record, retention
from ntt_backup.dump.events import DumpComplete, DumpSkipped, DumpStart
from ntt_backup.dump.pg_programs import Programs
from ntt_backup.dump.record import DumpRecord, Stored
from ntt_backup.dump.retention import Retention
from ntt_backup.dump.series import Form, kept_base
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
from ntt_backup.format import many, moment, size
from ntt_backup.objects.bucket import DEAD_SECONDS
from ntt_backup.packstore import marker
from ntt_backup.process.pipeline import wait_for
from ntt_backup.wire.stored_names import MAX_DUMPS

_BLOBS: Final = re.compile(rb"^\d+; \d+ \d+ TABLE DATA \S+ blobs ", re.MULTILINE)

Emit = Callable[[events.Event], None]


def dump(
    settings: RemoteConfig,
    emit: Emit,
    *,
    force: bool = False,
    whole: bool = False,
    patient: bool = False,
) -> bool:
    """Makes a dump if it is time to, and not where the last one is as good as a new one.

    Args:
        settings: of the run.
        emit: takes each event.
        force: make a dump whether or not anything has changed.
        whole: make a whole dump, not an increment.
        patient: the caller tries again after an outage, which is not noted for `status`.

    Returns:
        Whether the newest dump has a blob that was copied. One that has none does not tell what a
        restore must bring back.

    Raises:
        DumpImpossible: This machine or this key cannot make any.
        BackupError: After it was noted for `status`.
    """
    job = _Job(settings, emit)
    try:
        return job.run(force=force or whole, whole=whole)
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


class _Job:
    """One dump, from the look at earlier ones to the removal of those no longer wanted."""

    def __init__(self, settings: RemoteConfig, emit: Emit) -> None:
        self._settings = settings
        self._emit = emit
        self._application = application_name("dump")
        self._keys = HostKeys.of(settings)
        self._begun = datetime.now(UTC)
        self._clock = time.monotonic()

    def run(self, *, force: bool, whole: bool) -> bool:
        with self._connect() as conn:
            state = history.database_state(conn)
        found = pg_programs.find(self._settings.dump.bin, state.server_version)
        with closing(open_dumps(self._settings)) as store:
            return self._dump(store, found, state, force=force, whole=whole)

    def _dump(
        self, store: FileStore, found: Programs, state: DatabaseState, *, force: bool, whole: bool
    ) -> bool:
        settings, dumps = self._settings, list_dumps(store)
        with self._connect() as conn:
            ledger = history.noted_dumps(conn, settings.target, MAX_DUMPS)
        of_host = retention.of_host(dumps, self._keys, ledger)
        ours = record.of_catalog(of_host, settings.target, state.database)
        names = [one.name for one in of_host if one.whole]
        for missed in newest.compare(settings, {("dump", ""): names}):
            self._warn(str(missed))
        known = restorable(retention.signed(ours, self._keys))
        last = known[-1].record if known else None
        copied = store.placed and last is not None and last.copied
        if not copied:
            with self._connect() as conn:
                copied = selection.any_copied(conn, settings.target)
        if copied and not store.placed:
            # By-hash is also missing at the start of a target's life. Once blobs were copied, the
            # cause is a disk that is not mounted.
            place, but = settings.remote.blobs, ", but the catalog has blobs copied to it"
            packs = settings.remote.packs
            raise marker.gone(place, but) if packs else explain_gone(f"{place} is missing{but}")
        age = settings.dump.max_age
        reason = due(known, state.fingerprint, self._begun, age, force=force, copied=copied)
        if not reason:
            self._note_good(known[-1])
            self._emit(DumpSkipped(name=known[-1].name))
            return copied
        if lost := newest.lost_key(settings, self._keys):
            self._warn(lost)
        self._emit(DumpStart(reason=reason, program=found.version))
        number = record.next_number(of_host)
        name = record.name_of(self._begun, secrets.token_hex(4))
        with closing(Form.of(settings, state.database, known, whole=whole)) as form:
            made = self._make(store, name, found, state, number, form, copied=copied)
            form.keep(name)
        strangers = record.of_catalog(dumps, settings.target, state.database)
        self._prune(store, name, made, ours, len(strangers) - len(ours))
        return copied

    def _connect(self) -> connection.Connection:
        return connection.connect(self._settings.catalog.url, self._application)

    def _make(
        self,
        store: FileStore,
        name: str,
        found: Programs,
        state: DatabaseState,
        number: int,
        form: Form,
        *,
        copied: bool,
    ) -> DumpRecord:
        upload = store.write(name)
        try:
            head = self._pour(found.pg_dump, upload, form)
            written, digest = upload.finish()
            if not _BLOBS.search(pg_programs.read_head(found.pg_restore, head, "--list")):
                raise DumpFailed(
                    "the dump does not hold the table blobs",
                    hint="does the user of catalog.url see the table that the backup uses?",
                )
            made = DumpRecord(
                format=form.format,
                number=number,
                target=self._settings.target,
                database=state.database,
                server_version=state.server,
                program=found.version,
                host=socket.gethostname(),
                bytes=written,
                sha256=digest.hex(),
                fingerprint=state.fingerprint,
                duration_s=round(time.monotonic() - self._clock, 3),
                base=form.base,
                step=form.step,
                text_bytes=form.text_bytes,
                text_sha256=form.text_sha256,
                copied=copied,
                head_bytes=len(head),
                head_sha256=hashlib.sha256(head).hexdigest(),
            ).signed(name, self._keys)
            publish_dump(store, upload, name, made)
        except BaseException:
            upload.discard()
            raise
        return made

    def _pour(self, pg_dump: Path, upload: NewFile, form: Form) -> bytes:
        """Sends what form makes of pg_dump's output; returns the beginning of that."""
        url, head = self._settings.catalog.url, bytearray()
        child = pg_programs.start_pg_dump(pg_dump, url, self._application, *form.options)
        patience = self._settings.run.receipt_timeout
        deadline = time.monotonic() + patience
        try:
            while (data := child.read()) != b"":
                child.drain_stderr()
                if data is None:
                    if time.monotonic() > deadline:
                        raise DumpFailed(
                            "pg_dump has stalled",
                            detail=f"it wrote nothing for {patience:.0f} s; {child.stderr.text}",
                            hint="look at pg_stat_activity of the catalog's server; or raise"
                            " run.receipt_timeout, which is how long pg_dump may be silent",
                        )
                    upload.poll()
                    wait_for(reading=child.fds, timeout=1.0)
                    continue
                head += data[: max(0, pg_programs.HEAD_BYTES - len(head))]
                upload.add(form.add(data))
                deadline = time.monotonic() + patience
            status = child.wait(patience)
        finally:
            child.kill()
        if status != 0:
            raise pg_programs.pg_dump_failed(status, child.stderr.text)
        upload.add(form.end())
        return bytes(head)

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
        newest.record(self._settings, "dump", name, key=self._keys.name)
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
        self._emit(events.Warning(reason=reason))

    def _note_good(self, last: Stored) -> None:
        """Notes that the last dump is as good as a new one, where the last attempt has failed.

        Otherwise `status` would show that failure until the next dump is made.
        """
        with suppress(CatalogError):
            with self._connect() as conn:
                failed = any(one.error for one in history.last_dumps(conn, self._settings.target))
            if failed:
                self.note(last.name, last.record, "")

    def note(self, name: str, made: DumpRecord | None, error: str) -> None:
        """Writes into the catalog what `status` shows. It may be away: then only the log knows."""
        with suppress(CatalogError), self._connect() as conn:
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
                keys = HostKeys.of(settings)
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
