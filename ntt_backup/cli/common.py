"""Commands share the options before the command, settings, the catalog, and files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click
from click.core import ParameterSource

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.cli import options
from ntt_backup.errors import ConfigError, remember_global_options
from ntt_backup.format import printable
from ntt_backup.model import DEFAULT_TARGET

if TYPE_CHECKING:
    from ntt_backup.catalog.connection import Connection
    from ntt_backup.config import CatalogConfig, ConfigT
    from ntt_backup.config.sealing import Keyring


@dataclass(frozen=True, slots=True)
class Common:
    """The options before the command."""

    config: Path | None
    target: str

    @property
    def default_target(self) -> bool:
        """Returns whether no --target is given."""
        source = click.get_current_context().find_root().get_parameter_source("target")
        return source is ParameterSource.DEFAULT

    @property
    def words(self) -> list[str]:
        """Returns the options as they are written on a command line; none for a default."""
        file = ["--config", str(self.config)] if self.config is not None else []
        return [*file, *(["--target", self.target] if self.target != DEFAULT_TARGET else [])]

    def load(self, model: type[ConfigT], flags: Mapping[str, object] | None = None) -> ConfigT:
        """Returns the settings under these options. Raises ConfigError, and click.UsageError where
        they name several targets.
        """
        found = self.load_each(model, flags)
        if list(found) != [self.target]:
            text = f"--target {self.target} names several targets: this command takes one"
            raise click.UsageError(text)
        return found[self.target]

    def load_each(
        self, model: type[ConfigT], flags: Mapping[str, object] | None = None
    ) -> dict[str, ConfigT]:
        """Returns the settings of each target of --target, by its name. Raises ConfigError.

        flags: settings that options of the command make, besides --identity.
        """
        from ntt_backup.config import load_each, misspelt

        for warning in misspelt(os.environ):
            click.echo(f"warning: {warning}", err=True)
        if identity := options.given("identity"):
            flags = {"pack.identity_file": str(identity.absolute()), **(flags or {})}
        return load_each(model, self.target, flags=flags, file=self.config)

    def names(self) -> list[str]:
        """Returns the names of the targets of --target, as the settings have them now. Raises
        ConfigError.
        """
        from ntt_backup.config import names_of

        return names_of(self.target, environ=os.environ, file=self.config)

    def turn_to(self, target: str) -> None:
        """Lets command lines in hints name this one of several targets from now on."""
        remember_global_options(replace(self, target=target).words)

    def keyring(self) -> Keyring:
        """Returns what opens the packs in files, by --identity or by the settings."""
        from ntt_backup.config import CatalogConfig
        from ntt_backup.config.sealing import Keyring

        identity: Path | None = options.given("identity")
        return Keyring(lambda: identity or self.load(CatalogConfig).pack.identity_file)


def connect(settings: CatalogConfig, application: str, *, no_tables: bool = False) -> Connection:
    """Connects to the catalog, under a name that `status` shows; see `catalog.connection.connect`.
    Raises CatalogError.
    """
    from ntt_backup.catalog import connection
    from ntt_backup.config import identity

    name = identity.application(application)
    return connection.connect(settings.catalog.url, name, no_tables=no_tables)


@contextmanager
def open_catalog(
    settings: CatalogConfig, command: str, *, application: str = ""
) -> Iterator[Connection]:
    """Yields a connection to a catalog that has, and allows, what the command (of
    `privileges.NEEDS`) does. Raises CatalogError.
    """
    from ntt_backup.catalog import privileges
    from ntt_backup.catalog.schema_check import verify_schema

    bucket = settings.remote is not None and settings.remote.kind == "s3"
    with connect(settings, application or command) as conn:
        verify_schema(conn, settings.target, privileges.of(command, bucket=bucket))
        yield conn


@contextmanager
def writing(path: Path, hint: str = "name another file") -> Iterator[None]:
    """Raises ConfigError for what the system says about a file that the operator named."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}", detail=error.strerror or str(error), hint=hint
        ) from error


@contextmanager
def written(path: Path, hint: str = "name another file") -> Iterator[TextIO]:
    """Gives a new file that the operator named. Raises ConfigError where it cannot be made, or has
    not got all that was written; what ends the context comes before that.
    """
    with writing(path, hint):
        file = path.open("w", encoding="utf-8")
    try:
        yield file
    except BaseException:
        with suppress(OSError):
            file.close()
        raise
    with writing(path, hint):
        file.close()


def read_blobids(names: TextIO) -> Iterator[str]:
    """Yields the blobids of a file, one a line. Raises click.UsageError for anything else."""
    stripped = ((number, line.strip()) for number, line in enumerate(names, 1))
    return require_blobids(
        ((number, line) for number, line in stripped if line), f"{names.name}, line"
    )


def require_blobids(names: Iterable[tuple[int, str]], where: str) -> Iterator[str]:
    """Yields numbered names. Raises click.UsageError for one that is no blobid."""
    for number, name in names:
        if not is_blobid(name):
            raise click.UsageError(f"{where} {number}: {printable(name[:80])} is not a blobid")
        yield name
