"""The command `snapshot list` lists the versions of a set, or of all."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from datetime import datetime
from typing import Any

import click

from ntt_backup.cli.common import Common, json_option
from ntt_backup.cli.completion import set_names
from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import Origin
from ntt_backup.errors import SOME_FAILED, ConfigError, Unsupported
from ntt_backup.format import many, moment, printable, size, utc
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.repository.names import require_set
from ntt_backup.snapshot.repository.open import open_repository
from ntt_backup.snapshot.versions import Facts, Version, facts, versions
from ntt_backup.wire.snapshot_names import begun


@click.command()
@click.argument("set_name", metavar="[SET]", default="", shell_complete=set_names)
@json_option
@click.pass_obj
def list(common: Common, set_name: str, as_json: bool) -> None:
    """List the versions of a set, or of all.

    Of versions that cannot be read, since they are sealed or the ssh key may not, only names and
    sizes are listed. A version that is not signed by a key of this host is `not of this host`; one
    whose signature is wrong is FORGED. Exit code 7 when a manifest is damaged.
    """
    if set_name:
        require_set(set_name)
    settings = common.load(RemoteConfig)
    origins = Origins.of(settings)
    with closing(open_repository(settings)) as repository:
        found, known = versions(repository, set_name), dict[Version, Facts]()
        try:
            known |= {one.version: one for one in facts(repository, found, origins)}
        except (ConfigError, Unsupported) as error:  # It is sealed, or this key may not read it.
            click.echo(f"warning: only names and sizes can be told: {error}", err=True)
    rows = [fields(one, known.get(one)) for one in found]
    if as_json:
        click.echo(json.dumps({"target": common.target, "versions": rows}))
    else:
        said = [line(one, known.get(one)) for one in found]
        click.echo("\n".join(said or [f"no snapshots{' of ' * bool(set_name)}{set_name}"]))
    if any(one.problem for one in known.values()):
        sys.exit(SOME_FAILED)


def fields(version: Version, known: Facts | None) -> dict[str, Any]:
    """Returns a version as JSON values."""
    said: dict[str, Any] = {
        "set": version.set,
        "version": version.name,
        "begun": utc(_begun(version, known)),
        "finished": version.whole,
        "arrived": utc(version.arrived),
        "stored": version.size,
    }
    if known is not None and known.header is not None and known.trailer is not None:
        header, trailer = known.header, known.trailer
        said |= {"full": not header.parent, "parent": header.parent, "chain": len(header.chain)}
        said |= {"files": trailer.files, "bytes": trailer.bytes, "host": header.host}
        said |= {"unsettled": trailer.unsettled, "skipped": trailer.skipped}
        said["origin"] = str(known.origin)
    elif known is not None:
        said["damage"] = known.problem
    return said


def _begun(version: Version, known: Facts | None) -> datetime:
    header = known.header if known is not None else None
    return header.begun if header is not None else begun(version.name)


def line(version: Version, known: Facts | None) -> str:
    """Returns a version as a line for people."""
    begin = f"{version}  {moment(_begun(version, known))}"
    if known is None:
        return f"{begin}  {'' if version.whole else 'never finished, '}{size(version.size)} stored"
    if known.header is None or known.trailer is None:
        return f"{begin}  DAMAGED: {printable(known.problem)}"
    trailer, number = known.trailer, len(known.header.chain) - 1
    said = [
        f"increment {number}" if number else "full",
        f"{many(trailer.files, 'file')}, {size(trailer.bytes)}",
        f"{size(version.size)} stored",
    ]
    if trailer.unsettled:
        said.append(f"{trailer.unsettled:,} UNSETTLED")
    if trailer.skipped:
        said.append(f"{trailer.skipped:,} skipped")
    if known.origin != Origin.OURS:
        said.append(known.origin.text)
    return f"{begin}  {', '.join(said)}"
