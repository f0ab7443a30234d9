"""The command `snapshot verify` checks that versions are there as they were taken."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial

import click

from ntt_backup.cli.common import Common, result_options
from ntt_backup.cli.completion import set_names
from ntt_backup.cli.param_types import PART
from ntt_backup.cli.results import fields_of, first_lines, report
from ntt_backup.config import RemoteConfig
from ntt_backup.daemon.newest_check import missed_versions
from ntt_backup.errors import SOME_FAILED
from ntt_backup.format import duration, many, size
from ntt_backup.report.lines import ProgressLine, pace
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.repository.open import open_to_read
from ntt_backup.snapshot.repository.patient import PatientRepository
from ntt_backup.snapshot.verify import Findings, Question
from ntt_backup.snapshot.verify import verify as check

_TAKE = "ntt-backup-remote snapshot take"


@click.command()
@click.argument("which", metavar="[SET[@VERSION]]", default="", shell_complete=set_names)
@click.option(
    "--sample", "part", type=PART, metavar="PERCENT", help="Fetch a random part, such as 5%."
)
@click.option("--download", is_flag=True, help="Fetch all content, and compare it.")
@click.option(
    "--since", default="", metavar="DAY|VERSION", help="Check only versions from then on."
)
@result_options
@click.pass_obj
def verify(
    common: Common,
    which: str,
    part: float | None,
    download: bool,
    since: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check that versions are there as they were taken.

    Manifests are read whole, and the sizes of all files compared. To prove contents, --sample
    fetches a part of them, and --download all. Exit code 7 when a version is damaged.
    """
    if part is not None and download:
        raise click.UsageError("give only one of --sample and --download")
    question = Question(which, 1.0 if download else part or 0.0, since)
    settings = common.load(RemoteConfig)
    missed: list[str] | None = None  # Not looked for.
    with (
        ProgressLine(sys.stderr, quiet=quiet) as line,
        closing(
            PatientRepository(partial(open_to_read, settings), settings.run, line.outage)
        ) as repository,
    ):
        found = check(
            repository,
            question,
            lambda found: line.show(lambda: progress_text(found)),
            Origins.of(settings),
        )
        if "@" not in which:
            missed = [str(one) for one in missed_versions(settings, repository, which)]
    wrong = [one._asdict() for one in found.wrong]
    fields = {"target": common.target, **fields_of(found), "wrong": wrong, "missed": missed}
    said = [*lines(found, question), *(f"MISSED: {one}" for one in missed or ())]
    report(fields, said, found.exit_code or (SOME_FAILED if missed else 0), as_json=as_json)


def progress_text(found: Findings) -> str:
    """Returns how far a check is."""
    return (
        f"version {found.versions:,}, {many(found.entries, 'file')},"
        f" {pace(found.bytes, found.duration_s)}, {many(found.wrong_total, 'damage')}"
    )


def lines(found: Findings, question: Question) -> list[str]:
    """Returns what was checked, and what is damaged."""
    said = [
        f"checked {many(found.versions, 'version')} with {many(found.entries, 'file')}:"
        f" {many(found.files, 'stored file')}, {size(found.bytes)} of content, in"
        f" {duration(found.duration_s)}"
    ]
    if found.unfinished:
        said.append(f"{many(found.unfinished, 'version was', 'versions were')} never finished")
    if found.foreign:
        said.append(
            f"{many(len(found.foreign), 'version')} NOT of this host: nothing proves the maker"
        )
        said += first_lines(found.foreign, len(found.foreign))
    if not found.damaged:
        if not found.versions:
            return [*said, "there was nothing to check"]
        more = "" if question.share else "; to prove contents, add --sample 5% or --download"
        return [*said, f"all of it is right{more}"]
    said.append(f"DAMAGED: {', '.join(found.damaged)}")
    wrong = (f"{one.version} {one.path or one.file}: {one.detail}" for one in found.wrong)
    said += first_lines(wrong, found.wrong_total)
    sets = dict.fromkeys(one.partition("@")[0] for one in found.damaged)
    said += [f"take a version that needs no other: {_TAKE} {one} --full" for one in sets]
    return said
