"""The command `dumps` lists the dumps of the catalog on the remote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

from ntt_backup import newest
from ntt_backup.catalog.dump_history import DumpRun, recent_dumps
from ntt_backup.cli.common import (
    Common,
    identity_flag,
    identity_option,
    json_option,
    open_catalog,
)
from ntt_backup.cli.results import fields_of
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import HostKeys, Origin
from ntt_backup.dump.chain import restorable
from ntt_backup.dump.record import Stored
from ntt_backup.dump.remote_dir import RemoteDir, open_remote_dir
from ntt_backup.errors import CatalogError, RemoteDenied
from ntt_backup.format import many, moment, printable, size, utc

_OF_LEDGER: Final = 1000


@click.command()
@click.option("--all", "of_all", is_flag=True, help="List the dumps of all targets.")
@click.option(
    "--remove",
    "unwanted",
    multiple=True,
    metavar="NAME",
    help="Remove this dump from the remote, of whichever target; may be repeated.",
)
@identity_option
@json_option
@click.pass_obj
def dumps(
    common: Common, of_all: bool, unwanted: tuple[str, ...], identity: Path | None, as_json: bool
) -> None:
    """List the dumps of the catalog on the remote, and remove some.

    The newest comes first. Beside each stands who made it, as far as that can be proved, and what
    is wrong with it. `restore --catalog --dump NAME` brings one back. This works without the
    catalog, too, which only adds what it knows.

    Dumps that this host does not know are removed by nothing but --remove.
    """
    settings = common.load(RemoteConfig, identity_flag(identity))
    keys = HostKeys.of(settings)
    if unwanted:
        with closing(open_remote_dir(settings)) as remote_dir:
            removed = remove(remote_dir, unwanted)
        newest.removed(settings, "dump", unwanted)
        if as_json:
            click.echo(json.dumps({"target": settings.target, "removed": removed}))
        else:
            click.echo(f"removed {many(removed, 'dump')}")
        return
    ledger: list[DumpRun] | None = None
    problem = ""
    try:
        with open_catalog(settings, "dumps") as conn:
            ledger = recent_dumps(conn, settings.target, _OF_LEDGER)
    except CatalogError as error:
        problem = str(error)
    with closing(open_remote_dir(settings)) as remote_dir:
        found = remote_dir.contents().dumps
    ours = [
        one for one in found if of_all or one.record is None or one.record.target == settings.target
    ]
    whole = frozenset(one.name for one in restorable(ours))
    recorded = None if ledger is None else frozenset(one.name for one in ledger)
    rows = [_fields(one, whole, recorded, keys) for one in reversed(ours)]
    if as_json:
        listed = [fields_of(one) for one in ledger] if ledger is not None else None
        click.echo(json.dumps({"target": settings.target, "dumps": rows, "ledger": listed}))
    else:
        click.echo("\n".join(lines(rows, ledger, problem)))
        if keys.problem:
            click.echo(f"warning: {printable(keys.problem)}", err=True)


def remove(remote_dir: RemoteDir, names: Sequence[str]) -> int:
    """Removes dumps by their names, and returns how many there were.

    Raises:
        UsageError: There is no such dump, or another one needs it.
        RemoteDenied: The remote keeps some of them.
    """
    found = remote_dir.contents().dumps
    known = frozenset(one.name for one in found)
    for name in names:
        if name not in known:
            raise click.UsageError(f"there is no dump {printable(name)} on the remote")
    for one in found:
        if one.base in names and one.name not in names:
            said = f"{one.name} is an increment on {one.base}: remove both, or neither"
            raise click.UsageError(said)
    # The newest first: no moment has an increment without what it needs.
    in_order = [one.name for one in reversed(found) if one.name in names]
    removed = remote_dir.drop(in_order)
    if removed < len(in_order):
        raise RemoteDenied(
            f"the remote has kept {many(len(in_order) - removed, 'dump')}",
            detail="its forced command keeps the newest of each catalog, and what it cannot read",
            hint="remove them from pgdump/ there, or by a key that may replace",
        )
    return removed


def _fields(
    one: Stored, whole: frozenset[str], recorded: frozenset[str] | None, keys: HostKeys
) -> dict[str, Any]:
    """Returns a dump for programs. whole: those that can come back; recorded: those in the ledger,
    None where that cannot be asked. Its kind is None where its record cannot be read.
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
        "target": record.target if record is not None else None,
        "number": one.number,
        "size": one.size,
        "kind": kind,
        "base": one.base,
        "database": record.database if record is not None else None,
        "server_version": record.server_version if record is not None else None,
        "host": record.host if record is not None else None,
        "sealed": record is not None and record.sealed > 0,
        "complete": one.whole,
        "refused": one.refused,
        "restorable": one.name in whole,
        "recorded": None if recorded is None else one.name in recorded,
    }


def lines(rows: list[dict[str, Any]], ledger: list[DumpRun] | None, problem: str) -> list[str]:
    """Returns the dumps for people, then what the ledger says beyond them."""
    said = [printable(_line(row)) for row in rows] or ["there is no dump on the remote"]
    if ledger is None:
        return [*said, printable(f"the ledger cannot be asked: {problem}")]
    last = ledger[0] if ledger else None
    good = next((row for row in ledger if not row.error), None)
    if last is not None and last.error:
        said.append(printable(f"the last one, of {moment(last.started_at)}, FAILED: {last.error}"))
    if good is not None and all(row["name"] != good.name for row in rows):
        said.append(printable(f"NOT on the remote: {good.name}, the newest that the ledger knows"))
    return said


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
    return text
