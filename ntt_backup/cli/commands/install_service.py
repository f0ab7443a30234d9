"""The command `install-service` writes the service's files on this host, or into a package's tree.

It starts and enables nothing: what runs on a host is for its operator to say.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Final

import click

from ntt_backup.cli.common import GivenPath, writing
from ntt_backup.config.host_key import SERVICE_KEY, make_host_key
from ntt_backup.daemon.service_files import SETTINGS, UNITS, service_files
from ntt_backup.errors import ConfigError, SourceError
from ntt_backup.process.pipeline import start, version_of

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
@click.option("--uninstall", is_flag=True, help="Remove what was installed; data stays.")
@click.option(
    "--root",
    type=GivenPath(),
    default=Path("/"),
    help="Write below this directory, and run nothing: for a package, or an image.",
)
@click.option(
    "--prefix",
    type=GivenPath(),
    help="Put what belongs to a package below PREFIX/lib instead of /etc, such as /usr.",
)
@click.option("--program", help="What the units start.  [default: this program]")
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
    """Returns the path of this program. Raises ConfigError for one that the service's user could
    not start.
    """
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
