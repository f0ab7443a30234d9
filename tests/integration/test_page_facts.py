"""What the status page reads of a catalog: right, only read, and told where it cannot be read."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from ntt_backup.catalog.connection import Connection
from ntt_backup.config import CatalogConfig
from ntt_backup.report import target_facts
from ntt_backup.report.health import Health, judge
from ntt_backup.report.page import Target, render
from ntt_backup.report.target_facts import FactsReader
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE

# Where nothing gives up, a test would wait for ever.
pytestmark = pytest.mark.timeout(PATIENCE)


@pytest.fixture
def reader(catalog_url: str, tmp_path: Path) -> Iterator[FactsReader]:
    tables = {
        "catalog": {"url": catalog_url},
        "remote": {"url": f"file://{tmp_path}/remote"},
        "log": {"jsonl": str(tmp_path / "log")},
        "lock": {"file": str(tmp_path / "lock")},
    }
    made = FactsReader({"remote": CatalogConfig.model_validate(tables)})
    yield made
    made.close()


def test_failures_and_proofs_are_read(reader: FactsReader, catalog: Connection) -> None:
    catalog.execute(
        "insert into blobs (blobid, size, remote_copied, remote_last_checked)"
        " select encode(sha256(n::text::bytea), 'hex'), 10, true,"
        " case when n > 10 then now() - n * interval '1 day' end from generate_series(1, 100) as n"
    )
    catalog.execute(
        "insert into blobs (blobid, remote_copied, remote_copy_failed)"
        " select repeat(n::text, 64), false, true from generate_series(1, 3) as n"
    )
    catalog.execute(
        "insert into ntt_backup.failures (target, blobid, reason, detail)"
        " select 'remote', repeat(n::text, 64), 'missing', 'gone ' || n"
        " from generate_series(1, 3) as n"
    )
    found = reader.read("remote")
    assert found.totals is not None
    assert (found.totals.copied, found.totals.failed, found.unknown) == (100, 3, 3)
    assert [one.detail for one in found.examples] == ["gone 1", "gone 2"]
    assert found.proved is not None
    assert (found.proved.blobs, found.proved.week, found.proved.month) == (100, 0, 19)
    assert (found.proved.quarter, found.proved.ever) == (79, 90)
    assert found.lacks == []


def test_a_catalog_that_hangs_costs_no_descriptor(
    reader: FactsReader, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_facts, "_SOON_SECONDS", 0.0)
    reader._patience = 0.05
    gc.disable()
    try:
        with postgres.frozen():
            open_now = []
            for _ in range(4):
                assert reader.read("remote").trouble is not None
                open_now.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert len({*open_now}) == 1


def test_its_session_can_only_read(reader: FactsReader) -> None:
    reader.read("remote")
    assert reader._connection is not None
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        reader._connection.execute("delete from public.blobs")


def test_tables_that_nobody_made_are_named_and_the_rest_is_shown(
    reader: FactsReader, catalog: Connection
) -> None:
    catalog.execute("drop table ntt_backup.hours, ntt_backup.checks")
    found = reader.read("remote")
    assert found.totals is not None
    (point,) = (one for one in judge(found, datetime.now(UTC)).points if one.level)
    assert "ntt_backup.hours" in point.what
    assert "init-db" in point.do


def test_what_was_known_stays_while_the_catalog_is_away(
    reader: FactsReader, postgres: Postgres
) -> None:
    known = reader.read("remote")
    postgres.stop()
    try:
        found = reader.read("remote")
        page = render([Target.of(found, judge(found, datetime.now(UTC)))], datetime.now(UTC))
        assert (found.totals, found.read_at) == (known.totals, known.read_at)
        assert judge(found, datetime.now(UTC)).level is Health.WAITING
        assert "Figures of the catalog are as of" in page
    finally:
        postgres.start()


def test_a_catalog_that_stands_still_is_not_waited_for(
    reader: FactsReader, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And afterwards it is read again."""
    reader._patience = 0.5
    monkeypatch.setattr(target_facts, "_SOON_SECONDS", 0.0)
    reader.read("remote")
    with postgres.frozen():
        assert reader.read("remote").trouble is not None
        assert reader.read("remote").trouble is not None
    reader._patience = 60.0
    assert reader.read("remote").trouble is None
