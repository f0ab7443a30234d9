"""The global options, and what they give every command: settings, catalog, files, keys."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

import click
from click.core import ParameterSource

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.cli import options
from ntt_backup.errors import ConfigError, remember_global_options
from ntt_backup.formatting import printable
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
        """Returns the options as words of a command line, without those that have their default."""
        file = ["--config", str(self.config)] if self.config is not None else []
        return [*file, *(["--target", self.target] if self.target != DEFAULT_TARGET else [])]

    def load(self, model: type[ConfigT], flags: Mapping[str, object] | None = None) -> ConfigT:
        """Returns the settings of the target. Raises ConfigError, or UsageError for several."""
        found = self.load_each(model, flags)
        if list(found) != [self.target]:
            text = f"--target {self.target} names several targets: this command takes one"
            raise click.UsageError(text)
        return found[self.target]

    def load_each(
        self, model: type[ConfigT], flags: Mapping[str, object] | None = None
    ) -> dict[str, ConfigT]:
        """Returns the settings of each target of --target, by name. Raises ConfigError.

        flags: Settings by `table.key` that options of the command make, besides --identity.
        """
        from ntt_backup.config import load_each, misspelt

        for warning in misspelt(os.environ):
            click.echo(f"warning: {warning}", err=True)
        if identity := options.given("identity"):
            flags = {"pack.identity_file": str(identity.absolute()), **(flags or {})}
        return load_each(model, self.target, flags=flags, file=self.config)

    def names(self) -> list[str]:
        """Returns the names of the targets of --target, read anew. Raises ConfigError."""
        from ntt_backup.config import names_of

        return names_of(self.target, environ=os.environ, file=self.config)

    def turn_to(self, target: str) -> None:
        """Makes command lines in hints name this target from now on."""
        remember_global_options(replace(self, target=target).words)

    def keyring(self) -> Keyring:
        """Returns the keys that open sealed packs: those of --identity, else of the settings."""
        from ntt_backup.config import CatalogConfig
        from ntt_backup.config.sealing import Keyring

        identity: Path | None = options.given("identity")
        return Keyring(lambda: identity or self.load(CatalogConfig).pack.identity_file)


def connect(settings: CatalogConfig, application: str, *, no_tables: bool = False) -> Connection:
    """Connects to the catalog. Raises CatalogError. application: The session, for `status`."""
    from ntt_backup.catalog import connection
    from ntt_backup.config import application_name

    name = application_name(application)
    return connection.connect(settings.catalog.url, name, no_tables=no_tables, part=settings.part)


def refuse_paths(settings: CatalogConfig, hint: str) -> None:
    """Raises ConfigError where files go by their paths: the command needs names that are hashes."""
    if settings.by_path:
        raise ConfigError("the files of this store go by their paths", hint=hint)


@contextmanager
def open_catalog(
    settings: CatalogConfig, command: str, *, application: str = ""
) -> Iterator[Connection]:
    """Yields a connection to a catalog that has the tables and privileges that a command needs.

    Args:
        settings: The settings of the target.
        command: A key of `privileges.NEEDS`.
        application: The name of the session, if it is not that of the command.

    Raises:
        CatalogError: The catalog is unreachable, or lacks a table or a privilege.
    """
    from ntt_backup.catalog import privileges
    from ntt_backup.catalog.schema_check import verify_schema

    packs = settings.remote is not None and settings.remote.packs
    with connect(settings, application or command) as conn:
        verify_schema(conn, settings.target, privileges.of(command, packs=packs))
        yield conn


@contextmanager
def writing(path: Path, hint: str = "name another file") -> Iterator[None]:
    """Turns an OSError about a file that the operator named into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}", detail=error.strerror or str(error), hint=hint
        ) from error


class NamedFile:
    """A text file that the operator named. Raises ConfigError where it cannot be written.

    Each line is written at once, so that an error is told when it occurs.
    """

    def __init__(self, path: Path, hint: str = "name another file", mode: str = "w") -> None:
        self._writing = partial(writing, path, hint)
        with self._writing():
            self._file = path.open(mode, buffering=1, encoding="utf-8")

    def write(self, line: str) -> None:
        with self._writing():
            self._file.write(f"{line}\n")

    def clear(self) -> None:
        with self._writing():
            if self._file.seekable():
                self._file.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._writing():
            self._file.close()


def read_blobids(names: TextIO) -> Iterator[str]:
    """Yields the blobids of a file, one per line. Raises UsageError for any other line."""
    stripped = ((number, line.strip()) for number, line in enumerate(names, 1))
    return require_blobids(
        ((number, line) for number, line in stripped if line), f"{names.name}, line"
    )


def require_blobids(names: Iterable[tuple[int, str]], where: str) -> Iterator[str]:
    """Yields the names. Raises UsageError, with the number, for a name that is not a blobid."""
    for number, name in names:
        if not is_blobid(name):
            raise click.UsageError(f"{where} {number}: {printable(name[:80])} is no whole blobid")
        yield name
