"""A dump is rehearsed without its rows and without a trace: `check` knows what a run will find.

What looks like a dump that can be made, a pg_dump that is new enough, says little: the job once
failed at a table of another program that it may not read, and at a directory on the remote that was
another account's. So everything is done as `dump.job` does it: pg_dump dumps all that is no row
through a connection of its own, pg_restore reads that, and the remote writes into `pgdump/`. What
only the rows would show, privileges and policies, the catalog is asked in one query.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from ntt_backup.catalog import connection, history, privileges, selection
from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.config.host_key import HostKeys
from ntt_backup.dump import pg_programs, shelf
from ntt_backup.dump.form import kept_base
from ntt_backup.dump.pg_programs import Programs
from ntt_backup.dump.record import Stored, of_catalog
from ntt_backup.dump.store import open_dumps, read_contents, restorable
from ntt_backup.errors import BackupError, CatalogError, DumpFailed, DumpImpossible
from ntt_backup.format import moment, size
from ntt_backup.wire.stored_names import MAX_DUMPS


def rehearse(settings: RemoteConfig, *, remote_too: bool) -> tuple[str, str]:
    """Returns what will make a dump, if one can be made, and how large it may be; and a warning
    where the dumps that are there do not tell what must come back, else "".

    Raises DumpFailed where a run would end with its exit code, CatalogError where the catalog does
    not answer, and DumpImpossible where none can be made and nobody relies on them.
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
        _dump_no_rows(settings, found, application)
        if remote_too:
            with closing(open_dumps(settings)) as store:
                keys = HostKeys.of(settings)
                dumps = shelf.of_host(read_contents(store).dumps, keys, ledger)
                ours = of_catalog(dumps, settings.target, database)
                known = restorable(shelf.signed(ours, keys))
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
    """Returns when the newest dump was begun, and what either mode of dumps would send, by the last
    dump of each kind.
    """

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
    """Returns whether somebody counts on dumps, so that one that cannot be made is a failure: a
    place of pg_dump is set, or a dump was made before.
    """
    if settings.dump.bin is not None:
        return True
    try:
        with connection.connect(settings.catalog.url, application_name("dump")) as conn:
            return history.ever_made(conn, settings.target)
    except CatalogError:
        return True


def _dump_no_rows(settings: RemoteConfig, found: Programs, application: str) -> None:
    child = pg_programs.start_pg_dump(
        found.pg_dump, settings.catalog.url, application, "--schema-only"
    )
    try:
        head = child.output(settings.run.receipt_timeout)
        status = child.status
    finally:
        child.kill()
    if status != 0:
        raise pg_programs.pg_dump_failed(status, child.stderr.text)
    pg_programs.read_head(found.pg_restore, head, "--list")
