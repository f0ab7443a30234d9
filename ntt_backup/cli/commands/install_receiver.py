"""The command `install-receiver` prepares an ssh key that can only back up.

A key that may run anything on the remote makes whoever holds this host the master of its backups,
too. A forced command takes that away, but its line in authorized_keys is easily got wrong: quotes
within quotes, an option forgotten. So it is made from the settings. Nothing is installed: the right
to do that is just what this host should not have.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

import click

from ntt_backup.cli.common import Common, GivenPath, writing
from ntt_backup.client.bootstrap import standalone
from ntt_backup.config import RemoteSettings, Settings
from ntt_backup.errors import ConfigError, complete
from ntt_backup.process.durable import durable_file

RECEIVER: Final = "ntt-backup-receive"
_ALLOWED: Final = "put,list,verify,dump,snapshot"
_NO_KEY: Final = "ssh-ed25519 AAAA... (the public half of the key for this job)"


@click.command("install-receiver")
@click.option("--print", "show", is_flag=True, help="Print the steps, and the line for sshd.")
@click.option(
    "--write",
    type=GivenPath(path_type=str),  # A Path would not tell ./- from -.
    help="Write the receiver to this file, or to standard output (-); copy it to the remote.",
)
@click.pass_obj
def install_receiver(common: Common, show: bool, write: str | None) -> None:
    """Prepare an ssh key that can only back up.

    This command installs nothing: it writes the receiver, and says what to do with it.
    """
    if not show and write is None:
        raise click.UsageError("give --print, --write FILE, or both")
    if write == "-":
        if show:
            raise click.UsageError("--print and --write - would both use standard output: give one")
        click.echo(standalone().encode(), nl=False)
    elif write is not None:
        write_receiver(Path(write))
    if show:
        remote = common.load(Settings).remote
        if remote.kind != "ssh":
            raise ConfigError(
                f"a receiver is installed on another machine, and {remote.url} is none",
                hint="name an ssh target with --target",
            )
        click.echo(complete(steps(remote)))


def key_line(remote: RemoteSettings) -> str:
    """Returns the line for authorized_keys on the remote."""
    command = f"{RECEIVER} --root {shlex.quote(remote.path)} --allow {_ALLOWED} --require blake3"
    # sshd takes the text up to the next quote without a backslash before it.
    quoted = command.replace('"', '\\"')
    return f'restrict,command="{quoted}" {_public_key(remote.identity_file) or _NO_KEY}'


def steps(remote: RemoteSettings) -> str:
    """Returns what to do, in order, for a person."""
    lines = [
        f"How to let this host do no more at {remote.host} than add to {remote.path},",
        "and remove old dumps of the catalog there, never the newest:",
        "",
        f"1. Put the receiver on the remote as /usr/local/bin/{RECEIVER}, with mode 755, owned by",
        "   root. It is one file for any Python from 3.8 on, and is written by",
        f"       ntt-backup-remote install-receiver --write {RECEIVER}",
        f"   (A remote that has the package ntt-backup has {RECEIVER} already; that must be",
        "   in the PATH that sshd gives to commands.)",
        "2. Give it BLAKE3: `apt-get install b3sum`, or the Python module blake3 or libblake3.",
        "   Without it the receiver must take this host's word for what a new blob's name should",
        "   be; --require blake3 in the line below has it serve nobody then.",
        f"3. Make the directory {remote.path}, if it is missing, and give it to the account.",
        "4. Put this line into ~/.ssh/authorized_keys of that account, in place of every",
        "   other line with the same key:",
        "",
        key_line(remote),
        "",
        "5. On this host: run.strategy must be stream or auto; then see that it works:",
        "       ntt-backup-remote check",
    ]
    if _public_key(remote.identity_file) is None:
        name = remote.identity_file or "~/.ssh/id_ed25519"
        lines[-2:-2] = [
            "   The key is not known: set remote.identity_file. Its public half is shown by",
            f"       ssh-keygen -y -f {name}",
        ]
    return "\n".join(lines)


def write_receiver(path: Path) -> None:
    """Writes the receiver as one file, ready to be run. Raises ConfigError."""
    with writing(path):
        if path.exists() and not path.is_file():  # Such as a pipe.
            path.write_bytes(standalone().encode())
            return
        with durable_file(path.resolve(), 0o755) as file:
            file.write(standalone().encode())


def _public_key(identity: Path | None) -> str | None:
    """Returns the key that belongs to an identity file; None where it is not to be read."""
    if identity is None:
        return None
    try:
        text = identity.with_name(f"{identity.name}.pub").read_text("utf-8")
    except (OSError, ValueError):
        return None
    line = text.partition("\n")[0].strip()
    return line if len(line.split()) >= 2 and line.isprintable() else None
