"""An outage is no blob's failure: the run waits, sends again what had no receipt, and completes.

Each test breaks the way to the remote while batches are under way. The rate is limited, so that
there is a middle to break in, and the moment is counted in bytes on the link: nobody has to look in
time.
"""

from __future__ import annotations

import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.waiting import PATIENCE, wait_until

BLOBS = 150
# Of 1.5 MB of content and half a MB before it: some batches are answered by then, others not sent.
MIDDLE = 1_200_000


@pytest.fixture
def slow(env: Environment, link: Link) -> Environment:
    """1.5 MB to send over the link, which takes some seconds, in batches of 100 kB."""
    env.through(env.sshd.through(link.port))
    env.write_config(
        run={"batch_size": 10, "bwlimit": "1MB", "stall_timeout": 1, "attempts": 3},
        remote={"connect_timeout": 10, "alive_interval": 1, "alive_count": 1},
    )
    env.fill(BLOBS, size=lambda chance: chance.randrange(20_000))
    return env


def noticed(env: Environment) -> bool:
    return bool(env.events("outage"))


def assert_made_good(env: Environment, code: int | None) -> None:
    """All is there, nothing was failed, and the log says what was waited for and sent again."""
    assert code == 0, env.output()
    assert env.on_remote() == env.in_store()
    assert len(env.copied()) == BLOBS
    assert env.failures() == {}
    assert {event["what"] for event in env.events("outage")} == {"remote"}
    assert all(event["reason"] for event in env.events("outage") + env.events("batch_retry"))
    (stop,) = env.events("run_stop")
    assert (stop["copied"], stop["failed"], stop["outcome"]) == (BLOBS, 0, "done")


def assert_tidy_after_next_run(env: Environment) -> None:
    """What a dead session left on the remote lasts no longer than to the next session."""
    env.put(b"one more")
    env.run("run", "--once", expect=0)
    env.assert_complete()


def test_a_run_completes_after_the_link_is_cut_in_the_middle_of_a_batch(
    slow: Environment, link: Link
) -> None:
    link.cut_after(MIDDLE)
    with slow.running("run", "--once") as run:
        wait_until(lambda: noticed(slow), "the outage to be noticed")
        rows = len(slow.copied())
        link.restore()
        code = run.wait(PATIENCE)

    assert 0 < rows < BLOBS
    assert slow.events("batch_retry")
    assert_made_good(slow, code)
    assert_tidy_after_next_run(slow)


def test_a_run_completes_after_the_link_stalled(slow: Environment, link: Link) -> None:
    link.stall_after(MIDDLE)
    with slow.running("run", "--once") as run:
        wait_until(lambda: slow.events("batch_retry"), "the stall to be noticed")
        link.resume()
        code = run.wait(PATIENCE)

    assert_made_good(slow, code)


def test_a_single_run_ends_with_5_when_the_link_stays_away(slow: Environment, link: Link) -> None:
    slow.write_config(run={"outage_timeout": 0.5})
    link.cut_after(MIDDLE)
    with slow.running("run", "--once") as run:
        code = run.wait(PATIENCE)

    assert code == 5, slow.output()
    (error,) = slow.events("error")
    assert error["exit_code"] == 5
    assert error["hint"]
    assert slow.failures() == {}
    recorded = slow.copied()
    assert recorded
    assert recorded <= {path.rpartition("/")[2] for path in slow.on_remote()}
    assert slow.events("run_stop")[-1]["copied"] == len(recorded)
    wait_until(lambda: slow.litter() == [], "the remote to tidy up after the broken sessions")

    link.restore()
    assert_tidy_after_next_run(slow)
