"""Passwords and the addresses of notices are in the configuration, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.environment import Environment
from tests.postgres import Postgres

SECRET = "hunter2"
# Python loads it at every start: what it is told to start is seen, however short that runs.
WATCH = """
import sys

def note(event, args):
    if event in ("os.exec", "os.posix_spawn", "subprocess.Popen"):
        with open({file!r}, "a") as file:
            print(event, args[1], file=file)

sys.addaudithook(note)
with open({file!r}, "a") as file, open("/proc/self/cmdline") as own:
    print("started", own.read().split("\\0"), file=file)
"""
QUIETLY = ("status --json", "status", "failed --json", "config show", "config show --json")


@pytest.mark.long
def test_no_secret_is_in_arguments_logs_outputs_and_messages(
    env: Environment, postgres: Postgres
) -> None:
    started = env.root / "started"
    (env.root / "sitecustomize.py").write_text(WATCH.format(file=str(started)))
    env.environ["PYTHONPATH"] = str(env.root)
    env.write_config(
        catalog={"url": make_conninfo(env.url, password=SECRET)},
        run={"skip_pgdump": False},
        dump={"bin": str(postgres.programs)},
        notify={"webhook_url": f"http://127.0.0.1:1/{SECRET}", "timeout": 1},
        **{"snapshots.config": {"paths": [str(env.store)], "every": 60}},
    )
    env.put(b"a blob")
    env.path(env.put(b"lost")).unlink()

    said = [env.run(*line.split()) for line in ("check", "run", "dump --force", "reconcile")]
    said += [env.call(*line.split()) for line in QUIETLY]
    assert [done.returncode for done in said[:4]] == [0, 7, 0, 0], said[:2]
    where = conninfo_to_dict(env.url)["host"]
    for wrong in (f"host=/nonexistent password={SECRET}", f"host={where} {SECRET}"):
        env.write_config(catalog={"url": wrong})
        said += [env.call(*line.split()) for line in ("status", "-v status", "requeue", "init-db")]
        assert all(done.returncode in (2, 4) for done in said[-4:])

    names = {Path(line.split("'")[1]).name for line in started.read_text().splitlines()}
    assert {"pg_dump", "ssh"} <= names
    assert SECRET not in started.read_text()
    assert SECRET not in "".join(done.stdout + done.stderr for done in said)
    assert SECRET not in env.log.read_text()
    for table in ("runs", "dumps"):
        assert SECRET not in str(env.query(f"select t::text from ntt_backup.{table} t"))
