"""The command `drill` proves that everything can be restored."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from ntt_backup.catalog.connection import database_name
from ntt_backup.cli.check_note import noted
from ntt_backup.cli.commands.restore import progress_text
from ntt_backup.cli.common import (
    Common,
    GivenPath,
    bwlimit_option,
    dump_options,
    identity_flag,
    identity_option,
    prefix_option,
    result_options,
    sessions_option,
)
from ntt_backup.cli.results import count_lines, failure_lines, fields_of, first_failures, report
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import Origin
from ntt_backup.config.timetable import Timetable
from ntt_backup.format import duration, many, printable, size
from ntt_backup.report.lines import ProgressLine
from ntt_backup.restore.drill import Drilled
from ntt_backup.restore.drill import drill as restore_and_prove

_NOBODY: Final = (
    "nothing proves who made this dump: only rows of blobs and of the schema ntt_backup came back"
)


@click.command()
@click.option(
    "--scratch",
    type=GivenPath(),
    required=True,
    metavar="DIR",
    help="Directory for the blobs; must be absent or empty.",
)
@click.option(
    "--database",
    required=True,
    metavar="URL",
    help="Empty database for the catalog, used instead of catalog.url; a password is for ~/.pgpass,"
    " since others may see arguments.",
)
@dump_options
@prefix_option("Restore")
@bwlimit_option("that the blobs may take")
@sessions_option(default=4)
@identity_option
@result_options
@click.pass_obj
def drill(
    common: Common,
    scratch: Path,
    database: str,
    trust_target: bool,
    allow_superuser: bool,
    prefix: str,
    bwlimit: Timetable | None,
    workers: int,
    identity: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove that everything can be restored.

    Catalog and blobs are restored into scratch space, read back and checked. The production
    database and the store are not touched. Exit code 7 when something is wrong.
    """
    flags = {"catalog.url": database, **identity_flag(identity)}
    settings = common.load(RemoteConfig, flags)
    lost = database_name(common.load(RemoteConfig, identity_flag(identity)).catalog.url)
    with (
        noted(common, "drill", prefix=prefix) as note,
        ProgressLine(sys.stderr, quiet=quiet) as line,
    ):
        found = restore_and_prove(
            settings,
            scratch.absolute(),
            prefix,
            workers,
            on_dump=lambda dump: line.say(f"the catalog is restored, from {dump.name}"),
            on_restored=lambda done: line.show(lambda: progress_text(done)),
            on_proof=lambda proof: line.show(
                lambda: f"{proof.part:.0%}, {proof.right:,} read back and right"
            ),
            on_outage=line.outage,
            on_warning=lambda text: line.say(f"warning: {text}"),
            bwlimit=bwlimit,
            trust_target=trust_target,
            allow_superuser=allow_superuser,
            lost=lost,
        )
        restored, proof = found.restored, found.proof
        wrong = len(restored.wrong) + proof.lost + proof.wrong
        note.saw(proof.right, proof.bytes, wrong, found.exit_code)
    fields = {
        "target": settings.target,
        "prefix": prefix,
        "proved": found.proved,
        "dump": found.dump.name,
        "dump_begun": found.dump.begun.isoformat(),
        "dump_origin": str(found.origin),
        "bad_dumps": list(found.bad_dumps),
        **fields_of(proof),
        "restored": restored.restored,
        "not_restored": restored.wrong.counts,
        "catalog_s": round(found.catalog_s, 3),
        "restore_s": round(restored.duration_s, 3),
        "failures": first_failures([*restored.wrong.first, *proof.failures.first]),
    }
    report(fields, lines(found, scratch), found.exit_code, as_json=as_json)


def lines(found: Drilled, scratch: Path) -> list[str]:
    """Returns what was restored and checked, and the verdict."""
    restored, proof = found.restored, found.proof
    age = duration(max(0.0, (datetime.now(UTC) - found.dump.begun).total_seconds()))
    rows = (
        ("catalog", found.catalog_s, f"{found.dump.name}, {age} old"),
        ("blobs", restored.duration_s, f"{restored.restored:,}, {size(restored.bytes)}"),
        ("read back", proof.proof_s, f"{proof.right:,} right, {size(proof.bytes)}"),
    )
    return [
        *(f"{name:<10}{duration(seconds):>12}  {text}" for name, seconds, text in rows),
        f"the catalog has {many(proof.rows, 'row')}, {proof.copied:,} copied;"
        f" {many(proof.later, 'restored blob is', 'restored blobs are')} not in it,"
        f" {proof.unsent:,} were not yet sent when it was dumped",
        *(() if found.origin is Origin.OURS else (_NOBODY,)),
        *_verdict(found),
        f"to clean up: rm -r {shlex.quote(str(scratch))}, and drop the database",
    ]


def _verdict(found: Drilled) -> list[str]:
    restored, proof = found.restored, found.proof
    if found.proved:
        return ["PROVED: all that the catalog calls copied was restored, and every byte is right"]
    said = ["NOT PROVED", *count_lines(restored.wrong.counts, ": not restored")]
    lost = "copied according to the catalog, but not restored"
    said += count_lines({lost: proof.lost, "restored, but not right": proof.wrong})
    if not proof.right:
        said.append("nothing was restored")
    if not proof.rows:
        said.append("the restored catalog has no blobs")
    elif not proof.copied:
        said.append(
            "the restored catalog calls nothing copied, so it does not tell what should have come"
            " back: make a dump after a run, ntt-backup-remote dump --force"
        )
    said += [f"  {printable(text)}" for text in found.bad_dumps]
    said += [*failure_lines(restored.wrong), *failure_lines(proof.failures)]
    if restored.wrong or proof.lost:
        said.append(
            "to send again what the store still has: ntt-backup-remote verify, then"
            " ntt-backup-remote run"
        )
    return said
