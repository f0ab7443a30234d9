"""A running daemon does what is asked of it, and nothing is lost by it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.views import on_screen
from tests.helpers.waiting import PATIENCE, await_silence, wait_until


def told(env: Environment, *command: str) -> dict[str, Any]:
    result = env.call(*command, "--json", expect=0)
    said: dict[str, Any] = json.loads(result.stdout)
    return said


_MOST_LINES = 1000


@dataclass
class Seen:
    """What `status --watch` prints where nobody draws."""

    stdout: IO[str]

    def await_text(self, pattern: str) -> None:
        lines = list(itertools.takewhile(lambda line: not re.search(pattern, line), self._lines()))
        assert len(lines) < _MOST_LINES, "".join(lines[-40:])

    def _lines(self) -> Iterator[str]:
        return itertools.islice(self.stdout, _MOST_LINES)


@contextmanager
def watching(env: Environment) -> Iterator[Seen]:
    """Somebody who looks on, until Ctrl-C."""
    with subprocess.Popen(
        env.argv("status", "--watch", "--interval", "0.2"),
        env=env.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield Seen(process.stdout)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(PATIENCE) == 0


def test_a_daemon_is_paused_limited_hurried_and_stopped(env: Environment, link: Link) -> None:
    """No limit was set at the start."""
    env.through(env.sshd.through(link.port))
    env.write_config(
        run={"workers": 2, "batch_size": 20, "codec": "none", "poll_interval": 86_400},
    )
    env.put(b"the first one")
    with env.running("run", "--watch") as run:
        wait_until(lambda: len(env.copied()) == 1, "the first one")
        assert told(env, "bwlimit", "200kB")["bwlimit"] == 200_000
        blobids = env.fill(150, size=lambda _: 10_000)
        env.call("now")
        began, before = time.monotonic(), link.sent
        wait_until(lambda: link.sent >= before + 400_000, "some of it")
        assert 400_000 / (time.monotonic() - began) < 300_000

        assert told(env, "pause")["done"].startswith("paused")
        assert "already" in told(env, "pause")["done"]
        await_silence(lambda: link.sent)
        assert len(env.copied()) < len(blobids)
        copied = len(env.copied())
        assert told(env, "bwlimit", "off")["bwlimit"] is None
        # What was asked for holds over new settings, and that is said.
        env.write_config(run={"bwlimit": "90kB"})
        run.send_signal(signal.SIGHUP)
        wait_until(lambda: "the new run.bwlimit waits" in env.output(), "a word on it")
        assert "`ntt-backup-remote --config" in env.output()
        status = env.status()
        state = status["daemon"]
        last = status["last_run"]
        assert (last["run_id"], last["copied"]) == (state["run_id"], state["state"]["copied"])
        assert (state["paused"], state["pid"]) == (True, run.pid)
        assert "paused" in {worker["state"] for worker in state["state"]["workers"]}

        assert told(env, "resume") == {
            "done": "resumed",
            "target": "remote",
            "paused": False,
            "bwlimit": None,
        }
        env.await_copied(set(blobids))
        assert len(env.copied()) > copied
        Path(f"{env.lock}.sock").unlink()
        wait_until(lambda: env.call("resume").returncode == 0, "another socket")
        with watching(env) as seen:
            seen.await_text(f"PID {run.pid} since ")
            seen.await_text("copied +151 blobs")
        assert told(env, "stop")["done"] == "it stops after what is in flight"
        assert run.wait(PATIENCE) == 143, env.output()
    env.assert_complete()
    uid = os.geteuid()
    assert [event["uid"] for event in env.events("paused")] == [uid]
    assert [event["uid"] for event in env.events("resumed")] == [uid]
    limits = [(event["bytes_per_s"], event["uid"]) for event in env.events("bandwidth_limit")]
    assert limits == [(200_000, uid), (None, uid)]
    assert [event["do"] for event in env.events("asked")] == ["now", "stop"]
    for kind in ("outage", "worker_stall", "batch_retry", "error"):
        assert env.events(kind) == []
    gone = env.call("pause", expect=8)
    assert "no daemon runs for target" in gone.stderr
    assert not Path(f"{env.lock}.sock").exists()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["stream", "tar"])
def test_a_pause_is_longer_than_all_clocks_and_a_stop_ends_it(
    env: Environment, link: Link, strategy: str
) -> None:
    env.through(env.sshd.through(link.port))
    env.fill_slowly()
    env.write_config(run={"strategy": strategy, "stall_timeout": 4, "receipt_timeout": 4})
    with env.running("run") as run:
        env.await_event("batch_complete")
        env.call("pause")
        since = time.monotonic()
        wait_until(lambda: time.monotonic() - since > 12, "all clocks to run out")
        for kind in ("outage", "worker_stall", "batch_retry", "error"):
            assert env.events(kind) == []
        env.call("resume")
        copied = len(env.copied())
        wait_until(lambda: len(env.copied()) > copied + 5, "it to go on")
        env.call("pause")
        assert "at once" in told(env, "stop")["done"]
        assert run.wait(PATIENCE) == 143, env.output()
    env.assert_nothing_half()
    env.finish()


@pytest.mark.long
def test_a_watched_daemon_is_drawn_on_a_terminal(env: Environment) -> None:
    env.fill_slowly(300)
    with env.running("run"), on_screen(env, "status", "--watch", "--interval", "0.3") as screen:
        wait_until(lambda: screen.shows(r"2 workers, strategy \w+, PID \d+ since"), "the daemon")
        wait_until(lambda: screen.shows(r"worker 1 +sending"), "its workers")
        wait_until(lambda: screen.shows(r"last \d+ minutes \|.*[▁▂▃▄▅▆▇█]"), "the last hour")
        wait_until(lambda: screen.shows(r"pending +\d+ blobs"), "the catalog's figures")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(PATIENCE) == 0
