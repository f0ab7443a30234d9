"""Settings: read once, validated once, frozen.

Flags win over the environment, the environment over the TOML file, the file over the defaults. With
layered settings it is hard to find out where a wrong value came from. So each value keeps the name
that the operator wrote, and all problems are reported at once, by these names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ntt_backup.config import sources
from ntt_backup.config.messages import config_error, explain
from ntt_backup.config.models import (
    ENVIRONMENT,
    CatalogConfig,
    DumpSettings,
    RemoteConfig,
    RemoteSettings,
    RunSettings,
    Settings,
    StoreConfig,
)
from ntt_backup.config.sources import misspelt
from ntt_backup.config.values import parse_duration, parse_size
from ntt_backup.model import DEFAULT_TARGET

__all__ = [
    "DEFAULT_TARGET",
    "ENVIRONMENT",
    "CatalogConfig",
    "ConfigT",
    "DumpSettings",
    "RemoteConfig",
    "RemoteSettings",
    "RunSettings",
    "Settings",
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
    """Reads all layers and returns validated settings.

    flags maps `table.key` to the value given on the command line (None: not given). file is
    `--config`; without it `NTT_CONFIG`, else /etc/ntt/backup-remote.toml where that exists. An
    empty environment variable counts as not set.

    Raises ConfigError that names every problem, in one line.
    """
    in_file = sources.from_file(file, environ, target)
    in_environment = sources.from_environment(environ)
    merged = sources.merged(in_file, in_environment, sources.from_flags(flags or {}))
    table = "remote" if target == DEFAULT_TARGET else f"targets.{target}"
    problems = sources.place_conflicts(in_environment, in_file, table)
    for other in in_file.others:
        problems += sources.problems_of_other_target(other)
    settings = None
    try:
        settings = model.model_validate({**merged.values, "target": target})
    except ValidationError as error:
        problems[:0] = explain(error.errors(), merged.origins, table)
    if settings is None or problems:
        raise config_error(problems)
    return settings
