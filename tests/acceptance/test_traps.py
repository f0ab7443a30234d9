"""Nothing that others put into the search path is ever called.

PostgreSQL takes the function, or the operator, whose arguments match best in all schemas of the
search path; the order of the schemas decides only between equals. So there is a hostile schema with
an overload for each type that our statements use, at each argument, and an equal of each for a path
that names pg_catalog last. Each overload ends the statement. What is trapped comes from the
statements themselves: a new one is covered.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog.statements import load_all
from ntt_backup.config import CatalogConfig, load
from ntt_backup.report.target_facts import FactsReader
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.environment import Environment
from tests.helpers.postgres import TARGET, Postgres
from tests.helpers.waiting import PATIENCE

SCHEMA = "traps"
_SPRUNG = "a trap was sprung"
# What ends a statement of ours in the normal course of things.
_USUAL = re.compile(r"canceling statement due to (statement|lock) timeout|terminating connection")
_TYPES = (
    'text varchar "char" name oid regclass int4 int8 float8 numeric bool timestamptz interval uuid'
    " jsonb bytea text[] int4[] int8[] oid[]"
)
_PREPARE = f"""
create schema {SCHEMA};
create function {SCHEMA}.spring(said text) returns bool language plpgsql as $$
begin raise exception '{_SPRUNG}: %', said; end $$;
create function {SCHEMA}.as_type(type oid, poly oid) returns oid stable language sql as $$
select case
    when poly is null or t.typtype <> 'p' then t.oid
    when t.typname ~ 'array$'
        then (select coalesce(nullif(typarray, 0), oid) from pg_type where oid = poly)
    when t.typname ~ '^any' then poly
    else t.oid
end from pg_type t where t.oid = type $$;
"""
# Of each function: as it is, with each type for what may be any type, and with each at each place.
_FUNCTIONS = r"""
do $do$
declare
    one record; made int := 0; given text; result text; head text;
begin
    for one in
        with types as (select unnest(%(types)s::regtype[])::oid as oid),
        calls as (
            select p.oid, p.proname, p.prokind, p.proretset, p.prorettype, p.proallargtypes,
                p.proargmodes, p.proargnames, p.provariadic,
                string_to_array(p.proargtypes::text, ' ')::oid[] as args
            from pg_proc p
            where p.pronamespace = 'pg_catalog'::regnamespace and p.proname = any(%(names)s)
                and p.prorettype <> 'tsm_handler'::regtype
                and (p.prokind <> 'a' or p.prorettype <> 'record'::regtype)
        ), widened as (
            select c.*, n from calls c, generate_series(1, 3) as n
            where (n = 1 or c.provariadic = '"any"'::regtype)
        ), meant as (
            -- An argument list that may be of any length has one, two or three.
            select w.*, case when provariadic = 0 then args
                else args[:cardinality(args) - 1] || array_fill(
                    case provariadic when '"any"'::regtype then 'anyelement'::regtype::oid
                    else provariadic end, array[n]
                ) end as wanted
            from widened w
        ), variants as (
            select m.*, t.oid as poly, 0 as place, null::oid as instead from meant m, types t
            union
            select m.*, null, place, t.oid from meant m, types t,
                lateral generate_series(1, cardinality(m.wanted)) as place
            union
            -- Two arguments of any type, each of another one.
            select m.*, t.oid, cardinality(m.wanted), other.oid from meant m, types t, types other
            where m.provariadic <> 0 and cardinality(m.wanted) <= 3
        )
        select v.*, coalesce((
            select array_agg(
                case when nth = place then instead else traps.as_type(arg, poly) end order by nth
            )
            from unnest(wanted) with ordinality as a (arg, nth)
        ), '{}') as final
        from variants v
    loop
        continue when exists (
            select from unnest(one.final) as a join pg_type t on t.oid = a where t.typtype = 'p'
        ) or 0 = any(one.final) or exists (
            select from pg_proc p where p.pronamespace = 'traps'::regnamespace
                and p.proname = one.proname
                and p.proargtypes::text = array_to_string(one.final, ' ')
        );
        select string_agg(format_type(a, null), ', ' order by nth) into given
        from unnest(one.final) with ordinality as u (a, nth);
        if not coalesce(one.proargmodes && '{o,t}', false) then
            result := format_type(traps.as_type(
                one.prorettype, coalesce(one.poly, one.instead, 'text'::regtype)
            ), null);
            result := case when one.proretset then 'setof ' else '' end || result;
        else
            select 'table (' || string_agg(
                format('%%I %%s', one.proargnames[nth], format_type(a, null)), ', ' order by nth
            ) || ')' into result
            from unnest(one.proallargtypes) with ordinality as u (a, nth)
            where one.proargmodes[nth] in ('o', 't');
        end if;
        made := made + 1;
        head := format('traps.%%I(%%s)', one.proname, given);
        if one.prokind = 'a' then
            execute format(
                'create function traps.step_%%s(%%s) returns %%s language plpgsql as %%L', made,
                concat_ws(', ', result, given), result,
                format('begin perform traps.spring(%%L); end', head)
            );
            execute format(
                'create aggregate traps.%%I(%%s) (sfunc = traps.step_%%s, stype = %%s)',
                one.proname, coalesce(given, '*'), made, result
            );
        else
            execute format(
                'create function %%s returns %%s language plpgsql as %%L', head, result,
                format('begin perform traps.spring(%%L); end', head)
            );
        end if;
    end loop;
end $do$;
"""
_OPERATORS = r"""
do $do$
declare one record;
begin
    for one in
        with types as (
            select unnest(%(types)s::regtype[] || '{anyelement,anyarray}'::regtype[]) as type
        )
        select operator, l.type as left, r.type as right, row_number() over () as nth,
            case when operator ~ '^[-+*/^&|>]+$' and operator not in ('>', '>=', '->>')
                and operator <> '||' then l.type::text
                when operator in ('||', '->>') then 'text' else 'bool' end as result
        from types l, types r, unnest(%(operators)s::text[]) as operator
        where (l.type::text ~ '^any') = (r.type::text ~ '^any')
    loop
        execute format(
            'create function traps.op_%%s(%%s, %%s) returns %%s language plpgsql as %%L', one.nth,
            one.left, one.right, one.result, format('begin perform traps.spring(%%L); end',
            concat_ws(' ', one.left, one.operator, one.right))
        );
        execute format(
            'create operator traps.%%s (leftarg = %%s, rightarg = %%s, function = traps.op_%%s)',
            one.operator, one.left, one.right, one.nth
        );
    end loop;
end $do$;
"""
_DOMAINS = r"""
do $do$
declare one text;
begin
    foreach one in array %(words)s::text[] loop
        if exists (
            select from pg_type
            where typnamespace = 'pg_catalog'::regnamespace and typname = one and typtype = 'b'
        ) then
            execute format(
                'create domain traps.%%1$I as pg_catalog.%%1$I check (traps.spring(%%1$L))', one
            );
        end if;
    end loop;
end $do$;
"""
_VIEWS = r"""
do $do$
declare one text;
begin
    foreach one in array %(words)s::text[] loop
        if one <> 'blobs' and (
            to_regclass('pg_catalog.' || quote_ident(one)) is not null
            or to_regclass('ntt_backup.' || quote_ident(one)) is not null or one ~ '_found$'
        ) then
            execute format('create view traps.%%I as select traps.spring(%%L)', one, one);
        end if;
    end loop;
end $do$;
"""


# A statement of ours in the server's log; a COPY is logged as a statement, too.
_NAMED = re.compile(r"LOG:  (?:statement|execute \S+): /\* ntt_backup (\w+) \*/")


def _values() -> dict[str, list[str]]:
    """What our SQL calls; its comments and texts call nothing."""
    text = re.sub(r"--.*|'[^']*'", " ", "\n".join(load_all().values()))
    operators = re.findall(r"(?<![-\w<>=|~!*/^&%+@])[-<>=|~!*/^&+]+", text)
    return {
        "types": _TYPES.split(),
        "names": sorted({*re.findall(r"\b([a-z_]\w*)\s*\(", text)}),
        "operators": sorted({*operators} - {"=>"}),
        "words": sorted({*re.findall(r"\b[a-z]\w*\b", text)}),
    }


def _execute(url: str, *scripts: str) -> None:
    with (
        psycopg.connect(url, autocommit=True, options="-c search_path=pg_catalog") as conn,
        psycopg.ClientCursor(conn) as cursor,
    ):
        for script in scripts:
            cursor.execute(script.encode(), _values())


def plant(url: str) -> None:
    """Makes functions, operators and types in the schema `traps` of a database without tables."""
    _execute(url, _PREPARE.replace("%", "%%"), _FUNCTIONS, _OPERATORS, _DOMAINS)


def plant_tables(url: str) -> None:
    """Adds what is called as the server's tables, and ours."""
    _execute(url, _VIEWS)


class Log:
    """What the server has logged since. Statements are in it for roles with log_statement = all."""

    def __init__(self, postgres: Postgres) -> None:
        self._path = postgres.log
        self._begin = self._path.stat().st_size

    def _read(self) -> str:
        with self._path.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def errors(self) -> list[str]:
        """The errors of statements, but for what is usual. Where a trap has another kind or type
        than what it stands for, the server does not get as far as to call it.
        """
        found = (line for line in self._read().splitlines() if "ERROR:" in line)
        return [line for line in found if not _USUAL.search(line)]

    def executed(self) -> set[str]:
        """The names of the statements of ours that were executed."""
        return {*_NAMED.findall(self._read())}


@pytest.fixture(scope="module")
def trapped(postgres: Postgres) -> Iterator[str]:
    """The name of a database without a table, in which the functions of the server have rivals."""
    name = "ntt_traps"
    postgres.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    plant(postgres.url(name))
    yield name
    postgres.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def boss(postgres: Postgres, role: Callable[[], str]) -> str:
    """A superuser whose search path leads to the rivals, and to pg_catalog at last."""
    name = role()
    for text in (
        "alter role {} superuser",
        "alter role {} set search_path = public, traps, pg_catalog",
        "alter role {} set log_statement = 'all'",
    ):
        postgres.execute(sql.SQL(text).format(sql.Identifier(name)))
    return name


@pytest.fixture
def copy(postgres: Postgres, trapped: str, boss: str) -> Iterator[Callable[[], str]]:
    """Makes another database like it; returns the URL for the superuser of the search path."""
    with ExitStack() as stack:

        @contextmanager
        def made(name: str) -> Iterator[str]:
            create = sql.SQL("create database {} template {} strategy file_copy")
            postgres.execute(create.format(sql.Identifier(name), sql.Identifier(trapped)))
            yield postgres.url(name, boss)
            drop = sql.SQL("drop database {} with (force)")
            postgres.execute(drop.format(sql.Identifier(name)))

        names = iter(f"{trapped}_{boss}_{number}" for number in range(10))
        yield lambda: stack.enter_context(made(next(names)))


@pytest.fixture(params=["env", "bucket_env"])
def trap_env(
    request: pytest.FixtureRequest, postgres: Postgres, copy: Callable[[], str]
) -> Environment:
    """The environment, its catalog still to be made in a database with traps; the program is the
    superuser, the test is another one.
    """
    env: Environment = request.getfixturevalue(request.param)
    url = copy()
    env.url = make_conninfo(url, user="postgres")
    env.write_config(
        catalog={"url": url},
        dump={"bin": str(postgres.programs)},
    )
    return env


@pytest.mark.long
def test_no_command_calls_what_others_have_put_into_the_search_path(
    trap_env: Environment,
    postgres: Postgres,
    role: Callable[[], str],
) -> None:
    env, log = trap_env, Log(postgres)
    of_bucket = isinstance(env, BucketEnvironment)
    url = env.settings["catalog"]["url"]

    def call(*args: str, code: int = 0) -> str:
        done = env.call(*args)
        assert log.errors() == [], args
        assert done.returncode == code, (args, done.stdout, done.stderr)
        return done.stdout

    # The catalog is made: by a script first, as far as one goes that leaves no table.
    script = call("init-db", "--print-sql", "--notify")
    assert script.count("create table") > 5
    done = postgres.psql(script, url)
    assert log.errors() == [], script
    assert done.returncode == 0, done.stderr
    call("init-db", "--notify")
    plant_tables(env.url)
    call("init-db", "--notify")
    call("init-db")
    script = call("init-db", "--print-sql", "--role", role(), "--monitor", role(), "--notify")
    assert "grant" in script
    done = postgres.psql(script, url)
    assert done.returncode == 0, done.stderr

    # A run, with all that stands around it.
    blobids = [env.put_in_store(b"blob %d" % number) for number in range(40)]
    call("scan")
    call("check")
    call("run", "--dry-run")
    call("run")
    env.register(["ab" * 32, "cd" * 32])
    call("run", code=7)
    call("failed")
    call("failed", "--json")
    call("failed", "--known")
    call("requeue", "--reason", "missing")
    call("run", code=7)
    call("requeue")
    env.query("delete from blobs where blobid not like '%ab%' and not remote_copied")
    env.query("delete from blobs where remote_copied is not true")
    call("status")
    call("status", "--json")
    call("runs")
    call("dump")
    call("dumps")
    call("show", blobids[0])

    # A daemon; blobs come by a program with the same search path.
    env.write_config(metrics={"textfile": str(env.root / "ntt.prom")})
    with env.running("run", "--watch") as run:
        env.await_event("worker_start")
        late = env.put_in_store(b"late")
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("insert into public.blobs (blobid) values (%s)", [late])
        env.await_copied({late})
        call("status", "--json")
        call("pause")
        call("resume")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    if not of_bucket:
        env.put(b"by tar")
        call("run", "--strategy", "tar")

    # What was sent is looked at, and comes back.
    call("verify", "--download")
    call("verify", "--download", "--sample", "50%")
    call("verify", "--local")
    call("reconcile")
    call("reconcile", "--apply")
    if not of_bucket:
        env.remote_path(blobids[0]).unlink()
        call("verify", "--download", code=7)
        call("run")
    call("restore", "--to", str(env.root / "back"))
    env.query("update blobs set remote_copied = false")
    call("reconcile", "--adopt")
    env.write_config(policy={"copies": 1, "proved": "30d"})
    call("status", "--policy")

    # Files by their paths, which a query lists; some change, some go, and are removed.
    files = {name: name.encode() * 20 for name in ("up/kept", "up/gone", "up/same", "up/changed")}
    for name, content in files.items():
        path = env.store / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    env.query("create table files (path text, size bigint)")
    for name, content in files.items():
        env.query("insert into files values (%s, %s)", name, len(content))
    reader = role()
    env.query(f"grant select on files to {reader}")
    env.query(f"alter role {reader} set search_path = public, traps, pg_catalog")
    listed = {"url": make_conninfo(url, user=reader), "query": "select path, size from files"}
    env.write_config(**{"catalog.from": listed})
    call("init-db", "--notify")
    call("scan")
    call("run")
    (env.store / "up/changed").write_bytes(b"changed")
    (env.store / "up/gone").unlink()
    env.query("update files set size = 7 where path = 'up/changed'")
    env.query("delete from files where path = 'up/gone'")
    call("scan", "--restart")
    call("run")
    call("failed")
    call("requeue")
    call("run")
    call("show", "up/kept")
    call("reconcile")
    call("verify")
    call("restore", "--as-paths", "--to", str(env.root / "paths"), "--path", "up/*")
    env.query("update ntt_backup.places set gone_at = gone_at - interval '1 year'")
    call("prune", "--gone-for", "90d", "--max-share", "99%", "--apply")
    call("status", "--json")
    page = FactsReader({TARGET: load(CatalogConfig, file=env.config, environ={})}).read(TARGET)
    assert page.totals is not None
    assert log.errors() == []

    # The others are parts of statements, or shown.
    assert len(log.executed() & set(load_all())) > len(load_all()) * 0.45


@pytest.mark.long
def test_what_restores_a_catalog_calls_nothing_that_waits_in_the_new_database(
    env: Environment, postgres: Postgres, copy: Callable[[], str]
) -> None:
    env.write_config(run={"skip_pgdump": False}, dump={"bin": str(postgres.programs)})
    env.fill_both(5)
    env.call("dump", expect=0)
    log = Log(postgres)

    drill = env.call("drill", "--scratch", str(env.root / "scratch"), "--database", copy())
    env.write_config(catalog={"url": copy()})
    restored = env.call("restore", "--catalog")

    assert log.errors() == []
    assert drill.returncode == 0, drill.stdout + drill.stderr
    assert restored.returncode == 0, restored.stderr
