"""The commands `restore` and `drill` fetch blobs and the catalog from the remote."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import (
    Common,
    NamedFile,
    connect,
    open_catalog,
    read_blobids,
    require_blobids,
)
from ntt_backup.cli.options import DIR, IDENTITY, PATH, RESULT, GivenPath, flag, repeated, value
from ntt_backup.config import RemoteConfig
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.config.signing_key import Origin
from ntt_backup.errors import ConfigError, complete
from ntt_backup.formatting import duration, many, moment, printable, size
from ntt_backup.model import WHOLE, ListedFile, Shard
from ntt_backup.restore.blobs import Restored, Thaw, Wanted
from ntt_backup.restore.blobs import restore as restore_blobs

if TYPE_CHECKING:
    # What speaks to PostgreSQL takes longer to load than a few blobs to restore.
    from ntt_backup.restore.as_paths import FileRestore
    from ntt_backup.restore.drill import Drilled

_NOBODY: Final = (
    "nothing proves who made this dump: only rows of blobs and of the schema ntt_backup came back"
)


@options.command(IDENTITY, *RESULT)
@click.argument("directory", type=PATH, metavar="[DIR]", required=False)
@value("--to", DIR, "Directory for the blobs; may also be given without --to.", "destination")
@flag(
    "--catalog",
    "Restore the newest good dump of this host into the empty database of catalog.url.",
    "of_catalog",
)
@value("--dump", "NAME", "With --catalog: restore this dump instead of the newest.")
@repeated("--table", "SCHEMA.NAME", "With --catalog: restore only this table", "tables")
@value("--schema", "NAME", "With --table: restore the table into this schema.", default="")
@value("--database", "URL", "With --table: restore the table into this database.", default="")
@flag("--no-refresh", "With --catalog: leave materialized views empty.", "no_refresh")
@options.of_dump
@options.prefix("Restore")
@options.blob_list("Restore")
@repeated("--blobid", "ID", "Restore this blob", "blobids")
@value("--query", "SQL", "Restore the blobids that SQL returns in the database of the catalog.")
@options.shard("Restore")
@options.bwlimit("for fetching blobs")
@options.sessions(default=4)
@flag("--trust-size", "Keep a file in DIR that has the right size, without hashing it.")
@flag("--as-paths", "Restore files by their paths, with their times and modes.", "as_paths")
@repeated("--path", "GLOB", "With --as-paths: restore only paths that match", "paths")
@value(
    "--places",
    "LIST",
    "With --as-paths, without the catalog: the list of the files. latest is the newest list on the"
    " target; or the NAME of a dump there, or a local file.",
)
@flag("--with-gone", "With --as-paths: also restore files that are no longer listed.", "with_gone")
@flag("--hard-links", "With --as-paths: restore equal files as hard links.", "hard_links")
@value(
    "--archived", GivenPath("file", dir_okay=False), "Write the keys of archived objects into FILE."
)
@value("--thaw", click.IntRange(1), "Thaw archived objects for DAYS days.", "days", metavar="DAYS")
@value(
    "--tier",
    click.Choice(["bulk", "standard", "expedited"]),
    "With --thaw: the speed, standard by default; the slowest is the cheapest.",
)
def restore(
    common: Common,
    directory: Path | None,
    destination: Path | None,
    of_catalog: bool,
    dump: str | None,
    tables: tuple[str, ...],
    schema: str,
    database: str,
    no_refresh: bool,
    trust_target: bool,
    allow_superuser: bool,
    prefix: str,
    names: TextIO | None,
    blobids: tuple[str, ...],
    query: str | None,
    shard: Shard | None,
    bwlimit: Timetable | None,
    workers: int,
    trust_size: bool,
    as_paths: bool,
    paths: tuple[str, ...],
    places: str | None,
    with_gone: bool,
    hard_links: bool,
    archived: Path | None,
    days: int | None,
    tier: str | None,
) -> None:
    """Restore blobs, files or the catalog from the remote.

    Blobs are restored into DIR/aa/bb/, without the catalog. Each blob is hashed before its file
    gets its name. Correct files in DIR are kept, so the same command continues after an
    interruption. The exit code is 7 if a blob could not be restored.

    With --as-paths, the files of a store whose files go by their paths are restored to DIR/PATH.
    The catalog lists the files, or without a catalog --places. A wrong file in DIR is replaced.
    """
    if directory is not None and destination is not None:
        raise click.UsageError("give one directory: --to DIR, or DIR alone")
    destination = destination or directory
    if of_catalog:
        if any((destination, prefix, names, blobids, query, shard, days, tier, bwlimit, as_paths)):
            raise click.UsageError(
                "--catalog cannot be combined with --to, --thaw, --bwlimit or a choice of blobs"
            )
        if (trust_target or no_refresh) if tables else (schema or database):
            raise click.UsageError(
                "--schema and --database are for --table, --trust-target and --no-refresh are not"
            )
        choice = {"name": dump, "allow_superuser": allow_superuser}
        if tables:
            _restore_tables(common, tables, schema, database, choice)
        else:
            choice |= {"trust_target": trust_target, "refresh": not no_refresh}
            _restore_catalog(common.load(RemoteConfig), choice)
        return
    of_target = trust_target and not places
    if any((dump, tables, schema, database, of_target, allow_superuser, no_refresh)):
        raise click.UsageError(
            "--dump, --table, --schema, --database, --trust-target, --allow-superuser and"
            " --no-refresh are for --catalog"
        )
    if not as_paths and any((paths, places, with_gone, hard_links)):
        raise click.UsageError("--path, --places, --with-gone and --hard-links are for --as-paths")
    if as_paths and (names is not None or blobids or (places and query)):
        raise click.UsageError(
            "--as-paths cannot be combined with --list or --blobid, nor --query with --places"
        )
    if destination is None:
        raise click.UsageError("restore needs --to DIR, or --catalog")
    if bool(prefix) + (names is not None) + bool(blobids) + (query is not None) > 1:
        raise click.UsageError("give only one of --prefix, --list, --blobid and --query")
    options.require_whole_space(prefix, shard)
    if tier is not None and days is None:
        raise click.UsageError("--tier says how fast --thaw DAYS is: give that, too")
    chosen = "of a query" if query else "of a list" if names is not None or blobids else ""
    listed: Iterable[str] | None = None
    if names is not None:
        listed = read_blobids(names)
    elif blobids:
        listed = require_blobids(enumerate(blobids, 1), "--blobid")
    from ntt_backup.catalog.identities import identified_if_known

    settings = identified_if_known(common.load(RemoteConfig), "restore")
    if days is not None and settings.remote.kind != "s3":
        raise ConfigError(
            f"{settings.remote.where} is no bucket: nothing is archived there",
            hint="leave out --thaw",
        )
    with ExitStack() as stack:
        asked = {"prefix": prefix, "blobs": chosen, "shard": str(shard or "")}
        note = stack.enter_context(results.noted(common, "restore", **asked))
        line = stack.enter_context(results.progress_line())
        if query is not None and not as_paths:
            from ntt_backup.catalog.selection import blobids_of

            listed = blobids_of(stack.enter_context(connect(settings, "restore")), query)
        wanted = Wanted(prefix, listed, shard or WHOLE)
        files: FileRestore | None = None
        if as_paths:
            from ntt_backup.restore import as_paths as by_paths

            chosen_files = by_paths.FileChoice(paths, with_gone=with_gone, hard_links=hard_links)
            source = _list_of_files(settings, places, query, trust_target=trust_target)
            files = by_paths.FileRestore(source, chosen_files, wanted)
        keys: NamedFile | None = None
        if archived is not None:
            keys = stack.enter_context(NamedFile(archived, "name another file with --archived"))

        def progress(done: Restored) -> None:
            note.saw(done.restored + done.right, done.bytes, len(done.wrong), done.exit_code)
            line.show(lambda: _restored_so_far(done))

        done = restore_blobs(
            settings,
            destination.absolute(),
            wanted,
            workers=workers,
            trust_size=trust_size,
            on_progress=progress,
            on_outage=line.outage,
            on_archived=keys.write if keys is not None else lambda key: None,
            thaw=Thaw(days, tier or "standard") if days is not None else None,
            bwlimit=bwlimit,
            files=files,
        )
        progress(done)
    said, counts = lines(done, destination), {}
    if files is not None:
        counts = asdict(files.counts)
        said.append(
            f"{many(files.counts.files, 'file')} got their names, {files.counts.replaced:,} of them"
            f" in place of others; {files.counts.kept:,} were already there and right"
        )
    results.report_on(done, said, done.exit_code, target=common.target, **counts)


def _list_of_files(
    settings: RemoteConfig, places: str | None, query: str | None, *, trust_target: bool
) -> Callable[[str], Iterator[ListedFile]]:
    """Returns what lists the files to restore, see `FileRestore`."""
    from ntt_backup.dump.places_file import open_places, read_places
    from ntt_backup.restore.as_paths import of_catalog

    def listed(directory: str) -> Iterator[ListedFile]:
        if places is None:
            with open_catalog(settings, "reading of files by path", application="restore") as conn:
                return of_catalog(conn, query, directory)
        warn = results.warn
        file = open_places(settings, places, directory, warn, trust_target=trust_target)
        return read_places(file, places)

    return listed


def _restore_tables(
    common: Common, names: tuple[str, ...], schema: str, database: str, choice: dict[str, Any]
) -> None:
    """Restores tables of a dump into a new database or one that exists, and prints what is left."""
    from ntt_backup.catalog.connection import database_name, new_database
    from ntt_backup.dump.restore import restore_catalog

    live = common.load(RemoteConfig).catalog.url
    tables = [(one or "public", name) for one, _, name in (name.rpartition(".") for name in names)]
    choice |= {"tables": tables, "schema": schema, "database": database_name(live)}
    with ExitStack() as stack:
        if not (database or schema):
            prefix = f"{database_name(live)[:40] or 'catalog'}_tables_"
            database = stack.enter_context(new_database(live, prefix, keep=True))
        settings = common.load(RemoteConfig, {"catalog.url": database or live})
        found = restore_catalog(settings, results.warn, **choice)
    if not options.wants("quiet"):
        shown = ", ".join(f"{schema or one}.{name}" for one, name in tables)
        where = f"the database {database_name(database or live)}; the owner is {found.user}"
        text = f"restored {shown} of {moment(found.dump.begun)} from {found.dump.name} into {where}"
        click.echo(printable(text))
    if found.rights:
        click.echo("once a table is in its place, what else belonged to it, for a superuser:")
        for text in found.rights:
            click.echo("\n".join(map(printable, text.splitlines())))


def _restore_catalog(settings: RemoteConfig, choice: dict[str, Any]) -> None:
    """Restores a dump, and prints what came back, what did not, and what to do next."""
    from ntt_backup.dump.restore import restore_catalog

    found = restore_catalog(settings, results.warn, **choice)
    if found.others:
        others = ", ".join(found.others)
        results.warn(f"there are dumps of other databases, too: {others}; --dump NAME takes one")
    if not options.wants("quiet"):
        record = found.dump.record
        assert record is not None  # Else it would not have been taken.
        next_step = f"`{complete('ntt-backup-remote run')}` finds it on the remote"
        if settings.remote.packs:
            next_step = f"`{complete('ntt-backup-remote reconcile --apply')}` marks it as copied"
        click.echo(
            f"restored the catalog of {moment(found.dump.begun)} from {found.dump.name}, a dump of"
            f" {printable(f'the database {record.database} on {record.host}')}; what was copied"
            f" since then is pending in it, and {next_step}; what is newer than"
            f" the dump needs `{complete('ntt-backup-remote scan')}`"
        )
        user = printable(found.user)
        click.echo(f"everything in it belongs to {user} now, and no grants were restored")
        if found.new_owner:
            click.echo(
                f"{user} cannot log in. To use the catalog: create an ordinary role, run"
                f" `grant {user} to ROLE;` as a superuser, and name ROLE in catalog.url. A"
                " superuser is refused, because code that others put into the tables would run"
                " with all rights"
            )
    if found.origin is not Origin.OURS:
        results.warn(f"{_NOBODY}. Compare them with the remote: `reconcile`, then `verify`")
    if found.dump.record is not None and found.dump.record.lacks:
        results.warn(printable(f"{found.dump.record.lacks} (dump.exclude_table_data)"))
    if found.left_out:
        results.warn(f"{many(len(found.left_out), 'object')} were left out:")
        lines = results.first_lines(found.left_out, len(found.left_out), end="")
        click.echo("\n".join(lines), err=True)
    if found.views:
        click.echo("the materialized views are empty; to compute them run:")
        for text in found.views:
            click.echo(printable(f"REFRESH MATERIALIZED VIEW {text};"))
    if found.rights:
        click.echo("for the former owners and grants create the roles, then as a superuser run:")
        for text in found.rights:
            click.echo(printable(text))


def _restored_so_far(done: Restored) -> str:
    text = f"{done.restored:,} restored, {done.right:,} already there"
    wrong = f", {len(done.wrong):,} wrong" if done.wrong else ""
    return f"{text}{wrong}, {results.so_far(done.bytes, done.duration_s, done.part)}"


def lines(done: Restored, destination: Path) -> list[str]:
    """Returns what was restored, for a terminal."""
    said = [
        f"restored {many(done.restored, 'blob')}, {size(done.bytes)} in"
        f" {duration(done.duration_s)}, into {destination}; {done.right:,} were already there and"
        " right"
    ]
    if done.wrong:
        said.append(f"NOT restored: {len(done.wrong):,}, for these reasons")
        said += results.wrong_lines(done.wrong)
    if done.not_needed:
        said.append("damaged, and not needed, since other packs have all of their blobs:")
        said += [f"  {printable(key)}" for key in done.not_needed]
    said += results.strangers(done.strangers)
    if done.archived:
        next_step = (
            "The object store is thawing them, which takes hours: then call this again"
            if done.thawing
            else "Have the object store thaw them (--thaw DAYS asks for it, --archived FILE lists"
            " their keys), and call this again"
        )
        said.append(
            f"NOT restored: what lies in {many(done.archived, 'object')},"
            f" {size(done.archived_bytes)}, of an archive class. {next_step}"
        )
    return said


@options.command(IDENTITY, *RESULT)
@value("--scratch", DIR, "Directory for the blobs; must be missing or empty.", required=True)
@value(
    "--database",
    "URL",
    "Empty database for the catalog; or embedded, for a new one on the embedded server, which is"
    " dropped at the end. Other users can see arguments, so a password belongs in ~/.pgpass.",
    required=True,
)
@options.of_dump
@options.prefix("Restore")
@options.shard("Restore")
@options.bwlimit("for fetching blobs")
@options.sessions(default=4)
def drill(
    common: Common,
    /,
    scratch: Path,
    database: str,
    prefix: str,
    shard: Shard | None,
    workers: int,
    **chosen: Any,
) -> None:
    """Prove that everything can be restored.

    Catalog and blobs are restored into scratch space, read back and checked. The production
    database and the store are not touched. The exit code is 7 if something is wrong.
    """
    from ntt_backup.catalog.connection import database_name, new_database
    from ntt_backup.catalog.identities import identified_if_known
    from ntt_backup.restore.drill import drill as restore_and_prove

    options.require_whole_space(prefix, shard)
    production = identified_if_known(common.load(RemoteConfig), "drill")
    new = ExitStack()
    if new_server := database == "embedded":
        database = new.enter_context(new_database(production.catalog.url, "ntt_drill_"))
    flags = {"catalog.url": database}
    settings = common.load(RemoteConfig, flags).model_copy(update={"remote": production.remote})
    lost = database_name(production.catalog.url)
    asked = {"prefix": prefix, "shard": str(shard or "")}
    with new, results.noted(common, "drill", **asked) as note, results.progress_line() as line:
        found = restore_and_prove(
            settings,
            scratch.absolute(),
            prefix,
            workers,
            on_dump=lambda dump: line.say(f"the catalog is restored, from {dump.name}"),
            on_restored=lambda done: line.show(lambda: _restored_so_far(done)),
            on_proof=lambda proof: line.show(
                lambda: f"{proof.part:.0%}, {proof.right:,} read back and right"
            ),
            on_outage=line.outage,
            on_warning=lambda text: line.say(f"warning: {text}"),
            lost=lost,
            shard=shard or WHOLE,
            **chosen,
        )
        restored, proof = found.restored, found.proof
        wrong = len(restored.wrong) + proof.lost + proof.wrong
        note.saw(proof.right, proof.bytes, wrong, found.exit_code)
    results.report_on(
        proof,
        _drilled(found, scratch, "" if new_server else ", and drop the database"),
        found.exit_code,
        target=settings.target,
        prefix=prefix,
        shard=str(shard or ""),
        proved=found.proved,
        dump=found.dump.name,
        dump_begun=found.dump.begun.isoformat(),
        dump_origin=str(found.origin),
        bad_dumps=list(found.bad_dumps),
        restored=restored.restored,
        not_restored=restored.wrong.counts,
        catalog_s=round(found.catalog_s, 3),
        restore_s=round(restored.duration_s, 3),
        failures=results.first_failures([*restored.wrong.first, *proof.failures.first]),
    )


def _drilled(found: Drilled, scratch: Path, besides: str) -> Iterator[str]:
    """Yields what was restored and checked, and the verdict. besides: what else to remove."""
    restored, proof = found.restored, found.proof
    age = duration(max(0.0, (datetime.now(UTC) - found.dump.begun).total_seconds()))
    for name, seconds, text in (
        ("catalog", found.catalog_s, f"{found.dump.name}, {age} old"),
        ("blobs", restored.duration_s, f"{restored.restored:,}, {size(restored.bytes)}"),
        ("read back", proof.proof_s, f"{proof.right:,} right, {size(proof.bytes)}"),
    ):
        yield f"{name:<10}{duration(seconds):>12}  {text}"
    yield (
        f"the catalog has {many(proof.rows, 'row')}, {proof.copied:,} copied;"
        f" {many(proof.later, 'restored blob is', 'restored blobs are')} not in it,"
        f" {proof.unsent:,} were not yet sent when it was dumped"
    )
    if found.origin is not Origin.OURS:
        yield _NOBODY
    if found.dump.record is not None and found.dump.record.lacks:
        yield printable(found.dump.record.lacks)
    if found.proved:
        yield "PROVED: all that the catalog calls copied was restored, and every byte is right"
    else:
        yield from _not_proved(found)
    yield f"to clean up: rm -r {shlex.quote(str(scratch))}{besides}"


def _not_proved(found: Drilled) -> Iterator[str]:
    restored, proof = found.restored, found.proof
    yield "NOT PROVED"
    yield from results.count_lines(restored.wrong.counts, ": not restored")
    lost = "copied according to the catalog, but not restored"
    yield from results.count_lines({lost: proof.lost, "restored, but not right": proof.wrong})
    if not proof.right:
        yield "nothing was restored"
    if not proof.rows:
        yield "the restored catalog has no blobs"
    elif not proof.copied:
        yield (
            "the restored catalog calls nothing copied, so it does not tell what should have come"
            " back: make a dump after a run, ntt-backup-remote dump --force"
        )
    yield from (f"  {printable(text)}" for text in found.bad_dumps)
    yield from (*results.failure_lines(restored.wrong), *results.failure_lines(proof.failures))
    if restored.wrong or proof.lost:
        yield (
            "to send again what the store still has: ntt-backup-remote verify, then"
            " ntt-backup-remote run"
        )
