"""The command `drill`: its options, and its verdict for people and machines."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from ntt_backup.cli.common import Common, plain_failures
from ntt_backup.cli.param_types import HexPrefix
from ntt_backup.cli.restore import progress_line
from ntt_backup.config import RemoteConfig
from ntt_backup.dump.record import Stored
from ntt_backup.errors import complete
from ntt_backup.format import duration, many, printable, size
from ntt_backup.restore.drill import Drilled, Proof, Telling
from ntt_backup.restore.drill import drill as drill_all
from ntt_backup.restore.restore import Restored
from ntt_backup.ui.progress_line import Meter

_SHOWN: Final = 20


@click.command()
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Where the blobs go; absent or empty.",
)
@click.option(
    "--database",
    required=True,
    metavar="URL",
    help="Where the catalog goes: an empty database, in the place of catalog.url.",
)
@click.option(
    "--prefix", type=HexPrefix(), default="", help="Only blobids that begin so: 00 is a 256th."
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Side by side."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what was found at the end.")
@click.pass_obj
def drill(
    common: Common,
    scratch: Path,
    database: str,
    prefix: str,
    workers: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove that it would come back: restore catalog and blobs into scratch space, check them all.

    Neither the production database nor the store is touched. Exit code 7 when something is wrong.
    """
    settings = common.load(RemoteConfig, {"catalog.url": database})
    meter = Meter(sys.stderr, quiet=quiet)

    def dumped(found: Stored) -> None:
        meter.say(f"the catalog is back, from {found.name}")

    def restored(done: Restored) -> None:
        if meter.due:
            meter.show(progress_line(done))

    def proved(proof: Proof) -> None:
        if meter.due:
            meter.show(f"{proof.part:.0%}, {proof.right:,} read back and right")

    found = drill_all(
        settings,
        scratch.absolute(),
        prefix,
        workers,
        Telling(dumped, restored, proved, meter.outage, lambda text: meter.say(f"warning: {text}")),
    )
    meter.close()
    if as_json:
        click.echo(json.dumps(as_object(found, settings.target, prefix)))
    else:
        click.echo("\n".join(lines(found, scratch)))
    sys.exit(found.exit_code)


def as_object(found: Drilled, target: str, prefix: str) -> dict[str, Any]:
    """What came of it as plain JSON values; `failures` holds the first 1000."""
    restored, proof = found.restored, found.proof
    return {
        "target": target,
        "prefix": prefix,
        "proved": found.proved,
        "dump": found.dump.name,
        "dump_begun": found.dump.begun.isoformat(),
        "bad_dumps": list(found.bad_dumps),
        "rows": proof.rows,
        "copied": proof.copied,
        "restored": restored.restored,
        "right": proof.right,
        "bytes": proof.bytes,
        "not_restored": {str(reason): n for reason, n in sorted(restored.wrong.items())},
        "lost": proof.lost,
        "wrong": proof.wrong,
        "later": proof.later,
        "unsent": proof.unsent,
        "catalog_s": round(found.catalog_s, 3),
        "restore_s": round(restored.duration_s, 3),
        "proof_s": round(proof.duration_s, 3),
        "failures": plain_failures([*restored.failures, *proof.failures]),
        "exit_code": found.exit_code,
    }


def lines(found: Drilled, scratch: Path) -> list[str]:
    """What came of it for a terminal."""
    restored, proof = found.restored, found.proof
    old = duration(max(0.0, (datetime.now(UTC) - found.dump.begun).total_seconds()))
    rows = (
        ("catalog", found.catalog_s, f"{found.dump.name}, {old} old"),
        ("blobs", restored.duration_s, f"{restored.restored:,}, {size(restored.bytes)}"),
        ("read back", proof.duration_s, f"{proof.right:,} right, {size(proof.bytes)}"),
    )
    said = [f"{name:<10}{duration(seconds):>12}  {text}" for name, seconds, text in rows]
    said.append(
        f"the catalog has {many(proof.rows, 'row')}, {proof.copied:,} copied;"
        f" {many(proof.later, 'blob')} came that it does not know,"
        f" {proof.unsent:,} not sent when it was dumped"
    )
    said += _verdict(found)
    said.append(f"when you have seen enough: rm -r {shlex.quote(str(scratch))}, and dropdb")
    return said


def _verdict(found: Drilled) -> list[str]:
    restored, proof = found.restored, found.proof
    if found.proved:
        return ["PROVED: all that the catalog calls copied came back, and every byte is right"]
    said = ["NOT PROVED"]
    for number, text in (
        *((n, f"{reason}: not restored") for reason, n in sorted(restored.wrong.items())),
        (proof.lost, "copied, says the catalog, and did not come back"),
        (proof.wrong, "came back and are not right"),
    ):
        said += [f"{number:>10,} {text}"] if number else []
    if not proof.right:
        said.append("nothing came back at all")
    if not proof.rows:
        said.append("the catalog that came back knows no blob")
    said += [f"  {printable(text)}" for text in found.bad_dumps]
    failures = (*restored.failures, *proof.failures)
    for one in failures[:_SHOWN]:
        said.append(f"  {printable(one.blobid)} {one.reason} {printable(one.detail)}")
    if len(failures) > _SHOWN:
        said.append("  and more; --json tells of the first 1000")
    if restored.wrong or proof.lost:
        again = complete("ntt-backup-remote verify")
        said.append(f"what the store still has right is sent again after: {again}")
    return said
