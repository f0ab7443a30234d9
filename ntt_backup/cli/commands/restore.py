"""The command `restore` fetches blobs, or the catalog, from the remote."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TextIO

import click

from ntt_backup.cli.check_note import noted
from ntt_backup.cli.common import (
    Common,
    GivenPath,
    bwlimit_option,
    dump_options,
    identity_flag,
    identity_option,
    list_option,
    prefix_option,
    read_blobids,
    require_blobids,
    result_options,
    sessions_option,
    writing,
    written,
)
from ntt_backup.cli.results import count_lines, failure_lines, fields_of, report, strangers, warn
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import Origin
from ntt_backup.config.timetable import Timetable
from ntt_backup.errors import ConfigError, complete
from ntt_backup.format import duration, many, moment, printable, size
from ntt_backup.report.lines import ProgressLine, pace, time_left
from ntt_backup.restore.blobs import restore as restore_blobs
from ntt_backup.restore.from_bucket import Thaw
from ntt_backup.restore.work import Restored, Wanted

# Of what was left out of a dump.
_SHOWN: Final = 20


@click.command()
@click.argument("directory", type=GivenPath(), metavar="[DIR]", required=False)
@click.option(
    "--to",
    "destination",
    type=GivenPath(),
    metavar="DIR",
    help="Directory for the blobs; may also be given without --to.",
)
@click.option(
    "--catalog",
    "of_catalog",
    is_flag=True,
    help="Restore the catalog instead: the newest good dump of this host, into the empty database"
    " of catalog.url.",
)
@click.option("--dump", metavar="NAME", help="With --catalog: this dump, and not the newest.")
@dump_options
@prefix_option("Restore")
@list_option("Restore")
@click.option(
    "--blobid", "blobids", multiple=True, metavar="ID", help="Restore this blob; may be repeated."
)
@bwlimit_option("that the blobs may take")
@sessions_option(default=4)
@click.option(
    "--trust-size",
    is_flag=True,
    help="Keep a file in DIR that has the right size, without hashing it.",
)
@click.option(
    "--archived",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="Write into FILE the keys of a bucket's objects that must be thawed first.",
)
@click.option(
    "--thaw",
    "days",
    type=click.IntRange(1),
    metavar="DAYS",
    help="Ask the object store to thaw the objects that must be, for so many days.",
)
@click.option(
    "--tier",
    type=click.Choice(["bulk", "standard", "expedited"]),
    help="With --thaw, how fast: standard by default; the slowest is the cheapest.",
)
@identity_option
@result_options
@click.pass_obj
def restore(
    common: Common,
    directory: Path | None,
    destination: Path | None,
    of_catalog: bool,
    dump: str | None,
    trust_target: bool,
    allow_superuser: bool,
    prefix: str,
    names: TextIO | None,
    blobids: tuple[str, ...],
    bwlimit: Timetable | None,
    workers: int,
    trust_size: bool,
    archived: Path | None,
    identity: Path | None,
    days: int | None,
    tier: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Restore blobs, or the catalog, from the remote.

    Blobs are restored into DIR/aa/bb/, without the catalog. Each is hashed before it appears under
    its name. Files in DIR that are right are kept, so the same command continues after an
    interruption. Exit code 7 when a blob could not be restored.
    """
    if directory is not None and destination is not None:
        raise click.UsageError("give one directory: --to DIR, or DIR alone")
    destination = destination or directory
    if of_catalog:
        of_blobs = (destination, prefix, names, blobids, days, tier, bwlimit)
        if any(of_blobs):
            raise click.UsageError(
                "--catalog cannot be combined with --to, --thaw, --bwlimit or a choice of blobs"
            )
        _restore_catalog(
            common,
            identity,
            dump,
            trust_target=trust_target,
            allow_superuser=allow_superuser,
            quiet=quiet,
        )
        return
    if dump is not None or trust_target or allow_superuser:
        raise click.UsageError("--dump, --trust-target and --allow-superuser are for --catalog")
    if destination is None:
        raise click.UsageError("restore needs --to DIR, or --catalog")
    if bool(prefix) + (names is not None) + bool(blobids) > 1:
        raise click.UsageError("give only one of --prefix, --list and --blobid")
    if tier is not None and days is None:
        raise click.UsageError("--tier says how fast --thaw DAYS is: give that, too")
    wanted = Wanted(prefix)
    chosen = "of a list" if names is not None or blobids else ""
    if names is not None:
        wanted = Wanted(blobids=read_blobids(names))
    elif blobids:
        wanted = Wanted(blobids=require_blobids(enumerate(blobids, 1), "--blobid"))
    settings = common.load(RemoteConfig, identity_flag(identity))
    if days is not None and settings.remote.kind != "s3":
        raise ConfigError(
            f"{settings.remote.where} is no bucket: nothing is archived there",
            hint="leave out --thaw",
        )
    with ExitStack() as stack:
        note = stack.enter_context(noted(common, "restore", prefix=prefix, blobs=chosen))
        line = stack.enter_context(ProgressLine(sys.stderr, quiet=quiet))
        keys = None
        another = "name another file with --archived"

        def note_key(key: str) -> None:
            if keys is not None and archived is not None:
                with writing(archived, another):
                    keys.write(f"{key}\n")

        def progress(done: Restored) -> None:
            note.saw(done.restored + done.right, done.bytes, len(done.wrong), done.exit_code)
            line.show(lambda: progress_text(done))

        if archived is not None:
            keys = stack.enter_context(written(archived, another))
        done = restore_blobs(
            settings,
            destination.absolute(),
            wanted,
            workers=workers,
            trust_size=trust_size,
            on_progress=progress,
            on_outage=line.outage,
            on_archived=note_key,
            thaw=Thaw(days, tier or "standard") if days is not None else None,
            bwlimit=bwlimit,
        )
        progress(done)
    fields = {"target": common.target, **fields_of(done)}
    report(fields, lines(done, destination), done.exit_code, as_json=as_json)


def _restore_catalog(
    common: Common,
    identity: Path | None,
    name: str | None,
    *,
    trust_target: bool,
    allow_superuser: bool,
    quiet: bool,
) -> None:
    # What speaks to PostgreSQL takes longer to load than a few blobs to restore.
    from ntt_backup.dump.restore import restore_catalog

    settings = common.load(RemoteConfig, identity_flag(identity))
    found = restore_catalog(
        settings,
        warn,
        name=name,
        trust_target=trust_target,
        allow_superuser=allow_superuser,
    )
    if found.others:
        others = printable(", ".join(found.others))
        click.echo(
            f"warning: there are dumps of other databases, too: {others}; --dump NAME takes one",
            err=True,
        )
    if not quiet:
        record = found.dump.record
        assert record is not None  # Else it would not have been taken.
        of = printable(f"the database {record.database} on {record.host}")
        next_step = f"`{complete('ntt-backup-remote run')}` finds it on the remote"
        if settings.remote.kind == "s3":
            next_step = f"`{complete('ntt-backup-remote reconcile --apply')}` marks it as copied"
        click.echo(
            f"restored the catalog of {moment(found.dump.begun)} from"
            f" {found.dump.name}, a dump of {of}; what was copied since then is pending in it, and"
            f" {next_step}"
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
        click.echo(
            "warning: nothing proves who made this dump: only rows of blobs and of the schema"
            " ntt_backup came back. Compare them with the remote: `reconcile`, then `verify`",
            err=True,
        )
    if found.left_out:
        click.echo(f"warning: {many(len(found.left_out), 'object')} were left out:", err=True)
        for text in found.left_out[:_SHOWN]:
            click.echo(f"  {printable(text)}", err=True)
        if len(found.left_out) > _SHOWN:
            click.echo(f"  and {len(found.left_out) - _SHOWN:,} more", err=True)
    if found.rights:
        click.echo("for the former owners and grants create the roles, then as a superuser run:")
        for text in found.rights:
            click.echo(printable(text))


def progress_text(done: Restored) -> str:
    """Returns how far a restore is."""
    text = (
        f"{done.restored:,} restored, {done.right:,} already there,"
        f" {pace(done.bytes, done.duration_s)}"
    )
    if done.wrong:
        text += f", {len(done.wrong):,} wrong"
    if done.part:
        text += f", {done.part:.1%}{time_left(done.part, done.duration_s)}"
    return text


def lines(done: Restored, destination: Path) -> list[str]:
    """Returns what was restored, for a terminal."""
    said = [
        f"restored {many(done.restored, 'blob')}, {size(done.bytes)} in"
        f" {duration(done.duration_s)}, into {destination}; {done.right:,} were already there and"
        " right"
    ]
    if done.wrong:
        said.append(f"NOT restored: {len(done.wrong):,} that the remote lacks, or has damaged")
        said += [*count_lines(done.wrong.counts), *failure_lines(done.wrong)]
    if done.not_needed:
        said.append("damaged, and not needed, since other packs have all of their blobs:")
        said += [f"  {printable(key)}" for key in done.not_needed]
    said += strangers(done.strangers)
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
