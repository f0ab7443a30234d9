"""A scan under way: how far it is, and the strays that it finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from ntt_backup.audit.scan import ScanResult
from ntt_backup.blobdir.layout import Stray
from ntt_backup.errors import ConfigError
from ntt_backup.format import printable

STRAYS_SHOWN: Final = 20
_LINE_SECONDS: Final = 60.0


class ScanView:
    """Shows how far a scan is, in place on a terminal, by a line a minute elsewhere; and its first
    strays.

    The file strays, where given, gets every stray as a JSON line, before the scan notes that it is
    past it. ConfigError is raised where it cannot be written.
    """

    def __init__(self, stream: TextIO, strays: Path | None, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = None if quiet else stream
        self._in_place = stream.isatty()
        self._next_line = 0.0
        self._strays = 0
        self._path = strays
        with self._writing():
            self._file = None if strays is None else strays.open("a", buffering=1, encoding="utf-8")

    def begin(self, resumed_from: str | None) -> None:
        """Empty the file of strays, unless the scan goes on where an earlier one ended."""
        if resumed_from is None and self._file is not None and self._file.seekable():
            with self._writing():
                self._file.truncate(0)

    def progress(self, result: ScanResult) -> None:
        """Show how far the scan is."""
        now = result.duration_s
        if self._in_place or now >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            done = f"{result.registered:,} registered, {result.known:,} known"
            self._print(f"{done}, at {result.directory}", end="" if self._in_place else "\n")

    def stray(self, stray: Stray) -> None:
        """Report one entry that is no blob."""
        if self._file is not None:
            line = {"path": stray.path, "kind": stray.kind.value, "detail": stray.detail}
            with self._writing():
                print(json.dumps(line), file=self._file)
        self._strays += 1
        if self._strays <= STRAYS_SHOWN:
            self._print(printable(f"stray {stray.path}: {stray.kind.value} {stray.detail}"))
        elif self._strays == STRAYS_SHOWN + 1:
            self._print("more strays are not shown; --strays FILE has them all")

    def close(self) -> None:
        """Erase the line that was kept up to date, and close the file."""
        if self._in_place:
            self._print("", end="")
        if self._file is not None:
            with self._writing():
                self._file.close()

    def _print(self, text: str, end: str = "\n") -> None:
        if self._stream is None:
            return
        start = "\r\x1b[K" if self._in_place else ""
        try:
            print(start + text, file=self._stream, end=end, flush=True)
        except OSError:  # nobody reads any more
            self._stream = None

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
