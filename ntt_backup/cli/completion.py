"""A shell completes the names of targets and snapshot sets.

A shell asks at each press of a key, so only the configuration is read: neither the catalog nor the
remote is asked, and what cannot be read completes to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import click

from ntt_backup.errors import ConfigError


def target_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Returns the targets of the configuration that begin so, and the word for all of several."""
    from ntt_backup.config import ALL_TARGETS, sources

    found = _known(sources.targets, ctx, incomplete)
    several = len(_known(sources.targets, ctx, "")) > 1 and ALL_TARGETS.startswith(incomplete)
    return [*found, *([ALL_TARGETS] if several else [])]


def set_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Returns the snapshot sets of the configuration that begin so."""
    from ntt_backup.config import sources

    return _known(sources.snapshot_sets, ctx, incomplete)


def _known(
    names: Callable[[Path | None, Mapping[str, str]], list[str]], ctx: click.Context, begin: str
) -> list[str]:
    with suppress(ConfigError):
        found = names(ctx.find_root().params.get("config"), os.environ)
        return [name for name in found if name.startswith(begin)]
    return []
