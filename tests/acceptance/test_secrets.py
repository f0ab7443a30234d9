"""Passwords and the addresses of notices are in the configuration, and nowhere else."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.views import serving
from tests.helpers.waiting import PATIENCE, wait_until

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


@pytest.fixture
def posted() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server, and what is posted to it: path and body."""
    found: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.append(f"{self.path} {body.decode()}")
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", found
        http.shutdown()
        thread.join()


@pytest.mark.long
def test_no_secret_is_in_arguments_logs_outputs_and_messages(
    env: Environment, postgres: Postgres, posted: tuple[str, list[str]]
) -> None:
    url, arrived = posted
    told, metrics = env.root / "told", env.root / "ntt.prom"
    program = env.root / "program"
    program.write_text(f"#!/bin/sh\ncat >>{told}\n")
    program.chmod(0o755)
    started = env.root / "started"
    (env.root / "sitecustomize.py").write_text(WATCH.format(file=str(started)))
    env.environ["PYTHONPATH"] = str(env.root)
    env.write_config(
        catalog={"url": make_conninfo(env.url, password=SECRET)},
        run={"skip_pgdump": False},
        dump={"bin": str(postgres.programs)},
        metrics={"textfile": str(metrics)},
        notify={
            "command": [str(program)],
            "webhook_url": f"{url}/hook/{SECRET}",
            "ping_url": f"{url}/ping/{SECRET}",
        },
        **{"snapshots.config": {"paths": [str(env.store)], "every": 60}},
    )
    env.put(b"a blob")
    env.path(env.put(b"lost")).unlink()

    said = [env.run(*line.split()) for line in ("check", "run", "dump --force", "reconcile")]
    said += [env.call(*line.split()) for line in QUIETLY]
    assert [done.returncode for done in said[:4]] == [0, 7, 0, 0], said[:2]
    wait_until(lambda: told.exists() and "first_failure" in told.read_text(), "the notice")
    bodies = [line.partition(" ")[2] for line in arrived]
    paths = {line.partition(" ")[0] for line in arrived}
    assert paths == {f"/hook/{SECRET}", f"/ping/{SECRET}/start", f"/ping/{SECRET}/fail"}
    with serving(env) as page, urlopen(page, timeout=PATIENCE) as answer:
        shown = [answer.read().decode(), metrics.read_text(), told.read_text(), *bodies]
    assert "ntt_backup_up" in shown[1]
    # What does not go out is a warning, without the URL.
    env.write_config(notify={"webhook_url": f"http://127.0.0.1:1/{SECRET}", "timeout": 1})
    said += [env.call("notify", "all is well")]
    assert "webhook_url" in said[-1].stdout + said[-1].stderr
    where = conninfo_to_dict(env.url)["host"]
    for wrong in (
        f"host=/nonexistent password={SECRET}",
        f"host={where} {SECRET}",
        f"postgresql://me:{SECRET}@x@host/db",
        f"postgresql://me:{SECRET}@host/%ff",
    ):
        env.write_config(catalog={"url": wrong})
        for line in ("status", "-v status", "requeue", "init-db", "check", "-v run"):
            said.append(env.call(*line.split()))
            assert said[-1].returncode in (2, 4)

    names = {Path(line.split("'")[1]).name for line in started.read_text().splitlines()}
    assert {"pg_dump", "ssh", "program"} <= names
    assert SECRET not in started.read_text()
    assert SECRET not in "".join(done.stdout + done.stderr for done in said)
    assert SECRET not in env.log.read_text()
    assert SECRET not in "".join(shown)
    for table in ("runs", "dumps"):
        assert SECRET not in str(env.query(f"select t::text from ntt_backup.{table} t"))


@pytest.mark.long
def test_setup_passes_no_secret_on(env: Environment, scratch_url: str) -> None:
    """The answer to its question has a password, which nobody else shall see."""
    started = env.root / "started"
    (env.root / "sitecustomize.py").write_text(WATCH.format(file=str(started)))
    env.environ["PYTHONPATH"] = str(env.root)
    env.put_in_store(b"a blob")
    env.config.unlink()
    values = {"log.jsonl": env.log, "lock.file": env.lock, "host.key_file": env.host_key}
    argv = env.argv("setup", f"--store={env.store}", f"--to=file://{env.root}/disk")
    argv += [f"--set={key}={json.dumps(str(one))}" for key, one in values.items()]
    url = make_conninfo(scratch_url, password=SECRET)
    done = subprocess.run(
        argv,
        env=env.environment(),
        input=f"{url}\ny\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert SECRET in env.config.read_text()
    assert env.config.stat().st_mode & 0o007 == 0
    assert "init-db" in started.read_text()
    for shown in (started.read_text(), done.stdout, done.stderr, env.log.read_text()):
        assert SECRET not in shown
