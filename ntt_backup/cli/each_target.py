"""A command does the same for each target of --target; what is wrong with one hides no other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import click

from ntt_backup.cli.common import Common
from ntt_backup.cli.results import failed
from ntt_backup.config import CatalogConfig
from ntt_backup.errors import BackupError, worst
from ntt_backup.format import render_error

T = TypeVar("T")


class EachTarget(Generic[T]):
    """Works on each target, and keeps what was found and what went wrong.

    settings: of each target, by name. found and errors: what `do` has found, or met.
    """

    def __init__(self, common: Common, settings: Mapping[str, CatalogConfig]) -> None:
        self._common = common
        self.settings = settings
        self.found: dict[str, T] = {}
        self.errors: dict[str, BackupError] = {}

    @property
    def several(self) -> bool:
        """Returns whether --target names more than one, or all."""
        return list(self.settings) != [self._common.target]

    def do(self, work: Callable[[CatalogConfig], T]) -> None:
        """Works on each."""
        self.found, self.errors = {}, {}
        for name, settings in self.settings.items():
            self._common.turn_to(name)
            try:
                self.found[name] = work(settings)
            except BackupError as error:
                self.errors[name] = error

    def json(self, fields: Callable[[T], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns plain JSON values: of one target, or of all by their names."""
        told: dict[str, Mapping[str, Any]] = {
            name: failed(name, error) for name, error in self.errors.items()
        }
        told |= {name: fields(one) for name, one in self.found.items()}
        if self.several:
            return {"targets": {name: told[name] for name in self.settings}}
        return dict(told[self._common.target])

    def complain(self) -> None:
        """Prints the errors of several targets. Raises the one of a single target."""
        for name, error in self.errors.items():
            if not self.several:
                raise error
            click.echo(f"target {name}: {render_error(error)}", err=True)

    def end(self) -> None:
        """Ends the process with the exit code of the worst error, where there was one."""
        if self.errors:
            sys.exit(worst(error.exit_code for error in self.errors.values()))
