"""The command `snapshot diff` shows what differs between two versions."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing

import click

from ntt_backup.cli.commands.snapshot_show import entry_fields
from ntt_backup.cli.common import Common, json_option
from ntt_backup.cli.completion import set_names
from ntt_backup.cli.results import warn
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import Origin
from ntt_backup.errors import ConfigError
from ntt_backup.format import printable, size
from ntt_backup.snapshot.diff import Difference, Kind, differences
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.repository.open import open_repository
from ntt_backup.snapshot.versions import (
    choose,
    facts,
    newest_of_host,
    open_manifest,
    versions,
)

_SIGNS = {Kind.ADDED: "+", Kind.REMOVED: "-", Kind.CHANGED: "M", Kind.ATTRIBUTES: "a"}


@click.command()
@click.argument("old", metavar="SET[@OLD]", shell_complete=set_names)
@click.argument("new", metavar="[SET][@NEW]", default="")
@json_option
@click.pass_obj
def diff(common: Common, old: str, new: str, as_json: bool) -> None:
    """Show what differs between two versions.

    SET alone compares its last two; one version is compared with the newest. A line begins with
    `+` for a new file, `-` for one that is gone, `M` where the content is another, `a` where only
    mode, owner, time or attributes are. With --json there is one JSON object for each.
    """
    name = old.partition("@")[0]
    settings = common.load(RemoteConfig)
    origins = Origins.of(settings)
    with closing(open_repository(settings)) as repository:
        if not new and old == name:
            after = choose(repository, name, origins, warn)
            older = [
                one for one in versions(repository, name) if one.whole and one.name < after.name
            ]
            if not older:
                raise ConfigError(
                    f"{name} has no version before {after}",
                    hint=f"make another one: ntt-backup-remote snapshot take {name}",
                )
            before = newest_of_host(repository, older, origins) or older[-1]
        else:
            before = choose(repository, old, origins, warn)
            after = choose(
                repository, name + new if not new or new.startswith("@") else new, origins, warn
            )
        for known in facts(repository, [before, after], origins):
            if known.origin != Origin.OURS:
                click.echo(f"warning: {known.version} is {known.origin.text}", err=True)
        counts: Counter[Kind] = Counter()
        grown = 0
        for one in differences(open_manifest(repository, before), open_manifest(repository, after)):
            counts[one.kind] += 1
            grown += (one.new.size if one.new else 0) - (one.old.size if one.old else 0)
            click.echo(json.dumps(fields(one)) if as_json else line(one))
    if not as_json:
        said = ", ".join(f"{counts[kind]:,} {kind}" for kind in Kind if counts[kind])
        change = f"; {size(abs(grown))} {'more' if grown > 0 else 'less'}" if grown else ""
        click.echo(f"{before} and {after}: {said or 'nothing differs'}{change}", err=True)


def fields(one: Difference) -> dict[str, object]:
    """Returns a difference as JSON values."""
    was = {"was": entry_fields(one.old)} if one.old is not None and one.new is not None else {}
    return {"difference": str(one.kind), **entry_fields(one.entry), **was}


def line(one: Difference) -> str:
    """Returns a difference as a line for people."""
    before, after = one.old, one.new
    what = f"{_SIGNS[one.kind]} {printable(one.entry.path)}"
    if one.kind == Kind.CHANGED and before is not None and after is not None:
        if before.kind != after.kind:
            return f"{what}  (was {before.kind}, is {after.kind})"
        if before.size != after.size:
            return f"{what}  ({size(before.size)}, now {size(after.size)})"
    return what
