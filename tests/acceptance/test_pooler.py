"""A pooler between us and PostgreSQL: locks belong to sessions, so a session has to be ours."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.helpers.environment import Environment
from tests.helpers.sshd import free_port
from tests.helpers.waiting import wait_until

_PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(_PGBOUNCER is None, reason="there is no pgbouncer")


@pytest.fixture
def pooled(env: Environment) -> Iterator[Callable[[str], str]]:
    """Starts a PgBouncer of a pool_mode before the environment's catalog; returns the URL to it."""
    with ExitStack() as stack:

        def start(mode: str) -> str:
            home = Path(stack.enter_context(TemporaryDirectory(prefix="ntt-pooler-")))
            port = free_port()
            users = home / "users.txt"
            users.write_text('"postgres" ""\n')
            config = home / "pgbouncer.ini"
            config.write_text(
                f"[databases]\n* = host={conninfo_to_dict(env.url)['host']}\n"
                f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
                f"unix_socket_dir =\nauth_type = trust\nauth_file = {users}\n"
                f"pool_mode = {mode}\n"
            )
            argv = [str(_PGBOUNCER), "--quiet", str(config)]
            if os.geteuid() == 0:  # As root it refuses to run.
                home.chmod(0o755)
                argv[1:1] = ["--user", "nobody"]
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.terminate)
            url = make_conninfo(env.url, host="127.0.0.1", port=port)
            wait_until(lambda: _answers(url), "the pooler")
            return url

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


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
