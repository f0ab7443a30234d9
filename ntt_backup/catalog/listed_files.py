"""Questions about files that go by their paths: where a blob lies, what is listed, what failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from psycopg import sql

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.statements import fragment, statement
from ntt_backup.formatting import printable
from ntt_backup.model import ListedFile

# What is counted at most, and how many rows are read at once.
_COUNTED: Final = 100_000
_PAGE: Final = 2000
_QUERY_SECONDS: Final = 600


def places_of(conn: Connection, blobids: Iterable[str], each: int = 4) -> Mapping[str, list[bytes]]:
    """Returns the paths where blobs lie, those that their origin still gives first.

    Args:
        conn: The connection.
        blobids: The blobs.
        each: The most paths of a blob.
    """
    found: dict[str, list[bytes]] = {}
    for blobid, path in conn.ask("find files", "places_of", blobids=list(blobids), each=each):
        found.setdefault(blobid, []).append(path)
    return found


@dataclass(frozen=True, slots=True)
class FileAtPath:
    """What the catalog knows of the file at a path.

    Attributes:
        blobid: The blob with its content; None as long as it was not read.
        size: In bytes, as it was read, or else as its origin gives it; None where neither is known.
        reason: Why it could not be read, or that it was changed since; None where it is right.
        detail: More about the reason.
        registered_at: When its path was first listed.
        read_at: When its content was hashed.
        gone_at: When its origin was first seen not to give it any more.
    """

    blobid: str | None
    size: int | None
    reason: str | None
    detail: str
    registered_at: datetime
    read_at: datetime | None
    gone_at: datetime | None


def file_at(conn: Connection, path: bytes) -> FileAtPath | None:
    """Returns what the catalog knows of the file at a path; None if the path was never listed."""
    found = conn.ask("look for a file", "file_at", path=path)
    return next((FileAtPath(*row) for row in found), None)


@dataclass(frozen=True, slots=True)
class Files:
    """The numbers of files that go by their paths.

    Attributes:
        listed: Those that their origins give; an estimate where they are many.
        unread: Those that were not read yet.
        failed: Those that could not be read, or were changed since.
        gone: Those that no origin gives any more.
        registered_at: When the last pass over an origin has ended.
    """

    listed: int
    unread: int
    failed: int
    gone: int
    registered_at: datetime | None


class FailedFile(NamedTuple):
    """A file that could not be read, or was changed since it was read."""

    path: bytes
    reason: str
    detail: str
    registered_at: datetime


def count_files(conn: Connection) -> Files:
    """Counts the files. Above 100,000, the listed ones are estimated, and others not counted on."""
    parts = {name: fragment(name) for name in ("unread", "failed", "gone")}
    with translated("count its files"):
        return Files(*conn.rows("files_of_origins", {"limit": _COUNTED}, **parts)[0])


def iter_failed_files(conn: Connection, reason: str | None = None) -> Iterator[FailedFile]:
    """Yields the files that failed, in constant memory. reason: Only these; None: all."""
    past, found = 0, _PAGE
    while found == _PAGE:
        values = {"past": past, "reason": reason, "limit": _PAGE}
        with translated("list failed files"):
            rows = conn.rows("failed_files", values, failed=fragment("failed"))
        yield from (FailedFile(*row) for _, *row in rows)
        found, past = len(rows), rows[-1][0] if rows else 0


def listed_blobs(conn: Connection, prefix: str) -> Iterator[tuple[str, int]]:
    """Yields the blobs with a prefix of which a file is listed, in order, each with its size."""
    yield from conn.ask("list files", "listed_blobs", prefix=prefix)


def listed_files(conn: Connection, query: str | None = None) -> Iterator[ListedFile]:
    """Yields the files whose place was not replaced, in the order of their blobids.

    Those that were never read come last, and without those that are gone. The transaction that
    lists them stays open until the last one is taken.

    Args:
        conn: The connection.
        query: A query of the operator that gives blobids: only files with these are listed.

    Raises:
        CatalogError: The catalog refuses, or is unreachable.
    """
    of_query = fragment("files_of_query", query=sql.SQL(query)) if query else sql.SQL("")
    with translated("list files"), conn.transaction():
        conn.rows("query_reads_only")
        if query:
            conn.rows("limit_query", limit=sql.Literal(f"{_QUERY_SECONDS}s"))
            conn.rows("path_of_query", schema=sql.Identifier(conn.schema or "public"))
        # In this form the server takes one statement, and no second one behind it.
        conn.execute(statement("begin_files", of_query=of_query), binary=True)
        while rows := conn.rows("next_files"):
            yield from (ListedFile(*row) for row in rows)


def shown_path(path: bytes) -> str:
    """Returns a path as people see it, whatever bytes it has."""
    return printable(path.decode("utf-8", "backslashreplace"))
