"""Registers the files of a store that go by their paths, as `scan` does where names are hashes.

The query of another database lists the files, or a walk of directories finds them (see
`audit.directory_walk`). The rows are copied into the catalog as they are, and no file is opened: a
worker reads each file later, see `upload.first_reads`. A file that its origin no longer lists is
marked as gone, and stays on the targets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from ntt_backup.audit.directory_walk import Problem, Walk, pass_over_directories
from ntt_backup.catalog import foreign_query, listed_files, origin_passes, range_locks, unread_files
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.foreign_query import OpenQuery, open_query
from ntt_backup.catalog.origin_passes import Pass, Registration
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.config import CatalogConfig, StoreConfig, application_name
from ntt_backup.config.sections import CatalogFromSettings
from ntt_backup.errors import (
    BackupError,
    CatalogRefused,
    ConfigError,
    FileListUnavailable,
    LockHeld,
    SourceError,
)
from ntt_backup.source.paths import Paths
from ntt_backup.source.store import Store

# The name of the query among the origins, which no table [files.NAME] can have.
QUERY: Final = ""
_DOING: Final = "registering files"
# How long a process waits for notifications before another one takes its place.
_STAY_SECONDS: Final = 3600.0
# From one try to the next while another process registers files.
_BUSY_SECONDS: Final = 60.0
_OF_THE_QUERY: Final = (FileListUnavailable, CatalogRefused, ConfigError)


def register_due(
    settings: StoreConfig,
    on_progress: Callable[[Registration], None],
    *,
    stays: bool,
    on_error: Callable[[BackupError], None] = lambda _: None,
) -> float:
    """Registers the files of the origins that are due.

    Args:
        settings: The settings.
        on_progress: Receives the counts of each step.
        stays: Whether the caller calls again, so that only what is due is read, and notifications
            of new rows, if there is a channel, are waited for during an hour.
        on_error: Receives an error if the last pass over an origin could not read all directories,
            once until that changes.

    Returns:
        The seconds until an origin is due again.

    Raises:
        CatalogError: The catalog, or the database of the query, refuses or is unreachable.
        ConfigError: The query cannot be used.
        SourceError: The root of the store cannot be read.
    """
    wanted, soonest = settings.catalog.from_, min(settings.origins.values())
    with ExitStack() as stack:
        conn = stack.enter_context(connect(settings.catalog.url, application_name("files")))
        verify_schema(conn, settings.target, "files by path")
        unread_files.send_returned(conn, settings.target)
        watching = range_locks.take_turns(conn, _DOING, origin_passes.WATCHING)
        if stays and not stack.enter_context(watching):
            return soonest
        due = _due(conn, settings)[0] if stays else list(settings.origins)
        listening = None
        if stays and wanted is not None and wanted.channel is not None:
            with suppress(*_OF_THE_QUERY):  # The pass over the query tells that.
                listening = stack.enter_context(open_query(wanted, application_name("files")))
            due = [QUERY, *due]  # Between two processes, nobody hears a notification.
        until = time.monotonic() + _STAY_SECONDS
        told: list[tuple[str, str]] = []
        while True:
            try:
                register_files(conn, settings, due, on_progress=on_progress)
            except LockHeld:
                return min(soonest, _BUSY_SECONDS)
            if (found := origin_passes.problems(conn, settings.files)) and found != told:
                on_error(_unreadable(found))
            told = found
            due, wait_s = _due(conn, settings)
            left_s = until - time.monotonic()
            if listening is None or left_s <= 0:
                return 0.0 if listening else wait_s
            if not due and listening.wait(min(wait_s, left_s)):
                due = [QUERY]
            unread_files.send_returned(conn, settings.target)


def _due(conn: Connection, settings: StoreConfig) -> tuple[list[str], float]:
    """Returns the origins that are due, and the seconds until the next one is."""
    ages = origin_passes.ages_of_passes(conn)
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
    on_progress: Callable[[Registration], None] = lambda _: None,
    problem: Problem = lambda _path, _why: None,
) -> Registration:
    """Registers the files that the origins of a store list.

    Args:
        conn: The connection to the catalog.
        settings: The settings.
        origins: Which origins are read; None: all.
        whole: Whether all rows are read, even if that is not due.
        on_progress: Receives the counts of each step, once it is committed.
        problem: Receives the path of each directory that cannot be read, and why.

    Returns:
        The counts.

    Raises:
        CatalogError: The catalog, or the database of the query, refuses or is unreachable.
        ConfigError: The query cannot be used.
        LockHeld: Another session registers files.
        SourceError: The root of the store cannot be read.
    """
    total, at = Registration(), time.monotonic()

    def add(found: Registration) -> None:
        nonlocal total, at
        if found.back:
            unread_files.send_returned(conn, settings.target)
        if found.registered or found.back:
            range_locks.wake_workers(conn)
        before, at = at, time.monotonic()
        found = replace(found, duration_s=at - before)
        total += found
        on_progress(found)

    with range_locks.take_turns(conn, _DOING, origin_passes.REGISTERING) as ours:
        if not ours:
            raise LockHeld(
                "another process registers the files of this catalog",
                hint="wait for its end: a daemon does so by itself",
            )
        wanted, failed = settings.catalog.from_, None
        if wanted is not None and (origins is None or QUERY in origins):
            try:
                with open_query(wanted, application_name("files")) as query:
                    _pass_over_query(conn, query, wanted, settings.files, whole=whole, on_step=add)
            except _OF_THE_QUERY as error:
                failed = error  # No directory waits for the database of an application.
        for name, one in settings.files.items():
            if origins is None or name in origins:
                walk = Walk(name, settings.source.root, one)
                others = [other for other in settings.origins if other != name]
                pass_over_directories(conn, walk, others, whole=whole, on_step=add, problem=problem)
        if failed is not None:
            raise failed
        return total


def open_store(settings: CatalogConfig, conn: Connection) -> Store:
    """Returns the store of the settings, which finds the paths of blobs in the catalog."""
    assert settings.source is not None  # Who reads the store has settings with one.
    paths = Paths(partial(listed_files.places_of, conn)) if settings.by_path else None
    return Store.of(settings.source, paths=paths)


def _pass_over_query(
    conn: Connection,
    query: OpenQuery,
    wanted: CatalogFromSettings,
    others: Collection[str],
    *,
    whole: bool,
    on_step: Callable[[Registration], None],
) -> None:
    """Registers the rows of a query."""
    current = origin_passes.begin_pass(
        conn,
        QUERY,
        query.definition,
        rows=query.sum_of_rows(wanted.on_change, sorted(others)),
        whole_every=wanted.whole_every,
        whole=whole,
    )
    if current.began_at is None:
        return

    def write(before: Pass) -> tuple[Pass, Registration, bool]:
        after, found = origin_passes.register(
            conn,
            before,
            query.rows_from(before.key),
            versions=wanted.on_change == "version",
            others=others,
        )
        more = query.keyed and found.rows >= foreign_query.STEP_ROWS
        if more and after.key == before.key:
            raise CatalogRefused(
                f"{found.rows:,} rows of the query of catalog.from have the same key",
                detail=str(before.key),
                hint="let its column key grow from row to row, as an id does, or leave it out",
            )
        origin_passes.save_pass(conn, after)
        return after, found, more

    more = True
    while more:
        one = partial(write, current)
        current, found, more = conn.in_transaction("register files", one)
        on_step(found)
    nothing = current.whole and current.key is None and not found.rows
    if nothing and origin_passes.has_files(conn, QUERY):
        raise CatalogRefused(
            "the query of catalog.from gives no row any more",
            detail="no file counts as gone by that",
            hint="correct it, or what its role may see; where it shall list nothing, leave"
            " catalog.from out",
        )
    if query.keyed and current.whole and query.lacks_keys():
        raise CatalogRefused(
            "a row of the query of catalog.from has no key, and may never be registered",
            hint="give each row a key, or leave the column out",
        )
    on_step(Registration(gone=origin_passes.end_pass(conn, current)))
