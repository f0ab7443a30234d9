"""Settings: read once, validated once, frozen.

Flags win over the environment, the environment over the TOML file, the file over the defaults. The
trouble with layered settings is finding out where a wrong value came from; so each layer remembers
the name that the operator wrote, and a value that fails is reported with that name, what it
is, and what is needed. All problems are reported at once.

`settings` holds the models, `layers` the sources and the names of the environment variables (they
follow no one scheme, scripts rely on them), `problems` the wording; pydantic-settings merges the
layers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ntt_backup.config import sources
from ntt_backup.config.messages import Problem, config_error, explain
from ntt_backup.config.models import (
    DEFAULT_TARGET,
    LAYERS,
    CatalogConfig,
    CatalogSettings,
    DumpSettings,
    LockSettings,
    LogSettings,
    RemoteConfig,
    RemoteSettings,
    RunSettings,
    Settings,
    SourceSettings,
    StoreConfig,
    parse_duration,
    parse_size,
)
from ntt_backup.config.sources import DEFAULT_FILE, ENVIRONMENT, misspelt

__all__ = [
    "DEFAULT_FILE",
    "DEFAULT_TARGET",
    "ENVIRONMENT",
    "CatalogConfig",
    "CatalogSettings",
    "DumpSettings",
    "LockSettings",
    "LogSettings",
    "RemoteConfig",
    "RemoteSettings",
    "RunSettings",
    "Settings",
    "SourceSettings",
    "StoreConfig",
    "load",
    "misspelt",
    "parse_duration",
    "parse_size",
]

ConfigT = TypeVar("ConfigT", bound=CatalogConfig)


def load(
    model: type[ConfigT],
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    target: str = DEFAULT_TARGET,
) -> ConfigT:
    """Read all layers and return validated settings.

    flags maps `table.key` to the value given on the command line (None: not given). file is
    `--config`; without it `NTT_CONFIG`, else /etc/ntt/backup-remote.toml where that exists. An
    empty environment variable counts as not set.

    Raises ConfigError that tells of every problem, in one line.
    """
    in_file = sources.from_file(file, environ, target)
    in_environment = sources.from_environment(environ)
    layers = [sources.from_flags(flags or {}), in_environment, in_file]
    place = "remote" if target == DEFAULT_TARGET else f"targets.{target}"
    problems = [*_two_places(in_environment, in_file, place), *_in_other_targets(in_file)]
    token = LAYERS.set(tuple(layer.values for layer in layers))
    try:
        settings = model(target=target)
    except ValidationError as error:
        raise config_error([*explain(error.errors(), layers, place), *problems]) from error
    finally:
        LAYERS.reset(token)
    if problems:
        raise config_error(problems)
    return settings


def _two_places(environment: sources.Layer, file: sources.FileLayer, place: str) -> list[Problem]:
    """The environment says where `remote` is: it must not send another target's blobs there."""
    keys = [f"remote.{name}" for name in sources.PLACE]
    if place == "remote" or not any(key in file.origins for key in keys):
        return []
    return [
        Problem(
            f"{environment.origins[key]} is set, but [{place}] in {file.path} is another place",
            "unset it to work on this target",
        )
        for key in keys
        if key in environment.origins
    ]


def _in_other_targets(file: sources.FileLayer) -> list[Problem]:
    """What is wrong with the targets that are not used now; those may be incomplete."""
    problems: list[Problem] = []
    for layer in file.others:
        try:
            CatalogConfig.model_validate(layer.values)
        except ValidationError as error:
            wrong = [one for one in error.errors() if one["type"] != "missing"]
            problems += explain(wrong, [layer], "remote")
    return problems
