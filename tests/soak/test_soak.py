"""A daemon through a simulated time: `tests/soak/run`. A short one is a long test of the suite."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ntt_backup.config.values import parse_duration
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.s3_servers import S3Server
from tests.helpers.sshd import Sshd
from tests.soak.judge import ALL, Expectations, Flatness, idle_lines
from tests.soak.soak import Soak
from tests.soak.timeline import plan
from tests.soak.world import World


def _seconds(name: str, default: str) -> float:
    return parse_duration(os.environ.get(name, default))


CALM = "NTT_SOAK_CALM" in os.environ
SEED = int(os.environ.get("NTT_SOAK_SEED", "1"))
TARGETS = os.environ.get("NTT_SOAK_TARGETS", "usb,remote,vault,disk,sealed,sftp,bucket").split(",")
# Calm days are the same each day: what is due once a day is due every six hours.
OFTEN = 4.0 if CALM else 1.0


@pytest.fixture
def world(
    env: Environment, postgres: Postgres, remote: Sshd, request: pytest.FixtureRequest
) -> Iterator[World]:
    """A store, a catalog and the targets; nothing runs yet."""
    if remote.kind != "local":
        pytest.skip("the directories of targets are looked at on this machine: NTT_TEST_SSHD=local")
    bucket: dict[str, Any] = {}
    with ExitStack() as stack:
        links = {
            name: stack.enter_context(Link(remote.host, remote.port))
            for name in {"remote", "vault", "sftp"} & set(TARGETS)
        }
        if "bucket" in TARGETS:
            server: S3Server = request.getfixturevalue("s3")
            at = urlsplit(server.endpoint)
            link = links["bucket"] = stack.enter_context(Link(at.hostname or "", at.port or 0))
            endpoint = f"http://{link.host}:{link.port}"
            bucket = {"url": server.bucket().url, "endpoint": endpoint, "addressing": "path"}
            env.environ |= server.sender.environment
        factor = _seconds("NTT_SOAK_SIMULATE", "2d") / _seconds("NTT_SOAK_FOR", "6min")
        upgrade_from = os.environ.get("NTT_SOAK_UPGRADE_FROM", "")
        chance = random.Random(SEED)
        made = World(env, postgres, remote, links, TARGETS, factor, chance, upgrade_from, OFTEN)
        made.make(bucket)
        yield made


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_daemon_through_time(world: World, tmp_path: Path) -> None:
    hours = int(_seconds("NTT_SOAK_SIMULATE", "2d") / 3600)
    acts = plan(SEED, hours, TARGETS, calm=CALM)
    soak = Soak(world, acts, hours, partial(print, flush=True))
    assert soak.play() == [], f"seed {SEED}; the log and the settings are in {tmp_path}"


def _check(command: str, target: str, exit_code: int) -> list[dict[str, Any]]:
    begun = {"event": "check_start", "target": target, "command": command}
    return [begun, {**begun, "event": "check_complete", "exit_code": exit_code}]


def test_an_alarm_that_nothing_explains_is_false_and_trouble_untold_is_silence() -> None:
    said = "The last verify, 3 h ago, found 2 blobs missing or wrong"
    told = Expectations()
    told.take(_check("verify", "vault", 7))
    assert told.hear(9, {"vault": [said]}, 100) == []  # The page may be older than the log.
    assert told.hear(9, {"vault": [said.replace("3", "4")]}, 110) == [
        f"hour 9: vault: {said[:17]}4{said[18:]}"
    ]
    assert told.hear(9, {"vault": [said]}, 120) == []  # It was told already.
    told.expect("found snapshot", "vault", 10, "rot", must="found")
    told.expect("failed", ALL, 10, "a bad blob", must="failed")
    for now in (200, 300):
        assert told.hear(12, {"vault": [said], "remote": []}, now) == []
    assert told.hear(13, {"remote": [said]}, 400) == []
    assert len(told.hear(14, {"remote": [said]}, 500)) == 1
    assert len(told.false_alarms) == 2
    assert told.silences() == ["hour 10: *: nobody was told of a bad blob (failed)"]


def test_trouble_explains_what_it_has_left_until_the_work_was_done_anew() -> None:
    said = "The last drill, 3 h ago, found 2 blobs missing or wrong"
    told = Expectations()
    told.expect("found", "vault", 10, "rot", must="found")
    told.end("rot")
    told.take(_check("drill", "vault", 7))
    for hour in range(11, 200):  # A drill is done once a week.
        told.take(_check("verify", "vault", 0))
        assert told.hear(hour, {"vault": [said]}, hour * 10) == []
    assert told.silences() == []
    told.take(_check("drill", "vault", 0))
    told.hear(200, {"vault": [said]}, 2000)
    assert len(told.hear(201, {"vault": [said]}, 2010)) == 1


def test_what_is_slow_on_a_slow_machine_is_false_only_if_it_stays() -> None:
    said = "The catalog is too slow to be read; these figures are older"
    told = Expectations()
    for now in (0, 50, 100, 200):
        assert told.hear(1, {"vault": [said]}, now, took=9.0) == []
    assert told.hear(2, {}, 210, took=9.0) == []
    assert told.passed == [200]
    assert [told.hear(3, {"vault": [said]}, now, took=0.1) for now in (1000, 1050)] == [[], []]
    for now in range(2000, 2600, 10):
        told.hear(4, {"vault": [said]}, now, took=0.1)
    assert len(told.false_alarms) == 1


def test_what_rises_in_each_quarter_grows_and_states_and_caches_do_not() -> None:
    def judged(values: Iterable[float]) -> str:
        return Flatness.of(list(values), 2.0, 90.0).verdict

    assert judged(9 for _ in range(100)) == "flat"
    assert judged(9 + hour // 10 for hour in range(100)) == "GROWS"
    assert judged(9 + 10 * (hour % 24 > 8) for hour in range(100)) == "flat"
    assert judged(9 + 10 * (hour > 60) for hour in range(100)) == "bounded"
    assert judged(9 + min(hour, 60) for hour in range(100)) == "bounded"
    assert judged(9 + 90 * (hour == 60) for hour in range(100)) == "TOO HIGH"


def test_idle_hours_are_those_after_hours_without_work() -> None:
    lines = {1: ["progress"], 2: ["batch_complete"] * 30, 3: ["progress"] * 2, 4: ["progress"] * 3}
    idle, mean, most, events = idle_lines(lines, busy={2}, hours=6)
    assert (idle, mean, most, dict(events)) == (3, 4 / 3, 3, {"progress": 4})
