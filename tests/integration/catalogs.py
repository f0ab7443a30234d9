"""Tables of blobs of several forms: made, filled and read by statements of the tests."""

from __future__ import annotations

import psycopg

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.schema_check import verify_schema

LIVE = "create table blobs (blobid text primary key, n_hardlinks int, created_at timestamptz)"
LIVE_COLUMNS = (
    "alter table blobs add remote_copied boolean, add remote_last_checked timestamptz,"
    " add remote_copy_failed boolean"
)
INDEX = "create index idx_blobs_remote_pending on blobs (blobid) where "
FORMS = {
    "is false": "remote_copied is false or remote_copied is null",
    "equals false": "remote_copied = false or remote_copied is null",
    "is not true": "remote_copied is not true",
    "negated": "not remote_copied or remote_copied is null",
}
MALFORMED = [
    "",
    " ",
    "\n",
    "0",
    "'; drop table blobs; --",
    "FF00",
    "a%sb",
    "ff" * 100,
    "g",
    "~",
    "é",
]


def assert_usable(conn: Connection) -> None:
    """There is nothing to say about what a run and a scan need."""
    for command in ("run", "scan"):
        assert verify_schema(conn, "remote", command) == []


def add(conn: Connection, *blobids: str | None, size: int | None = None) -> None:
    conn.cursor().executemany(
        "insert into blobs (blobid, size) values (%s, %s)", [(one, size) for one in blobids]
    )


def add_hashes(conn: Connection, count: int) -> None:
    conn.execute(
        "insert into blobs (blobid, size) select encode(sha256(n::text::bytea), 'hex'), n"
        " from generate_series(1, %s) as n",
        [count],
    )


def allow_null(conn: Connection) -> None:
    """Make the table one of those whose blobid is unique, but no key."""
    conn.execute("alter table blobs drop constraint blobs_pkey")
    conn.execute("alter table blobs alter blobid drop not null")
    conn.execute("create unique index on blobs (blobid)")


def rows(conn: Connection, query: str) -> list[tuple[object, ...]]:
    return conn.execute(query.encode()).fetchall()


def state(conn: Connection) -> dict[str, tuple[object, ...]]:
    """blobid -> copied, whether checked, failed, size."""
    found = rows(
        conn,
        "select blobid, remote_copied, remote_last_checked is not null, remote_copy_failed, size"
        " from blobs",
    )
    return {str(blobid): tuple(rest) for blobid, *rest in found}


def losing(conn: psycopg.Connection, table: str, state: str, turns: int = 1) -> None:
    """The next writes to a table end as the server ends the transaction that loses to another."""
    lost = f"raise 'lost' using errcode = '{state}'"
    body = f"if nextval('public.turns') <= {turns} then {lost}; end if;"
    for text in (
        "create sequence public.turns",
        f"create function losing() returns trigger language plpgsql as $$begin {body}"
        " return null; end$$",
        f"create trigger losing after insert or update on {table} for each statement"
        " execute function losing()",
    ):
        conn.execute(text.encode())


def stubborn(conn: Connection, body: str) -> None:
    """A trigger of the table's owner, before each update of the blobid 'stubborn'."""
    for text in (
        f"create function stubborn() returns trigger language plpgsql as $$begin {body} end$$",
        "create trigger stubborn before update on blobs for each row"
        " when (new.blobid = 'stubborn') execute function stubborn()",
    ):
        conn.execute(text.encode())
