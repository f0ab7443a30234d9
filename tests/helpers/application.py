"""The database of an application that lists files, and a role that may read its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql

from ntt_backup.config import StoreConfig

QUERY = "select path, size, sum as checksum, id as key from files"


class Application:
    """The database of an application, and a role that may read one of its tables.

    Attributes:
        url: The URL by which the program reads.
        owner: A session of the owner.
    """

    def __init__(self, url: str, owner: psycopg.Connection, reader: str) -> None:
        self.url = psycopg.conninfo.make_conninfo(url, user=reader)
        self.owner = owner
        self.reader = reader
        owner.execute(
            "create table files (id bigint generated always as identity primary key,"
            " path text, size bigint, sum text)"
        )
        self.grant("select")

    def grant(self, privilege: str) -> None:
        grant = sql.SQL("grant {} on files to {}").format(
            sql.SQL(privilege), sql.Identifier(self.reader)
        )
        self.owner.execute(grant)

    def add(self, *paths: str, size: int | None = 1, sum: str | None = None) -> None:
        for path in paths:
            self.owner.execute(
                "insert into files (path, size, sum) values (%s, %s, %s)", (path, size, sum)
            )

    def settings(self, query: str = QUERY, **others: object) -> StoreConfig:
        listed = {"url": self.url, "query": query, **others}
        return StoreConfig.model_validate(
            {"catalog": {"from": listed}, "source": {"root": "/srv/files"}}
        )


@pytest.fixture
def application(database_url: str, role: Callable[[], str]) -> Iterator[Application]:
    with psycopg.connect(database_url, autocommit=True) as owner:
        yield Application(database_url, owner, role())
