"""The command `show` tells all that is known of one blob."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ntt_backup.audit.one_blob import InStore, Place, look_in_bucket, look_in_store
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog.failures import FailedBlob, LedgerEntry, find_blob, ledger_of
from ntt_backup.cli.common import (
    Common,
    identity_flag,
    identity_option,
    json_option,
    open_catalog,
)
from ntt_backup.cli.results import fields_of
from ntt_backup.config import CatalogConfig, RemoteConfig
from ntt_backup.errors import BackupError
from ntt_backup.format import many, moment, printable, size
from ntt_backup.model import Blob


@dataclass(frozen=True, slots=True)
class Shown:
    """All that is known. source: None where the settings have no store. places: None where the
    target is no bucket; problem: why the bucket cannot be asked.
    """

    blobid: str
    size: int | None
    source: InStore | None
    targets: Sequence[LedgerEntry]
    places: Sequence[Place] | None
    problem: str


@click.command()
@click.argument("blobid")
@click.option("--verify", is_flag=True, help="Hash the content that the store has.")
@identity_option
@json_option
@click.pass_obj
def show(common: Common, blobid: str, verify: bool, identity: Path | None, as_json: bool) -> None:
    """Tell everything that is known of one blob.

    The first digits of BLOBID are enough, where no other blob begins so.
    """
    settings = common.load(CatalogConfig, identity_flag(identity))
    with open_catalog(settings, "show") as conn:
        name = find_blob(conn, blobid)
        targets = ledger_of(conn, name)
    known = next((one.size for one in targets), None)
    source = None
    if settings.source is not None:
        source = look_in_store(settings.source.root, Blob(name, known), verify=verify)
    places, problem = None, ""
    if settings.remote is not None and settings.remote.kind == "s3" and is_blobid(name):
        try:
            places = look_in_bucket(common.load(RemoteConfig, identity_flag(identity)), name)
        except BackupError as error:
            problem = str(error)
    found = Shown(name, known, source, targets, places, problem)
    click.echo(json.dumps(fields(found)) if as_json else "\n".join(lines(found)))


def fields(found: Shown) -> dict[str, Any]:
    """Returns it for programs."""
    return {
        "blobid": found.blobid,
        "size": found.size,
        "source": fields_of(found.source) if found.source is not None else None,
        "targets": [
            {**fields_of(one), "failure": fields_of(one.failure) if one.failure else None}
            for one in found.targets
        ],
        "objects": None if found.places is None else [fields_of(one) for one in found.places],
        "problem": found.problem,
    }


def lines(found: Shown) -> list[str]:
    """Returns it for people."""
    rows = [("blob", found.blobid)]
    rows.append(("size", "not known" if found.size is None else f"{found.size:,} bytes"))
    if found.source is not None:
        rows.append(("store", _in_store(found.source)))
    for one in found.targets:
        rows.append((f"target {one.target}", _state(one)))
        if one.failure is not None:
            rows += _why(one.failure)
    for place in found.places or ():
        where = f", {place.stored:,} bytes from {place.offset:,} on" if place.pack else ""
        rows.append(("object", f"{place.key} ({size(place.size)}){where}"))
    if found.places == []:
        rows.append(("object", "none in the bucket has it"))
    if found.problem:
        rows.append(("object", f"not known: {found.problem}"))
    width = max(len(name) for name, _ in rows) + 2
    return [printable(f"{name:<{width}}{text}") for name, text in rows]


def _in_store(found: InStore) -> str:
    if found.problem:
        return f"{found.problem}: {found.detail}"
    proved = "its content hashes to its name" if found.verified else "--verify hashes its content"
    return f"{found.size or 0:,} bytes; {proved}"


def _state(one: LedgerEntry) -> str:
    state = "copied" if one.copied else "failed" if one.failed else "pending"
    checked = f", last checked {moment(one.last_checked)}" if one.last_checked else ""
    return state + checked


def _why(why: FailedBlob) -> list[tuple[str, str]]:
    rows = [("", f"{why.reason} {why.detail}".rstrip())]
    if why.first_at is not None and why.last_at is not None and why.attempts is not None:
        times = f"since {moment(why.first_at)}, last {moment(why.last_at)}"
        known = f"; known since {moment(why.known_at)}" if why.known_at is not None else ""
        rows.append(("", f"{times}, {many(why.attempts, 'attempt')}{known}"))
    return rows
