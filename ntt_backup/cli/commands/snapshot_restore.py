"""The command `snapshot restore` restores a version, or a part of it, into a directory."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from ntt_backup.cli.common import Common, destination_option, jobs_option, result_options
from ntt_backup.cli.completion import set_names
from ntt_backup.cli.results import fields_of, first_lines, report, warn
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import Origin
from ntt_backup.format import duration, many, printable, size
from ntt_backup.report.lines import ProgressLine, pace, time_left
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.repository.open import open_to_read
from ntt_backup.snapshot.repository.patient import PatientRepository
from ntt_backup.snapshot.restore.landlock import confine
from ntt_backup.snapshot.restore.plan import Options
from ntt_backup.snapshot.restore.version import Restored
from ntt_backup.snapshot.restore.version import restore as restore_version


@click.command()
@click.argument("wanted", metavar="SET[@VERSION]", shell_complete=set_names)
@destination_option("Directory for the files: /etc/hosts becomes DIR/etc/hosts.")
@click.option(
    "--path",
    "patterns",
    multiple=True,
    metavar="GLOB",
    help="Restore only what fits, with all that is below it: '/etc/ssh', '*.conf', '/srv/**/a?';"
    " may be repeated.",
)
@click.option(
    "--delta",
    is_flag=True,
    help="Hash the files that are there, and fetch only those parts of them that differ.",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="With --delta, write into the files themselves and not into copies, which saves room; an"
    " interruption leaves a file half changed.",
)
@jobs_option(", each with its own connection")
@click.option(
    "--trust-target",
    is_flag=True,
    help="Restore the version also where nothing proves that this host made it.",
)
@click.option(
    "--no-privileges",
    is_flag=True,
    help="Make files of this user's, and set no bits of set-user-id and set-group-id, and no"
    " capabilities: for a version whose maker is not trusted.",
)
@click.option("--no-verify", is_flag=True, help="Do not compare new files with their hashes.")
@result_options
@click.pass_obj
def restore(
    common: Common,
    wanted: str,
    destination: Path,
    patterns: tuple[str, ...],
    delta: bool,
    in_place: bool,
    jobs: int,
    trust_target: bool,
    no_privileges: bool,
    no_verify: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Restore a version, or a part of it, into a directory.

    Without a version, the newest of this host. A version that this host did not make, as its host
    key tells, is refused without --trust-target. Each file is compared with its hash. A file in DIR
    that has the size and the time of the version's is taken for it, and hashed where an earlier
    restore did not finish, so the same command continues after an interruption or a power cut. A
    file that differs is replaced, and one that the version lacks is left alone. Exit code 7 when a
    file could not be restored.
    """
    if in_place and not delta:
        raise click.UsageError("--in-place is a way of --delta: give that, too")
    settings = common.load(RemoteConfig)
    destination = destination.absolute()
    with ProgressLine(sys.stderr, quiet=quiet) as line:
        done = restore_version(
            lambda: PatientRepository(partial(open_to_read, settings), settings.run, line.outage),
            wanted,
            destination,
            Options(
                delta=delta,
                in_place=in_place,
                verify=not no_verify,
                privileges=not no_privileges,
            ),
            jobs=jobs,
            patterns=patterns,
            origins=Origins.of(settings),
            trust=trust_target,
            on_progress=lambda done: line.show(lambda: progress_text(done)),
            before_writing=lambda: confine([destination]),
            tell=warn,
        )
    fields = {"target": common.target, **fields_of(done)}
    report(fields, lines(done, destination), done.exit_code, as_json=as_json)


def progress_text(done: Restored) -> str:
    """Returns how far a restore is."""
    part = done.part or 0
    text = (
        f"{done.files:,} restored, {done.kept:,} already there,"
        f" {pace(done.bytes, done.duration_s)}, {part:.1%}{time_left(part, done.duration_s)}"
    )
    return f"{text}, {done.wrong:,} wrong" if done.wrong else text


def lines(done: Restored, destination: Path) -> list[str]:
    """Returns what was restored, for a terminal."""
    said = [
        f"restored {many(done.files, 'file')} of {done.version}, {size(done.bytes)} in"
        f" {duration(done.duration_s)}, into {destination}; {done.kept:,} were already there and"
        f" right; {size(done.fetched)} fetched"
    ]
    said += [f"NOTE: {printable(one)}" for one in done.notes]
    if done.origin != Origin.OURS:
        origin = Origin(done.origin)
        said.append(f"NOTE: by --trust-target: this version is {origin.text}: {origin.why}")
    if done.wrong:
        said.append(f"NOT restored: {many(done.wrong, 'file')}")
        said += first_lines((f"{path}: {why}" for path, why in done.problems), done.wrong)
    return said
