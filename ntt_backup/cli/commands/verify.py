"""The command `verify` checks the blobs on the remote by their hashes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ntt_backup.audit.verify import Findings, Question, Way, verify_remote, verify_store
from ntt_backup.audit.verify_bucket import verify_bucket
from ntt_backup.cli.check_note import noted
from ntt_backup.cli.common import (
    Common,
    bwlimit_option,
    identity_flag,
    identity_option,
    open_catalog,
    prefix_option,
    result_options,
    sessions_option,
)
from ntt_backup.cli.param_types import DURATION, PART, SIZE
from ntt_backup.cli.results import count_lines, failure_lines, fields_of, report, strangers
from ntt_backup.config import RemoteConfig, StoreConfig
from ntt_backup.daemon.newest_check import NOT_LOOKED, look
from ntt_backup.errors import SOME_FAILED, BackupError
from ntt_backup.format import duration, many, size
from ntt_backup.model import Reason
from ntt_backup.report.lines import ProgressLine, pace, time_left


@click.command()
@click.option(
    "--sample", "fraction", type=PART, metavar="PERCENT", help="Check a random part, such as 1%."
)
@click.option(
    "--max-duration", type=DURATION, metavar="TIME", help="Stop after this time: 90s, 2h, 1d."
)
@click.option(
    "--max-bytes", type=SIZE, metavar="SIZE", help="Stop before more than this is read: 10GB, 1TiB."
)
@click.option(
    "--older-than",
    type=DURATION,
    metavar="TIME",
    help="Check only blobs whose last check is older than this, such as 30d.",
)
@prefix_option("Check")
@click.option("--local", is_flag=True, help="Check the local store instead of the remote.")
@click.option(
    "--download", is_flag=True, help="Fetch every blob and hash it locally, not on the remote."
)
@bwlimit_option("that --download fetches")
@sessions_option(default=2)
@identity_option
@result_options
@click.pass_obj
def verify(
    common: Common,
    /,
    local: bool,
    download: bool,
    identity: Path | None,
    as_json: bool,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Check the blobs on the remote by their hashes.

    A bucket cannot hash: its objects are looked up, size and checksum are compared with what was
    sent, and --download reads them. Blobs whose last check is oldest come first, and every check is
    recorded. A blob that is missing or wrong becomes pending again, and the next run repairs it.
    Exit code 7 when a blob was wrong.
    """
    if local and download:
        raise click.UsageError("give only one of --local and --download")
    if chosen["bwlimit"] and not download:
        raise click.UsageError("--bwlimit is for --download: nothing else goes over the link")
    way: Way = "local" if local else "download" if download else "there"
    question = Question(way, **chosen)
    sample = f"{question.fraction:.3%}" if question.fraction else None
    asked = {"way": "download" if download else "", "prefix": question.prefix, "sample": sample}
    command = "verify --local" if local else "verify"
    # None: not looked for, or not known.
    missed: list[str] | None = None
    with noted(common, command, **asked) as note, ProgressLine(sys.stderr, quiet=quiet) as line:

        def progress(found: Findings) -> None:
            note.saw(found.checked, found.bytes, len(found.wrong), found.exit_code)
            line.show(lambda: progress_text(found))

        if local:
            store = common.load(StoreConfig)
            with open_catalog(store, "verify --local", application="verify") as conn:
                found = verify_store(conn, store, question, on_progress=progress)
            said = [*lines(found, question), *advice_for_store(found, store.source.root)]
        else:
            remote = common.load(RemoteConfig, identity_flag(identity))
            with open_catalog(remote, "verify") as conn:
                check = verify_bucket if remote.remote.kind == "s3" else verify_remote
                found = check(conn, remote, question, on_progress=progress, on_outage=line.outage)
            said = [*lines(found, question), *advice_for_remote(found)]
            try:
                missed = [str(one) for one in look(remote)]
            except BackupError as error:
                said.append(NOT_LOOKED.format(error))
            said += [f"MISSED: {one}" for one in missed or ()]
            if remote.remote.kind == "s3" and way == "there":
                said.append(
                    "only sizes and checksums were asked for; to prove the contents:"
                    " ntt-backup-remote verify --download"
                )
        progress(found)
        code = found.exit_code or (SOME_FAILED if missed else 0)
        if missed:
            note.exit_code, note.detail = code, "; ".join([*filter(None, [note.detail]), *missed])
    fields = {"target": common.target, "way": way, **fields_of(found), "missed": missed}
    report(fields, said, code, as_json=as_json)


def progress_text(found: Findings) -> str:
    """Returns how far a check is."""
    return (
        f"{found.checked:,} of {found.total:,} checked, {pace(found.bytes, found.duration_s)},"
        f" {len(found.wrong):,} wrong"
        + time_left(found.checked / max(found.total, 1), found.duration_s)
    )


def lines(found: Findings, question: Question) -> list[str]:
    """Returns how many blobs were checked, and which are wrong."""
    where = "in the store" if question.way == "local" else "on the remote"
    said = [
        f"checked {found.checked:,} of {many(found.total, 'blob')} {where}, {size(found.bytes)} in"
        f" {duration(found.duration_s)}"
    ]
    if not found.complete:
        said.append("not all were checked: the next call begins with those checked longest ago")
    if found.left_out:
        many_are = many(found.left_out, "blob is", "blobs are")
        said.append(f"{many_are} never checked so: larger than --max-bytes, or in a pack that is")
    if found.lost_packs:
        said.append(f"LOST: {many(found.lost_packs, 'pack')}, missing or damaged as a whole")
    said += strangers(found.strangers)
    if found.by_size:
        said.append(
            f"{many(found.by_size, 'blob')} of them by the size of their objects alone: the object"
            " store has no checksum of these that can be compared, and another object of the same"
            " size is not noticed"
        )
    if found.wrong:
        count = len(found.wrong)
        said.append(f"WRONG: {count:,} of them ({count / found.checked:.3%})")
        return [*said, *count_lines(found.wrong.counts), *failure_lines(found.wrong)]
    if not found.checked:
        return [*said, "there was nothing to check"] if found.complete else said
    if found.lost_packs:
        return [*said, "all their blobs are in other packs, or not copied any more"]
    if found.by_size == found.checked:
        return [*said, "none is missing, and none has another size"]
    said.append("all of them are right")
    if question.fraction is not None:
        # The rule of three: if a part p were wrong, n of n would be right with (1-p)^n < e^(-pn).
        bound = min(1.0, 3 / found.checked)
        said.append(f"with 95% confidence fewer than {bound:.3%} of all blobs are wrong")
    return said


def advice_for_store(found: Findings, root: Path) -> list[str]:
    """Returns how to repair the store's blobs."""
    if not found.wrong:
        return []
    names = " ".join(f"--blobid {one.blobid}" for one in found.wrong.first[:3])
    command = f"ntt-backup-remote restore --to {shlex.quote(str(root))} {names}"
    return [f"fetch them from the remote: {command}"]


def advice_for_remote(found: Findings) -> list[str]:
    """Returns how to repair the remote's blobs."""
    said = []
    if found.requeued:
        pending = many(found.requeued, "blob is", "blobs are")
        said.append(f"{pending} pending again; to repair this: ntt-backup-remote run")
    if found.wrong.counts[Reason.REMOTE_UNREADABLE]:
        said.append(
            "blobs that cannot be read were left as they are: look at the disk and the kernel log"
            " of the remote"
        )
    return said
