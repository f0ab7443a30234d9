"""What a person sees of a run on a terminal, and what its log says of the same moments."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.views import on_screen
from tests.helpers.waiting import PATIENCE, wait_until


@pytest.fixture
def one_large_batch(env: Environment) -> Environment:
    """3 MB that two workers send as one batch each, over some seconds."""
    env.write_config(run={"workers": 2, "batch_size": 1000, "bwlimit": "500kB"})
    env.fill(300, size=lambda chance: chance.randrange(20_000))
    return env


@pytest.mark.parametrize("strategy", ["stream", pytest.param("tar", marks=pytest.mark.long)])
def test_bar_share_and_time_left_move_while_no_batch_is_answered(
    one_large_batch: Environment, strategy: str
) -> None:
    env = one_large_batch
    env.write_config(run={"strategy": strategy}, log={"progress_interval": 0.1})
    with env.locked_catalog() as release, on_screen(env, "run") as screen:
        left = r"[1-9]\d?%, about [^,]* left, 0 of 300 confirmed"
        wait_until(lambda: screen.shows(left), "share and time left")
        wait_until(lambda: screen.shows(r"[\d.]+ MB sent in"), "content that was sent")
        assert env.events("batch_complete") == []
        release()
        assert screen.process.wait(PATIENCE) == 0
    assert screen.shows(r"100%, 300 of 300 confirmed|done: 300 copied, 0 failed")
    told = env.events("progress")
    assert all(line["copied"] > 0 or line["bytes"] == 0 for line in told)
    assert any(line["pending"] == 300 and line["eta_s"] for line in told)
    assert not any(line["estimated"] for line in told if line["pending"] is not None)


@pytest.mark.long
def test_a_burst_of_a_daemon_ends_at_all_with_nothing_left(env: Environment) -> None:
    env.write_config(run={"poll_interval": 0.1}, log={"progress_interval": 0.1})
    env.fill_slowly(100, rate="500kB")
    with on_screen(env, "run", "--watch") as screen:
        wait_until(
            lambda: screen.shows(r"\b100%, 100 of 100 confirmed"), "the end of the first burst"
        )
        wait_until(lambda: _last(env)["active_workers"] == 0, "the log's word")
        assert (_last(env)["pending"], _last(env)["eta_s"]) == (0, 0)
        env.fill(40, seed=2, size=lambda chance: chance.randrange(10_000, 30_000))
        wait_until(
            lambda: screen.shows(r"\b100%, 40 of 40 confirmed"), "the end of the second burst"
        )
        screen.process.send_signal(signal.SIGTERM)
        assert screen.process.wait(PATIENCE) == 143
    assert not re.search(r"100%, about", screen.text)


def _last(env: Environment) -> dict[str, Any]:
    """What the log said last of the run's progress."""
    return env.events("progress")[-1]
