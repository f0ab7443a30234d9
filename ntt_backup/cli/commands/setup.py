"""The command `setup` makes what a first backup needs, step by step.

It finds out what is there, shows each step before it is done, and undoes the steps that were done
where one fails or somebody stops it. Most steps are commands that an operator would type, each a
process of its own: another user may have to call them, and none leaves a session behind.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from ntt_backup.catalog import connection
from ntt_backup.cli import options
from ntt_backup.cli.commands.install import public_key, uid_of
from ntt_backup.cli.global_options import Common, writing
from ntt_backup.cli.options import DIR, flag, repeated, value
from ntt_backup.client.transport import transport_to
from ntt_backup.config import RemoteSettings, Settings, application_name, examine, refuse, sources
from ntt_backup.config.display import HIDDEN, settings_in_effect
from ntt_backup.config.sections import SERVICE_HOME, state_directory
from ntt_backup.config.signing_key import SERVICE_KEY, key_file
from ntt_backup.config.values import FORMS, parse_target_url
from ntt_backup.daemon.service_files import UNITS, USER, is_sample
from ntt_backup.errors import (
    BackupError,
    CatalogError,
    ConfigError,
    LockHeld,
    RemoteCannotStore,
    complete,
)
from ntt_backup.formatting import duration, many, printable
from ntt_backup.model import DEFAULT_TARGET
from ntt_backup.process import embedded, postgres
from ntt_backup.process.durable import write_durably
from ntt_backup.process.spawn import TAIL_BYTES, run, start, wait_for
from ntt_backup.source.store import Store

_LOCAL: Final = f"postgresql:///{postgres.DATABASE}"
_SOCKET: Final = Path("/var/run/postgresql/.s.PGSQL.5432")
_AS_POSTGRES: Final = ("runuser", "-u", "postgres", "--")
_AS_SERVICE: Final = ("runuser", "-u", USER, "--")
_OURS: Final = (sys.executable, "-P", "-m", "ntt_backup")
_SECONDS: Final = 60.0
# So many files are looked at to say how many are young.
_MOST_FILES: Final = 100_000
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How a command of ours ends with an error, and how `check` reports one.
_ERROR: Final = re.compile(r"(?ms)^error: (.*?)(?:\nhint: (.*))?\Z")
_FAILED: Final = re.compile(r"(?m)^FAILED +\S+ +(.*)(?:\n +(.*))?$")
_HEAD: Final = "# Made by `ntt-backup-remote setup`. docs/settings.md has all settings.\n"


class Step(NamedTuple):
    """A step: what it does in words, the work, and what undoes the work."""

    says: str
    do: Callable[[], None]
    undo: Callable[[], None] | None = None


@options.command()
@repeated("--files", "DIR", "Directory whose files are written once")
@value("--store", DIR, "Store that holds aa/bb/<blobid>, in place of --files.")
@value("--to", "URL", f"The target: {FORMS}.")
@value("--catalog", "URL", "The database; embedded for one of the program; default: what is there.")
@repeated("--set", "KEY=VALUE", "Write another setting, such as run.bwlimit=4MB", "more")
@flag("--service", "Install the service, and prepare the backup for its user.")
@flag("--yes", "Ask nothing.")
def setup(
    common: Common,
    files: tuple[str, ...],
    store: Path | None,
    to: str | None,
    catalog: str | None,
    more: tuple[str, ...],
    service: bool,
    yes: bool,
) -> None:
    """Prepare the first backup: settings, catalog, target.

    What is not given is found on this host, or asked. Each step is shown before it is done. If a
    step fails or is interrupted, what was made is removed again. What exists is kept, so the
    command may be repeated.
    """
    if common.target != DEFAULT_TARGET:
        raise click.UsageError("setup makes the target `remote`: add others to its settings")
    if service and os.geteuid():
        raise ConfigError("only root can install the service", hint="call it as root")
    path = sources.path_of(common.config, os.environ).absolute()
    if os.geteuid() and path == sources.DEFAULT_FILE:
        path = sources.OWN_FILE.expanduser()
    values = dict(_given(files, store, to, catalog, more))
    steps: list[Step] = []
    if exists := path.exists() and not is_sample(path):
        _require_same(path, values)
    else:
        try:
            _complete(values, service=service, ask=not yes)
        except click.Abort:
            hint = "give --files or --store, and --to; --yes confirms"
            raise ConfigError(
                "there is no terminal on which the questions can be answered", hint=hint
            ) from None
    file, flags = (path, {}) if exists else (Path(os.devnull), values)
    found = examine(Settings, flags=flags, environ=os.environ, file=file, target=DEFAULT_TARGET)
    refuse(found.problems)
    settings = found.settings
    assert settings is not None  # Else there would be a problem.
    if not exists:
        shown = {one.key: one.value for one in settings_in_effect(settings, found.layer)}
        steps.append(_written(path, values, shown))
    program = (*(_AS_SERVICE if service else ()), *_OURS, "--config", str(path))
    steps += _preparations(settings, USER if service else "root")
    if steps or run((*program, "run", "--dry-run"), _SECONDS, cwd="/")[0]:
        steps.append(Step("prepare the catalog: init-db", partial(_call, (*program, "init-db"))))
        if not settings.by_path:
            steps.append(Step("register the store: scan", partial(_call, (*program, "scan"))))
    changes = bool(steps)
    steps.append(Step("check everything: check", partial(_check, program, changes=changes)))
    for number, step in enumerate(steps, 1):
        click.echo(f"{number}. {step.says}")
    if changes and not yes and not _confirmed():
        raise ConfigError("nothing was done", hint="--yes confirms the steps")
    _do(steps, _new_paths(settings, path), _embedded(settings))
    if not changes:
        click.echo("everything was set up already: nothing was changed")
    for line in _next(settings, service=service):
        click.echo(complete(line))


def _confirmed() -> bool:
    with suppress(click.Abort):
        return click.confirm("Do this?", default=True)
    return False


def _do(steps: Sequence[Step], new: Sequence[Path], server: Path | None) -> None:
    """Does the steps. Where one fails or is interrupted, undoes them and removes new paths."""
    done: list[Step] = []
    try:
        for number, step in enumerate(steps, 1):
            click.echo(f"--- {number}. {step.says.splitlines()[0]}")
            # A step that has to be undone is not interrupted in its middle, nor its programs.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if step.undo else ())
            try:
                step.do()
                # A step that fails has made nothing: `createdb` fails where the database exists.
                done.append(step)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except BaseException as error:
        if isinstance(error.__cause__, FileExistsError):
            raise  # Another setup has made the settings, and makes the rest.
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        for one in new:
            with suppress(BackupError, OSError):  # The others are undone all the same.
                if one == server:
                    embedded.remove(one)
                elif one.is_dir():
                    one.rmdir()  # What somebody else has put there stays.
                else:
                    one.unlink()
        for undo in (step.undo for step in reversed(done) if step.undo):
            with suppress(BackupError, OSError):
                undo()
        if done or new:
            click.echo("--- undone: what setup has made is removed again", err=True)
        raise


def _new_paths(settings: Settings, path: Path) -> list[Path]:
    """Returns what the steps may make and does not exist yet, what is below others first."""
    server = _embedded(settings)
    made = [path, key_file(settings), settings.log.jsonl, settings.lock.file]
    made += [server] if server else []
    made += [SERVICE_KEY] if os.geteuid() == 0 else []
    made += [Path(settings.remote.path)] if settings.remote.kind == "file" else []
    missing = {one for place in made for one in (place, *place.parents) if not os.path.lexists(one)}
    return sorted(missing, key=lambda one: len(one.parts), reverse=True)


def _embedded(settings: Settings) -> Path | None:
    """Returns the directory of the embedded server, None for a catalog elsewhere."""
    host = Path(connection.host_of(settings.catalog.url))
    return host if host.name == embedded.NAME else None


# --- the settings ---------------------------------------------------------------------------------


def _given(
    files: Sequence[str],
    store: Path | None,
    to: str | None,
    catalog: str | None,
    more: Sequence[str],
) -> Iterator[tuple[str, Any]]:
    """Yields the settings of the options, by `table.key`. Raises UsageError."""
    if files and store:
        raise click.UsageError("give --files or --store: a store has files by their hashes")
    if files:
        yield from _by_path([_directory(one) for one in files])
    if store:
        yield "source.root", str(_directory(store))
    for key, given in (("remote.url", to), ("catalog.url", catalog)):
        if given is not None:
            yield key, given
    for one in more:
        key, equals, text = one.partition("=")
        if not equals or "." not in key:
            raise click.UsageError(f"--set {one}: it needs KEY=VALUE, as in run.bwlimit=4MB")
        try:
            yield key, json.loads(text)
        except ValueError:
            yield key, text


def _by_path(places: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    yield "source.root", os.path.commonpath(places)
    named: dict[str, list[str]] = {}
    for place in places:
        name = re.sub(r"[^a-z0-9]+", "-", place.name.lower()).strip("-")[:31] or "files"
        named.setdefault(name, []).append(str(place))
    for name, paths in named.items():
        yield f"files.{name}.paths", paths


def _directory(path: str | Path) -> Path:
    found = Path(path).expanduser().resolve()
    if not found.is_dir():
        raise click.UsageError(f"{found} is no directory")
    return found


def _require_same(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError where existing settings differ from those that are given."""
    layer = sources.from_file(path, {}, DEFAULT_TARGET).own
    for key, given in values.items():
        if key not in layer or layer[key].value != given:
            raise ConfigError(
                f"{path} exists, and has another {key}",
                hint="change it there, or name another file with --config before the command",
            )


def _complete(values: dict[str, Any], *, service: bool, ask: bool) -> None:
    """Adds the settings that are found on this host, or answered. Raises Abort, ConfigError.

    A setting of the environment is not asked for, and not written: it has priority anyway.
    """
    environment = sources.from_environment(os.environ)
    for key in values.keys() & environment.keys():
        name = environment[key].origin
        said = f"{name} is set, and would have priority over {key} in the file"
        raise ConfigError(said, hint=f"unset {name}")
    known = {**values, **environment}

    def answer(question: str, option: str) -> str:
        if not ask:
            raise click.UsageError(f"give {option}")
        return str(click.prompt(question))

    if "source.root" not in known:
        root = _directory(answer("Directory to back up", "--files or --store"))
        is_store = all(re.fullmatch("[0-9a-f]{2}", one.name) for one in root.iterdir())
        values |= {"source.root": str(root)} if is_store else dict(_by_path([root]))
    if "remote.url" not in known:
        values["remote.url"] = answer(f"Target, {FORMS}", "--to")
    if "remote.url" in values:
        try:
            values["remote.url"] = str(parse_target_url(values["remote.url"]))
        except ValueError:
            raise ConfigError("the target is no valid URL", hint=f"give {FORMS}") from None
    if "catalog.url" not in known:
        values["catalog.url"] = _found_catalog(service=service)
        if ask:
            text = "Catalog, a PostgreSQL connection string or embedded"
            values["catalog.url"] = click.prompt(text, default=values["catalog.url"])
    if service:
        values.setdefault("lock.file", "/run/ntt-backup/{target}.lock")
    elif os.geteuid():
        for key, name in (("log.jsonl", "backup-remote.jsonl"), ("lock.file", "{target}.lock")):
            if key not in known:
                values[key] = str(state_directory() / name)


def _found_catalog(*, service: bool) -> str:
    """Returns the database of this host that the catalog can be in. Raises ConfigError."""
    if os.geteuid() == 0 and _SOCKET.exists():
        return _LOCAL  # Root can have the administrator of the server make it.
    if not service:
        with suppress(CatalogError):
            connection.connect(_LOCAL, application_name("setup"), no_tables=True).close()
            return _LOCAL
    if postgres.installations():
        return "embedded"
    raise ConfigError(
        "there is no PostgreSQL on this host that this user may use",
        hint="pip install 'ntt-backup[embedded]' brings a private one; or give --catalog URL",
    )


def _written(path: Path, values: Mapping[str, Any], shown: Mapping[str, Any]) -> Step:
    """Returns the step that writes the settings file, also in the place of a sample.

    shown: the values without secrets.
    """
    text = _HEAD + _toml(values)
    try:
        data = text.encode()
        tomllib.loads(text)
    except ValueError:
        hint = "control characters, names that are no UTF-8, null and nested values are none"
        raise ConfigError("a value cannot be written into a settings file", hint=hint) from None
    lines = _toml({key: shown.get(key, HIDDEN) for key in values}).splitlines()
    says = "\n     ".join(map(printable, filter(None, lines)))
    mode, owner = 0o600 if os.geteuid() else 0o640, None
    replaced = path.read_bytes() if is_sample(path) else None
    if replaced is not None:
        owner = (os.lstat(path).st_uid, os.lstat(path).st_gid)

    def write(content: bytes) -> None:
        with writing(path, "name another file with --config before the command"):
            write_durably(path, content, mode, owner=owner, replace=replaced is not None)

    undo = None if replaced is None else partial(write, replaced)
    return Step(f"write the settings into {path}\n     {says}", partial(write, data), undo)


def _toml(values: Mapping[str, Any]) -> str:
    tables: dict[str, str] = {}
    for key, setting in sorted(values.items()):
        table, _, name = key.rpartition(".")
        line = f"{name} = {json.dumps(setting, ensure_ascii=False)}\n"
        tables[table] = tables.get(table, f"\n[{table}]\n") + line
    return "".join(tables.values())


# --- the steps ------------------------------------------------------------------------------------


def _call(argv: Sequence[str], code: int | None = None) -> None:
    """Runs a program and shows its output.

    Args:
        argv: The program and its arguments.
        code: The exit code of the error; None for that of the program.

    Raises:
        BackupError: The program has failed. The error is what the program says itself.
    """
    child, shown = start(argv, cwd="/"), b""
    child.close_stdin()
    try:
        while (data := child.read()) != b"":
            child.drain_stderr()
            if data is None:
                wait_for(reading=child.fds, timeout=None)
            else:
                click.echo(data, nl=False)
                shown = (shown + data)[-TAIL_BYTES:]
        child.wait(_SECONDS)
    except BaseException:
        os.kill(child.pid, signal.SIGTERM)  # The program removes what it has begun on the target.
        child.wait(_SECONDS)
        raise
    finally:
        status = child.kill()
    said = child.stderr.text
    if status:
        code = code or (status if status > 0 else 128 - status)
        last = next(reversed(said.splitlines()), f"{argv[-1]} ended with {code}")
        found = _FAILED.search(shown.decode(errors="replace")) or _ERROR.search(said)
        message, hint = map(printable, found.groups("") if found else (last, ""))
        raise BackupError(message, hint=hint, exit_code=code)
    if said:
        click.echo(said, err=True)


def _check(program: Sequence[str], *, changes: bool) -> None:
    try:
        _call((*program, "check"))
    except BackupError as error:
        if changes or error.exit_code != LockHeld.exit_code:
            raise
        click.echo("a run of this backup is at work, which `ntt-backup-remote why` judges")


def _preparations(settings: Settings, user: str) -> Iterator[Step]:
    """Yields the steps for what is missing on this host and on the target. Raises BackupError.

    user: Who does the backup, where root calls setup.
    """
    remote, server, root = settings.remote, _embedded(settings), os.geteuid() == 0
    installed = [Path(one, UNITS, "ntt-backup-remote.service") for one in ("/etc", "/usr/lib")]
    if user == USER and not any(one.exists() for one in installed):
        install = (*_OURS, "install-service")
        undo = partial(_call, (*install, "--uninstall"))
        yield Step("install the service: install-service", partial(_call, install), undo)
    elif server is not None and root:
        try:
            embedded.owner_of(server)
        except ConfigError:
            make = ("useradd", "--system", "--home-dir", str(SERVICE_HOME), USER)
            says = f"make the account {USER}, since PostgreSQL refuses to run as root: useradd"
            made = partial(_call, make, ConfigError.exit_code)
            yield Step(says, made, partial(_call, ("userdel", USER)))
    if settings.catalog.url == _LOCAL and root:
        name = postgres.DATABASE
        for what, query, of, create, drop in (
            (f"role {user}", f'set role "{user}"', "postgres", ("createuser",), "dropuser"),
            (f"database {name}", "", name, ("createdb", "--owner", user), "dropdb"),
        ):
            named = user if of == "postgres" else name
            ask = (*_AS_POSTGRES, "psql", "-Xqc", query, f"dbname={of}")
            if run(ask, _SECONDS, cwd="/")[0]:
                yield Step(
                    f"make the {what} in the local PostgreSQL: {create[0]}",
                    partial(_call, (*_AS_POSTGRES, *create, named), CatalogError.exit_code),
                    partial(_call, (*_AS_POSTGRES, drop, named)),
                )
    if remote.kind == "file" and not Path(remote.path).is_dir():
        yield Step(f"make {remote.path}", partial(_make_place, Path(remote.path), user))
    elif remote.kind == "ssh":
        if user == USER and uid_of(USER) < 0:
            raise ConfigError(
                f"there is no account {USER} yet, and the remote has to accept its key",
                hint="call `ntt-backup-remote install-service`, make a key and known_hosts for that"
                " account as docs/install.md says, then call this again",
            )
        as_user = _AS_SERVICE if user == USER else ()
        if _is_there(remote, as_user):
            return
        made, gone = (
            partial(
                _call,
                (*as_user, *transport_to(remote).argv(f"{do} {shlex.quote(remote.path)}")),
                RemoteCannotStore.exit_code,
            )
            for do in ("mkdir -p", "rmdir")
        )
        yield Step(f"make {remote.path} on {remote.host}", made, gone)


def _make_place(place: Path, user: str) -> None:
    with writing(place, "let this user make it, or name another place with --to"):
        place.mkdir(parents=True)
        if user == USER:
            shutil.chown(place, user)


def _is_there(remote: RemoteSettings, as_user: Sequence[str]) -> bool:
    """Returns whether the remote has the directory of the target. Raises RemoteError.

    as_user: what the program is called by for the user of the service, else nothing.
    """
    transport = transport_to(remote)
    argv = (*as_user, *transport.argv(f"test -d {shlex.quote(remote.path)}"))
    status, _, said = run(argv, transport.connect_timeout, env=transport.environment())
    if status in (0, 1):
        return status == 0
    error = transport.explain(status, said)
    if as_user:
        error.hint += f"; the user is {USER}: see docs/install.md for its key and known_hosts"
    home = SERVICE_HOME if as_user else Path("~").expanduser()
    keys = [home / ".ssh" / f"id_{one}" for one in ("ed25519", "rsa")]
    if remote.identity_file is not None:
        keys = [remote.identity_file.expanduser()]
    for line in filter(None, map(public_key, keys)):
        error.hint += f"; the line for ~/.ssh/authorized_keys there: {line}"
        break
    raise error


# --- what comes next ------------------------------------------------------------------------------


def _next(settings: Settings, *, service: bool) -> Iterator[str]:
    """Yields what an operator does next, and what may surprise at the first run."""
    store, remote = Store.of(settings.source), settings.remote
    found = (
        os.path.join(above, name)
        for one in settings.files.values()
        for place in one.paths
        for above, _, names in os.walk(place)
        for name in names
    )
    looked = [os.lstat(file) for file in islice(found, _MOST_FILES) if os.path.lexists(file)]
    if young := sum(map(store.is_young, looked)):
        yield (
            f"of {many(len(looked), 'file')}, {young:,} may still be being written: changed within"
            f" the last {duration(settings.source.grace)} (source.grace). A later run copies"
            " what has not changed for that time"
        )
    if service:
        if remote.kind == "file":
            yield "let the service write there: systemctl edit ntt-backup-remote.service, with"
            yield f"  [Service]\n  ReadWritePaths={remote.path}"
        yield "next: systemctl enable --now ntt-backup-remote.service"
    else:
        yield "next: `ntt-backup-remote run --once` makes the backup, and"
        yield "`ntt-backup-remote verify` proves the copies; docs/restore-drill.md has the drill"
    if remote.kind == "ssh":
        user = f"runuser -u {USER} -- " * service
        yield f"`{user}ntt-backup-remote install-receiver --print`: how the key can only back up"
