"""What every command has at hand: the options before it, settings, and a way to the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ntt_backup import identity
from ntt_backup.catalog import db
from ntt_backup.config import CatalogConfig, load

ConfigT = TypeVar("ConfigT", bound=CatalogConfig)


@dataclass(frozen=True, slots=True)
class Common:
    """The options before the command."""

    config: Path | None
    target: str

    def load(self, model: type[ConfigT], flags: Mapping[str, object] | None = None) -> ConfigT:
        """The settings under these options. Raises ConfigError."""
        return load(model, flags=flags, file=self.config, target=self.target)


def connect(settings: CatalogConfig, command: str) -> db.Connection:
    """The catalog, under a name that says which command asks. Raises CatalogError."""
    return db.connect(settings.catalog.url, identity.application(command))
