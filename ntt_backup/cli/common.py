"""What commands share: the options before them, settings, a way to the catalog, what JSON says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ntt_backup import identity
from ntt_backup.catalog import connection
from ntt_backup.config import DEFAULT_TARGET, CatalogConfig, load
from ntt_backup.model import Failure

ConfigT = TypeVar("ConfigT", bound=CatalogConfig)


@dataclass(frozen=True, slots=True)
class Common:
    """The options before the command."""

    config: Path | None
    target: str

    @property
    def options(self) -> list[str]:
        """They as they are written; none for a default."""
        file = ["--config", str(self.config)] if self.config is not None else []
        return [*file, *(["--target", self.target] if self.target != DEFAULT_TARGET else [])]

    def load(self, model: type[ConfigT], flags: Mapping[str, object] | None = None) -> ConfigT:
        """The settings under these options. Raises ConfigError."""
        return load(model, flags=flags, file=self.config, target=self.target)


def plain_failures(failures: Iterable[Failure]) -> list[dict[str, str]]:
    """Failures as plain JSON values."""
    return [
        {"blobid": one.blobid, "reason": str(one.reason), "detail": one.detail} for one in failures
    ]


def connect(settings: CatalogConfig, command: str) -> connection.Connection:
    """The catalog, under a name that says which command asks. Raises CatalogError."""
    return connection.connect(settings.catalog.url, identity.application(command))
