"""verify of a remote that the receiver serves: what it has found counts, however it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntt_backup.audit.verify import Findings, Question, verify_remote
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import Ledger
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import CatalogUnavailable
from tests.helpers.blobs import put, put_as

TARGET = "remote"


def test_what_was_found_before_an_error_is_recorded(
    catalog: Connection, root: Path, placed: None
) -> None:
    good = put(root / "by-hash", b"content")
    bad = put_as(root / "by-hash", "ab" * 32, b"rotten")
    for one in (good, bad):
        catalog.execute("insert into blobs (blobid) values (%s)", [one.blobid])
    Ledger(catalog, TARGET).record([good, bad], [])
    catalog.execute("update blobs set remote_last_checked = null")

    def fail(found: Findings) -> None:
        if found.checked:
            raise CatalogUnavailable("somebody stopped it")

    with pytest.raises(CatalogUnavailable, match="somebody stopped it"):
        verify_remote(
            catalog,
            RemoteConfig.model_validate({"remote": {"url": f"file://{root}"}}),
            Question("download", workers=1),
            on_progress=fail,
            on_outage=lambda error, seconds: None,
        )

    rows = "select blobid, remote_copied, remote_last_checked is not null from blobs order by 1"
    found = {(good.blobid, True, True), (bad.blobid, False, True)}
    assert set(catalog.execute(rows.encode())) == found
