"""The command `scan` registers in the catalog what only the store has."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from ntt_backup.audit.scan import ScanResult
from ntt_backup.audit.scan import scan as scan_store
from ntt_backup.blobdir.layout import Stray
from ntt_backup.cli.common import (
    Common,
    GivenPath,
    json_option,
    only_errors_option,
    open_catalog,
    writing,
)
from ntt_backup.cli.results import fields_of, report
from ntt_backup.config import StoreConfig
from ntt_backup.format import amount, duration, many
from ntt_backup.report.lines import ProgressLine
from ntt_backup.source.inspection import Store

_STRAYS_SHOWN: Final = 20


@click.command()
@click.option("--restart", is_flag=True, help="Begin anew, even if an earlier scan did not finish.")
@click.option(
    "--strays",
    type=GivenPath(),
    help="Write every stray to this file, one JSON object a line. A scan that continues an"
    " interrupted one adds to the file, and may write a stray twice.",
)
@json_option
@only_errors_option
@click.pass_obj
def scan(common: Common, restart: bool, strays: Path | None, as_json: bool, quiet: bool) -> None:
    """Register in the catalog what only the store has.

    What is not a blob (another name, another place, a symlink) is a stray: it is reported and never
    registered. Exit code 7 when something could not be read.
    """
    settings = common.load(StoreConfig)
    with ExitStack() as stack:
        conn = stack.enter_context(open_catalog(settings, "scan"))
        line = stack.enter_context(ProgressLine(sys.stderr, quiet=quiet))
        found = _Strays(line, strays, stack)
        result = scan_store(
            conn,
            Store(settings.source.root),
            restart=restart,
            on_begin=found.begin,
            on_progress=lambda done: line.show(lambda: progress_text(done)),
            on_stray=found.add,
        )
    fields = {"target": settings.target, **fields_of(result)}
    report(fields, lines(result), result.exit_code, as_json=as_json)


class _Strays:
    """Shows the first strays. The file, where one is named, gets each as a JSON line, before the
    scan notes that it is past it.
    """

    def __init__(self, line: ProgressLine, path: Path | None, stack: ExitStack) -> None:
        self._line = line
        self._number = 0
        self._path = path
        if path is not None:
            with writing(path):
                file = path.open("a", buffering=1, encoding="utf-8")
            self._file = stack.enter_context(file)

    def begin(self, resumed_from: str | None) -> None:
        """Empties the file, unless the scan goes on where an earlier one ended."""
        if self._path is not None and resumed_from is None and self._file.seekable():
            with writing(self._path):
                self._file.truncate(0)

    def add(self, stray: Stray) -> None:
        if self._path is not None:
            line = {"path": stray.path, "kind": stray.kind.value, "detail": stray.detail}
            with writing(self._path, "what was registered so far stays; name another file"):
                print(json.dumps(line), file=self._file)
        self._number += 1
        if self._number <= _STRAYS_SHOWN:
            self._line.say(f"stray {stray.path}: {stray.kind.value} {stray.detail}")
        elif self._number == _STRAYS_SHOWN + 1:
            self._line.say("more strays are not shown; --strays FILE has them all")


def progress_text(done: ScanResult) -> str:
    """Returns how far a scan is."""
    return f"{done.registered:,} registered, {done.known:,} known, at {done.directory}"


def lines(result: ScanResult) -> list[str]:
    """Returns what a scan found, for a terminal."""
    resumed = f", continued after {result.resumed_from}" if result.resumed_from else ""
    unread = ["NOT known: which blobs lie in what could not be read; let this user read it"]
    return [
        f"registered {amount(result.registered, result.bytes)}; {result.known:,} known before",
        f"looked at {many(result.directories, 'directory', 'directories')} in"
        f" {duration(result.duration_s)}{resumed}",
        *(
            f"left aside {many(count, 'stray')}: {kind.value}"
            for kind, count in sorted(result.strays.items())
        ),
        *(unread if result.exit_code else ()),
    ]
