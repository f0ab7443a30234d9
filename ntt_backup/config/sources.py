"""Settings come from flags, environment, credentials and file, each with the name of its origin.

A layer has the values of one source, by `table.key`, with an origin for each value: `--workers`,
`NTT_WORKERS`, `run.workers in /etc/ntt/backup-remote.toml`. The form of a layer is correct; its
values are validated once the layers are merged.

An empty environment variable counts as not set: an EnvironmentFile of systemd, and `VAR= command`
in a shell, unset a setting that way. Other programs may use NTT_ variables too, so an unknown
variable is not an error; a variable that looks like a misspelling of ours gets a warning
(`misspelt`).

A credential of systemd (LoadCredential=) is a file in $CREDENTIALS_DIRECTORY that only the service
can read: a secret that is in no configuration file, environment or command line. A credential with
the name of a setting in `_HELD` sets that setting; the names in `_OF_A_TARGET` are for one target.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ntt_backup.config.command_settings import ENVIRONMENT, FORMER_LOG, NAMED_TABLES, TABLES
from ntt_backup.config.sections import idle_for
from ntt_backup.errors import ConfigError
from ntt_backup.model import DEFAULT_TARGET
from ntt_backup.wire.stored_names import is_set

DEFAULT_FILE = Path("/etc/ntt/backup-remote.toml")
# That of an ordinary user, as `setup` makes it.
OWN_FILE: Final = Path("~/.config/ntt-backup/backup-remote.toml")
CONFIG_VARIABLE = "NTT_CONFIG"

# The former names of settings, which remain valid.
_RENAMED: Mapping[str, str] = {"dump.refresh": "dump.max_age"}
# A target that sets one of these must not inherit the others.
PLACE = ("remote.url", "remote.host", "remote.port", "remote.path", "remote.endpoint")
_TARGET_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
# Whether the setting is the content of the file, or else its path.
_HELD: Final = {
    "catalog.url": True,
    "remote.identity_file": False,
    "pack.identity_file": False,
    "host.key_file": False,
    "notify.ping_url": True,
    "notify.webhook_url": True,
}
# The names of credentials below `targets.NAME.`
_OF_A_TARGET: Final = {
    "remote.identity_file": "identity_file",
    "pack.identity_file": "pack.identity_file",
}
_SET_HINT = "such a name has at most 31 characters of a-z 0-9 _ -, and begins with a-z or 0-9"
_TARGET_HINT = "a target's name has at most 31 characters of a-z 0-9 _, and begins with a-z"
# Tables of tables whose names the operator chooses: an example of a setting, which names are valid.
_NAMED: Final[Mapping[str, tuple[str, Callable[[str], object], str]]] = {
    "targets": ("url = ...", _TARGET_NAME.fullmatch, _TARGET_HINT),
    **dict.fromkeys(NAMED_TABLES, ("paths = [...]", is_set, _SET_HINT)),
}
_TABLES_HINT: Final = (
    "settings stand below their table: [run], then workers = 4; the tables are "
    + ", ".join((*TABLES, *(f"{one}.NAME" for one in _NAMED)))
)


class Setting(NamedTuple):
    """A value, and where the operator set it."""

    value: object
    origin: str


Layer = dict[str, Setting]


class Problem(NamedTuple):
    """An error in the settings. hint: the remedy, if the text does not say it."""

    text: str
    hint: str = ""


class InFile(NamedTuple):
    """The layer of one target, a layer for each other target, and errors of form in the file.

    targets: the names of all targets.
    """

    own: Layer
    others: list[Layer]
    problems: list[Problem]
    targets: list[str]


def nested(layer: Layer) -> dict[str, Any]:
    """Returns the values by table and key; those of named tables by table, name and key."""
    tables: dict[str, Any] = {}
    for key, setting in layer.items():
        is_named = key.partition(".")[0] in NAMED_TABLES
        section, *of_set, name = key.split(".", 2 if is_named else 1)
        table = tables.setdefault(section, {})
        for one in of_set:
            table = table.setdefault(one, {})
        table[name] = setting.value
    return tables


def from_flags(flags: Mapping[str, object]) -> Layer:
    """Returns the layer of flags. flags: values by `table.key`; None for not given."""
    return {
        key: Setting(value, "--" + key.partition(".")[2].replace("_", "-"))
        for key, value in flags.items()
        if value is not None
    }


def from_environment(environ: Mapping[str, str]) -> Layer:
    layer = {
        key: Setting(environ[name], name) for name, key in ENVIRONMENT.items() if environ.get(name)
    }
    if environ.get(FORMER_LOG):
        layer.setdefault("log.jsonl", Setting(environ[FORMER_LOG], FORMER_LOG))
    return layer


def from_aws(environ: Mapping[str, str], layer: Layer) -> Layer:
    """Returns the layer of the variables of AWS, if the target of a layer is a bucket."""
    name = next(filter(environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")), None)
    url = layer["remote.url"].value if "remote.url" in layer else None
    if name is None or not str(url).lower().startswith("s3:"):
        return {}
    return {"remote.endpoint": Setting(environ[name], name)}


def from_credentials(environ: Mapping[str, str], target: str, in_file: Layer) -> Layer:
    """Returns the layer of the credentials for a target. in_file: its layer of the file.

    A target's own setting, also in the file, has priority over a credential for all targets.

    Raises:
        ConfigError: A credential cannot be read.
    """
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return {}
    shared = _credentials(Path(directory), {key: key for key in _HELD})
    if target == DEFAULT_TARGET:
        return shared
    own = f"targets.{target}."
    url = in_file["remote.url"].value if "remote.url" in in_file else "ssh:"
    shared = {
        key: setting
        for key, setting in of_its_kind(shared, str(url)).items()
        if not (key in in_file and in_file[key].origin.startswith(own))
    }
    return shared | _credentials(
        Path(directory), {key: own + name for key, name in _OF_A_TARGET.items()}
    )


def _credentials(directory: Path, names: Mapping[str, str]) -> Layer:
    """Returns the settings of credentials. names: the names of the credentials by setting."""
    layer = Layer()
    for key, name in names.items():
        path = directory / name
        try:
            if path.is_file():
                value = path.read_text("utf-8").strip() if _HELD[key] else str(path)
                layer[key] = Setting(value, f"the credential {name}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the credential {path}", detail=str(error)) from error
    return layer


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """Returns a line for each variable that is set and is a misspelling, or a former name."""
    ours = {name.removeprefix("NTT_"): name for name in (*ENVIRONMENT, CONFIG_VARIABLE)}
    lines = []
    if environ.get(FORMER_LOG) and not environ.get("NTT_BACKUP_LOG"):
        lines.append(
            f"{FORMER_LOG} is a variable of other programs, too: set NTT_BACKUP_LOG instead"
        )
    for name in sorted({*environ} - {FORMER_LOG}):
        bare = name.upper().removeprefix("NTT_")
        if name.upper().startswith("NTT_") and environ[name] and name not in ours.values():
            for match in difflib.get_close_matches(bare, ours, n=1, cutoff=0.8):
                lines.append(f"{name} has no effect; did you mean {ours[match]}?")
    return lines


def from_file(file: Path | None, environ: Mapping[str, str], target: str) -> InFile:
    """Returns the layers of a configuration file. file: see `path_of`.

    Raises:
        ConfigError: The file cannot be read, or has no such target.
    """
    if not _TARGET_NAME.fullmatch(target):
        raise ConfigError(f"target {target!r} is not a valid name", hint=_TARGET_HINT)
    problems: list[Problem] = []
    path, tables = _read(file, environ, problems)
    if tables is None:
        return InFile({}, [], [], [target])
    remotes = _remotes(tables, path, problems)
    if target not in remotes:
        there = _with_a_place(remotes, environ)
        raise ConfigError(
            f"target {target!r} is not in {path}",
            detail=f"it has {', '.join(there) if there else 'no targets'}",
            hint=f"add a table [targets.{target}] with url",
        )
    names = [name for name in _with_a_place(remotes, environ) if name != target]
    own, layer = remotes.pop(target), Layer()
    for of in NAMED_TABLES:
        for name, table in _by_name(of, tables.pop(of, {}), path, problems).items():
            # One without settings lacks its paths; the error then has its name.
            layer |= _layer(f"{of}.{name}", {"paths": [], **table}, f"{of}.{name}", path)
    for section, table in tables.items():
        layer |= _layer(section, table, section, path)
    layer |= own
    for former, today in _RENAMED.items():
        if former in layer and today in layer:
            text = f"{path} sets {former} and {today}, which are the same"
            problems.append(Problem(text, f"keep {today}"))
        if former in layer:
            layer[today] = layer.pop(former)
    return InFile(layer, list(remotes.values()), problems, sorted([target, *names]))


def targets(file: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Returns the names of all targets. Raises ConfigError if the file cannot be read.

    The names are those of `[targets.*]`, and `remote` if the file or the environment sets its
    place.
    """
    path, tables = _read(file, environ, [])
    remotes = _remotes(tables or {}, path, [])
    return _with_a_place(remotes, environ) or [DEFAULT_TARGET]


def _with_a_place(remotes: Mapping[str, Layer], environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the targets, without `remote` if no place is set for it."""
    said = remotes[DEFAULT_TARGET].keys() | from_environment(environ).keys()
    return [name for name in remotes if name != DEFAULT_TARGET or not said.isdisjoint(PLACE)]


def snapshot_sets(file: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Returns the valid names of snapshot sets. Raises ConfigError if the file cannot be read."""
    path, tables = _read(file, environ, [])
    return list(_by_name("snapshots", (tables or {}).get("snapshots", {}), path, []))


def path_of(file: Path | None, environ: Mapping[str, str]) -> Path:
    """Returns the path of the configuration file, which need not exist.

    file: the argument of `--config`; None for the file of NTT_CONFIG, or else the default file,
    which is this user's own where that exists.
    """
    named = file or environ.get(CONFIG_VARIABLE)
    if not named and os.geteuid():
        own = Path(os.path.expanduser(OWN_FILE))  # noqa: PTH111  never raises
        named = own if own.exists() else None
    return Path(os.path.expanduser(named or DEFAULT_FILE))  # noqa: PTH111


def _layer(section: str, values: Mapping[str, object], written: str, path: Path) -> Layer:
    """Returns the layer of a table. written: the name of the table in the file."""
    return {
        f"{section}.{name}": Setting(value, f"{written}.{name} in {path}")
        for name, value in values.items()
    }


def _remotes(tables: dict[str, Any], path: Path, problems: list[Problem]) -> dict[str, Layer]:
    """Removes `[remote]` and `[targets.*]` from tables, and returns the layers by target.

    The layer of a target has the settings of `[remote]` except for the place, overridden by
    `[targets.NAME]` and `[targets.NAME.pack]`.
    """
    targets = _by_name("targets", tables.pop("targets", {}), path, problems)
    if targets.pop(DEFAULT_TARGET, None) is not None:
        text = f"targets.{DEFAULT_TARGET} in {path} is the target of the table [{DEFAULT_TARGET}]"
        hint = f"put its settings under [{DEFAULT_TARGET}], or give it another name"
        problems.append(Problem(text, hint))
    written = {name: name for name in targets}
    for group in [name for name, own in targets.items() if "media" in own]:
        own = targets.pop(group)
        names = _media(group, own.pop("media"), [*written, DEFAULT_TARGET], path, problems)
        targets |= {name: {**own} for name in names}
        written |= dict.fromkeys(names, group)
    packs = {
        name: _layer("pack", own.pop("pack"), f"targets.{written[name]}.pack", path)
        for name, own in targets.items()
        if isinstance(own.get("pack"), dict)
    }
    default = _layer("remote", tables.pop(DEFAULT_TARGET, {}), DEFAULT_TARGET, path)
    shared = {key: setting for key, setting in default.items() if key not in PLACE}
    return {DEFAULT_TARGET: default} | {
        name: of_its_kind(shared, str(own.get("url", "ssh:")))
        | _layer("remote", own, f"targets.{written[name]}", path)
        | packs.get(name, {})
        for name, own in targets.items()
    }


def _media(
    group: str, said: object, taken: Sequence[str], path: Path, problems: list[Problem]
) -> list[str]:
    """Returns the targets that the media of a target are: each has columns and marks of its own."""
    media = said if isinstance(said, list) else []
    names = [f"{group}_{one}" for one in media]
    valid = all(isinstance(one, str) for one in media) and all(map(_TARGET_NAME.fullmatch, names))
    if len(names) < 2 or not valid or len({*names, *taken}) < len(names) + len(taken):
        key = f"targets.{group}.media in {path}"
        text = f"{key} is {said!r}: a list of two or more different names is needed"
        hint = f'as in media = ["a", "b"], which makes the targets {group}_a and {group}_b'
        problems.append(Problem(text, f"{hint}; {_TARGET_HINT}"))
        return []
    return names


def media(file: Path | None, environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the names of the media of each target that has any.

    Raises ConfigError if the file cannot be read.
    """
    path, tables = _read(file, environ, [])
    named = _by_name("targets", (tables or {}).get("targets", {}), path, [])
    return {
        name: _media(name, own["media"], [], path, [])
        for name, own in named.items()
        if "media" in own
    }


def of_its_kind(shared: Layer, url: str) -> Layer:
    """Returns the settings of `[remote]` that a target with this URL inherits."""
    kind = url.partition(":")[0].lower()
    idle = {f"remote.{name}" for name in idle_for(kind)}
    return {key: setting for key, setting in shared.items() if key not in idle}


def _by_name(
    table: str, named: object, path: Path, problems: list[Problem]
) -> dict[str, dict[str, Any]]:
    """Returns the tables within a table by name, without those whose names are not valid."""
    example, is_valid, hint = _NAMED[table]
    if not isinstance(named, dict) or not all(isinstance(one, dict) for one in named.values()):
        how = f"write [{table}.NAME], then {example} on a line below it"
        problems.append(Problem(f"{table} in {path} must hold tables", how))
        return {}
    wrong = [name for name in named if not is_valid(name)]
    problems += [Problem(f"{table}.{name} in {path} is not a valid name", hint) for name in wrong]
    return {name: one for name, one in named.items() if name not in wrong}


def _read(
    file: Path | None, environ: Mapping[str, str], problems: list[Problem]
) -> tuple[Path, dict[str, Any] | None]:
    """Returns the path of the file and its tables; None if the default file does not exist."""
    path = path_of(file, environ)
    try:
        data = path.read_bytes()
    except OSError as error:
        named = file is not None or environ.get(CONFIG_VARIABLE)
        if not named and isinstance(error, FileNotFoundError | NotADirectoryError):
            return path, None
        raise ConfigError(
            f"cannot read the configuration {path}",
            detail=error.strerror or str(error),
            hint=f"name another with --config or {CONFIG_VARIABLE}, or correct its permissions",
        ) from error
    try:
        # Some editors write a byte order mark, which TOML does not allow.
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not valid TOML", detail=f"line {line} is not UTF-8", hint="save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        # The error of tomllib is a ValueError; so is int()'s for thousands of digits.
        raise ConfigError(
            f"{path} is not valid TOML",
            detail=str(error),
            hint='correct it there; text stands in quotes, as in url = "file:///mnt/usb"',
        ) from error
    sound = {
        name: table
        for name, table in tables.items()
        if name in (*TABLES, *_NAMED) and isinstance(table, dict)
    }
    problems += [
        Problem(f"{name} in {path} is not a table of settings{_guess(name)}", _TABLES_HINT)
        for name in tables
        if name not in sound
    ]
    return path, sound


def _guess(name: str) -> str:
    near = difflib.get_close_matches(name, (*TABLES, *_NAMED), n=1)
    return f": did you mean {near[0]}?" if near else ""
