"""The command `dumps` lists the dumps of the catalog on the remote."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

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
from ntt_backup.dump.chain import restorable
from ntt_backup.dump.record import Stored
from ntt_backup.dump.remote_dir import open_remote_dir
from ntt_backup.errors import CatalogError
from ntt_backup.format import moment, printable, size, utc

_OF_LEDGER: Final = 1000


@click.command()
@identity_option
@json_option
@click.pass_obj
def dumps(common: Common, identity: Path | None, as_json: bool) -> None:
    """List the dumps of the catalog on the remote.

    The newest comes first. Beside each stands what is wrong with it. `restore --catalog --dump
    NAME` brings one back. This works without the catalog, too, which only adds what it knows.
    """
    settings = common.load(RemoteConfig, identity_flag(identity))
    ledger: list[DumpRun] | None = None
    problem = ""
    try:
        with open_catalog(settings, "dumps") as conn:
            ledger = recent_dumps(conn, settings.target, _OF_LEDGER)
    except CatalogError as error:
        problem = str(error)
    with closing(open_remote_dir(settings)) as remote_dir:
        found = remote_dir.contents().dumps
    ours = [one for one in found if one.record is None or one.record.target == settings.target]
    whole = frozenset(one.name for one in restorable(ours))
    recorded = None if ledger is None else frozenset(one.name for one in ledger)
    rows = [_fields(one, whole, recorded) for one in reversed(ours)]
    if as_json:
        listed = [fields_of(one) for one in ledger] if ledger is not None else None
        click.echo(json.dumps({"target": settings.target, "dumps": rows, "ledger": listed}))
    else:
        click.echo("\n".join(lines(rows, ledger, problem)))


def _fields(one: Stored, whole: frozenset[str], recorded: frozenset[str] | None) -> dict[str, Any]:
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
        "number": one.number,
        "size": one.size,
        "kind": kind,
        "base": one.base,
        "database": record.database if record is not None else None,
        "server_version": record.server_version if record is not None else None,
        "host": record.host if record is not None else None,
        "sealed": record is not None and record.sealed > 0,
        "complete": one.whole,
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
        text += f", of {row['database']} on {row['host']}"
    if row["sealed"]:
        text += ", sealed"
    if row["kind"] is not None and not row["complete"]:
        text += ", NOT COMPLETE"
    elif row["kind"] is not None and not row["restorable"]:
        text += ", CANNOT BE READ: one that it needs is missing"
    if row["recorded"] is False:
        text += ", not in the ledger"
    return text
