"""The commands `install-service` and `install-receiver` prepare this host and the remote."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from ntt_backup.cli import options
from ntt_backup.cli.global_options import Common, writing
from ntt_backup.cli.options import PATH, flag, value
from ntt_backup.client.bootstrap import standalone
from ntt_backup.config import CatalogConfig, RemoteSettings, Settings, examine
from ntt_backup.config.sections import SERVICE_HOME, LogSettings
from ntt_backup.config.signing_key import SERVICE_KEY, make_signing_key
from ntt_backup.config.sources import CONFIG_VARIABLE
from ntt_backup.daemon.event_log import make_log
from ntt_backup.daemon.service_files import (
    SETTINGS,
    UNITS,
    USER,
    ServiceFile,
    is_sample,
    read_all_files,
    service_files,
    service_user,
    user_files,
)
from ntt_backup.errors import ConfigError, SourceError, complete
from ntt_backup.model import DEFAULT_TARGET
from ntt_backup.name_hash import HashOfNames
from ntt_backup.process.durable import durable_file
from ntt_backup.process.spawn import run, version_of

# --- the service ----------------------------------------------------------------------------------

# It starts and enables nothing: what runs on a host is for its operator to say.
_SECONDS: Final = 900.0
_BOOTED: Final = Path("/run/systemd/system")
_PACKAGED: Final = Path("usr/lib")
_ACCOUNT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}")
# What is kept about targets, and the lock and the socket of a run; the log is not in these.
_STATE: Final = (SERVICE_HOME, Path("/run/ntt-backup"))


def next_steps(user: str) -> str:
    """Returns what is to be done after the installation, for people."""
    return f"""\
next, as docs/install.md has it in full:
  edit /{SETTINGS}: source.root, remote.url, catalog.url
  for ssh, a key that the remote knows: {_home(user)}/.ssh/id_ed25519
  su - postgres -c 'createuser {user}'                       # where the catalog is on this host,
  su - postgres -c 'createdb --owner {user} copyjob'         # and does not exist yet
  runuser -u {user} -- ntt-backup-remote init-db
  runuser -u {user} -- ntt-backup-remote scan                # adds what only the store has
  runuser -u {user} -- ntt-backup-remote check
  systemctl enable --now ntt-backup-remote.service            # or ntt-backup-remote-once.timer"""


_LEFT: Final = (
    f"left: /{SETTINGS.parent}, {SERVICE_HOME} (the key), the log in /var/log/ntt, drop-ins of"
    f" units that were made by hand, the user {USER}"
)


@click.command("install-service")
@flag("--uninstall", "Remove what was installed; data is kept.")
@value("--user", "NAME", f"Run the service as this existing account.  [default: {USER}]")
@click.option(
    "--read-all/--no-read-all", default=None, help="Let the service read every file of this host."
)
@flag("--log", "Only create the file of log.jsonl, if it is missing.")
@value("--root", PATH, "Write below this directory, and run nothing.", default=Path("/"))
@value("--prefix", PATH, "Write a package's files below PATH/lib, such as /usr/lib, not /etc.")
@value("--program", str, "Program that the units start.  [default: this program]")
def install_service(
    uninstall: bool,
    user: str | None,
    read_all: bool | None,
    log: bool,
    root: Path,
    prefix: Path | None,
    program: str | None,
) -> None:
    """Install the service for systemd, or remove it.

    The command creates units, user, directories, the log and its rotation, and a sample
    configuration; it enables and starts nothing. Files that were changed by hand are kept, so the
    command may be repeated, for example after an upgrade. --user and --read-all keep their values
    until they are given again.
    """
    here = root.resolve() == Path("/")
    former = service_user(root)
    if log:
        if here:
            # A unit names its account, which an operator may have set by a drop-in.
            _make_log(_account(user or former, exists=True), former, of_any=user is not None)
        return
    user = _account(former if user is None or uninstall else user, exists=here)
    program = program or _this_program(user, check=here)
    release = _release() if here and prefix is None else 0
    files = list(service_files(program, prefix, release, user))
    if uninstall:
        units = [file.path.name for file in files if file.path.parent.parts[-2:] == UNITS.parts]
        if here and _BOOTED.is_dir():
            _run("systemctl", "stop", "ntt-backup-remote*")
            _run("systemctl", "--quiet", "disable", *units, may_fail=True)
    wanted = [(file, prefix is not None or _is_missing(file, root, user)) for file in files]
    wanted += [(file, user != USER) for file in user_files(user)]
    if uninstall or read_all is not None:
        wanted += [(file, bool(read_all)) for file in read_all_files()]
    for file, stays in wanted:
        with writing(root / file.path, hint="run it as root"):
            done = file.write(root) if stays and not uninstall else file.remove(root)
        if uninstall or stays or done != "not there":
            click.echo(f"{root / file.path}: {done}")
    if here:
        _apply(uninstall, user, former)
        if uninstall:
            click.echo(_LEFT)
        elif is_sample(root / SETTINGS):  # Else somebody, or `setup`, has made the settings.
            click.echo(next_steps(user))


def _is_missing(file: ServiceFile, root: Path, user: str) -> bool:
    """Returns whether no package has installed the file, or the file must differ from that one."""
    packaged = root / _PACKAGED / file.path.relative_to("etc")
    return not packaged.exists() or (user != USER and "tmpfiles.d" in file.path.parts)


def _account(name: str, *, exists: bool) -> str:
    """Returns the name of an account that can run the service. Raises ConfigError.

    exists: Whether the account must exist on this host.
    """
    if not _ACCOUNT.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of an account", hint="name one with --user")
    if name == "root":
        hint = "name another account with --user; --read-all lets the service read every file"
        raise ConfigError("the service does not run as root", hint=hint)
    if exists and name != USER:
        try:
            pwd.getpwnam(name)
        except KeyError:
            hint = "make the account first, or name another one with --user"
            raise ConfigError(f"there is no account {name} on this host", hint=hint) from None
    return name


def _home(user: str) -> Path:
    """Returns the home of an account, where ssh looks for its keys."""
    try:
        return SERVICE_HOME if user == USER else Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        return Path(f"~{user}")


def _this_program(user: str, *, check: bool) -> str:
    """Returns the path of this program. Raises ConfigError if the service could not start it."""
    program = Path(os.path.abspath(sys.argv[0]))
    if program.name == "__main__.py":  # Called by `python -m`: no unit can execute that file.
        program = Path(sys.executable).with_name("ntt-backup-remote")
    uid = -1 if user == USER or not check else pwd.getpwnam(user).pw_uid
    package = Path(__file__).resolve().parents  # Others cannot enter what root made by umask 077.
    found = {one: one.stat() for one in (*program.resolve().parents, *package)}
    closed = [
        one
        for one, at in found.items()
        if not at.st_mode & (stat.S_IXUSR if at.st_uid == uid else stat.S_IXOTH)
    ]
    if check and closed:
        raise ConfigError(
            f"the user {user} could not start {program}",
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


def _apply(uninstall: bool, user: str, former: str) -> None:
    """Makes the user, the directories and the log, and has systemd read its units."""
    if not uninstall:
        _run("systemd-sysusers", "ntt-backup.conf")
        if user != USER:
            _run("gpasswd", "--add", user, USER)  # The settings are readable for the group.
        account = pwd.getpwnam(user)
        if user != former:
            _hand_over(uid_of(former), account)
        _run("systemd-tmpfiles", "--create", "ntt-backup.conf")
        with writing(Path("/", SETTINGS)):
            shutil.chown(Path("/", SETTINGS), group=USER)
        _make_log(user, former)
        if made := make_signing_key(SERVICE_KEY):
            click.echo(made)
    if _BOOTED.is_dir():
        _run("systemctl", "daemon-reload")


def uid_of(user: str) -> int:
    """Returns the user id of an account; -1 if there is none of that name."""
    with suppress(KeyError):
        return pwd.getpwnam(user).pw_uid
    return -1


def _hand_over(former: int, account: pwd.struct_passwd) -> None:
    """Gives what the service keeps to another account. Raises ConfigError."""
    for top in filter(Path.is_dir, _STATE):
        with writing(top):
            # Only what belonged to the former account, which could have put links there.
            for _, directories, files, above in os.fwalk(top):
                for name in (".", *directories, *files):
                    if os.stat(name, dir_fd=above, follow_symlinks=False).st_uid == former:
                        ids = (account.pw_uid, account.pw_gid)
                        os.chown(name, *ids, dir_fd=above, follow_symlinks=False)


def _make_log(user: str, former: str, *, of_any: bool = False) -> None:
    """Makes the log of the settings for the service's account, and says so. Raises ConfigError."""
    # What the shell of root sets for other programs is not for the service.
    environ = {name: os.environ.get(name, "") for name in (CONFIG_VARIABLE, "NTT_BACKUP_LOG")}
    log = LogSettings()
    try:
        found = examine(CatalogConfig, environ=environ, file=None, target=DEFAULT_TARGET)
        log = log if found.settings is None else found.settings.log
    except ConfigError as error:
        click.echo(f"warning: {error}; the log is {log.jsonl} until then", err=True)
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"there is no account {user} on this host") from None
    with writing(log.jsonl, hint="run it as root"):
        uids = (0, uid_of(former), uid_of(USER))  # Root's own `check` makes the log, too.
        done = make_log(log.jsonl, account.pw_uid, account.pw_gid, uids, of_any=of_any)
    click.echo(f"{log.jsonl}: {done}")


def _run(*argv: str, may_fail: bool = False) -> None:
    """Runs a program of systemd. Raises ConfigError where it fails."""
    status, _, said = run(argv, _SECONDS)
    if status and not may_fail:
        raise ConfigError(f"`{' '.join(argv)}` failed ({status})", detail=said)


# --- the receiver ---------------------------------------------------------------------------------

# A key that may run anything on the remote makes whoever holds this host the master of its backups,
# too. A forced command takes that away, but its line in authorized_keys is easily got wrong: quotes
# within quotes, an option forgotten. So it is made from the settings. Nothing is installed: the
# right to do that is just what this host should not have.
RECEIVER: Final = "ntt-backup-receive"
_ALLOWED: Final = {"files": "put,list,verify,dump,snapshot", "packs": "packs,dump,snapshot"}
# What the names of new blobs are checked with, as a step for a person.
_BY_BLAKE3: Final = (
    "2. Give it BLAKE3: `apt-get install b3sum`, or the Python module blake3 or libblake3.",
    "   Without it the receiver must take this host's word for what a new blob's name should",
    "   be; --require blake3 in the line below has it serve nobody then.",
)
_BY_SHA256: Final = (
    "2. It needs no BLAKE3: Python itself computes SHA-256, which the names of the store are.",
    "   --require sha256 in the line below has the receiver take no other names.",
)
_IN_PACKS: Final = (
    "2. It needs no BLAKE3: packs are compared by SHA-256, which Python itself computes.",
)
_NO_KEY: Final = "ssh-ed25519 AAAA... (the public half of the key for this job)"


@options.command()
@flag("--print", "Print the steps, and the line for sshd.", "show")
@value(
    "--write", options.GivenPath(path_type=str), "Write the receiver to this file; - for stdout."
)
def install_receiver(common: Common, show: bool, write: str | None) -> None:
    """Prepare an ssh key that can only back up.

    The command installs nothing: it writes the receiver, and prints the steps to install it.
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
        settings = common.load(Settings)
        remote = settings.remote
        if remote.kind != "ssh":
            raise ConfigError(
                f"a receiver is installed on another machine, and {remote.url} is none",
                hint="name an ssh target with --target",
            )
        click.echo(complete(steps(remote, settings.source.hash)))


def key_line(remote: RemoteSettings, names: HashOfNames = "blake3") -> str:
    """Returns the line for authorized_keys on the remote. names: the hash of names."""
    layout = remote.layout or "files"
    command = f"{RECEIVER} --root {shlex.quote(remote.path)} --allow {_ALLOWED[layout]}"
    if layout == "files":
        command += f" --require {names}"
    # sshd takes the text up to the next quote without a backslash before it.
    quoted = command.replace('"', '\\"')
    return f'restrict,command="{quoted}" {public_key(remote.identity_file) or _NO_KEY}'


def steps(remote: RemoteSettings, names: HashOfNames = "blake3") -> str:
    """Returns what to do, in order, for a person. names: the hash of names."""
    checks = (
        _IN_PACKS if remote.layout == "packs" else {"sha256": _BY_SHA256}.get(names, _BY_BLAKE3)
    )
    lines = [
        f"How to let this host do no more at {remote.host} than add to {remote.path},",
        "and remove old dumps of the catalog there, never the newest:",
        "",
        f"1. Put the receiver on the remote as /usr/local/bin/{RECEIVER}, with mode 755, owned by",
        "   root. It is one file for any Python from 3.8 on, and is written by",
        f"       ntt-backup-remote install-receiver --write {RECEIVER}",
        f"   (A remote that has the package ntt-backup has {RECEIVER} already; that must be",
        "   in the PATH that sshd gives to commands.)",
        *checks,
        f"3. Make the directory {remote.path}, if it is missing, and give it to the account.",
        "4. Put this line into ~/.ssh/authorized_keys of that account, in place of every",
        "   other line with the same key:",
        "",
        key_line(remote, names),
        "",
        "5. On this host: run.strategy must be stream or auto; then see that it works:",
        "       ntt-backup-remote check",
    ]
    if public_key(remote.identity_file) is None:
        name = remote.identity_file or "~/.ssh/id_ed25519"
        lines[-2:-2] = [
            "   The key is not known: set remote.identity_file. Its public half is shown by",
            f"       ssh-keygen -y -f {name}",
        ]
    elif remote.identity_file is None:
        lines[-2:-2] = [
            f"   The key is that of {_own_key()}. If ssh takes another one, set",
            "   remote.identity_file, and call this again.",
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


def _own_key() -> Path:
    return Path("~/.ssh/id_ed25519").expanduser()


def public_key(identity: Path | None) -> str | None:
    """Returns the key that belongs to an identity file; None where it is not to be read.

    Args:
        identity: The file; None: the one that ssh takes by itself.
    """
    identity = identity or _own_key()
    try:
        text = identity.with_name(f"{identity.name}.pub").read_text("utf-8")
    except (OSError, ValueError):
        return None
    line = text.partition("\n")[0].strip()
    return line if len(line.split()) >= 2 and line.isprintable() else None
