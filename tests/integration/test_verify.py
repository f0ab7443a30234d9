"""verify of a remote that the receiver serves: what it proves, and what it has found counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ntt_backup.audit.verify import Findings, Question, verify_remote
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import Ledger
from ntt_backup.client import session_pool
from ntt_backup.client.bootstrap import Banner
from ntt_backup.client.read_session import ReadSession
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import CatalogUnavailable
from ntt_backup.model import Blob, Reason
from ntt_backup.wire.messages import WHOLE, BlobHash
from tests.helpers.blobs import path_of, put, put_as

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


def check(catalog: Connection, root: Path, store: Path | None, **asked: Any) -> Findings:
    settings: dict[str, Any] = {"remote": {"url": f"file://{root}"}}
    if store is not None:
        settings["source"] = {"root": store}
    catalog.execute("close all")
    return verify_remote(
        catalog,
        RemoteConfig.model_validate(settings),
        Question(workers=1, **asked),
        on_progress=lambda found: None,
        on_outage=lambda error, seconds: None,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def blobs(catalog: Connection, root: Path, placed: None, store: Path) -> list[Blob]:
    """Blobs that the store and the remote have, and that the catalog calls copied."""
    contents = [b"content %d" % number for number in range(20)]
    for content in contents:
        put(store, content)
    found = [put(root / "by-hash", content) for content in contents]
    for blob in found:
        catalog.execute("insert into blobs (blobid) values (%s)", [blob.blobid])
    Ledger(catalog, TARGET).record(found, [])
    catalog.execute("update blobs set remote_last_checked = null")
    return found


class Thrower(ReadSession):
    """A remote that has thrown the contents away, and kept names, sizes and hashes."""

    kept: ClassVar[dict[bytes, int]] = {}

    def ask_hashes(self, hashed: int, digests: Sequence[bytes]) -> None:
        super().ask_hashes(hashed, digests)
        self.asked = digests

    def hashes(self, size: int = 0) -> Sequence[BlobHash]:
        super().hashes(size)
        return [BlobHash(WHOLE, self.kept[one], one) for one in self.asked]


@pytest.mark.parametrize("hashed", ["blake3", "none"])
def test_a_remote_that_has_thrown_the_contents_away_is_caught_in_the_first_round(
    catalog: Connection,
    root: Path,
    store: Path,
    blobs: list[Blob],
    monkeypatch: pytest.MonkeyPatch,
    hashed: str,
) -> None:
    Thrower.kept = {bytes.fromhex(one.blobid): one.size or 0 for one in blobs}
    for blob in blobs:
        path_of(root / "by-hash", blob.blobid).write_bytes(bytes(blob.size or 0))
    monkeypatch.setattr(session_pool, "ReadSession", Thrower)
    monkeypatch.setattr(Banner, "can_hash", hashed == "blake3")
    if hashed == "blake3":
        assert not check(catalog, root, store, trust_remote=True).wrong

    found = check(catalog, root, store)

    assert found.wrong.counts == {Reason.REMOTE_CORRUPT: len(blobs)}
    assert catalog.execute("select from blobs where remote_copied").fetchall() == []


def test_a_remote_without_blake3_proves_its_blobs_by_another_sum(
    catalog: Connection, root: Path, store: Path, blobs: list[Blob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Banner, "can_hash", False)
    flipped, missing, sourceless = blobs[:3]
    path_of(root / "by-hash", flipped.blobid).write_bytes(b"rotten")
    path_of(root / "by-hash", missing.blobid).unlink()
    path_of(store, sourceless.blobid).unlink()

    found = check(catalog, root, store)

    reasons = {one.blobid: one.reason for one in found.wrong.first}
    assert reasons == {
        flipped.blobid: Reason.REMOTE_CORRUPT,
        missing.blobid: Reason.REMOTE_MISSING,
    }
    assert (found.checked, found.unchecked, found.complete) == (len(blobs) - 1, 1, True)
    unchecked = "select blobid from blobs where remote_last_checked is null"
    assert catalog.execute(unchecked.encode()).fetchall() == [(sourceless.blobid,)]


def test_what_the_store_lacks_is_right_by_the_remotes_word(
    catalog: Connection, root: Path, store: Path, blobs: list[Blob]
) -> None:
    gone, rotten, rotten_too = blobs[:3]
    path_of(store, gone.blobid).unlink()
    for one in rotten, rotten_too:
        path_of(store, one.blobid).write_bytes(b"rotten")
    path_of(root / "by-hash", rotten_too.blobid).write_bytes(b"rotten")

    found = check(catalog, root, store)

    assert (found.by_remote_hash, found.requeued) == (2, 1)
    reasons = sorted((one.blobid, one.reason) for one in found.wrong.first)
    assert reasons == sorted(
        [
            (rotten.blobid, Reason.CORRUPT_SOURCE),
            (rotten_too.blobid, Reason.CORRUPT_SOURCE),
            (rotten_too.blobid, Reason.REMOTE_CORRUPT),
        ]
    )
    assert check(catalog, root, None).by_remote_hash == len(blobs) - 1


def test_blobs_that_cannot_be_checked_wait_for_their_turn_and_are_never_proved(
    catalog: Connection, root: Path, store: Path, blobs: list[Blob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Banner, "can_hash", False)
    sourceless, others = blobs[:10], blobs[10:]
    for blob in sourceless:
        path_of(store, blob.blobid).unlink()

    seen = [check(catalog, root, store, max_bytes=100).unchecked for _ in range(4)]

    proved = catalog.execute(b"select blobid from blobs where remote_last_checked is not null")
    assert {blobid for (blobid,) in proved} == {blob.blobid for blob in others}
    assert sum(seen[:2]) == sum(seen[2:]) == len(sourceless)
    # As in a catalog that was made before that was noted.
    catalog.execute("drop table ntt_backup.unchecked")
    assert check(catalog, root, store, max_bytes=100).unchecked == len(sourceless)
