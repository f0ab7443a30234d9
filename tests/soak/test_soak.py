"""A daemon through a simulated time: `tests/soak/run`. A short one is a long test of the suite."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.config.values import parse_duration
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.s3_servers import S3Server
from tests.helpers.sshd import Sshd
from tests.soak.judge import ALL, Expectations, Use, growths, idle_lines
from tests.soak.soak import Soak
from tests.soak.timeline import plan
from tests.soak.world import World


def _seconds(name: str, default: str) -> float:
    return parse_duration(os.environ.get(name, default))


CALM = "NTT_SOAK_CALM" in os.environ
SEED = int(os.environ.get("NTT_SOAK_SEED", "1"))
TARGETS = os.environ.get(
    "NTT_SOAK_TARGETS", "usb,remote,vault,disk,sftp,bucket" if CALM else "usb,remote,vault"
).split(",")


@pytest.fixture
def world(
    env: Environment, postgres: Postgres, remote: Sshd, request: pytest.FixtureRequest
) -> Iterator[World]:
    """A store, a catalog and the targets; nothing runs yet."""
    if remote.kind != "local":
        pytest.skip("the directories of targets are looked at on this machine: NTT_TEST_SSHD=local")
    bucket: dict[str, Any] = {}
    with ExitStack() as stack:
        if "bucket" in TARGETS:
            server: S3Server = request.getfixturevalue("s3")
            place = server.bucket()
            bucket = {"url": place.url, "endpoint": place.endpoint, "addressing": "path"}
            env.environ |= server.sender.environment
        links = {
            name: stack.enter_context(Link(remote.host, remote.port))
            for name in {"remote", "vault", "sftp"} & set(TARGETS)
        }
        factor = _seconds("NTT_SOAK_SIMULATE", "2d") / _seconds("NTT_SOAK_FOR", "6min")
        upgrade_from = os.environ.get("NTT_SOAK_UPGRADE_FROM", "")
        chance = random.Random(SEED)
        made = World(env, postgres, remote, links, TARGETS, factor, chance, upgrade_from)
        made.make(bucket)
        yield made


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_daemon_through_time(world: World, tmp_path: Path) -> None:
    hours = int(_seconds("NTT_SOAK_SIMULATE", "2d") / 3600)
    acts = plan(SEED, hours, TARGETS, calm=CALM)
    soak = Soak(world, acts, hours, partial(print, flush=True))
    assert soak.play() == [], f"seed {SEED}; the log and the settings are in {tmp_path}"


def test_an_alarm_that_nothing_explains_is_false_and_trouble_untold_is_silence() -> None:
    told = Expectations()
    told.expect("found snapshot", "vault", 10, 20, "rot", must="found")
    told.expect("failed", ALL, 10, 20, "a bad blob", must="failed")
    said = "The last verify, 3 h ago, found 2 blobs missing or wrong"
    assert told.hear(9, {"vault": [said]}) != []
    assert told.hear(12, {"vault": [said], "remote": []}) == []
    assert [one.partition(": ")[0] for one in told.hear(13, {"remote": [said]})] == ["hour 13"]
    assert told.hear(14, {"remote": [said.replace("3", "4")]}) == []  # It was told already.
    assert len(told.false_alarms) == 2
    assert told.silences() == ["hour 10: *: nobody was told of a bad blob (failed)"]


def test_growth_is_of_a_life_and_not_of_many() -> None:
    flat = [Use(hour, pid, "worker", 10**8 * pid, 9, 1) for pid in (1, 2) for hour in range(60)]
    leaking = [
        Use(hour, 3, "parent", 10**7 + hour * 10**5, 9 + hour // 10, 1) for hour in range(90)
    ]
    parent, worker = growths([*flat, *leaking], ("worker", "parent"))
    assert worker.problems() == []
    assert (worker.lives, worker.memory) == (2, 2 * 10**8)
    assert parent.problems() == [
        "the memory of a parent has grown by 6.1 MB",
        "the files of a parent have grown by 6",
    ]


def test_idle_hours_are_those_after_hours_without_work() -> None:
    lines = {1: ["progress"], 2: ["batch_complete"] * 30, 3: ["progress"] * 2, 4: ["progress"] * 3}
    idle, mean, most, events = idle_lines(lines, busy={2}, hours=6)
    assert (idle, mean, most, dict(events)) == (3, 4 / 3, 3, {"progress": 4})
