"""How commands print results: for programs, for people, for each target; and note them."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TextIO, TypeVar

import click

from ntt_backup.cli import options
from ntt_backup.cli.global_options import Common
from ntt_backup.config import CatalogConfig, application_name, load
from ntt_backup.errors import (
    SOME_FAILED,
    BackupError,
    CatalogUnavailable,
    ConfigError,
    DestinationError,
    LockHeld,
    SourceError,
    complete,
    worst,
)
from ntt_backup.formatting import duration, json_value, many, printable, render_error, size
from ntt_backup.model import Failure, Failures

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
_SHOWN: Final = 20
_INTERRUPTED: Final = 130
_NOTE_S: Final = 3.0
_LINE_SECONDS: Final = 60.0
_IN_PLACE_SECONDS: Final = 0.5
# A catalog that does not answer is no trouble of the target, and may be a mistyped `--database`.
_REFUSALS: Final = (CatalogUnavailable, ConfigError, DestinationError, LockHeld, SourceError)


def tell(fields: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the fields as JSON if --json is given, else the lines."""
    if options.wants("as_json"):
        click.echo(json.dumps(fields))
    elif text := "\n".join(lines):
        click.echo(text)


def report(fields: Mapping[str, Any], lines: Iterable[str], exit_code: int) -> NoReturn:
    """Prints the fields as JSON or the lines, and ends the process with the exit code."""
    tell({**fields, "exit_code": exit_code}, map(complete, lines))
    sys.exit(exit_code)


def report_on(
    record: DataclassInstance, lines: Iterable[str], exit_code: int, **more: object
) -> NoReturn:
    """Reports a record. more: Fields that are added to those of the record, or replace them."""
    report({**more, **fields_of(record), **more}, lines, exit_code)


def warn(text: str) -> None:
    """Prints a warning to stderr. The text is made printable, so it may come from strangers."""
    click.echo(f"warning: {printable(text)}", err=True)


def failed(target: str, error: BackupError) -> dict[str, Any]:
    """Returns the JSON fields of an error that ends a command, or the part for one target."""
    return {"target": target, "error": error.fields, "exit_code": error.exit_code}


def fields_of(record: DataclassInstance) -> dict[str, Any]:
    """Returns the fields of a record as JSON values, except `part`.

    Failures become counts by reason, and the first failures are listed as `failures`.
    """
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(record) if field.name != "part"):
        value = getattr(record, name)
        if isinstance(value, Failures):
            fields |= {name: value.counts, "failures": first_failures(value.first)}
        else:
            fields[name] = json_value(value)
    return fields


def first_failures(failures: Sequence[Failure]) -> list[dict[str, str]]:
    """Returns failures as JSON values."""
    return [
        {"blobid": one.blobid, "reason": str(one.reason), "detail": one.detail} for one in failures
    ]


def count_lines(counts: Mapping[Any, int], after: str = "") -> list[str]:
    """Returns a line for each count that is not zero, in the order of the words."""
    return [f"{count:>10,} {word}{after}" for word, count in sorted(counts.items()) if count]


def strangers(packs: int) -> list[str]:
    """Returns a line about sealed packs that this host has not signed; none if there are none."""
    if not packs:
        return []
    return [
        f"{many(packs, 'sealed pack')} not signed by this host: somebody else who knows a recipient"
        " has made them, or this host before it had its key; a blob counts only if it is what its"
        " name says"
    ]


def wrong_lines(failures: Failures) -> list[str]:
    """Returns lines with the number of failures by reason, and with the first failures."""
    return [*count_lines(failures.counts), *failure_lines(failures)]


def failure_lines(failures: Failures) -> list[str]:
    """Returns a line for each of the first failures, and a line with the number of the others."""
    lines = (f"{one.blobid} {one.reason} {one.detail}" for one in failures.first)
    return first_lines(lines, len(failures))


def first_lines(
    problems: Iterable[str], total: int, end: str = "; --json lists the first 1000"
) -> list[str]:
    """Returns a line for each of the first problems, and a line with the number of the others."""
    lines = [f"  {printable(one)}" for one in islice(problems, _SHOWN)]
    if (more := total - _SHOWN) > 0:
        lines.append(f"  and {more:,} more{end}")
    return lines


class ProgressLine:
    """Prints progress to a stream, usually stderr; nothing if quiet or if nobody reads."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = None if quiet else stream
        self._in_place = stream.isatty()
        self._step = _IN_PLACE_SECONDS if self._in_place else _LINE_SECONDS
        self._next = time.monotonic() + self._step
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_line()

    def show(self, text: Callable[[], str]) -> None:
        """Shows the present state. text: is called only when a line is due."""
        if self._stream is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._step
            self._print(f"\r\x1b[K{text()}" if self._in_place else f"{text()}\n")
            self._open = self._in_place

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self.end_line()
        self._print(f"{printable(text)}\n")

    def outage(self, error: BackupError, wait_s: float) -> None:
        """Says that the remote is unreachable, and when it is tried again."""
        self.say(f"remote is unreachable, again in {duration(wait_s)}: {error}")

    def end_line(self) -> None:
        """Lets other output begin in a line of its own."""
        if self._open:
            self._print("\n")
        self._open = False

    def _print(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.write(text)
                self._stream.flush()


def pace(bytes_: int, seconds: float) -> str:
    """Returns an amount with its rate: `3.0 GB (12.0 MB/s)`."""
    return f"{size(bytes_)} ({size(int(bytes_ / max(seconds, 1e-3)))}/s)"


def time_left(part: float, seconds: float) -> str:
    """Returns `, about 3 min 2 s left`, where a part from 0 to 1 took so many seconds."""
    return f", about {duration(seconds * (1 - part) / part)} left" if 0 < part < 1 else ""


def progress_line() -> ProgressLine:
    """Returns a progress line on stderr, which shows nothing if --quiet is given."""
    return ProgressLine(sys.stderr, quiet=options.wants("quiet"))


def so_far(bytes_: int, seconds: float, part: float | None) -> str:
    """Returns bytes with their rate; and, if the part (0 to 1) is known, percent and time left."""
    return pace(bytes_, seconds) + (f", {part:.1%}{time_left(part, seconds)}" if part else "")


def first_only(
    line: ProgressLine, begin: str = "", *, more: str = "", silent: bool = False
) -> Callable[[str], None]:
    """Returns a function that prints the first of many lines to stderr, even with --quiet.

    Args:
        line: The progress line, which the lines do not break.
        begin: The begin of each line.
        more: The line that stands for all further lines.
        silent: Print nothing if --quiet is given.
    """
    quiet = options.wants("quiet") and not silent
    show = partial(click.echo, err=True) if quiet else line.say
    numbers = count(1)

    def say(text: str) -> None:
        if (number := next(numbers)) <= _SHOWN:
            show(begin + printable(text))
        elif number == _SHOWN + 1:
            show(more or f"{begin}more, which is not shown")

    return say


class EachTarget(Generic[T]):
    """Does the same for each target of --target. An error of one target does not stop the others.

    found: The results. errors: The errors of targets that failed; such a target may have a result.
    """

    def __init__(self, common: Common, settings: Mapping[str, CatalogConfig]) -> None:
        self._common = common
        self.settings = settings
        self.found: dict[str, T] = {}
        self.errors: dict[str, BackupError] = {}

    @property
    def several(self) -> bool:
        """Returns whether --target names several targets, or all."""
        return list(self.settings) != [self._common.target]

    def do(self, work: Callable[[CatalogConfig], T]) -> None:
        """Calls `work` for each target, and keeps its result or error."""
        self.found, self.errors = {}, {}
        for name, settings in self.settings.items():
            self._common.turn_to(name)
            try:
                self.found[name] = work(settings)
            except BackupError as error:
                self.errors[name] = error

    def json(self, fields: Callable[[T], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns JSON fields: those of the single target, or those of all targets by name."""
        told: dict[str, Mapping[str, Any]] = {
            name: failed(name, error) for name, error in self.errors.items()
        }
        told |= {name: fields(one) for name, one in self.found.items()}
        if self.several:
            return {"targets": {name: told[name] for name in self.settings}}
        return dict(told[self._common.target])

    def report(self, fields: Callable[[T], Mapping[str, Any]], show: Callable[[], None]) -> None:
        """Prints results and errors. With an error, the process ends with the worst exit code.

        Args:
            fields: Returns the JSON fields of a result.
            show: Prints the results for people.
        """
        if options.wants("as_json"):
            click.echo(json.dumps(self.json(fields)))
            options.told()
        else:
            show()
        for name, error in self.errors.items():
            if not self.several:
                raise error
            click.echo(f"target {name}: {render_error(error)}", err=True)
        if self.errors:
            sys.exit(worst(error.exit_code for error in self.errors.values()))


@dataclass(slots=True)
class CheckNote:
    """The findings of a check so far; see `catalog.history`.

    The end of a check is noted in the catalog, for `status`, metrics and the page, over a separate
    connection and within some seconds. If that fails, the check goes on without a word: a check,
    or a restore on a new machine, does not need the catalog.
    """

    command: str
    detail: str = ""
    blobs: int = 0
    bytes: int = 0
    wrong: int = 0
    exit_code: int = 0

    def saw(self, blobs: int, bytes_: int, wrong: int, exit_code: int) -> None:
        """Sets the findings so far, and the exit code if the check ended now."""
        self.blobs, self.bytes, self.wrong, self.exit_code = blobs, bytes_, wrong, exit_code


@contextmanager
def noted(common: Common, command: str, **asked: object) -> Iterator[CheckNote]:
    """Notes the work in the context as one call of the command, in the catalog and by a notice.

    A call that is refused before it has looked at anything says nothing about the target, and is
    not noted: wrong options, directory or settings, or another process that holds the lock.

    Args:
        common: The options of all commands.
        command: The name of the command.
        **asked: The options that limit the check to a part of the blobs, by name.
    """
    note = CheckNote(
        command, ", ".join(f"{name} {value}" for name, value in asked.items() if value)
    )
    began, understood = time.monotonic(), True
    try:
        yield note
    except click.UsageError:
        understood = False
        raise
    except Exception as error:
        understood = not isinstance(error, _REFUSALS) or note.blobs > 0
        note.exit_code, note.detail = getattr(error, "exit_code", 1), printable(str(error))
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        code = getattr(end, "code", None)
        note.exit_code = code if isinstance(code, int) else _INTERRUPTED
        raise
    finally:
        with suppress(BackupError):
            settings = load(CatalogConfig, file=common.config, target=common.target)
            if understood:
                _note_check(settings, note, time.monotonic() - began)
            if note.wrong or note.exit_code == SOME_FAILED:
                _tell(settings, note)


def _note_check(settings: CatalogConfig, note: CheckNote, lasted: float) -> None:
    from ntt_backup.catalog.connection import connect
    from ntt_backup.catalog.history import note_check
    from ntt_backup.daemon.signals import time_limit

    with (
        suppress(BackupError),
        time_limit(_NOTE_S, CatalogUnavailable("it is too slow")),
        connect(settings.catalog.url, application_name("note"), part=settings.part) as conn,
    ):
        note_check(conn, settings.target, lasted=lasted, **asdict(note))


def _tell(settings: CatalogConfig, note: CheckNote) -> None:
    """Sends a notice about the findings."""
    from ntt_backup.report.notices import Notice, send

    found = f"{note.command} found {many(note.wrong, 'blob')} lost or not right"
    text = f"{found} ({note.detail})" if note.detail else found
    for problem in send(settings, Notice("findings", settings.target, text, asdict(note))):
        click.echo(f"warning: {problem}", err=True)
