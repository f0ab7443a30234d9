"""The command `snapshot forget` removes versions that are not to be kept."""

from __future__ import annotations

import sys
from contextlib import closing
from datetime import UTC, datetime
from functools import partial

import click

from ntt_backup import newest
from ntt_backup.cli.common import Common, json_option
from ntt_backup.cli.completion import set_names
from ntt_backup.cli.results import report
from ntt_backup.config import RemoteConfig
from ntt_backup.dump.retention import Retention
from ntt_backup.errors import ConfigError, LockHeld
from ntt_backup.format import many, moment, printable, size
from ntt_backup.report.lines import ProgressLine
from ntt_backup.snapshot.forget import plan_of
from ntt_backup.snapshot.job import set_lock
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.repository.names import require_set
from ntt_backup.snapshot.repository.open import open_repository
from ntt_backup.snapshot.repository.patient import PatientRepository
from ntt_backup.snapshot.retention import Plan
from ntt_backup.snapshot.versions import Version, versions

_COUNT = click.IntRange(0, 100_000)


@click.command()
@click.argument("set_name", metavar="SET", shell_complete=set_names)
@click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the newest N versions.")
@click.option("--keep-daily", type=_COUNT, metavar="N", help="Keep one version of each of N days.")
@click.option("--keep-weekly", type=_COUNT, metavar="N", help="Keep one of each of N weeks.")
@click.option(
    "--trust-target",
    is_flag=True,
    help="Count every version, by the time that it says itself, whoever made it: after the target"
    " was copied, or the host key was lost.",
)
@click.option(
    "--drop-doubtful", is_flag=True, help="Remove all doubtful versions that no other needs, too."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def forget(
    common: Common,
    set_name: str,
    keep_last: int | None,
    keep_daily: int | None,
    keep_weekly: int | None,
    trust_target: bool,
    drop_doubtful: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove versions that are not to be kept.

    Without --keep-... the settings of the set decide. The newest version always stays, and so does
    every one that a kept version needs: a full one goes with the last of its increments.

    Versions count by when they arrived on the target. Doubtful ones do not count, and stay: those
    that are not of this host, as its host key tells, that say another time than that of their
    arrival, or that arrived many at once.
    """
    settings = common.load(RemoteConfig)
    require_set(set_name)
    named = settings.snapshots.get(set_name)
    asked = (keep_last, keep_daily, keep_weekly)
    if any(one is not None for one in asked):
        rule = Retention(*(one or 0 for one in asked))
    elif named is not None:
        rule = Retention.of(named)
    else:
        raise click.UsageError(f"say what to keep: {set_name} is not in the configuration")
    with (
        ProgressLine(sys.stderr) as line,
        set_lock(settings, set_name),
        closing(
            PatientRepository(partial(open_repository, settings), settings.run, line.outage)
        ) as repository,
    ):
        if named is None and not versions(repository, set_name):
            raise ConfigError(
                f"{set_name} has no version, and is not in the configuration",
                hint="see ntt-backup-remote snapshot list",
            )

        def ask() -> Plan:
            return plan_of(
                repository,
                set_name,
                rule,
                datetime.now(UTC),
                Origins.of(settings),
                every=named.every if named is not None else None,
                trust=trust_target,
                drop=drop_doubtful,
            )

        found = ask()
        if not as_json:
            click.echo("\n".join(lines(found)))
        removes = bool(found.names)
        if removes and not yes:
            removes = _agreed()
            # Another host may have taken a version that builds on one of these.
            if removes and ask().names != found.names:
                raise LockHeld(
                    f"versions of {set_name} have changed since: nothing was removed",
                    hint="call it again, and look at what it would remove now",
                )
        if removes:
            repository.do(lambda remote: remote.remove(found.names))
            newest.removed(settings, "version", [one.name for one in found.gone], set_name)
    said = f"removed {size(found.size)}" if removes else "nothing was removed"
    told = {"target": common.target, **fields(found), "removed": removes}
    report(told, [said], 0, as_json=as_json)


def _agreed() -> bool:
    """Returns whether the operator wants it. Raises ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError("nothing was removed: nobody can be asked", hint="say it with --yes")
    return click.confirm("Remove them?", err=True)


def fields(found: Plan) -> dict[str, object]:
    """Returns a plan as JSON values."""
    return {
        "kept": [one.name for one in found.kept],
        "needed": [{"version": one.name, "for": why} for one, why in found.needed],
        "gone": [one.name for one in found.gone],
        "unfinished": [one.name for one in found.dead],
        "doubtful": [{"version": one.name, "why": why} for one, why in found.doubtful],
        "bytes": found.size,
    }


def lines(found: Plan) -> list[str]:
    """Returns a plan for people."""

    def line(verb: str, one: Version, more: str = "") -> str:
        return f"{verb:<6} {one}  {moment(found.begun(one))}, {size(one.size)}{more}"

    said = [line("keep", one) for one in found.kept]
    said += [line("keep", one, f", which {why} needs") for one, why in found.needed]
    said += [line("remove", one) for one in found.gone]
    said += [line("remove", one, ", which was never finished") for one in found.dead]
    said += [line("keep", one, f", DOUBTFUL: {printable(why)}") for one, why in found.doubtful]
    going = many(len(found.gone) + len(found.dead), "version")
    told = [*sorted(said, key=lambda one: one[7:]), f"{going} to remove, {size(found.size)}"]
    if found.doubtful:
        told.append(
            f"{many(len(found.doubtful), 'doubtful version')} neither counted nor removed: look at"
            " them, then add --drop-doubtful; or --trust-target, if they are right"
        )
    return told
