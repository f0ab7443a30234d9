"""The command `failed` lists the blobs that failed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Final

import click

from ntt_backup.catalog.failures import UNKNOWN, FailedBlob, acknowledge, iter_failed
from ntt_backup.cli.common import Common, json_option_of, open_catalog
from ntt_backup.cli.param_types import DURATION
from ntt_backup.cli.results import fields_of
from ntt_backup.config import CatalogConfig
from ntt_backup.errors import complete
from ntt_backup.format import many, moment, printable
from ntt_backup.model import OF_CHECKS, Reason

_CUT = (
    "so much is pending that blobs which another program marked as failed were not found in time;"
    f" to look for them however long it takes: ntt-backup-remote failed --reason {UNKNOWN}"
)
# What the operator does about each reason; docs/first-aid.md says more.
ADVICE: Final[Mapping[str, str]] = {
    Reason.BAD_BLOBID: "correct the catalog's row (64 lowercase hex digits), or delete the row",
    Reason.MISSING: "put the file back into the store, or delete the row",
    Reason.UNREADABLE: "let this user read the file; if the disk reports errors: the kernel log",
    Reason.NOT_A_FILE: "remove what stands at the blob's path and put the file there",
    Reason.WRONG_SIZE: "replace the file if it was cut, or correct the size in the catalog",
    Reason.CORRUPT_SOURCE: "replace the file from another copy: its content is not its name's",
    Reason.REMOTE_REJECTED: "look at what stands at the blob's path on the remote",
    UNKNOWN: "another program marked the blob as failed; after requeue a run says why it fails",
}


@click.command()
@click.option(
    "--reason",
    type=click.Choice([*(one.value for one in Reason if one not in OF_CHECKS), UNKNOWN]),
    help=f"Only blobs that failed for this reason; {UNKNOWN}: another program marked them.",
)
@click.option(
    "--since",
    type=DURATION,
    metavar="TIME",
    help="Only blobs that failed, or failed again, within this time, such as 1d.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Show only the first N.")
@click.option(
    "--known",
    is_flag=True,
    help="Say that the failures of now are known: runs and mails are silent about them.",
)
@json_option_of("one JSON object a line, for each")
@click.pass_obj
def failed(
    common: Common,
    reason: str | None,
    since: float | None,
    limit: int | None,
    known: bool,
    as_json: bool,
) -> None:
    """List the blobs that failed: why, since when, how often.

    `show BLOBID` tells more of one, `requeue` makes them pending again.
    """
    if known and (since is not None or limit is not None or reason == UNKNOWN):
        raise click.UsageError("--known goes with --reason, and with no other choice")
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "failed --known" if known else "failed") as conn:
        if known:
            count = acknowledge(conn, settings.target, reason)
            fields = {"target": settings.target, "known": count}
            blobs = many(count, "failed blob is known", "failed blobs are known")
            said = f"{blobs} from now on; what fails later is told of again"
            click.echo(json.dumps(fields) if as_json else said)
            return
        count = 0
        reasons: set[str] = set()
        cut: list[str] = []
        found = iter_failed(
            conn, settings.target, reason=reason, since=since, on_cut=lambda: cut.append(_CUT)
        )
        for one in islice(found, limit):
            print(json.dumps(fields_of(one)) if as_json else line(one))
            count += 1
            reasons.add(one.reason)
    if not as_json:
        more = ", and perhaps more" if count == limit else ""
        click.echo(f"{many(count, 'blob')} failed{more}" if count else "nothing failed")
        for text in advice(reasons):
            click.echo(text)
    for text in cut:
        click.echo(complete(text), err=True)


def advice(reasons: Collection[str]) -> list[str]:
    """Returns what to do about blobs that failed for these reasons, as lines for a terminal."""
    if not reasons:
        return []
    lines = [f"  {reason}: {text}" for reason, text in ADVICE.items() if reason in reasons]
    first = "what to do by reason, and then: ntt-backup-remote requeue"
    return [complete(one) for one in [first, *lines]]


def line(one: FailedBlob) -> str:
    """Returns a failure as a line."""
    text = f"{one.blobid}  {one.reason:<15}"
    if one.first_at is not None and one.attempts is not None:
        text += f"  since {moment(one.first_at)}, {many(one.attempts, 'attempt')}"
    if one.known_at is not None:
        text += ", known"
    return printable(f"{text}  {one.detail}".rstrip())
