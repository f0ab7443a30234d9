"""Nothing that others put into the search path is ever called: see `tests.helpers.traps`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog.queries import load_all
from ntt_backup.config import CatalogConfig, load
from ntt_backup.report.facts import FactsReader
from tests.helpers import traps
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.environment import Environment
from tests.helpers.patience import PATIENCE
from tests.helpers.postgres import TARGET, Postgres


@pytest.fixture(scope="module")
def trapped(postgres: Postgres) -> Iterator[str]:
    """The name of a database without a table, in which the functions of the server have rivals."""
    name = "ntt_traps"
    postgres.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    traps.plant(postgres.url(name))
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
    env, log = trap_env, traps.Log(postgres)
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
    traps.plant_tables(env.url)
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
    assert env.call("dump").returncode == 0
    log = traps.Log(postgres)

    drill = env.call("drill", "--scratch", str(env.root / "scratch"), "--database", copy())
    env.write_config(catalog={"url": copy()})
    restored = env.call("restore", "--catalog")

    assert log.errors() == []
    assert drill.returncode == 0, drill.stdout + drill.stderr
    assert restored.returncode == 0, restored.stderr
