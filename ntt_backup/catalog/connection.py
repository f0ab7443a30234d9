"""The connection to the catalog, and the translation of psycopg's errors into ours.

Of each error the daemon must know whether it may pass by itself, and what the operator should do.
Both are decided by SQLSTATE. Errors at connecting have none: a refusal is recognised by its
English words, and anything else counts as an outage, since to wait in vain harms less than to give
up on an outage.
"""

from __future__ import annotations

import logging
import math
import pwd
import random
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import errors, sql
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from ntt_backup.catalog.latest_server import LATEST
from ntt_backup.catalog.statements import fragment, shown, statement
from ntt_backup.config.display import PUBLIC_PARAMETERS
from ntt_backup.errors import (
    CatalogError,
    CatalogRefused,
    CatalogUnavailable,
    ConfigError,
    SessionExpired,
)
from ntt_backup.formatting import printable
from ntt_backup.model import ALL_BLOBS, Part
from ntt_backup.process import embedded

# What the driver logs it raises as well; without a handler Python would print it over the screen.
logging.getLogger("psycopg").addHandler(logging.NullHandler())

Result = TypeVar("Result")

_DETAIL_LENGTH = 500
_DRILL = "ntt-backup-remote/drill"
_PROBE = "ntt-backup-remote/probe"
_SHOWN = 3
_KEEPALIVE: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}

# How psycopg says which hosts it has tried, and what each one said.
_ATTEMPT = re.compile(
    r"^- host: (.+?), port: (.+?), hostaddr: .+?: (.*?)(?=^- host: |\Z)", re.MULTILINE | re.DOTALL
)
_OF_LIBPQ = re.compile(r"^connection failed: |connection to server (at|on) .*? failed: ")
_UNANSWERED = re.compile(r"timeout expired|does not answer")
_READ_ONLY = re.compile(r"session is read-only|in hot standby mode")

# A pooler lends first the session that came back last: one try is enough, unless it is busy.
_BORROWINGS = 5

# The server ends one of two transactions that wait for each other, or that it cannot put in order.
_VICTIM = (errors.DeadlockDetected, errors.SerializationFailure)
# The most seconds before each further try. Programs that write the same rows meet again and again.
_TRIES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 3.2, 3.2)

_TRANSIENT_CLASSES = frozenset({"08", "40", "53", "55", "57", "58"})
_TRANSIENT_STATES = frozenset({"25006", "25P03"})
# What ended was an idle session, or one that was idle within a transaction.
_EXPIRED_STATES = frozenset({"57P05", "25P03"})
_NOT_LET_IN = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|rejects connection"
    r"|role \".*\" does not exist|database \".*\" does not exist|is not permitted to log in"
    r"|permission denied for database|does not support SSL|certificate verify failed"
    r"|root certificate file"
)
_OTHERS = (
    "other programs write the same rows all the time: see pg_stat_activity, and call this again"
)
INIT_DB = "run `ntt-backup-remote init-db`"
_HINTS = {
    "25006": "the server is a standby (let catalog.url name all hosts, with"
    " target_session_attrs=read-write), or default_transaction_read_only is on for this role or"
    " database",
    "3D000": "create the database with createdb, or correct catalog.url (NTT_DB_URL), or the"
    " --database of a drill",
    "42P01": INIT_DB,
    "42703": INIT_DB,
    "3F000": INIT_DB,
    "42501": "run it as the owner of that object",
    "53100": "free space on the database server",
    "53300": "run fewer workers, or raise max_connections on the database server",
    "57014": "somebody cancelled it, or there is a statement_timeout in catalog.url (NTT_DB_URL)",
    "40P01": _OTHERS,
    "40001": _OTHERS,
    "55P03": "another session holds the lock: see pg_blocking_pids(pid) and pg_stat_activity",
}
WHO_KEEPS_ROWS = (
    "look at the triggers and policies of blobs (in psql: \\d blobs); the owner decides"
)
_SERVICE_USER = "ntt-backup"
_OF_ROOT = re.compile(r"(role|user) \"root\"")
_AWAY_HINT = "check that PostgreSQL runs on that host, and catalog.url (NTT_DB_URL)"
_NO_PRIMARY_HINT = (
    "promote a standby; where a host is the primary, default_transaction_read_only is on there"
)


class Server(NamedTuple):
    """The server that answers in a session.

    Attributes:
        system: The identifier of the cluster; all its standbys have the same. "" where it is not
            known, as the server does not let us ask.
        timeline: The timeline of a primary: a standby that is promoted begins the next one. 0 where
            it is not known.
        started: When the server started, which tells two servers of one timeline apart.
    """

    system: str = ""
    timeline: int = 0
    started: str = ""


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A session of ours.

    search_path: the path that the server, role, database and connection string give the session.
    schema: where that path finds the table `blobs`, else where a new table would be created; None
    where the path names no schema that exists.
    privileged: whoever logged in has rights beyond the database, or may become a role that has.
    part: the part of the blobs that the session is about, see `{mine}` in `sql/`.
    url: of the catalog. server: which server answers. patience_s: after so many seconds without a
    byte from the server, see `_look_for_server`.
    """

    url = ""
    server = Server()
    patience_s = math.inf
    search_path = ""
    schema: str | None = None
    privileged = False
    part = ALL_BLOBS

    def wait(self, gen: PQGen[RV], *args: Any, **kwargs: Any) -> RV:
        """Waits for the server as psycopg does, but not for a server that answers nobody."""
        try:
            wanted = next(gen)
        except StopIteration as end:  # Nothing is waited for: a row of a COPY is here already.
            value: RV = end.value
            return value
        return super().wait(self._watched(gen, wanted), *args, **kwargs)

    def _watched(self, gen: PQGen[RV], wanted: Any) -> Generator[Any, Any, RV]:
        heard = time.monotonic()
        try:
            while True:
                ready = yield wanted
                if ready:
                    heard = time.monotonic()
                elif time.monotonic() - heard >= self.patience_s:
                    self._look_for_server()
                    heard = time.monotonic()
                wanted = gen.send(ready)
        except StopIteration as end:
            value: RV = end.value
            return value

    def _look_for_server(self) -> None:
        """Ends the session where a new one finds no server, or another one.

        The kernel of a host whose server stands still, and a proxy before a server that is cut
        off, keep a connection alive for ever. A server that has a long statement to do answers
        others meanwhile.

        Raises:
            psycopg.OperationalError: The session was ended.
        """
        found = "nor does one answer a new session"
        try:
            if self.url:
                with _open(self.url, _PROBE) as other:
                    other.patience_s = _seconds(self.url, "connect_timeout", 1)
                    if _server(other) == self.server:
                        return
                found = "and another server answers a new session"
        except psycopg.Error as error:
            if not _UNANSWERED.search(str(error)):
                return  # Whoever refuses is alive.
        self.close()
        raise psycopg.OperationalError(f"the server does not answer a statement, {found}")

    def rows(
        self, name: str, values: Mapping[str, object] | None = None, /, **parts: sql.Composable
    ) -> list[tuple[Any, ...]]:
        """Executes a query of `sql/` and returns its rows, none for a statement that has no rows.

        values: the parameters of the query. parts: the SQL for its `{...}`.
        """
        cursor = self.execute(statement(name, **parts), values)
        return cursor.fetchall() if cursor.description else []

    def ask(self, doing: str, name: str, /, **values: object) -> list[tuple[Any, ...]]:
        """Returns what `rows` returns. Raises CatalogError; doing: see `translated`."""
        return self._repeat(doing, lambda: self.rows(name, values or None))

    def in_transaction(self, doing: str, work: Callable[[], Result]) -> Result:
        """Does work in one transaction, and returns the result of the work.

        The work is done again where the server ended the transaction because of another one: a
        deadlock, or a failure to serialize. Within a transaction of the caller, whoever began that
        one repeats it.

        Args:
            doing: See `translated`.
            work: The statements. Nothing but the transaction may remember that they were executed.

        Raises:
            CatalogError: The catalog refuses, or is away.
        """

        def once() -> Result:
            with self.transaction():
                return work()

        return self._repeat(doing, once)

    def _repeat(self, doing: str, work: Callable[[], Result]) -> Result:
        """Does work, and again if the server ends the transaction because of another one."""
        for most_s in _TRIES:
            try:
                with translated(doing):
                    return work()
            except CatalogUnavailable as error:
                # The state shows whether a transaction of the caller is left.
                over = self.info.transaction_status is TransactionStatus.IDLE
                if not (over and isinstance(error.__cause__, _VICTIM)):
                    raise
            time.sleep(random.uniform(0.0, most_s))
        with translated(doing):
            return work()


def connect(
    url: str, application_name: str, *, no_tables: bool = False, part: Part = ALL_BLOBS
) -> Connection:
    """Opens a connection in autocommit mode; each end notices within 30 s that the other died.

    A role with rights beyond the database gets no connection where roles with fewer rights can put
    code into the tables: it would run with all rights. SET ROLE is no wall, since such code can
    RESET it. Nobody gets one where the search path finds another table blobs than the one that
    init-db prepared: whoever may make schemas could make that of a path's "$user".

    Names in later statements are those of the server itself (search_path = pg_catalog, pg_temp).
    No statement is prepared, even where one asks for it, until a `prepare_threshold` is set: a plan
    that is kept was made for other values, and for the table as it was then.

    Args:
        url: a libpq connection string or URI; what it sets itself is left alone.
        application_name: what pg_stat_activity shows.
        no_tables: the session uses no tables but the system catalogs, so who can put code into
            ours is not checked.
        part: the part of the blobs that the session is about.

    Raises:
        ConfigError: The url is malformed.
        CatalogUnavailable: The server does not answer, or is an old primary.
        CatalogRefused: It refuses, the role has more rights than those who can put code there, or
            another table is meant.
    """
    try:
        conn = _open(url, application_name)
    except psycopg.Error as error:
        raise _translate(error, f"accept our connection ({describe(url)})") from error
    conn.part, conn.url = part, url
    conn.patience_s = _seconds(url, "tcp_user_timeout", 1000)
    try:
        with translated("set up the connection"):
            ((conn.search_path, conn.schema, conn.privileged, compared),) = conn.rows(
                "begin_session", privileged=privileged()
            )
            conn.server = _server(conn)
            conn.rows("set_defaults")
            if conn.info.parameter_status("server_encoding") == "SQL_ASCII":
                # There a text may be any bytes, and as UTF-8 the server would refuse to send some.
                configure(conn, "client_encoding", "latin1")
            LATEST.require(conn.server.system, conn.server.timeline)
            refuse_code_of_others(conn, tables=not no_tables)
            if not no_tables and compared:
                check_one_table(conn)
    except BaseException:
        conn.close()
        raise
    return conn


def _open(url: str, application_name: str) -> Connection:
    given = _parameters(url)
    if (host := Path(host_of(url))).name == embedded.NAME:
        embedded.hold(host)
    options: dict[str, Any] = {key: value for key, value in _KEEPALIVE.items() if key not in given}
    return Connection.connect(
        url,
        autocommit=True,
        prepare_threshold=None,
        client_encoding="utf8",
        application_name=application_name,
        **options,
    )


def _seconds(url: str, parameter: str, divisor: int) -> float:
    """Returns a limit of a connection string in seconds; infinity where there is none."""
    try:
        return int(_parameters(url).get(parameter) or _KEEPALIVE[parameter]) / divisor or math.inf
    except ValueError:
        return math.inf


def _server(conn: Connection) -> Server:
    try:
        return Server(*conn.rows("server")[0])
    except psycopg.Error:
        if conn.closed:
            raise
        return Server()  # Not every service lets its users ask.


def check_one_table(conn: Connection) -> None:
    """Raises CatalogRefused where the schema ntt_backup of this database serves another table.

    Claims and failures are told apart by target and blobid only, and the progress of a scan by the
    store. A second catalog in one database is not worth a third key to each: a database is cheap.
    """
    for (schema,) in conn.rows("other_table"):
        raise CatalogRefused(
            "the schema ntt_backup of this database serves another table",
            detail=f"it is about {schema}.blobs, which the search path does not find",
            hint="give a second catalog a database of its own; to use that table:"
            f" {search_path(conn, schema)}",
        )


def search_path(conn: Connection, schema: str, role: str = "") -> str:
    """Returns the SQL that lets a role ("": that of this session) find the tables of a schema."""
    names = {"user": role or conn.info.user, "database": conn.info.dbname, "schema": schema}
    return shown("mend_search_path", **{key: sql.Identifier(name) for key, name in names.items()})


def refuse_code_of_others(conn: Connection, *, tables: bool = True) -> None:
    """Raises CatalogRefused where a privileged session would run code of roles that are not.

    The session is closed then. tables: as in `code_of_others`, also for the table `blobs`.
    """
    if found := code_of_others(conn, tables=tables, blobs=tables):
        user = conn.info.user
        conn.close()
        raise CatalogRefused(
            f"{user} has rights beyond this database, and would run code of roles that have not",
            detail=shortened(found),
            hint="let catalog.url (NTT_DB_URL) name an ordinary role, for which `ntt-backup-remote"
            " init-db --role NAME` prints the grants; or change the owner of what is named to a"
            " superuser, and revoke each privilege that is named",
        )


def code_of_others(conn: Connection, *, tables: bool = True, blobs: bool = True) -> list[str]:
    """Lists what roles that are not privileged can put code into; nothing for an ordinary session.

    Event triggers are always checked. tables: also the schema `ntt_backup`, and what it needs.
    blobs: also that table, and what it needs.
    """
    if not conn.privileged:
        return []
    parts = code_parts(conn.schema if blobs else None, sql.SQL("array[session_user]"), ours=tables)
    return [line for line, _ in conn.rows("code_of_others", **parts)]


def code_parts(
    schema: str | None, trusted: sql.Composable, *, ours: bool = True
) -> dict[str, sql.Composable]:
    """Returns the parts of the query `code_of_others`.

    schema: of the table blobs; None leaves that table out. trusted: an array of the roles whose
    code may run. ours: whether to ask about the schema `ntt_backup`.
    """
    return {
        "schema": sql.Literal(schema),
        "ours": sql.Literal("ntt_backup" if ours else None),
        "trusted": trusted,
        "privileged": privileged(),
    }


def shortened(lines: list[str]) -> str:
    """Returns the first lines in one, and how many more there are."""
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return printable(", ".join(lines[:_SHOWN]) + more)


def privileged() -> sql.Composed:
    """Returns whether whoever logged in is privileged, as a part of a query."""
    return fragment("privileged", role_is_privileged=fragment("role_is_privileged"))


def for_program(url: str, application_name: str) -> tuple[str, dict[str, str]]:
    """Returns a connection string for a program of PostgreSQL, and environment variables for it.

    Every user of the machine may see arguments, so the string holds no secret. The password is in
    the environment.

    Raises:
        ConfigError: The url is malformed, or has another secret than a password.
    """
    given = _parameters(url)
    password = given.pop("password", None)
    if secrets := sorted(given.keys() - PUBLIC_PARAMETERS):
        raise ConfigError(
            f"catalog.url (NTT_DB_URL) has {', '.join(secrets)}, which pg_dump cannot be told"
            " secretly",
            hint="put it into a service file (~/.pg_service.conf) that only this user can read, and"
            " name the service in catalog.url by service=, or set run.skip_pgdump",
        )
    options = {**_KEEPALIVE, **given, "application_name": application_name}
    secret = {} if password is None else {"PGPASSWORD": str(password)}
    return make_conninfo("", **options), secret


def configure(conn: Connection, setting: str, value: object, *, local: bool = False) -> None:
    """Sets a server setting for this session, or with local for this transaction only."""
    conn.rows("configure", {"setting": setting, "value": str(value), "local": local})


def end_when_idle(conn: Connection, seconds: int) -> None:
    """Makes the server end this session after a time without a statement, from PostgreSQL 14 on.

    A limit in catalog.url is kept.
    """
    conn.ask("set up the connection", "end_when_idle", value=f"{seconds}s")


def show_life(conn: Connection) -> None:
    """Has the server not count the session as idle. A lost one shows at the next statement."""
    if not conn.closed:
        with suppress(psycopg.Error):
            _backend(conn)


def refuse_shared_session(conn: Connection, url: str) -> None:
    """Refuses a pooler that lends this session to other clients between two transactions.

    PgBouncer does that with `pool_mode = transaction`. The other clients would get the locks and
    settings of this session.

    A pooler is recognised where another backend answers than the reported one. Sessions are shared
    where a second connection then gets the backend of the first.

    Raises:
        ConfigError: A pooler shares the session.
    """
    with translated("say who answers"):
        if conn.info.backend_pid == _backend(conn) or not _is_lent(conn, url):
            return
    raise ConfigError(
        "the catalog is reached through a pooler that shares sessions",
        detail=f"{describe(url)}: two connections were given one session",
        hint="let catalog.url (NTT_DB_URL) name PostgreSQL itself, or a pool with pool_mode ="
        " session",
    )


def _is_lent(conn: Connection, url: str) -> bool:
    """Returns whether a second connection can be given the session of the first."""
    with Connection.connect(url, prepare_threshold=None) as other:
        for _ in range(_BORROWINGS):
            ours = _backend(conn)
            try:
                with other.transaction():
                    if _backend(other) == ours:
                        return True
            except psycopg.errors.ProtocolViolation:
                return True  # It lends single statements, and allows no transaction.
    return False


def _backend(conn: Connection) -> int:
    return int(conn.rows("backend")[0][0])


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raises CatalogError for what psycopg raises; doing completes "the catalog refused to"."""
    try:
        yield
    except psycopg.Error as error:
        raise _translate(error, doing) from error


def describe(url: str) -> str:
    """Returns the catalog as a message may name it: never with a password."""
    given = _parameters(url)
    where = given.get("host") or given.get("hostaddr") or given.get("service") or "local socket"
    return f"{given.get('dbname') or 'the default database'} on {where}"


def host_of(url: str) -> str:
    """Returns the host that url names, "" for that of libpq. Raises ConfigError."""
    return str(_parameters(url).get("host") or "")


def database_name(url: str) -> str:
    """Returns the database that url names, "" for that of the server. Raises ConfigError."""
    return str(_parameters(url).get("dbname") or "")


@contextmanager
def new_database(url: str, prefix: str, *, keep: bool = False) -> Iterator[str]:
    """Yields the URL of a new database on the server of a URL, and drops that database at the end.

    Args:
        url: The URL.
        prefix: What the name of the database begins with.
        keep: Drop the database only after an error.

    Raises:
        CatalogError: The database cannot be made, or the server is unreachable.
        ConfigError: The URL is none.
    """
    name = prefix + secrets.token_hex(8)
    other = make_conninfo("", **{**_parameters(url), "dbname": name})
    with connect(url, _DRILL, no_tables=True) as conn:
        with translated("create a database"):
            conn.rows("lock_database", {"key": _key_of(name)})
            conn.rows("create_database", database=sql.Identifier(name))
        kept = False
        try:
            yield other
            kept = keep
        finally:
            if not kept:
                with translated(f"drop the database {name}"):
                    conn.rows("drop_database", database=sql.Identifier(name))


def drop_left_databases(url: str, prefix: str) -> None:
    """Drops the databases of `new_database` whose maker was killed.

    Raises:
        CatalogError: A database cannot be dropped, or the server is unreachable.
        ConfigError: The URL is none.
    """
    with connect(url, _DRILL, no_tables=True) as conn, translated("drop a database"):
        for (name,) in conn.rows("databases_like", {"pattern": f"^{prefix}[0-9a-f]{{16}}$"}):
            # Its maker holds the lock as long as it lives.
            if conn.rows("lock_database", {"key": _key_of(name)})[0][0]:
                conn.rows("drop_database", database=sql.Identifier(name))


def _key_of(name: str) -> int:
    """Returns the key of the lock of a database: the number that its name ends with."""
    return int.from_bytes(bytes.fromhex(name[-16:]), "big", signed=True)


def _parameters(url: str) -> dict[str, Any]:
    """Returns the parts of url. Raises ConfigError, also for a password that is not escaped."""
    hint = "in a password write @ : / ? # and % as %40 %3A %2F %3F %23 and %25"
    try:
        given = conninfo_to_dict(url)
    except (psycopg.ProgrammingError, UnicodeError):
        # libpq quotes the part it stumbled over, which may be the password: its text is not shown.
        raise ConfigError(
            "catalog.url (NTT_DB_URL) is no PostgreSQL connection string", hint=hint
        ) from None
    host, port = str(given.get("host") or ""), str(given.get("port") or "")
    if "@" in host.lstrip("@") or re.search(r"[^\d,]", port):
        raise ConfigError("catalog.url (NTT_DB_URL) has no valid host and port", hint=hint)
    return given


def _translate(error: psycopg.Error, doing: str) -> CatalogError:
    tried = _tried(error)
    said = error.diag.message_primary or str(error).removeprefix("connection is bad: ")
    if tried:
        said = "; ".join(f"{host}: {_OF_LIBPQ.sub('', text)}" for host, text in tried.items())
    detail = " ".join(said.split())[:_DETAIL_LENGTH]
    state = error.sqlstate or ""
    lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    # A host that is fenced refuses; another one may be promoted.
    lost = lost and not state and not all(map(_NOT_LET_IN.search, tried.values() or [str(error)]))
    if lost or state[:2] in _TRANSIENT_CLASSES or state in _TRANSIENT_STATES:
        hint = _NO_PRIMARY_HINT if _READ_ONLY.search(detail) else _AWAY_HINT
        return (SessionExpired if state in _EXPIRED_STATES else CatalogUnavailable)(
            f"the catalog is not available to {doing}", detail=detail, hint=_HINTS.get(state, hint)
        )
    return CatalogRefused(
        f"the catalog refused to {doing}", detail=detail, hint=_refusal_hint(error, detail)
    )


def _tried(error: psycopg.Error) -> dict[str, str]:
    """Returns what each host of a connection string said, a host with several addresses once."""
    tried: dict[str, str] = {}
    for host, port, text in _ATTEMPT.findall(str(error)):
        name = f"{host}:{port}".replace("'", "").removesuffix(":None")
        tried[name] = f"{tried[name]}, {text.strip()}" if name in tried else text.strip()
    return tried


def _refusal_hint(error: psycopg.Error, detail: str) -> str:
    if "row-level security" in detail:
        return WHO_KEEPS_ROWS
    if "to create database" in detail:
        return "as a superuser: alter role ROLE createdb; or name an empty one with --database"
    if error.sqlstate == "42501" and "must be owner" not in detail:
        return "`ntt-backup-remote init-db --print-sql` prints the SQL for who may grant it"
    if error.sqlstate == "23502":
        return f"the column {error.diag.column_name} of blobs needs a default value"
    if error.sqlstate is not None:
        return _HINTS.get(error.sqlstate, "")
    if "database" in detail and "does not exist" in detail:
        return _HINTS["3D000"]
    if _OF_ROOT.search(detail):
        with suppress(KeyError):  # Not every host has the user of the service's units.
            pwd.getpwnam(_SERVICE_USER)
            return (
                f"root has no role in the catalog: put `runuser -u {_SERVICE_USER} --` before the"
                " command, as the service's user has one"
            )
    return "check user, password and host in catalog.url (NTT_DB_URL), and the server's pg_hba.conf"
