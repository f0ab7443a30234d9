"""Whoever reads a target or takes versions asks for its identity where there is a catalog."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.config.sections import CatalogSettings
from ntt_backup.errors import BackupError

SettingsT = TypeVar("SettingsT", bound=RemoteConfig)

# Where libpq looks for a server that nothing names.
_SOCKETS: Final = (Path("/var/run/postgresql"), Path("/tmp"))  # noqa: S108  Only looked at.


def identified_if_known(settings: SettingsT, application: str) -> SettingsT:
    """Returns the settings with the identity that the catalog knows, which each session requires.

    What reads a target needs no catalog, and may be called on the day on which that is lost.
    """
    if settings.remote.identity or not _may_answer(settings.catalog):
        return settings
    # To load them takes a fifth of the start of a restore.
    from ntt_backup.catalog.connection import connect
    from ntt_backup.catalog.identities import identified

    with suppress(BackupError), connect(settings.catalog.url, application_name(application)) as one:
        return identified(one, settings)
    return settings


def _may_answer(catalog: CatalogSettings) -> bool:
    """Returns whether a server is named, or there is one where none is named."""
    if "url" in catalog.model_fields_set or any(name.startswith("PG") for name in os.environ):
        return True
    return any(any(place.glob(".s.PGSQL.*")) for place in _SOCKETS)
