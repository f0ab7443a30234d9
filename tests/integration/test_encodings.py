"""Databases that do not speak UTF-8: their blobs go like any others, and odd text fails alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg import sql

from ntt_backup.catalog.ledger import Ledger
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.selection import first_pending
from ntt_backup.catalog.stats import exact_totals
from ntt_backup.model import Blob, Failure, Reason
from tests.helpers.postgres import Postgres, session

GOOD = "ab" * 32


@pytest.fixture(params=["sql_ascii", "latin1", "euc_jp"])
def url(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[str]:
    """The URL of a catalog in that encoding."""
    name = f"ntt_{request.param}"
    create = "create database {} template template0 encoding {} locale 'C'"
    postgres.execute(sql.SQL(create).format(sql.Identifier(name), sql.Literal(request.param)))
    with session(postgres.url(name), "test") as conn:
        init_db(conn, "remote")
    yield postgres.url(name)
    postgres.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_text_that_is_no_utf8_fails_its_own_blob(url: str) -> None:
    with session(url, "test") as conn:
        # Two bytes that each of these encodings takes, and UTF-8 does not.
        conn.execute(f"insert into blobs (blobid) values ('{GOOD}'), (E'a\\xb0\\xa1')")
        taken = [blob for blob, _ in Claims(conn, "remote", range(256)).take(10)]
        assert len(taken) == 2
        assert first_pending(conn, "remote", 10_000, 60_000) == taken
        (odd,) = (blob.blobid for blob in taken if blob.blobid != GOOD)
        failure = Failure(odd, Reason.BAD_BLOBID, f"not hex: {odd!r} \u00e9")
        Ledger(conn, "remote").record([Blob(GOOD, 1)], [failure])
        assert first_pending(conn, "remote", 10_000, 60_000) == []
        figures = exact_totals(conn, "remote")
        assert (figures.copied, figures.failed_by_reason) == (1, {"bad-blobid": 1})
