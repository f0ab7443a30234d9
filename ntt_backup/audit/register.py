"""Registers the files of a store that go by their paths, as `scan` does where names are hashes.

The query of another database lists the files, or a walk of directories finds them (see
`audit.directory_walk`). What they give is copied into the catalog as it is, and no file is opened:
a worker reads each file when its turn comes, see `upload.first_reads`. What an origin no longer
gives is noted as gone, and stays on the targets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ntt_backup.audit.directory_walk import Problem, Walk, pass_over_directories
from ntt_backup.catalog import files_by_path, foreign_query
from ntt_backup.catalog.connection import Connection, connect, translated
from ntt_backup.catalog.files_by_path import Pass, Registered
from ntt_backup.catalog.foreign_query import FileQuery, OpenQuery
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.config import CatalogConfig, StoreConfig, application_name
from ntt_backup.config.sections import CatalogFromSettings
from ntt_backup.errors import BackupError, CatalogRefused, LockHeld, SourceError
from ntt_backup.source.paths import Paths
from ntt_backup.source.store import Store

# The name of the query among the origins, which no table [files.NAME] can have.
QUERY: Final = ""
# How long a process waits for notifications before another one takes its place.
_STAY_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Registration:
    """The counts of one call so far.

    Attributes:
        rows: The rows that the origins gave.
        registered: The files that are new, or new versions.
        back: The files that were gone.
        changed: The files that were changed since they were read.
        gone: The files that an origin no longer gives, since its last pass that saw all.
        strays: The entries of listed directories that are neither a file nor a directory.
        unreadable: The directories that could not be read, or are missing.
    """

    rows: int = 0
    registered: int = 0
    back: int = 0
    changed: int = 0
    gone: int = 0
    strays: int = 0
    unreadable: int = 0
    duration_s: float = 0.0

    def since(self, before: Registration) -> Registration:
        """Returns the counts that came since then."""
        names = self.__slots__
        return Registration(*(getattr(self, name) - getattr(before, name) for name in names))


def register_due(
    settings: StoreConfig,
    on_progress: Callable[[Registration], None],
    *,
    stays: bool,
    on_error: Callable[[BackupError], None] = lambda _: None,
) -> float:
    """Registers what the origins give whose time has come.

    Args:
        settings: The settings.
        on_progress: Receives the counts after each step.
        stays: Whether the caller comes again, so that only what is due is read, and notifications
            of new rows are waited for, where there are any, for an hour.
        on_error: Receives an error if the last pass over an origin could not read all directories,
            once until that changes.

    Returns:
        The seconds until an origin is due again.

    Raises:
        CatalogError: The catalog, or the database of the query, refuses or is away.
        ConfigError: The query cannot be used.
        SourceError: The root of the store cannot be read.
    """
    wanted = settings.catalog.from_
    with ExitStack() as stack:
        conn = stack.enter_context(connect(settings.catalog.url, application_name("files")))
        verify_schema(conn, settings.target, "files by path")
        if not files_by_path.lock_origins(conn):
            return min(settings.origins.values())
        listening = None
        if stays and wanted is not None and wanted.channel is not None:
            opened = query_of(wanted).opened(application_name("files"))
            listening = stack.enter_context(opened)
        until = time.monotonic() + _STAY_SECONDS
        done = Registration()
        if not stays:
            register_files(conn, settings, on_progress=on_progress)
            if found := files_by_path.problems(conn, settings.files):
                on_error(_unreadable(found))
            return min(settings.origins.values())
        told: list[tuple[str, str]] = []
        while True:
            due, wait_s = _due(conn, settings)
            if due:
                done = register_files(conn, settings, due, before=done, on_progress=on_progress)
                continue
            if (found := files_by_path.problems(conn, settings.files)) and found != told:
                on_error(_unreadable(found))
            told = found
            if listening is None or time.monotonic() >= until:
                return wait_s
            if listening.wait(wait_s):
                done = register_files(conn, settings, [QUERY], before=done, on_progress=on_progress)


def _due(conn: Connection, settings: StoreConfig) -> tuple[list[str], float]:
    """Returns the origins that are due, and the seconds until the next one is."""
    ages = files_by_path.ages_of_passes(conn)
    waits = {
        name: every - ages[name] if name in ages else 0.0
        for name, every in settings.origins.items()
    }
    return [name for name, wait_s in waits.items() if wait_s <= 0], max(0.0, min(waits.values()))


def _unreadable(problems: list[tuple[str, str]]) -> SourceError:
    names = ", ".join(f"files.{name}" for name, _ in problems)
    return SourceError(
        f"not all of {names} can be read",
        detail=problems[0][1],
        hint="mount what is missing, let this user read it, or name it in exclude; none of the"
        " files there counts as gone. `ntt-backup-remote scan --restart` names all that it meets",
    )


def register_files(
    conn: Connection,
    settings: StoreConfig,
    origins: Collection[str] | None = None,
    *,
    whole: bool = False,
    before: Registration = Registration(),
    on_progress: Callable[[Registration], None] = lambda _: None,
    problem: Problem = lambda _path, _why: None,
) -> Registration:
    """Registers what the origins of a store give.

    Args:
        conn: The connection to the catalog.
        settings: The settings.
        origins: Which origins are read; None: all.
        whole: Whether all rows are read, even if it is not time for that.
        before: The counts of earlier calls, to be added to.
        on_progress: Receives the counts after each step, once it is committed.
        problem: Receives the path of each directory that cannot be read, and why.

    Returns:
        The counts.

    Raises:
        CatalogError: The catalog, or the database of the query, refuses or is away.
        ConfigError: The query cannot be used.
        LockHeld: Another session registers files.
        SourceError: The root of the store cannot be read.
    """
    if not files_by_path.lock_origins(conn):
        raise LockHeld(
            "another process registers the files of this catalog",
            hint="wait for it: a daemon does so by itself",
        )
    counts = _Counts(before, on_progress)
    wanted = settings.catalog.from_
    if wanted is not None and (origins is None or QUERY in origins):
        with query_of(wanted).opened(application_name("files")) as query:
            _pass_over_query(conn, query, wanted, counts, others=settings.files, whole=whole)
    for name, one in settings.files.items():
        if origins is None or name in origins:
            gone = pass_over_directories(
                conn,
                Walk(name, settings.source.root, one),
                [other for other in settings.origins if other != name],
                whole=whole,
                on_step=counts.add_step,
                problem=problem,
            )
            counts.add(gone=gone)
    return counts.result


class _Counts:
    """Adds up what the steps of passes have done, and tells it."""

    def __init__(self, before: Registration, told: Callable[[Registration], None]) -> None:
        self.result = before
        self._told = told
        self._at = time.monotonic()

    def add_step(self, rows: int, found: Registered, strays: int = 0, unreadable: int = 0) -> None:
        new, back, changed, gone = found
        self.add(
            rows=rows,
            registered=new,
            back=back,
            changed=changed,
            gone=gone,
            strays=strays,
            unreadable=unreadable,
        )

    def add(self, **counts: int) -> None:
        now = time.monotonic()
        added = replace(Registration(**counts), duration_s=now - self._at)
        self._at = now
        values = (getattr(self.result, name) + getattr(added, name) for name in added.__slots__)
        self.result = Registration(*values)
        self._told(self.result)


def open_store(settings: CatalogConfig, conn: Connection) -> Store:
    """Returns the store of the settings, which finds the paths of blobs in the catalog."""
    assert settings.source is not None  # Who reads the store has settings with one.
    paths = Paths(partial(files_by_path.places_of, conn)) if settings.by_path else None
    return Store.of(settings.source, paths=paths)


def query_of(wanted: CatalogFromSettings) -> FileQuery:
    """Returns the query of the settings."""
    return FileQuery(wanted.url, wanted.query, wanted.role, wanted.channel)


def _pass_over_query(
    conn: Connection,
    query: OpenQuery,
    wanted: CatalogFromSettings,
    counts: _Counts,
    *,
    others: Collection[str],
    whole: bool,
) -> None:
    current = files_by_path.begin_pass(
        conn,
        QUERY,
        query.query.definition,
        keyed=query.keyed,
        whole_every=wanted.whole_every,
        whole=whole,
    )
    rows = limit = foreign_query.STEP_ROWS
    while rows >= limit:
        versions = wanted.on_change == "version"
        current, rows, found = _step(conn, query, current, versions=versions, others=others)
        counts.add_step(rows, found)
        if not query.keyed:
            break
    counts.add(gone=files_by_path.end_pass(conn, current))


def _step(
    conn: Connection, query: OpenQuery, current: Pass, *, versions: bool, others: Collection[str]
) -> tuple[Pass, int, Registered]:
    """Registers the next rows of a query.

    Returns:
        The pass so far, how many rows there were, and what came of them.
    """
    with translated("register files"), conn.transaction():
        blocks = query.rows_from(current.key)
        after, rows, found = files_by_path.register(
            conn, current, blocks, versions=versions, others=others
        )
        if query.keyed and rows >= foreign_query.STEP_ROWS and after.key == current.key:
            raise CatalogRefused(
                f"{foreign_query.STEP_ROWS:,} rows of the query of catalog.from have the same key",
                detail=str(after.key),
                hint="let its column key grow from row to row, as an id does, or leave it out",
            )
    if found.new or found.back:
        files_by_path.wake_workers(conn)
    return after, rows, found
