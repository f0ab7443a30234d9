"""A pooler between us and PostgreSQL: locks belong to sessions, so a session has to be ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.helpers.environment import Environment
from tests.helpers.pooler import PGBOUNCER, running_pooler

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="there is no pgbouncer")


@pytest.fixture
def pooled(env: Environment) -> Iterator[Callable[[str], str]]:
    """Starts a PgBouncer of a pool_mode before the environment's catalog; returns the URL to it."""
    with ExitStack() as stack:

        def start(mode: str) -> str:
            server = f"host={conninfo_to_dict(env.url)['host']}"
            return stack.enter_context(running_pooler(mode, server, env.url)).through(env.url)

        yield start


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pooler_that_shares_sessions_is_refused(
    env: Environment, pooled: Callable[[str], str], mode: str
) -> None:
    env.fill(3)
    env.write_config(catalog={"url": pooled(mode)})
    for command in ("check", "run"):
        result = env.run(command, expect=2)
        said = result.stdout + result.stderr
        assert "a pooler that shares sessions" in said
        assert "pool_mode = session" in said
    assert env.copied() == set()


def test_a_pooler_that_gives_each_client_its_session_is_used(
    env: Environment, pooled: Callable[[str], str]
) -> None:
    env.fill(3)
    env.write_config(catalog={"url": pooled("session")})
    env.run("run", expect=0)
    env.assert_complete()
