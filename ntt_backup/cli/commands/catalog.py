"""The commands `init-db`, `move-catalog`, `dump` and `dumps` create, move and dump the catalog."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

import click

from ntt_backup import rollback_detection
from ntt_backup.catalog import schema
from ntt_backup.catalog.connection import describe
from ntt_backup.catalog.history import DumpRun, recent_dumps
from ntt_backup.catalog.move import move
from ntt_backup.catalog.schema import Who
from ntt_backup.catalog.schema_check import PRINT_SQL
from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, connect, open_catalog, writing
from ntt_backup.cli.options import IDENTITY, JSON, ONLY_ERRORS, PATH, flag, repeated, value
from ntt_backup.config import (
    ALL_TARGETS,
    CatalogConfig,
    RemoteConfig,
    application_name,
    load_each,
    sources,
)
from ntt_backup.config.display import without_password
from ntt_backup.config.signing_key import Origin, SigningKeys, key_file, make_signing_key
from ntt_backup.dump import job
from ntt_backup.dump.events import DumpComplete, DumpSkipped
from ntt_backup.dump.record import Stored
from ntt_backup.dump.store import (
    DUMPS,
    list_dumps,
    open_dumps,
    remove_dumps,
    restorable,
    write_text,
)
from ntt_backup.errors import CatalogError, DumpFailed, RemoteDenied, complete
from ntt_backup.events import Event
from ntt_backup.filestore.contract import FileStore
from ntt_backup.filestore.pins import pin_words, pins_that_count, put_pin, read_pins, remove_pins
from ntt_backup.formatting import many, moment, printable, size, utc
from ntt_backup.process.durable import durable_file, write_durably
from ntt_backup.process.pid_lock import pid_lock

_OF_LEDGER: Final = 1000


@options.command(JSON)
@flag("--notify", "Add a trigger by which inserts into blobs wake a watching daemon.")
@click.option(
    "--print-sql",
    "script",
    type=click.Choice(["all", *(who.value for who in Who)]),
    is_flag=False,
    flag_value="all",
    help="Change nothing. Print the missing SQL as one script for each role, or for one role.",
)
@value(
    "--role", "ROLE", "Print the SQL that grants this role the least rights; default: our own user."
)
@repeated("--monitor", "ROLE", "Print the SQL, also for a role that may only read the figures")
def init_db(
    common: Common, notify: bool, script: str | None, role: str | None, monitor: tuple[str, ...]
) -> None:
    """Create the catalog, or add what an existing one lacks.

    Existing rows are not changed, and the command may be repeated. The first call on a host also
    makes its host key, which signs what the host writes to a target.
    """
    if role or monitor:
        script = script or "all"
    settings = common.load(CatalogConfig)
    with connect(settings, "init-db", no_tables=True) as conn:
        if script is not None:
            plan = schema.make_plan(
                conn, settings.target, role=role, monitors=monitor, notify=notify
            )
            click.echo(plan.script(None if script == "all" else Who(script)))
            return
        said: list[str] = []
        report = said.append if options.wants("as_json") else click.echo
        not_yet = schema.init_db(conn, settings.target, notify=notify, report=report)
        who = conn.info.user
    if made := make_signing_key(key_file(settings)):
        report(made)
    lines = []
    if not_yet:
        lines.append(f"{who} may not use all commands yet: {'; '.join(not_yet)}")
        lines.append(complete(PRINT_SQL))
    others = ", for all other commands" if not_yet else ""
    lines.append(f"the catalog is ready for target {settings.target}{others}")
    results.tell({"target": settings.target, "done": said, "not_yet": not_yet}, lines)


@options.command(JSON)
@click.argument("url")
def move_catalog(common: Common, url: str) -> None:
    """Move the catalog to another database, such as from the embedded server.

    URL is an empty database, or `embedded`. All rows are copied in one transaction and counted, and
    then catalog.url is set in the configuration. The former database stays as it is. The command
    refuses to work while a run or another command uses the catalog.
    """
    here, there = (common.load(CatalogConfig, one) for one in ({}, {"catalog.url": url}))
    with ExitStack() as stack:
        for one in load_each(CatalogConfig, ALL_TARGETS, file=common.config).values():
            stack.enter_context(pid_lock(one.lock.file))
        with writing(path := sources.path_of(common.config, os.environ)):
            former = path.read_text("utf-8") if path.exists() else ""
        if "catalog.url" in sources.from_environment(os.environ):
            former = ""  # The file has no say.
        counts = move(here.catalog.url, there.catalog.url, application_name("move-catalog"))
        written = _with_url(former, url)
        if written is not None:
            found = path.stat()
            with writing(path, hint="the rows are moved: call this again, or set catalog.url"):
                owner = (found.st_uid, found.st_gid)
                real = path.resolve()  # A link stays one.
                write_durably(real, written.encode(), found.st_mode & 0o777, owner=owner)
    rows = sum(counts.values()) - counts["blobs"]
    lines = [
        f"moved {many(counts['blobs'], 'blob')} and {rows:,} other rows to"
        f" {describe(there.catalog.url)}; {describe(here.catalog.url)} is left as it was",
        f"set catalog.url in {path}"
        if written is not None
        else f"now set catalog.url (NTT_DB_URL) to {without_password(url)}",
    ]
    results.tell({"target": here.target, "rows": counts, "written": written is not None}, lines)


def _with_url(text: str, url: str) -> str | None:
    """Returns a configuration with another catalog.url, None where the line is not found."""
    with suppress(ValueError):
        before = tomllib.loads(text)
        for line in re.finditer(r"(?m)^\s*(?:catalog\.)?url\s*=.*$", text):
            new = re.sub(r"=.*", lambda _: f"= {json.dumps(url, ensure_ascii=False)}", line[0])
            changed = text[: line.start()] + new + text[line.end() :]
            wanted = {**before, "catalog": {**before.get("catalog", {}), "url": url}}
            if "url" in before.get("catalog", {}) and tomllib.loads(changed) == wanted:
                return changed
    return None


@options.command(JSON, ONLY_ERRORS)
@flag("--force", "Dump even if nothing has changed since the last dump.")
@flag("--whole", "Make a whole dump, not an increment.")
def dump(common: Common, force: bool, whole: bool) -> None:
    """Dump the catalog to the remote, and remove old dumps."""
    settings = common.load(RemoteConfig)
    as_json, quiet = options.wants("as_json"), options.wants("quiet")

    def show(event: Event) -> None:
        if as_json and isinstance(event, DumpComplete | DumpSkipped):
            fields = {"target": settings.target, "event": event.kind, **event.fields}
            click.echo(json.dumps(fields))
        elif event.line is not None and not quiet:
            click.echo(event.line, err=as_json)

    with open_catalog(settings, "dump"):
        pass  # What the command needs is missing before the work, not at its end.
    job.dump(settings, show, force=force, whole=whole)


@options.command(IDENTITY, JSON)
@flag("--all", "List the dumps of all targets.", "of_all")
@repeated("--remove", "NAME", "Remove this dump, whichever target it belongs to", "unwanted")
@repeated(
    "--pin", "NAME", "Keep this dump until it is unpinned, whatever the retention says", "pins"
)
@repeated("--unpin", "NAME", "Remove the pins of this dump", "unpinned")
@value("--fetch", "NAME", "Write this dump into a file that pg_restore reads.", "fetched")
@value("--to", PATH, "With --fetch: the file; default: the name of the dump.", "file")
@value("--reason", "TEXT", "With --pin: the reason, which the list shows.", default="")
def dumps(
    common: Common,
    of_all: bool,
    unwanted: tuple[str, ...],
    pins: tuple[str, ...],
    unpinned: tuple[str, ...],
    fetched: str | None,
    file: Path | None,
    reason: str,
) -> None:
    """List dumps of the catalog on the remote; remove, pin or fetch them.

    The newest dump comes first. The list says who made each dump, as far as that can be proved, and
    what is wrong with a dump. `restore --catalog --dump NAME` restores one. The command also works
    without the catalog, which only adds its own records.

    Only --remove removes dumps that this host does not know. A pin is a file beside the dump on the
    remote, signed by the host key. The dump that a pinned dump needs is kept, too.
    """
    if sum(map(bool, (unwanted, pins, unpinned, fetched))) > 1:
        raise click.UsageError("give only one of --remove, --pin, --unpin and --fetch")
    if file is not None and fetched is None:
        raise click.UsageError("--to is for --fetch NAME")
    settings = common.load(RemoteConfig)
    keys = SigningKeys.of(settings)
    if fetched is not None:
        _fetch(settings, keys, fetched, (file or Path(fetched)).absolute())
        return
    if pins or unpinned:
        with closing(open_dumps(settings)) as store:
            known = _named(list_dumps(store), pins or unpinned)
            if pins:
                done = sum(put_pin(store, DUMPS, one.name, keys, reason) for one in known)
            else:
                done = remove_pins(store, [name for one in known for name in one.pins])
        verb = "pinned" if pins else "unpinned"
        said = f"{verb} {many(len(known), 'dump')}: {many(done, 'pin')} {'new' if pins else 'gone'}"
        results.tell({"target": settings.target, verb: [one.name for one in known]}, [said])
        return
    if unwanted:
        with closing(open_dumps(settings)) as store:
            removed = _remove(store, unwanted, keys)
        rollback_detection.removed(settings, "dump", unwanted)
        said = f"removed {many(removed, 'dump')}"
        results.tell({"target": settings.target, "removed": removed}, [said])
        return
    ledger: list[DumpRun] | None = None
    problem = ""
    try:
        with open_catalog(settings, "dumps") as conn:
            ledger = recent_dumps(conn, settings.target, _OF_LEDGER)
    except CatalogError as error:
        problem = str(error)
    with closing(open_dumps(settings)) as store:
        found = list_dumps(store)
        pinned = read_pins(store, DUMPS, [name for one in found for name in one.pins], keys)
    ours = [
        one for one in found if of_all or one.record is None or one.record.target == settings.target
    ]
    whole = frozenset(one.name for one in restorable(ours))
    recorded = None if ledger is None else frozenset(one.name for one in ledger)
    rows = [
        {**_fields(one, whole, recorded, keys), "pinned": one.name in pinned}
        | ({"pin_reason": pinned[one.name]} if one.name in pinned else {})
        for one in reversed(ours)
    ]
    listed = [results.fields_of(one) for one in ledger] if ledger is not None else None
    lines = map(printable, _lines(rows, ledger, problem))
    results.tell({"target": settings.target, "dumps": rows, "ledger": listed}, lines)
    if keys.problem and not options.wants("as_json"):
        results.warn(keys.problem)


def _named(found: Sequence[Stored], names: Sequence[str]) -> list[Stored]:
    """Returns the dumps of these names. Raises UsageError where there is no such dump."""
    known = {one.name: one for one in found}
    for name in names:
        if name not in known:
            raise click.UsageError(f"there is no dump {printable(name)} on the remote")
    return [known[name] for name in dict.fromkeys(names)]


def _fetch(settings: RemoteConfig, keys: SigningKeys, name: str, path: Path) -> None:
    """Writes a dump into a new file, which only this user may read."""
    with closing(open_dumps(settings)) as store:
        found = list_dumps(store)
        (one,) = _named(found, [name])
        if not one.whole:
            raise DumpFailed(f"{name} {one.torn}")
        with (
            writing(path, "name another file with --to"),
            durable_file(path, 0o600, replace=False) as file,
        ):
            write_text(store, one, {other.name: other for other in found}, file)
            written = file.tell()
    if (origin := one.origin(keys)) is not Origin.OURS:
        results.warn(
            printable(f"{name} is {origin.text}: {origin.why}")
            + ". A dump is a program: restore it by a role without rights"
        )
    of_all = {"target": settings.target, "fetched": name, "file": str(path), "bytes": written}
    results.tell(of_all, [f"fetched {name}, {size(written)}, into {printable(str(path))}"])


def _remove(store: FileStore, names: Sequence[str], keys: SigningKeys) -> int:
    """Removes dumps by their names, and returns how many there were.

    Raises:
        UsageError: There is no such dump, another one needs it, or it is pinned.
        RemoteDenied: The remote keeps some of them.
    """
    found = list_dumps(store)
    for one in _named(found, names):
        if pins_that_count(one.pins, DUMPS, keys):
            raise click.UsageError(f"{one.name} is pinned: call `dumps --unpin {one.name}` before")
    for one in found:
        if one.base in names and one.name not in names:
            said = f"{one.name} is an increment on {one.base}: remove both, or neither"
            raise click.UsageError(said)
    # The newest first: at no moment an increment is there without its base.
    in_order = [one.name for one in reversed(found) if one.name in names]
    removed = remove_dumps(store, in_order)
    if removed < len(in_order):
        raise RemoteDenied(
            f"the remote has kept {many(len(in_order) - removed, 'dump')}",
            detail="its forced command keeps the newest of each catalog, and what it cannot read",
            hint="remove them from pgdump/ there, or by a key that may replace",
        )
    return removed


def _fields(
    one: Stored, whole: frozenset[str], recorded: frozenset[str] | None, keys: SigningKeys
) -> dict[str, Any]:
    """Returns the JSON fields of a dump. Its kind is None if its record cannot be read.

    Args:
        one: The dump.
        whole: The names of the dumps that can be restored.
        recorded: The names of the dumps in the ledger; None if the ledger cannot be asked.
        keys: The keys of this host.
    """
    record = one.record
    kind = None
    if record is not None:
        kind = "increment" if record.base else "full" if record.series else "plain"
    return {
        "name": one.name,
        "begun": utc(one.begun),
        "arrived": utc(one.arrived) if one.arrived is not None else None,
        "origin": str(one.origin(keys)),
        "target": record and record.target,
        "number": one.number,
        "size": one.size,
        "kind": kind,
        "base": one.base,
        "database": record and record.database,
        "server_version": record and record.server_version,
        "host": record and record.host,
        "sealed": one.sealed,
        "complete": one.whole,
        "refused": one.refused,
        "restorable": one.name in whole,
        "recorded": None if recorded is None else one.name in recorded,
    }


def _lines(rows: list[dict[str, Any]], ledger: list[DumpRun] | None, problem: str) -> Iterator[str]:
    """Yields the dumps for people, then what the ledger says beyond them."""
    yield from map(_line, rows) if rows else ("there is no dump on the remote",)
    if ledger is None:
        yield f"the ledger cannot be asked: {problem}"
        return
    if ledger and ledger[0].error:
        yield f"the last one, of {moment(ledger[0].started_at)}, FAILED: {ledger[0].error}"
    good = next((row for row in ledger if not row.error), None)
    if good is not None and all(row["name"] != good.name for row in rows):
        yield f"NOT on the remote: {good.name}, the newest that the ledger knows"


def _line(row: dict[str, Any]) -> str:
    text = f"{row['name']}  {size(row['size'] or 0):>9}  {row['kind'] or 'record cannot be read'}"
    if row["base"]:
        text += f" on {row['base']}"
    if row["kind"] is not None:
        text += f", of {row['database']} on {row['host']}, target {row['target']}"
        text += f", {Origin(row['origin']).text}"
    if row["sealed"]:
        text += ", sealed"
    if row["refused"]:
        text += f", REFUSED: it {row['refused']}"
    elif row["kind"] is not None and not row["complete"]:
        text += ", NOT COMPLETE"
    elif row["kind"] is not None and not row["restorable"]:
        text += ", CANNOT BE READ: one that it needs is missing"
    if row["recorded"] is False:
        text += ", not in the ledger"
    return text + pin_words(row.get("pin_reason"))
