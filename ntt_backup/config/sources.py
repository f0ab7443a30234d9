"""Where settings come from: flags, environment, file. Each value keeps the name its operator wrote.

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
from typing import Any, NamedTuple

from ntt_backup.config.models import ENVIRONMENT, ONLY_FOR, TABLES
from ntt_backup.errors import ConfigError
from ntt_backup.model import DEFAULT_TARGET

DEFAULT_FILE = Path("/etc/ntt/backup-remote.toml")
CONFIG_VARIABLE = "NTT_CONFIG"

# The former names of settings: files that were written then are still valid.
_RENAMED: Mapping[str, str] = {"dump.refresh": "dump.max_age"}
# A target that names one of these must not inherit the others from elsewhere.
PLACE = ("remote.url", "remote.host", "remote.port", "remote.path", "remote.endpoint")
_TARGET_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_TARGET_HINT = "a target's name is lowercase letters, digits and _, at most 31, a letter first"


class Setting(NamedTuple):
    """A value, and the name under which its operator wrote it."""

    value: object
    origin: str


Layer = dict[str, Setting]


def nested(layer: Layer) -> dict[str, dict[str, object]]:
    """Returns the values by table, then by key."""
    tables: dict[str, dict[str, object]] = {}
    for key, setting in layer.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = setting.value
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


def from_file(
    file: Path | None, environ: Mapping[str, str], target: str
) -> tuple[Layer, list[Layer]]:
    """Returns what the file (given, of NTT_CONFIG, or the default one) says for this target, and a
    layer for each other target. Raises ConfigError for one that cannot be read, or has another
    form.
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
            return {}, []
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
            hint=f"add a table [targets.{target}] with url",
        )
    own, layer = remotes.pop(target), Layer()
    for section, table in tables.items():
        layer |= _layer(section, table, section, path)
    layer |= own
    for former, today in _RENAMED.items():
        if former in layer and today in layer:
            raise ConfigError(
                f"{path} sets {former} and {today}, which are the same", hint=f"keep {today}"
            )
        if former in layer:
            layer[today] = layer.pop(former)
    return layer, list(remotes.values())


def _layer(section: str, values: Mapping[str, object], written: str, path: Path) -> Layer:
    """Returns the settings of a section, which stand in the table that is called so in the file."""
    return {
        f"{section}.{name}": Setting(value, f"{written}.{name} in {path}")
        for name, value in values.items()
    }


def _remotes(tables: dict[str, Any], path: Path) -> dict[str, Layer]:
    """Takes `[remote]` and `[targets.*]` out of tables; returns the layers of `remote` by target:
    the settings of `[remote]` except for the place, with its own laid over them. What stands in
    `[targets.NAME.pack]` is part of the target's layer, too.
    """
    targets = _targets(tables.pop("targets", {}), path)
    packs = {
        name: _layer("pack", own.pop("pack"), f"targets.{name}.pack", path)
        for name, own in targets.items()
        if isinstance(own.get("pack"), dict)
    }
    default = _layer("remote", tables.pop(DEFAULT_TARGET, {}), DEFAULT_TARGET, path)
    shared = {key: setting for key, setting in default.items() if key not in PLACE}
    return {DEFAULT_TARGET: default} | {
        name: _of_its_kind(shared, own)
        | _layer("remote", own, f"targets.{name}", path)
        | packs.get(name, {})
        for name, own in targets.items()
    }


def _of_its_kind(shared: Layer, own: Mapping[str, object]) -> Layer:
    """Returns what a target shares with `[remote]`: not what means nothing for its kind."""
    kind = str(own.get("url", "ssh:")).partition(":")[0].lower()
    idle = {f"remote.{name}" for one, names in ONLY_FOR.items() if one != kind for name in names}
    return {key: setting for key, setting in shared.items() if key not in idle}


def _targets(targets: object, path: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(targets, dict) or not all(isinstance(one, dict) for one in targets.values()):
        raise ConfigError(
            f"targets in {path} must hold tables",
            hint="write [targets.NAME], then url = ... on a line below it",
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
