"""What goes over the link is what `run.bwlimit` allows: counted on the way, not by the program."""

from __future__ import annotations

import random
import time

import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.waiting import wait_until

RATE = 500_000
# The preflight and what each worker needs to begin; then work for some seconds.
BEFORE = 1_000_000
COUNTED = 3_000_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "workers", "even"), [("stream", 4, True), ("stream", 4, False), ("tar", 1, True)]
)
def test_the_limit_is_what_goes_over_the_link(
    env: Environment, link: Link, strategy: str, workers: int, even: bool
) -> None:
    """In many small batches, and where only one of several workers has something to send."""
    env.through(env.sshd.through(link.port))
    run = {"strategy": strategy, "workers": workers, "batch_size": 20, "codec": "none"}
    env.write_config(run={**run, "bwlimit": RATE})
    if even:
        env.fill(250, size=lambda chance: chance.randrange(40_000))
    else:
        env.put(random.Random(5).randbytes(BEFORE + 4_000_000))
    with env.running("run"):
        wait_until(lambda: link.sent >= BEFORE, "the work to begin")
        before, began = link.sent, time.monotonic()
        wait_until(lambda: link.sent >= before + COUNTED, "some megabytes more")
        rate = (link.sent - before) / (time.monotonic() - began)
    assert 0.6 * RATE < rate < 1.1 * RATE
