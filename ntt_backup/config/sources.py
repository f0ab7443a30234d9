"""Where settings come from: flags, environment, file. Each value keeps the name its operator wrote.

A layer is what one of them says, as `table.key` to value, with an origin for each key: `--workers`,
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ntt_backup.config.messages import Problem, explain
from ntt_backup.config.models import ENVIRONMENT, TABLES, CatalogConfig
from ntt_backup.errors import ConfigError
from ntt_backup.model import DEFAULT_TARGET

DEFAULT_FILE = Path("/etc/ntt/backup-remote.toml")
CONFIG_VARIABLE = "NTT_CONFIG"

# The former names of settings: files that were written then are still valid.
_RENAMED: Mapping[str, str] = {"dump.refresh": "dump.max_age"}
# A target that names one of these must not inherit the others from elsewhere.
_PLACE = ("host", "port", "path")
_TARGET_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_TARGET_HINT = "a target's name is lowercase letters, digits and _, at most 31, a letter first"


@dataclass(slots=True)
class Layer:
    """What one source says. values are nested by table, origins go by `table.key`."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: object, origin: str) -> None:
        section, _, name = key.partition(".")
        self.values.setdefault(section, {})[name] = value
        self.origins[key] = origin if origin.isprintable() else ascii(origin)[1:-1]


@dataclass(slots=True)
class FileLayer(Layer):
    """What the file says for one target. others: its tables of the targets that are not used."""

    path: Path | None = None
    others: list[Layer] = field(default_factory=list)


def merged(*layers: Layer) -> Layer:
    """Returns one layer of all. A later one wins."""
    result = Layer()
    for layer in layers:
        for section, values in layer.values.items():
            result.values.setdefault(section, {}).update(values)
        result.origins.update(layer.origins)
    return result


def from_flags(flags: Mapping[str, object]) -> Layer:
    """Returns the layer of flags, which go by `table.key`; None means not given."""
    layer = Layer()
    for key, value in flags.items():
        if value is not None:
            layer.put(key, value, "--" + key.partition(".")[2].replace("_", "-"))
    return layer


def from_environment(environ: Mapping[str, str]) -> Layer:
    """Returns the layer of the environment."""
    layer = Layer()
    for name, key in ENVIRONMENT.items():
        if value := environ.get(name):
            layer.put(key, value, name)
    return layer


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


def from_file(file: Path | None, environ: Mapping[str, str], target: str) -> FileLayer:
    """Returns the layer of the file given, else that of NTT_CONFIG, else that of the default file
    where it exists.

    Raises ConfigError for a file that cannot be read, is not TOML, or has not the form of tables.
    """
    if not _TARGET_NAME.fullmatch(target):
        raise ConfigError(f"target {target!r} is not a valid name", hint=_TARGET_HINT)
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    path = Path(os.path.expanduser(file or DEFAULT_FILE))  # noqa: PTH111  never raises
    try:
        tables = _tables(path)
    except OSError as error:
        if file is None and isinstance(error, FileNotFoundError | NotADirectoryError):
            return FileLayer()
        raise ConfigError(
            f"cannot read the configuration {path}",
            detail=error.strerror or str(error),
            hint=f"name another with --config or {CONFIG_VARIABLE}, or correct its permissions",
        ) from error
    remotes = _remotes(tables, path)
    if target not in remotes:
        raise ConfigError(
            f"target {target!r} is not in {path}",
            detail=f"its targets are {', '.join(remotes)}",
            hint=f"add a table [targets.{target}] with host and path",
        )
    chosen = remotes.pop(target)
    layer = FileLayer(chosen.values, chosen.origins, path, list(remotes.values()))
    for section, table in tables.items():
        layer.values[section] = {}
        for name, value in table.items():
            key = f"{section}.{name}"
            today = _RENAMED.get(key, key)
            if today != key and today.partition(".")[2] in table:
                raise ConfigError(
                    f"{path} sets {key} and {today}, which are the same", hint=f"keep {today}"
                )
            layer.put(today, value, f"{key} in {path}")
    return layer


def place_conflicts(environment: Layer, file: FileLayer, table: str) -> list[Problem]:
    """Returns a problem for each variable that would send blobs of another target to `remote`."""
    keys = [f"remote.{name}" for name in _PLACE]
    if table == DEFAULT_TARGET or not any(key in file.origins for key in keys):
        return []
    return [
        Problem(
            f"{environment.origins[key]} is set, but [{table}] in {file.path} is another place",
            "unset it to work on this target",
        )
        for key in keys
        if key in environment.origins
    ]


def problems_of_other_target(layer: Layer) -> list[Problem]:
    """Returns what is wrong with a target that is not used now; it may be incomplete."""
    try:
        CatalogConfig.model_validate(layer.values)
    except ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] != "missing"]
        return explain(wrong, layer.origins, DEFAULT_TARGET)
    return []


def _remotes(tables: dict[str, Any], path: Path) -> dict[str, Layer]:
    """Takes `[remote]` and `[targets.*]` out of tables; returns a layer of `remote` by target.

    A target has the settings of `[remote]` except for the place, with its own laid over them.
    """
    targets = _targets(tables.pop("targets", {}), path)
    shared = tables.pop(DEFAULT_TARGET, None)
    layers = {DEFAULT_TARGET: Layer({} if shared is None else {"remote": {}})}
    layers |= {target: Layer({"remote": {}}) for target in targets}
    for target, layer in layers.items():
        for name, value in (shared or {}).items():
            if target == DEFAULT_TARGET or name not in _PLACE:
                layer.put(f"remote.{name}", value, f"remote.{name} in {path}")
        for name, value in targets.get(target, {}).items():
            layer.put(f"remote.{name}", value, f"targets.{target}.{name} in {path}")
    return layers


def _targets(targets: object, path: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(targets, dict) or not all(isinstance(one, dict) for one in targets.values()):
        raise ConfigError(
            f"targets in {path} must hold tables",
            hint="write [targets.NAME], then host = ... and path = ... on lines below it",
        )
    for name in targets:
        if not _TARGET_NAME.fullmatch(name):
            raise ConfigError(f"targets.{name} in {path} is not a valid name", hint=_TARGET_HINT)
        if name == DEFAULT_TARGET:
            raise ConfigError(
                f"targets.{name} in {path} is the target of the table [{DEFAULT_TARGET}]",
                hint=f"put its settings under [{DEFAULT_TARGET}], or give it another name",
            )
    return targets


def _tables(path: Path) -> dict[str, Any]:
    """Returns the file's tables by name. Raises OSError, and ConfigError for another form."""
    data = path.read_bytes()
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
        raise ConfigError(f"{path} is not valid TOML", detail=str(error)) from error
    for section, table in tables.items():
        if section not in (*TABLES, "targets") or not isinstance(table, dict):
            raise ConfigError(
                f"{section} in {path} is not a table of settings",
                hint="settings stand below their table: [run], then workers = 4; the tables are "
                + ", ".join((*TABLES, "targets.NAME")),
            )
    return tables
