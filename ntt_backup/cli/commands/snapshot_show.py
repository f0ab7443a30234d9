"""The command `snapshot show` shows a version, and with --files what is in it."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime

import click

from ntt_backup.cli.commands.snapshot_list import fields, line
from ntt_backup.cli.common import Common, json_option
from ntt_backup.cli.completion import set_names
from ntt_backup.cli.results import warn
from ntt_backup.config import RemoteConfig
from ntt_backup.format import moment, printable
from ntt_backup.snapshot.format.entry import DIRECTORY, FIFO, FILE, HARD_LINK, SYMLINK, Entry
from ntt_backup.snapshot.format.manifest import Header
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.repository.contract import SnapshotDamaged
from ntt_backup.snapshot.repository.open import open_repository
from ntt_backup.snapshot.versions import choose, facts, open_manifest

_TYPES = {
    FILE: stat.S_IFREG,
    HARD_LINK: stat.S_IFREG,
    DIRECTORY: stat.S_IFDIR,
    SYMLINK: stat.S_IFLNK,
    FIFO: stat.S_IFIFO,
}


@click.command()
@click.argument("version", metavar="SET[@VERSION]", shell_complete=set_names)
@click.option("--files", is_flag=True, help="List its files.")
@json_option
@click.pass_obj
def show(common: Common, version: str, files: bool, as_json: bool) -> None:
    """Show a version, the newest where none is named.

    With --files and --json there is one JSON object for each file.
    """
    settings = common.load(RemoteConfig)
    origins = Origins.of(settings)
    with closing(open_repository(settings)) as repository:
        chosen = choose(repository, version, origins, warn)
        if files:
            for entry in open_manifest(repository, chosen).entries():
                click.echo(json.dumps(entry_fields(entry)) if as_json else entry_line(entry))
            return
        known = next(facts(repository, [chosen], origins))
    if known.header is None:
        raise SnapshotDamaged(known.problem)
    if as_json:
        more = {"roots": known.header.roots, "chain_versions": known.header.chain}
        click.echo(json.dumps({"target": common.target, **fields(chosen, known), **more}))
    else:
        click.echo("\n".join([line(chosen, known), *header_lines(known.header)]))


def header_lines(header: Header) -> Iterator[str]:
    """Yields what a version is of, and which others it needs, for people."""
    for root in header.roots:
        yield f"  of {printable(root)}{f' on {printable(header.host)}' if header.host else ''}"
    for needed in header.chain[:-1]:
        yield f"  needs {header.set}@{needed}"


def entry_fields(entry: Entry) -> dict[str, object]:
    """Returns a file as JSON values."""
    return {
        "path": entry.path,
        "kind": entry.kind,
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "mtime": entry.mtime / 1e9,
        "size": entry.size,
        **({"target": entry.target} if entry.target else {}),
        **({"blake3": entry.digest} if entry.digest else {}),
        **({"unsettled": True} if entry.unsettled else {}),
    }


def entry_line(entry: Entry) -> str:
    """Returns a file as `ls -l` shows it, with what was hard to take behind it."""
    mode = stat.filemode(_TYPES[entry.kind] | entry.mode)
    when = _moment(entry.mtime)
    arrow = {SYMLINK: " -> ", HARD_LINK: " = "}.get(entry.kind, "")
    name = printable(entry.path) + (arrow + printable(entry.target) if arrow else "")
    end = "  (UNSETTLED)" if entry.unsettled else ""
    return f"{mode} {entry.uid:>5} {entry.gid:>5} {entry.size:>13} {when} {name}{end}"


def _moment(nanoseconds: int) -> str:
    try:
        return moment(datetime.fromtimestamp(nanoseconds // 10**9, UTC), zone=False)
    except (ValueError, OverflowError, OSError):
        return f"{nanoseconds // 10**9:>16}"
