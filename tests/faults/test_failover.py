"""A few rounds of the failover campaign; more by `python -m tests.faults.failover`."""

from __future__ import annotations

import pytest

from tests.faults.cluster import running_cluster
from tests.faults.failover import KINDS, MODES, Tally, campaign
from tests.helpers.pooler import PGBOUNCER


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_daemon_goes_on_while_its_catalog_fails_over(mode: str) -> None:
    if mode == "pooled" and PGBOUNCER is None:
        pytest.skip("there is no pgbouncer")
    tally = Tally()
    with running_cluster() as cluster:
        campaign(cluster, 11, len(KINDS), tally, print, (mode,))
    assert tally.problems() == []
    assert sorted(tally.kinds) == sorted(KINDS)
