"""Settings come from flags, environment and file. Each value keeps the name its operator wrote.

A layer is what one of them says, by `table.key`, with an origin for each value: `--workers`,
`NTT_WORKERS`, `run.workers in /etc/ntt/backup-remote.toml`. A layer has the right form; its values
are validated once the layers are merged.

An empty environment variable counts as not set: an EnvironmentFile of systemd, and `VAR= command`
in a shell, take a setting back that way. Other programs may own NTT_ variables too, so an unknown
one is no error; one that looks like a misspelling of ours is worth a warning (`misspelt`).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ntt_backup.config.models import ENVIRONMENT, TABLES
from ntt_backup.config.sections import ONLY_FOR
from ntt_backup.errors import ConfigError
from ntt_backup.model import DEFAULT_TARGET
from ntt_backup.wire.snapshot_names import is_set

DEFAULT_FILE = Path("/etc/ntt/backup-remote.toml")
CONFIG_VARIABLE = "NTT_CONFIG"

# The former names of settings: files that were written then are still valid.
_RENAMED: Mapping[str, str] = {"dump.refresh": "dump.max_age"}
# A target that names one of these must not inherit the others from elsewhere.
PLACE = ("remote.url", "remote.host", "remote.port", "remote.path", "remote.endpoint")
# What holds tables with names of the operator's own.
_NAMED = ("targets", "snapshots")
_SNAPSHOTS = "snapshots."
_TARGET_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_SET_HINT = (
    "a set's name is lowercase letters, digits, _ and -, at most 31, a letter or digit first"
)
_TARGET_HINT = "a target's name is lowercase letters, digits and _, at most 31, a letter first"
_TABLES_HINT: Final = (
    "settings stand below their table: [run], then workers = 4; the tables are "
    + ", ".join((*TABLES, *(f"{one}.NAME" for one in _NAMED)))
)


class Setting(NamedTuple):
    """A value, and the name under which its operator wrote it."""

    value: object
    origin: str


Layer = dict[str, Setting]


class Problem(NamedTuple):
    """Something is wrong in the settings. text: what, with which value. hint: what to do, where the
    text does not say it.
    """

    text: str
    hint: str = ""


class InFile(NamedTuple):
    """Holds what the file says for one target; a layer for each other target; what has no right
    form.
    """

    own: Layer
    others: list[Layer]
    problems: list[Problem]


def nested(layer: Layer) -> dict[str, Any]:
    """Returns the values by table, then by key; those of snapshots by set, then by key."""
    tables: dict[str, Any] = {}
    for key, setting in layer.items():
        section, *of_set, name = key.split(".", 2 if key.startswith(_SNAPSHOTS) else 1)
        table = tables.setdefault(section, {})
        for one in of_set:
            table = table.setdefault(one, {})
        table[name] = setting.value
    return tables


def from_flags(flags: Mapping[str, object]) -> Layer:
    """Returns the layer of flags, which go by `table.key`; None means not given."""
    return {
        key: Setting(value, "--" + key.partition(".")[2].replace("_", "-"))
        for key, value in flags.items()
        if value is not None
    }


def from_environment(environ: Mapping[str, str]) -> Layer:
    """Returns the layer of the environment."""
    return {
        key: Setting(environ[name], name) for name, key in ENVIRONMENT.items() if environ.get(name)
    }


def from_aws(environ: Mapping[str, str], layer: Layer) -> Layer:
    """Returns what the variables of AWS say, below all of ours, about the bucket of a layer."""
    name = next(filter(environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")), None)
    url = layer["remote.url"].value if "remote.url" in layer else None
    if name is None or not str(url).lower().startswith("s3:"):
        return {}
    return {"remote.endpoint": Setting(environ[name], name)}


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """Returns a line for each set variable that looks like a misspelling of ours."""
    ours = {name.removeprefix("NTT_"): name for name in (*ENVIRONMENT, CONFIG_VARIABLE)}
    lines = []
    for name in sorted(environ):
        bare = name.upper().removeprefix("NTT_")
        if name.upper().startswith("NTT_") and environ[name] and name not in ours.values():
            for match in difflib.get_close_matches(bare, ours, n=1, cutoff=0.8):
                lines.append(f"{name} has no effect; did you mean {ours[match]}?")
    return lines


def from_file(file: Path | None, environ: Mapping[str, str], target: str) -> InFile:
    """Returns what the file says: that given, of NTT_CONFIG, or the default one. Raises ConfigError
    where it cannot be read or has no such target.
    """
    if not _TARGET_NAME.fullmatch(target):
        raise ConfigError(f"target {target!r} is not a valid name", hint=_TARGET_HINT)
    problems: list[Problem] = []
    path, tables = _read(file, environ, problems)
    if tables is None:
        return InFile({}, [], [])
    remotes = _remotes(tables, path, problems)
    if target not in remotes:
        there = _with_a_place(remotes, environ)
        raise ConfigError(
            f"target {target!r} is not in {path}",
            detail=f"it has {', '.join(there) if there else 'no targets'}",
            hint=f"add a table [targets.{target}] with url",
        )
    own, layer = remotes.pop(target), _snapshots(tables.pop("snapshots", {}), path, problems)
    for section, table in tables.items():
        layer |= _layer(section, table, section, path)
    layer |= own
    for former, today in _RENAMED.items():
        if former in layer and today in layer:
            text = f"{path} sets {former} and {today}, which are the same"
            problems.append(Problem(text, f"keep {today}"))
        if former in layer:
            layer[today] = layer.pop(former)
    return InFile(layer, list(remotes.values()), problems)


def targets(file: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Returns the names of all targets: those of `[targets.*]`, and `remote` where it has a place,
    which the environment may give. Raises ConfigError where the file cannot be read.
    """
    path, tables = _read(file, environ, [])
    remotes = _remotes(tables or {}, path, [])
    return _with_a_place(remotes, environ) or [DEFAULT_TARGET]


def _with_a_place(remotes: Mapping[str, Layer], environ: Mapping[str, str]) -> list[str]:
    """Returns the targets, without `remote` where nothing says its place."""
    said = remotes[DEFAULT_TARGET].keys() | from_environment(environ).keys()
    return [name for name in remotes if name != DEFAULT_TARGET or not said.isdisjoint(PLACE)]


def snapshot_sets(file: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Returns the valid names of snapshot sets. Raises ConfigError as `targets` does."""
    path, tables = _read(file, environ, [])
    sets = _by_name("snapshots", (tables or {}).get("snapshots", {}), "", path, [])
    return [name for name in sets if is_set(name)]


def path_of(file: Path | None, environ: Mapping[str, str]) -> Path:
    """Returns where the configuration is, or would be."""
    named = file or environ.get(CONFIG_VARIABLE) or DEFAULT_FILE
    return Path(os.path.expanduser(named))  # noqa: PTH111  never raises


def _layer(section: str, values: Mapping[str, object], written: str, path: Path) -> Layer:
    """Returns the settings of a section, which stand in the table that is called so in the file."""
    return {
        f"{section}.{name}": Setting(value, f"{written}.{name} in {path}")
        for name, value in values.items()
    }


def _remotes(tables: dict[str, Any], path: Path, problems: list[Problem]) -> dict[str, Layer]:
    """Takes `[remote]` and `[targets.*]` out of tables; returns the layers of `remote` by target:
    the settings of `[remote]` except for the place, with its own laid over them. What stands in
    `[targets.NAME.pack]` is part of the target's layer, too.
    """
    targets = _targets(tables.pop("targets", {}), path, problems)
    packs = {
        name: _layer("pack", own.pop("pack"), f"targets.{name}.pack", path)
        for name, own in targets.items()
        if isinstance(own.get("pack"), dict)
    }
    default = _layer("remote", tables.pop(DEFAULT_TARGET, {}), DEFAULT_TARGET, path)
    shared = {key: setting for key, setting in default.items() if key not in PLACE}
    return {DEFAULT_TARGET: default} | {
        name: of_its_kind(shared, str(own.get("url", "ssh:")))
        | _layer("remote", own, f"targets.{name}", path)
        | packs.get(name, {})
        for name, own in targets.items()
    }


def of_its_kind(shared: Layer, url: str) -> Layer:
    """Returns what a target at a URL shares with `[remote]`: what its kind can use."""
    kind = url.partition(":")[0].lower()
    idle = {f"remote.{name}" for one, names in ONLY_FOR.items() if one != kind for name in names}
    return {key: setting for key, setting in shared.items() if key not in idle}


def _snapshots(sets: object, path: Path, problems: list[Problem]) -> Layer:
    layer = Layer()
    for name, own in _by_name("snapshots", sets, "paths = [...]", path, problems).items():
        if not is_set(name):
            problems.append(Problem(f"snapshots.{name} in {path} is not a valid name", _SET_HINT))
            continue
        # A set without settings has no paths, which is told by its name.
        own.setdefault("paths", [])
        layer |= _layer(f"snapshots.{name}", own, f"snapshots.{name}", path)
    return layer


def _by_name(
    table: str, named: object, example: str, path: Path, problems: list[Problem]
) -> dict[str, dict[str, Any]]:
    """Returns the tables in a table, by name."""
    if isinstance(named, dict) and all(isinstance(one, dict) for one in named.values()):
        return named
    hint = f"write [{table}.NAME], then {example} on a line below it"
    problems.append(Problem(f"{table} in {path} must hold tables", hint))
    return {}


def _targets(found: object, path: Path, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    targets = _by_name("targets", found, "url = ...", path, problems)
    if targets.pop(DEFAULT_TARGET, None) is not None:
        text = f"targets.{DEFAULT_TARGET} in {path} is the target of the table [{DEFAULT_TARGET}]"
        hint = f"put its settings under [{DEFAULT_TARGET}], or give it another name"
        problems.append(Problem(text, hint))
    wrong = [name for name in targets if not _TARGET_NAME.fullmatch(name)]
    for name in wrong:
        del targets[name]
        problems.append(Problem(f"targets.{name} in {path} is not a valid name", _TARGET_HINT))
    return targets


def _read(
    file: Path | None, environ: Mapping[str, str], problems: list[Problem]
) -> tuple[Path, dict[str, Any] | None]:
    """Returns the file's path and its tables; no tables where it is the default one and is missing.
    Raises ConfigError where it cannot be read.
    """
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
        # Some editors begin a file with a byte order mark, which TOML does not know.
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not valid TOML", detail=f"line {line} is not UTF-8", hint="save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        # tomllib's own error is a ValueError; int() has one for numbers of thousands of digits.
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
