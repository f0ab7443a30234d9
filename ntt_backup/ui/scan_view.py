"""A scan under way: how far it is, and the strays that it finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self, TextIO

from ntt_backup.audit.scan import ScanResult
from ntt_backup.blobdir.layout import Stray
from ntt_backup.errors import ConfigError
from ntt_backup.ui.progress_line import ProgressLine

STRAYS_SHOWN: Final = 20


class ScanView:
    """Shows how far a scan is, and its first strays.

    The file strays, where given, gets every stray as a JSON line, before the scan notes that it is
    past it. ConfigError is raised where it cannot be written.
    """

    def __init__(self, stream: TextIO, strays: Path | None, *, quiet: bool = False) -> None:
        self._line = ProgressLine(stream, quiet=quiet)
        self._strays = 0
        self._path = strays
        with self._writing():
            self._file = None if strays is None else strays.open("a", buffering=1, encoding="utf-8")

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.__exit__(*error)
        if self._file is not None:
            with self._writing():
                self._file.close()

    def begin(self, resumed_from: str | None) -> None:
        """Empties the file of strays, unless the scan goes on where an earlier one ended."""
        if resumed_from is None and self._file is not None and self._file.seekable():
            with self._writing():
                self._file.truncate(0)

    def progress(self, result: ScanResult) -> None:
        """Shows how far the scan is."""
        self._line.show(
            lambda: (
                f"{result.registered:,} registered, {result.known:,} known, at {result.directory}"
            )
        )

    def stray(self, stray: Stray) -> None:
        """Reports one entry that is no blob."""
        if self._file is not None:
            line = {"path": stray.path, "kind": stray.kind.value, "detail": stray.detail}
            with self._writing():
                print(json.dumps(line), file=self._file)
        self._strays += 1
        if self._strays <= STRAYS_SHOWN:
            self._line.say(f"stray {stray.path}: {stray.kind.value} {stray.detail}")
        elif self._strays == STRAYS_SHOWN + 1:
            self._line.say("more strays are not shown; --strays FILE has them all")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the strays cannot be written to {self._path}",
                detail=error.strerror or str(error),
                hint="name another file with --strays; what was registered so far stays",
            ) from error
