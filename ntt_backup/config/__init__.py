"""Settings are read once, validated once, and frozen.

Flags override the environment, the environment overrides the TOML file, the file overrides the
defaults. With layered settings it is hard to find the origin of a wrong value. So each value keeps
the name under which the operator set it, and all problems are reported at once by these names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from ntt_backup.config import sources
from ntt_backup.config.command_settings import CatalogConfig as CatalogConfig
from ntt_backup.config.command_settings import RemoteConfig as RemoteConfig
from ntt_backup.config.command_settings import SendConfig as SendConfig
from ntt_backup.config.command_settings import Settings as Settings
from ntt_backup.config.command_settings import StoreConfig as StoreConfig
from ntt_backup.config.display import explain
from ntt_backup.config.sections import RemoteSettings as RemoteSettings
from ntt_backup.config.sections import RunSettings as RunSettings
from ntt_backup.config.sections import SourceSettings as SourceSettings
from ntt_backup.config.sources import Problem
from ntt_backup.config.sources import misspelt as misspelt
from ntt_backup.config.values import parse_duration as parse_duration
from ntt_backup.config.values import parse_size as parse_size
from ntt_backup.errors import ConfigError
from ntt_backup.model import DEFAULT_TARGET as DEFAULT_TARGET

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound=CatalogConfig)
# The name for all targets, unless a target has this name.
ALL_TARGETS = "all"


def application_name(part: str = "") -> str:
    """Returns the application_name of a connection, `ntt-backup-remote/HOST/PART`.

    The name lets `status` show which host holds which range.

    Args:
        part: The purpose of the connection.
    """
    return "/".join(filter(None, ("ntt-backup-remote", socket.gethostname()[:30], part)))


def load(
    model: type[ConfigT],
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    target: str = DEFAULT_TARGET,
) -> ConfigT:
    """Reads all layers and returns validated settings.

    Args:
        model: The tables that the command needs.
        flags: Values by `table.key`; None for a flag that is not given.
        environ: The environment.
        file: The argument of `--config`, see `sources.path_of`.
        target: The name of the target.

    Raises:
        ConfigError: Settings are wrong. The error names all problems in one line.
    """
    found = examine(model, flags=flags, environ=environ, file=file, target=target)
    refuse(found.problems)
    assert found.settings is not None  # Else there would be a problem.
    return found.settings


def refuse(problems: Sequence[Problem]) -> None:
    """Raises a ConfigError that names all problems, if there are any."""
    if problems:
        texts = dict.fromkeys(problem.text for problem in problems)
        hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
        # A log entry is one line.
        raise ConfigError("; ".join(texts), hint="; ".join(hints))


class Examined(NamedTuple, Generic[ConfigT]):
    """Examined settings: the settings, None if they are wrong; the merged layer; all problems."""

    settings: ConfigT | None
    layer: sources.Layer
    problems: list[Problem]


def examine(
    model: type[ConfigT],
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str],
    file: Path | None,
    target: str,
) -> Examined[ConfigT]:
    """Returns the settings that `load` returns, or their problems, with the origin of each value.

    Raises:
        ConfigError: The file cannot be read, or has no such target.
    """
    in_file, others, problems, names = sources.from_file(file, environ, target)
    in_environment = sources.from_environment(environ)
    held = sources.from_credentials(environ, target, in_file)
    layer = in_file | held | in_environment | sources.from_flags(flags or {})
    layer = sources.from_aws(environ, layer) | layer
    table = "remote" if target == DEFAULT_TARGET else f"targets.{target}"
    path = sources.path_of(file, environ)
    of_groups = sources.media(file, environ).values()
    media = next((names for names in of_groups if target in names), [])
    settings, wrong = _validated(model, layer, target, table, path, media=media)
    problems += wrong
    if settings is not None:
        settings = settings.among(names)
    # The variable would send the blobs of this target to the place of `remote`.
    place = next((in_file[key].origin for key in sources.PLACE if key in in_file), None)
    if place is not None and target != DEFAULT_TARGET:
        problems += [
            Problem(
                f"{in_environment[key].origin} is set, but {place} is another place",
                "unset it to work on this target",
            )
            for key in sources.PLACE
            if key in in_environment and (key in in_file or key != "remote.endpoint")
        ]
    for other in others:
        problems += _validated(CatalogConfig, other, target, "remote", path, complete=False)[1]
    return Examined(settings, layer, problems)


def load_each(
    model: type[ConfigT],
    targets: str,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
) -> dict[str, ConfigT]:
    """Returns the settings of several targets by name, see `names_of`.

    Raises:
        ConfigError: The settings of a target are wrong. The error names the target.
    """
    found: dict[str, ConfigT] = {}
    wrong: dict[str, ConfigError] = {}
    for name in names_of(targets, environ=environ, file=file):
        try:
            found[name] = load(model, flags=flags, environ=environ, file=file, target=name)
        except ConfigError as error:
            wrong[name] = error
    if len({str(error) for error in wrong.values()}) == 1 and not found:
        raise next(iter(wrong.values()))
    if wrong:
        raise ConfigError(
            "; ".join(f"target {name}: {error}" for name, error in wrong.items()),
            hint="; ".join(dict.fromkeys(error.hint for error in wrong.values() if error.hint)),
        )
    return found


def names_of(targets: str, *, environ: Mapping[str, str], file: Path | None) -> list[str]:
    """Returns the names of the targets in `all` or in a list such as `a,b`. Raises ConfigError.

    In the place of a target that has media stand these.
    """
    names = targets.split(",")
    if len(names) > 1 and "" in names:
        raise ConfigError(
            f"--target {targets} has a comma with no name beside it",
            hint="write several targets as a,b",
        )
    if names == [ALL_TARGETS]:
        known = sources.targets(file, environ)
        names = names if ALL_TARGETS in known else known
    media = sources.media(file, environ)
    names = [one for name in names for one in media.get(name, [name])]
    return list(dict.fromkeys(names))


def shared_files(each: Mapping[str, CatalogConfig]) -> list[Problem]:
    """Returns a problem for each lock and each socket that several targets share.

    The daemons of these targets could not run at the same time. each: the settings by target.
    """
    problems: dict[str, Problem] = {}
    for key in ("lock.file", "control.socket"):
        for path, names in _in_common({name: attrgetter(key)(one) for name, one in each.items()}):
            hint = f"write {{target}} into {key}: it stands for the target's name"
            # Targets that share a lock also share the socket beside it.
            problems.setdefault(names, Problem(f"{key} is {path} for the targets {names}", hint))
    return list(problems.values())


def shared_places(each: Mapping[str, CatalogConfig]) -> list[Problem]:
    """Returns a problem for each place that several targets share.

    The place would hold one copy of their blobs, and not several. each: the settings by target.
    """
    places = {
        name: (one.remote.url, one.remote.endpoint)
        for name, one in each.items()
        # Of the media of a target, which take turns, one stands for all.
        if one.remote is not None and name in (one.media[:1] or (name,))
    }
    return [
        Problem(f"the targets {names} are one place, {url}", "give each a place of its own")
        for (url, _), names in _in_common(places)
    ]


def _in_common(what: Mapping[str, T]) -> Iterator[tuple[T, str]]:
    """Yields each value that several names have, and these names."""
    names: dict[T, list[str]] = {}
    for name, one in what.items():
        names.setdefault(one, []).append(name)
    for one, having in names.items():
        if len(having) > 1:
            yield one, " and ".join(having)


def _validated(
    model: type[ConfigT],
    layer: sources.Layer,
    target: str,
    table: str,
    file: Path,
    *,
    complete: bool = True,
    media: Sequence[str] = (),
) -> tuple[ConfigT | None, list[Problem]]:
    """Returns the settings of a layer, or its problems. complete: missing settings are problems."""
    try:
        return model.model_validate({**sources.nested(layer), "target": target, "media": media}), []
    except ValidationError as error:
        found = error.errors()
        # A list with wrong elements has no error of its own.
        above = {one["loc"][:size] for one in found for size in range(len(one["loc"]))}
        wrong = [
            one
            for one in found
            if one["loc"] not in above and (complete or one["type"] != "missing")
        ]
        return None, [problem for one in wrong for problem in explain(one, layer, table, file)]
