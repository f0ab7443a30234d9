"""The command `snapshot` keeps versions of files and trees that change in place."""

from __future__ import annotations

import click

from ntt_backup.cli.lazy_group import LazyGroup

_COMMANDS = {
    "diff": "Show what differs between two versions.",
    "forget": "Remove versions that are not to be kept.",
    "list": "List the versions of a set, or of all.",
    "restore": "Restore a version, or a part of it, into a directory.",
    "show": "Show a version, the newest where none is named.",
    "take": "Make a version of a set on the target.",
    "verify": "Check that versions are there as they were taken.",
}


@click.group(cls=LazyGroup, helps=_COMMANDS, prefix="snapshot_")
def snapshot() -> None:
    """Keep versions of files that change in place, and bring them back.

    A set has a name and paths. Each `take` makes a version of it on the target, and sends what has
    changed since the last one.
    """
