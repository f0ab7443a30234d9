"""The commands `install-service` and `install-receiver` prepare this host and the remote."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
from pathlib import Path
from typing import Final

import click

from ntt_backup.cli import options
from ntt_backup.cli.common import Common, writing
from ntt_backup.cli.options import PATH, flag, value
from ntt_backup.client.bootstrap import standalone
from ntt_backup.config import RemoteSettings, Settings
from ntt_backup.config.host_key import SERVICE_KEY, make_host_key
from ntt_backup.daemon.service_files import SETTINGS, UNITS, service_files
from ntt_backup.errors import ConfigError, SourceError, complete
from ntt_backup.process.durable import durable_file
from ntt_backup.process.pipeline import start, version_of

# --- the service ----------------------------------------------------------------------------------

# It starts and enables nothing: what runs on a host is for its operator to say.
_USER: Final = "ntt-backup"
_SECONDS: Final = 900.0
_BOOTED: Final = Path("/run/systemd/system")
NEXT: Final = f"""\
next, as docs/install.md has it in full:
  edit /{SETTINGS}: source.root, remote.url, catalog.url
  for ssh, a key that the remote knows: /var/lib/ntt-backup/.ssh/id_ed25519
  su - postgres -c 'createuser {_USER}'                       # where the catalog is on this host,
  su - postgres -c 'createdb --owner {_USER} copyjob'         # and does not exist yet
  runuser -u {_USER} -- ntt-backup-remote init-db
  runuser -u {_USER} -- ntt-backup-remote scan                # adds what only the store has
  runuser -u {_USER} -- ntt-backup-remote check
  systemctl enable --now ntt-backup-remote.service            # or ntt-backup-remote-once.timer"""
_LEFT: Final = (
    f"left: /{SETTINGS.parent}, /var/lib/ntt-backup (the key), /var/log/ntt, drop-ins of units,"
    f" the user {_USER}"
)


@click.command("install-service")
@flag("--uninstall", "Remove what was installed; data stays.")
@value("--root", PATH, "Write below this directory, and run nothing.", default=Path("/"))
@value("--prefix", PATH, "Write a package's files below PREFIX/lib and not /etc, such as /usr.")
@value("--program", str, "What the units start.  [default: this program]")
def install_service(uninstall: bool, root: Path, prefix: Path | None, program: str | None) -> None:
    """Install the service for systemd, or remove it.

    Writes units, user, directories, log rotation and sample settings; enables and starts nothing.
    What was changed by hand is kept, so it may be run again, such as after an upgrade.
    """
    here = root.resolve() == Path("/")
    program = program or _this_program(check=here)
    release = _release() if here and prefix is None else 0
    files = list(service_files(program, prefix, release))
    if uninstall:
        units = [file.path.name for file in files if file.path.parent.parts[-2:] == UNITS.parts]
        if here and _BOOTED.is_dir():
            _run("systemctl", "stop", "ntt-backup-remote*")
            _run("systemctl", "--quiet", "disable", *units, may_fail=True)
    for file in files:
        with writing(root / file.path, hint="run it as root"):
            done = file.remove(root) if uninstall else file.write(root)
        click.echo(f"{root / file.path}: {done}")
    if here:
        _apply(uninstall)
        click.echo(_LEFT if uninstall else NEXT)


def _this_program(*, check: bool) -> str:
    """Returns the path of this program. Raises ConfigError if the service could not start it."""
    program = Path(os.path.abspath(sys.argv[0]))
    closed = [one for one in program.resolve().parents if not one.stat().st_mode & stat.S_IXOTH]
    if check and closed:
        raise ConfigError(
            f"the user {_USER} could not start {program}",
            detail=f"{closed[0]} is closed to others",
            hint="install the program into a directory such as /opt/ntt-backup",
        )
    return str(program)


def _release() -> int:
    """Returns the release of this host's systemd; 0 where there is none."""
    try:
        return int(version_of(["systemctl", "--version"]).split()[1])
    except (SourceError, ValueError, IndexError):
        return 0


def _apply(uninstall: bool) -> None:
    """Makes the user and the directories, and has systemd read its units."""
    if not uninstall:
        _run("systemd-sysusers", "ntt-backup.conf")
        _run("systemd-tmpfiles", "--create", "ntt-backup.conf")
        with writing(Path("/", SETTINGS)):
            shutil.chown(Path("/", SETTINGS), group=_USER)
        if made := make_host_key(SERVICE_KEY):
            click.echo(made)
    if _BOOTED.is_dir():
        _run("systemctl", "daemon-reload")


def _run(*argv: str, may_fail: bool = False) -> None:
    """Runs a program of systemd. Raises ConfigError where it fails."""
    child = start(argv)
    child.close_stdin()
    child.output(_SECONDS)
    if (status := child.kill()) and not may_fail:
        raise ConfigError(f"`{' '.join(argv)}` failed ({status})", detail=child.stderr.text)


# --- the receiver ---------------------------------------------------------------------------------

# A key that may run anything on the remote makes whoever holds this host the master of its backups,
# too. A forced command takes that away, but its line in authorized_keys is easily got wrong: quotes
# within quotes, an option forgotten. So it is made from the settings. Nothing is installed: the
# right to do that is just what this host should not have.
RECEIVER: Final = "ntt-backup-receive"
_ALLOWED: Final = {
    "files": "put,list,verify,dump,snapshot --require blake3",
    "packs": "packs,dump,snapshot",
}
_NO_KEY: Final = "ssh-ed25519 AAAA... (the public half of the key for this job)"


@options.command()
@flag("--print", "Print the steps, and the line for sshd.", "show")
@value(
    "--write", options.GivenPath(path_type=str), "Write the receiver to this file; - for stdout."
)
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
    command = (
        f"{RECEIVER} --root {shlex.quote(remote.path)} --allow {_ALLOWED[remote.layout or 'files']}"
    )
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
