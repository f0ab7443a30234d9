"""What the store and the packs of a target have of one blob."""

from __future__ import annotations

import random
from pathlib import Path

from ntt_backup.audit.one_blob import look_in_packs, look_in_store
from ntt_backup.model import Blob, Reason
from ntt_backup.pack.names import blob_key
from ntt_backup.source.store import Store
from tests.helpers.blobs import put
from tests.helpers.bucket_packs import blobid_of, bucket_settings, put_large, put_pack
from tests.helpers.fake_bucket import FakeBucket


def test_the_store_is_looked_at_and_hashed_only_on_request(tmp_path: Path) -> None:
    blob = put(tmp_path, b"content")
    path = tmp_path / blob.blobid[:2] / blob.blobid[2:4] / blob.blobid

    assert look_in_store(Store(tmp_path), blob, verify=True).verified
    path.write_bytes(b"CONTENT")
    assert look_in_store(Store(tmp_path), blob, verify=False).size == 7
    assert look_in_store(Store(tmp_path), blob, verify=True).problem == Reason.CORRUPT_SOURCE
    path.unlink()
    assert look_in_store(Store(tmp_path), blob, verify=True).problem == Reason.MISSING
    assert look_in_store(Store(tmp_path), Blob("../x"), verify=True).problem == Reason.BAD_BLOBID
    assert look_in_store(Store(tmp_path / "away"), blob, verify=True).problem == "store-away"


def test_every_object_that_has_the_blob_is_named(bucket: FakeBucket) -> None:
    wanted, other, large = b"wanted" * 50, b"other", random.Random(1).randbytes(1000)
    packs = [put_pack(bucket, [wanted, one])[0] for one in (other, b"third")]
    put_large(bucket, large)

    found = look_in_packs(bucket_settings(), blobid_of(wanted))

    assert {one.key for one in found} == {one.key for one in packs}
    assert all(one.pack and one.stored for one in found)
    (alone,) = look_in_packs(bucket_settings(), blobid_of(large))
    assert (alone.key, alone.size, alone.pack) == (blob_key(blobid_of(large)), 1000, False)
    assert look_in_packs(bucket_settings(), blobid_of(b"nowhere")) == []
