"""An outage is no blob's failure: the run waits, sends again what had no receipt, and completes.

Each test breaks the way to the remote while batches are under way. The rate is limited, so that
there is a middle to break in, and the moment is counted in bytes on the link: nobody has to look in
time.
"""

from __future__ import annotations

import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.patience import PATIENCE

BLOBS = 150
# Of 1.5 MB of content and half a MB before it: some batches are answered by then, others not sent.
MIDDLE = 1_200_000


@pytest.fixture
def slow(site: Site, link: Link) -> Site:
    """A site with 1.5 MB to send over the link, which takes some seconds, in batches of 100 kB."""
    site.through(site.sshd.through(link.port))
    site.write_config(
        run={"batch_size": 10, "bwlimit": "1MB", "stall_timeout": 1, "attempts": 3},
        remote={"connect_timeout": 10, "alive_interval": 1, "alive_count": 1},
    )
    site.fill(BLOBS, size=lambda chance: chance.randrange(20_000))
    return site


def noticed(site: Site) -> bool:
    return bool(site.events("outage"))


def assert_made_good(site: Site, code: int | None) -> None:
    """All is there, nothing was failed, and the log says what was waited for and sent again."""
    assert code == 0, site.output()
    assert site.on_remote() == site.in_store()
    assert len(site.copied()) == BLOBS
    assert site.failures() == {}
    assert {event["what"] for event in site.events("outage")} == {"remote"}
    assert all(event["reason"] for event in site.events("outage") + site.events("batch_retry"))
    (stop,) = site.events("run_stop")
    assert (stop["copied"], stop["failed"], stop["outcome"]) == (BLOBS, 0, "done")


def assert_tidy_after_next_run(site: Site) -> None:
    """What a dead session left on the remote lasts no longer than to the next session."""
    site.put(b"one more")
    assert site.run("run", "--once").returncode == 0
    site.assert_complete()


def test_a_run_completes_after_the_link_is_cut_in_the_middle_of_a_batch(
    slow: Site, link: Link
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


def test_a_run_completes_after_the_link_stalled(slow: Site, link: Link) -> None:
    link.stall_after(MIDDLE)
    with slow.running("run", "--once") as run:
        wait_until(lambda: slow.events("batch_retry"), "the stall to be noticed")
        link.resume()
        code = run.wait(PATIENCE)

    assert_made_good(slow, code)


def test_a_single_run_ends_with_5_when_the_link_stays_away(slow: Site, link: Link) -> None:
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
