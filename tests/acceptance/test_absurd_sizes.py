"""Sizes that stand in the catalog and that no blob can have: another program's mistake.

They may fail their own blobs, and nothing else: no neighbour, no figure, no run.
"""

from __future__ import annotations

import pytest

from tests.helpers.environment import Environment

LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("strategy", ["stream", "tar"])
def test_a_size_that_no_blob_can_have_fails_that_blob_alone(
    env: Environment, strategy: str
) -> None:
    sizes = [MOST, MOST, LEAST, LEAST, -5, -1, 0, 2**61, 2**62]
    good = [env.put_in_store(b"good %d" % number * 1000) for number in range(20)]
    env.register(good, [len(env.path(blobid).read_bytes()) for blobid in good])
    bad = [env.put_in_store(b"bad %d" % number) for number in range(len(sizes))]
    env.register(bad, sizes)
    env.write_config(run={"outage_timeout": 2, "attempts": 1})
    env.run("run", "--strategy", strategy, expect=7)
    assert env.failures() == dict.fromkeys(bad, "wrong-size")
    assert env.copied() == set(good)
    assert {name.rpartition("/")[2] for name in env.on_remote()} == set(good)


def test_figures_of_absurd_sizes_can_be_had(env: Environment) -> None:
    """Their sums are more than a bigint holds, above as below."""
    for number, size in enumerate((MOST, MOST, MOST, LEAST, LEAST, LEAST, LEAST, LEAST)):
        env.register([env.put_in_store(b"%d" % number)], [size])
    for state in ("false", "true"):
        env.query(f"update blobs set remote_copied = {state}, remote_copy_failed = not {state}")
        status = env.status()
        assert status["pending"] == status["pending_bytes"] == 0
        assert status["copied_bytes"] + status["failed_bytes"] == MOST
    env.query("update blobs set remote_copied = false, remote_copy_failed = false")
    assert env.status()["pending"] == 8
    env.call("run", "--dry-run", expect=0)
    env.call("check", expect=0)


def test_a_numeric_that_no_bigint_holds_fails_its_own_blob(env: Environment) -> None:
    env.query("alter table blobs alter column size type numeric")
    good = [env.put_in_store(b"good %d" % number) for number in range(3)]
    env.register(good, [6, 6, 6])
    sizes = ("1e30", "-1e30", "NaN", "Infinity")
    bad = [env.put_in_store(b"bad %s" % size.encode()) for size in sizes]
    for blobid, size in zip(bad, sizes, strict=True):
        env.query("insert into blobs (blobid, size) values (%s, %s::numeric)", blobid, size)
    assert env.status()["pending"] == 7
    env.run("run", expect=7)
    assert env.failures() == dict.fromkeys(bad, "wrong-size")
    assert env.copied() == set(good)
    assert env.status()["failed"] == 4
