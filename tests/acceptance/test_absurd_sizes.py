"""Sizes that stand in the catalog and that no blob can have: another program's mistake.

They may fail their own blobs, and nothing else: no neighbour, no figure, no run.
"""

from __future__ import annotations

import pytest

from tests.environment import Site

LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("strategy", ["stream", "tar"])
def test_a_size_that_no_blob_can_have_fails_that_blob_alone(site: Site, strategy: str) -> None:
    sizes = [MOST, MOST, LEAST, LEAST, -5, -1, 0, 2**61, 2**62]
    good = [site.put_in_store(b"good %d" % number * 1000) for number in range(20)]
    site.register(good, [len(site.path(blobid).read_bytes()) for blobid in good])
    bad = [site.put_in_store(b"bad %d" % number) for number in range(len(sizes))]
    site.register(bad, sizes)
    site.write_config(run={"outage_timeout": 2, "attempts": 1})
    result = site.run("run", "--strategy", strategy)
    assert result.returncode == 7, result.stdout + result.stderr
    assert site.failures() == dict.fromkeys(bad, "wrong-size")
    assert site.copied() == set(good)
    assert {name.rpartition("/")[2] for name in site.on_remote()} == set(good)


def test_figures_of_absurd_sizes_can_be_had(site: Site) -> None:
    """Their sums are more than a bigint holds, above as below."""
    for number, size in enumerate((MOST, MOST, MOST, LEAST, LEAST, LEAST, LEAST, LEAST)):
        site.register([site.put_in_store(b"%d" % number)], [size])
    for state in ("false", "true"):
        site.query(f"update blobs set remote_copied = {state}, remote_copy_failed = not {state}")
        status = site.status()
        assert status["pending"] == status["pending_bytes"] == 0
        assert status["copied_bytes"] + status["failed_bytes"] == MOST
    site.query("update blobs set remote_copied = false, remote_copy_failed = false")
    assert site.status()["pending"] == 8
    result = site.call("run", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert site.call("check").returncode == 0


def test_a_numeric_that_no_bigint_holds_fails_its_own_blob(site: Site) -> None:
    site.query("alter table blobs alter column size type numeric")
    good = [site.put_in_store(b"good %d" % number) for number in range(3)]
    site.register(good, [6, 6, 6])
    sizes = ("1e30", "-1e30", "NaN", "Infinity")
    bad = [site.put_in_store(b"bad %s" % size.encode()) for size in sizes]
    for blobid, size in zip(bad, sizes, strict=True):
        site.query("insert into blobs (blobid, size) values (%s, %s::numeric)", blobid, size)
    assert site.status()["pending"] == 7
    assert site.run("run").returncode == 7
    assert site.failures() == dict.fromkeys(bad, "wrong-size")
    assert site.copied() == set(good)
    assert site.status()["failed"] == 4
