"""The command `verify`: its options, and its findings for people and machines."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any, Final

import click

from ntt_backup.audit.verify import (
    Findings,
    Question,
    Way,
    sample_bound,
    verify_remote,
    verify_store,
)
from ntt_backup.catalog import verify_schema
from ntt_backup.cli.common import Common, connect, plain_failures
from ntt_backup.cli.param_types import Duration, HexPrefix, Part
from ntt_backup.config import RemoteConfig, StoreConfig
from ntt_backup.errors import complete
from ntt_backup.format import duration, many, printable, size
from ntt_backup.model import Reason
from ntt_backup.planner import eta_seconds
from ntt_backup.ui.progress_line import Meter

_SHOWN: Final = 20


@click.command()
@click.option("--sample", type=Part(), metavar="PERCENT", help="Check a random part, such as 1%.")
@click.option(
    "--max-duration", type=Duration(), metavar="TIME", help="End after so long: 90s, 2h, 1d."
)
@click.option(
    "--older-than", type=Duration(), metavar="TIME", help="Only what was not checked for so long."
)
@click.option(
    "--prefix", type=HexPrefix(), default="", help="Only blobids that begin so, such as 3f."
)
@click.option("--local", is_flag=True, help="Check the store here, not the remote.")
@click.option("--download", is_flag=True, help="Fetch every blob, hash it here.")
@click.option(
    "--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Side by side."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what was found at the end.")
@click.pass_obj
def verify(
    common: Common,
    sample: float | None,
    max_duration: float | None,
    older_than: float | None,
    prefix: str,
    local: bool,
    download: bool,
    workers: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Hash what the remote holds, where it lies, and compare it with its names.

    What was checked longest ago comes first, and every check is remembered. A blob that is missing
    or wrong becomes pending again, and the next run mends it. Exit code 7 when something was wrong.
    """
    if local and download:
        raise click.UsageError("give only one of --local and --download")
    way: Way = "local" if local else "download" if download else "there"
    question = Question(way, prefix, sample, max_duration, older_than, workers)
    meter = Meter(sys.stderr, quiet=quiet)

    def progress(found: Findings) -> None:
        if meter.due:
            meter.show(progress_line(found))

    settings: StoreConfig | RemoteConfig
    if question.way == "local":
        settings = store = common.load(StoreConfig)
        with connect(settings, "verify") as conn:
            verify_schema(conn, settings.target, "verify --local")
            found = verify_store(conn, store, question, on_progress=progress)
    else:
        settings = remote = common.load(RemoteConfig)
        with connect(settings, "verify") as conn:
            verify_schema(conn, settings.target, "verify")
            found = verify_remote(
                conn, remote, question, on_progress=progress, on_outage=meter.outage
            )
    meter.close()
    if as_json:
        click.echo(json.dumps(as_object(found, settings.target, question)))
    else:
        click.echo("\n".join(lines(found, question, _root(settings))))
    sys.exit(found.exit_code)


def progress_line(found: Findings) -> str:
    """How far a check is."""
    left = eta_seconds(found.total - found.checked, found.checked, found.duration_s)
    rate = size(int(found.bytes / max(found.duration_s, 1e-3)))
    return (
        f"{found.checked:,} of {found.total:,} checked, {size(found.bytes)} ({rate}/s),"
        f" {found.wrong.total():,} wrong" + (f", about {duration(left)} left" if left else "")
    )


def as_object(found: Findings, target: str, question: Question) -> dict[str, Any]:
    """The findings as plain JSON values; `failures` holds the first 1000."""
    return {
        "target": target,
        "way": question.way,
        "total": found.total,
        "checked": found.checked,
        "bytes": found.bytes,
        "complete": found.complete,
        "duration_s": round(found.duration_s, 3),
        "wrong": {str(reason): count for reason, count in sorted(found.wrong.items())},
        "requeued": found.requeued,
        "failures": plain_failures(found.failures),
        "exit_code": found.exit_code,
    }


def lines(found: Findings, question: Question, root: str) -> list[str]:
    """The findings for a terminal: how serious, which, and what to do. root: the store."""
    where = "in the store" if question.way == "local" else "on the remote"
    said = [
        f"checked {found.checked:,} of {many(found.total, 'blob')} {where}, {size(found.bytes)} in"
        f" {duration(found.duration_s)}"
    ]
    if not found.complete:
        said.append("not all: the next call goes on with what was checked longest ago")
    if not found.wrong:
        said.append("all of them are right" if found.checked else "there was nothing to check")
        bound = sample_bound(found)
        if question.fraction is not None and bound is not None:
            said.append(f"with 95 % confidence fewer than {bound:.3%} of all are wrong")
        return said
    count = found.wrong.total()
    said.append(f"WRONG: {count:,} of them ({count / found.checked:.3%})")
    said += [f"{number:>10,} {reason}" for reason, number in sorted(found.wrong.items())]
    for failure in found.failures[:_SHOWN]:
        said.append(f"  {failure.blobid} {failure.reason} {printable(failure.detail)}")
    if count > _SHOWN:
        command = complete("ntt-backup-remote verify --json")
        said.append(f"  and {count - _SHOWN:,} more; `{command}` tells of the first 1000")
    if question.way == "local":
        names = " ".join(f"--blobid {one.blobid}" for one in found.failures[:3])
        command = complete(f"ntt-backup-remote restore --to {shlex.quote(root)}")
        said.append(f"fetch them from the remote: {command} {names}")
        return said
    if found.requeued:
        run = complete("ntt-backup-remote run")
        pending = many(found.requeued, "blob is", "blobs are")
        said.append(f"{pending} pending again; to mend this: {run}")
    if found.wrong[Reason.REMOTE_UNREADABLE]:
        said.append(
            "what cannot be read was left as it is: look at the disk and the kernel log there"
        )
    return said


def _root(settings: StoreConfig | RemoteConfig) -> str:
    return str(settings.source.root) if settings.source is not None else "DIR"
