"""A dump is restored by a role that can do nothing beyond the database that it restores.

A dump is a program: defaults, check constraints, expressions of indexes and functions in it run
while it is restored, as the role that restores. For a superuser that is code on the server. SET
ROLE is no wall, since any function may RESET it. So a superuser makes a role for the restore, which
logs in by itself, owns the new database for that time, and is dropped afterwards; what it made is
handed over to the superuser. A role that is no superuser, and cannot become anything dangerous,
restores by itself.

Functions that run with the rights of their owner would run with those of a superuser once they are
handed over: they run with those of the caller from then on, until somebody decides otherwise.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog.connection import Connection, connect, describe, translated
from ntt_backup.catalog.queries import fragment, shown, statement
from ntt_backup.errors import CatalogError, DumpFailed

# Owns what the owner of the database owns, from PostgreSQL 15 on.
_DATABASE_OWNER: Final = "pg_database_owner"
_PREFIX: Final = "ntt_restore_"
_VALID: Final = timedelta(days=7)
_SCRAM: Final = "scram-sha-256"
_ORDINARY: Final = (
    "createuser an ordinary role, createdb --owner that role, and name both in the URL of the"
    " database; or call it with --allow-superuser: then code in the dump runs as {user}"
)


class Restorer:
    """Who restores. url: how pg_restore logs in; returned: afterwards the statements that have
    functions run with the rights of their owners again.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.returned: list[str] = []


@contextmanager
def restorer(url: str, application: str, *, allow_superuser: bool) -> Iterator[Restorer]:
    """Yields who restores a dump into the database of url. Afterwards all belongs to the user of
    url, whether or not the restore ended well.

    Args:
        url: of the new database.
        application: what pg_stat_activity shows.
        allow_superuser: restore as the user of url, whatever that user may do.

    Raises:
        DumpFailed: The user may do more than a restore needs, and no lesser role can log in.
        CatalogError: The server does not answer, or refuses.
    """
    with connect(url, application, only_plan=True) as conn, translated("say what its user may do"):
        rights = statement("rights_beyond", dangerous=fragment("dangerous"))
        superuser, dangerous = conn.execute(rights).fetchall()[0]
        user = conn.info.user
    if allow_superuser or not (superuser or dangerous):
        yield Restorer(url)
        return
    if not superuser:
        raise DumpFailed(
            f"the user {user} may do more than a restore needs",
            detail=f"a dump is a program, and {user} is, or may become, {', '.join(dangerous)}",
            hint=_ORDINARY.format(user=user),
        )
    role, password = f"{_PREFIX}{secrets.token_hex(6)}", secrets.token_urlsafe(24)
    with (
        connect(url, application, only_plan=True) as conn,
        translated("make a role for the restore"),
    ):
        owners = conn.execute(statement("owners")).fetchall()[0]
        _make(conn, role, password)
    try:
        with (
            connect(url, application, only_plan=True) as conn,
            translated("give the database to that role"),
        ):
            _give(conn, role, role if owners[1] not in (None, _DATABASE_OWNER) else None)
        found = Restorer(_way_in(url, application, user, role, password))
        yield found
    finally:
        with connect(url, application, only_plan=True) as conn, translated(f"drop the role {role}"):
            found_rights = _hand_over(conn, role, user, owners)
    found.returned += found_rights


def _make(conn: Connection, role: str, password: str) -> None:
    name = role.encode()
    # What is sent is not the password: the server may log statements.
    sent = conn.pgconn.encrypt_password(password.encode(), name, _SCRAM.encode()).decode()
    parts = {
        "role": sql.Identifier(role),
        "password": sql.Literal(sent),
        "until": sql.Literal((datetime.now(UTC) + _VALID).isoformat()),
    }
    conn.execute(statement("create_restorer", **parts))


def _give(conn: Connection, database_to: str, public_to: str | None) -> None:
    database = sql.Identifier(conn.info.dbname)
    conn.execute(statement("give_database", database=database, role=sql.Identifier(database_to)))
    if public_to is not None:
        conn.execute(statement("give_public", role=sql.Identifier(public_to)))


def _way_in(url: str, application: str, user: str, role: str, password: str) -> str:
    """Returns a URL by which the role can log in: as the user does, or by TCP on this machine,
    where a socket believes the names of system users alone.
    """
    ways = [make_conninfo(url, user=role, password=password)]
    with connect(url, application, only_plan=True) as conn:
        if conn.info.host.startswith("/"):
            ways.append(make_conninfo(ways[0], host="127.0.0.1", port=str(conn.info.port)))
    said = ""
    for way in ways:
        try:
            with connect(way, application):
                return way
        except CatalogError as error:
            said = said or error.detail
    raise DumpFailed(
        f"a dump is not restored by the superuser {user}, and no lesser role can log in",
        detail=f"{describe(url)}: {said}",
        hint="let pg_hba.conf have a line for roles with a password (host all all 127.0.0.1/32"
        f" scram-sha-256); or {_ORDINARY.format(user=user)}",
    )


def _hand_over(conn: Connection, role: str, user: str, owners: tuple[str, str | None]) -> list[str]:
    """Gives what the role has to the user and to the former owners, and drops the role. Returns the
    statements that have functions run with the rights of their owners again.
    """
    conn.execute(statement("end_sessions"), {"role": role})
    owner, public = owners
    _give(conn, owner, public if public not in (None, _DATABASE_OWNER) else None)
    definers = [sql.SQL(name) for (name,) in conn.execute(statement("definers"), {"role": role})]
    for routine in definers:
        conn.execute(statement("as_caller", routine=routine))
    named = sql.Identifier(role)
    conn.execute(statement("hand_over", role=named, other=sql.Identifier(user)))
    conn.execute(statement("drop_grants", role=named))
    conn.execute(statement("drop_role", role=named))
    return [shown("as_owner", routine=routine) for routine in definers]
