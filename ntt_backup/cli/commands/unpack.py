"""The command `unpack` unpacks pack files into a directory."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ntt_backup.cli.common import (
    Common,
    GivenPath,
    destination_option,
    identity_option,
    jobs_option,
    result_options,
)
from ntt_backup.cli.results import count_lines, failure_lines, fields_of, report
from ntt_backup.format import amount, duration, printable
from ntt_backup.report.lines import ProgressLine, pace, time_left
from ntt_backup.restore.unpack import UnpackedAll
from ntt_backup.restore.unpack import unpack as unpack_files


@click.command()
@click.argument("files", type=GivenPath(), nargs=-1, required=True, metavar="FILE...")
@destination_option("Directory for the blobs.")
@jobs_option()
@click.option("--no-verify", is_flag=True, help="Trust the packs: hash no blob.")
@identity_option
@result_options
@click.pass_obj
def unpack(
    common: Common,
    files: tuple[Path, ...],
    destination: Path,
    jobs: int,
    no_verify: bool,
    identity: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Unpack pack files into a directory.

    Blobs are unpacked into DIR/aa/bb/, each hashed before it appears under its name. Files in DIR
    that are right are kept. Of a damaged pack, all that can be found and is right is unpacked. Exit
    code 7 when a pack was damaged, or a blob wrong.
    """
    with ProgressLine(sys.stderr, quiet=quiet) as line:
        done = unpack_files(
            files,
            destination.absolute(),
            jobs=jobs,
            verify=not no_verify,
            keyring=common.keyring(identity),
            on_progress=lambda done: line.show(lambda: _progress_text(done)),
        )
    report(fields_of(done), lines(done, destination), done.exit_code, as_json=as_json)


def _progress_text(done: UnpackedAll) -> str:
    part = done.part or 0
    return (
        f"{done.unpacked:,} unpacked, {done.right:,} already there,"
        f" {pace(done.bytes, done.duration_s)}, {part:.1%}{time_left(part, done.duration_s)}"
    )


def lines(done: UnpackedAll, destination: Path) -> list[str]:
    """Returns what was unpacked, for a terminal."""
    said = [
        f"unpacked {amount(done.unpacked, done.bytes)} in {duration(done.duration_s)}, into"
        f" {destination}; {done.right:,} were already there and right"
    ]
    for text in done.damaged:
        said.append(f"DAMAGED: {printable(text)}")
        said.append("  only blobs of 16 KiB and more can be found without its table")
    if done.wrong:
        said.append(f"NOT unpacked: {len(done.wrong):,} that are damaged in their pack")
        said += [*count_lines(done.wrong.counts), *failure_lines(done.wrong)]
    return said
