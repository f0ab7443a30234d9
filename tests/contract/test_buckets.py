"""What every bucket must do, whatever client and server are behind it; see `objects.bucket`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import md5, sha256

import pytest

from ntt_backup.config import RemoteSettings
from ntt_backup.errors import RemoteDenied, RemoteUnreachable
from ntt_backup.objects import s3_bucket
from ntt_backup.objects.bucket import (
    Bucket,
    ContentDamaged,
    ObjectExists,
    ObjectMissing,
    Part,
    UploadGone,
    checksum,
    composite,
)
from ntt_backup.objects.s3 import open_bucket
from tests.helpers import s3_servers
from tests.helpers.fake_bucket import SMALLEST_PART, FakeBucket
from tests.helpers.s3_servers import S3Server, as_account

KEY = "packs/ab/one.tar"


@dataclass(frozen=True)
class Site:
    """Makes buckets of one kind, each empty. weak: see `s3_servers.S3Server`."""

    bucket: Callable[[], Bucket]
    weak: bool = False

    def strict(self) -> Bucket:
        """A bucket for what a weak server does not do."""
        if self.weak:
            pytest.skip("a weak server: it takes whatever comes, and keeps no checksum")
        return self.bucket()


@pytest.fixture(scope="session")
def versitygw() -> Iterator[S3Server]:
    with s3_servers.versitygw() as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[S3Server]:
    with s3_servers.rclone() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with s3_servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def gofakes3() -> Iterator[S3Server]:
    with s3_servers.gofakes3() as server:
        yield server


_OTHERS = ("versitygw", "rclone", "moto", "gofakes3")


@pytest.fixture(
    params=["fake", "s3", *(pytest.param(name, marks=pytest.mark.long) for name in _OTHERS)]
)
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Site:
    if request.param == "fake":
        return Site(FakeBucket)
    server: S3Server = request.getfixturevalue(request.param)
    as_account(monkeypatch, server.sender)
    return Site(lambda: open_bucket(server.bucket()), server.weak)


@pytest.fixture
def bucket(site: Site) -> Bucket:
    return site.bucket()


def put(bucket: Bucket, key: str, content: bytes = b"content") -> None:
    bucket.put(key, content, sha256(content).digest())


def put_part(bucket: Bucket, upload_id: str, number: int, content: bytes) -> Part:
    return bucket.put_part(KEY, upload_id, number, content, sha256(content).digest())


def sent(bucket: Bucket, *contents: bytes) -> tuple[str, list[Part]]:
    """Begins an upload of KEY, and sends parts of it."""
    upload_id = bucket.create_upload(KEY)
    return upload_id, [
        put_part(bucket, upload_id, number, content) for number, content in enumerate(contents, 1)
    ]


def test_an_object_is_read_as_it_was_put(site: Site) -> None:
    bucket = site.bucket()
    content = os.urandom(70_000)
    digest = sha256(content).digest()
    info = bucket.put("a/b", memoryview(content), digest)
    assert (info.key, info.size) == ("a/b", len(content))
    assert bucket.get_range("a/b", 0, len(content)) == content
    found = bucket.head("a/b")
    assert found is not None
    assert (found.key, found.size) == ("a/b", len(content))
    if not site.weak:
        assert info.checksum == found.checksum == checksum(digest)
    assert found.modified is not None
    assert abs(found.modified - datetime.now(UTC)) < timedelta(hours=1)


def test_an_empty_object_is_an_object(bucket: Bucket) -> None:
    put(bucket, "empty", b"")
    found = bucket.head("empty")
    assert found is not None
    assert found.size == 0
    assert bucket.get_range("empty", 0, 10) == b""
    assert bucket.get_range("empty", -10, 10) == b""


def test_a_key_that_is_taken_stays_as_it_is(site: Site) -> None:
    bucket = site.strict()
    put(bucket, "key", b"first")
    with pytest.raises(ObjectExists):
        put(bucket, "key", b"second")
    assert bucket.get_range("key", 0, 100) == b"first"


def test_overwrite_replaces_an_object_where_the_bucket_allows_it(bucket: Bucket) -> None:
    put(bucket, "key", b"first")
    bucket.overwrite("key", b"second", sha256(b"second").digest())
    assert bucket.get_range("key", 0, 100) == b"second"


def test_content_that_was_damaged_on_its_way_is_not_stored(site: Site) -> None:
    bucket = site.strict()
    with pytest.raises(ContentDamaged):
        bucket.put("key", b"content", sha256(b"another").digest())
    assert bucket.head("key") is None


@pytest.mark.parametrize(
    ("start", "length", "wanted"),
    [
        (0, 4, slice(0, 4)),
        (10, 20, slice(10, 30)),
        (95, 20, slice(95, 100)),
        (100, 5, slice(0, 0)),
        (5000, 5, slice(0, 0)),
        (7, 0, slice(0, 0)),
        (-7, 7, slice(93, 100)),
        (-1000, 1000, slice(0, 100)),
    ],
)
def test_a_range_has_the_bytes_that_are_there(
    bucket: Bucket, start: int, length: int, wanted: slice
) -> None:
    content = bytes(range(100))
    put(bucket, "key", content)
    assert bucket.get_range("key", start, length) == content[wanted]


def test_what_is_not_there_is_told(bucket: Bucket) -> None:
    assert bucket.head("none") is None
    with pytest.raises(ObjectMissing):
        bucket.get_range("none", 0, 10)
    bucket.delete("none")


def test_an_object_of_parts_is_visible_only_when_it_is_complete(site: Site) -> None:
    bucket = site.bucket()
    first, second = os.urandom(SMALLEST_PART), os.urandom(1000)
    upload_id, parts = sent(bucket, first, second)
    assert bucket.head(KEY) is None
    info = bucket.complete(KEY, upload_id, parts)
    assert info.size == len(first) + len(second)
    found = bucket.head(KEY)
    assert found is not None
    assert found.size == info.size
    if not site.weak:
        assert found.checksum == composite(parts)
        assert info.checksum in ("", found.checksum)
    assert bucket.get_range(KEY, SMALLEST_PART - 10, 20) == first[-10:] + second[:10]
    assert bucket.get_range(KEY, -1000, 1000) == second


def test_a_part_that_is_sent_again_takes_the_place_of_the_first(site: Site) -> None:
    bucket = site.strict()
    upload_id, _ = sent(bucket, b"first")
    part = put_part(bucket, upload_id, 1, b"second")
    bucket.complete(KEY, upload_id, [part])
    assert bucket.get_range(KEY, 0, 100) == b"second"


def test_a_part_that_was_damaged_on_its_way_is_not_stored(site: Site) -> None:
    bucket = site.strict()
    upload_id = bucket.create_upload(KEY)
    with pytest.raises(ContentDamaged):
        bucket.put_part(KEY, upload_id, 1, b"content", sha256(b"another").digest())


def test_complete_does_not_overwrite(site: Site) -> None:
    bucket = site.strict()
    upload_id, parts = sent(bucket, b"second")
    put(bucket, KEY, b"first")
    with pytest.raises(ObjectExists):
        bucket.complete(KEY, upload_id, parts)
    assert bucket.get_range(KEY, 0, 100) == b"first"


def test_complete_a_second_time_changes_nothing(site: Site) -> None:
    bucket = site.strict()
    upload_id, parts = sent(bucket, b"content")
    bucket.complete(KEY, upload_id, parts)
    with suppress(ObjectExists, UploadGone):  # AWS and versitygw answer as the first time.
        bucket.complete(KEY, upload_id, parts)
    found = bucket.head(KEY)
    assert found is not None
    assert found.checksum == composite(parts)


def test_an_upload_that_was_aborted_is_gone(site: Site) -> None:
    bucket = site.bucket()
    upload_id, parts = sent(bucket, b"content")
    bucket.abort(KEY, upload_id)
    bucket.abort(KEY, upload_id)
    assert list(bucket.uploads("")) == []
    # A weak server may report an error of its own.
    gone = (UploadGone, RemoteUnreachable) if site.weak else UploadGone
    with pytest.raises(gone):
        put_part(bucket, upload_id, 2, b"more")
    with pytest.raises(gone):
        bucket.complete(KEY, upload_id, parts)
    assert bucket.head(KEY) is None


def test_uploads_that_were_not_ended_are_listed(site: Site) -> None:
    bucket = site.strict()
    wanted = {(f"packs/{number}", bucket.create_upload(f"packs/{number}")) for number in range(3)}
    bucket.create_upload("pgdump/other")
    found = list(bucket.uploads("packs/"))
    assert {(upload.key, upload.upload_id) for upload in found} == wanted
    assert all(abs(one.begun - datetime.now(UTC)) < timedelta(hours=1) for one in found)


def test_small_parts_are_refused_except_for_the_last(site: Site) -> None:
    bucket = site.strict()
    upload_id, parts = sent(bucket, b"small", b"last")
    with pytest.raises(RemoteDenied):
        bucket.complete(KEY, upload_id, parts)
    assert bucket.head(KEY) is None


def test_a_listing_has_the_keys_in_order_below_a_prefix(bucket: Bucket) -> None:
    keys = ["a/1", "a/10", "a/2", "a/sub/deep", "b+ü% &", "c"]
    for key in keys:
        put(bucket, key, key.encode())
    listed = list(bucket.list(""))
    assert [info.key for info in listed] == sorted(keys)
    assert [info.size for info in listed] == [len(key.encode()) for key in sorted(keys)]
    assert [info.key for info in bucket.list("a/")] == ["a/1", "a/10", "a/2", "a/sub/deep"]
    assert list(bucket.list("none/")) == []


def test_a_listing_goes_on_over_its_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_bucket, "PAGE", 3)
    keys = [f"many/{number}" for number in range(8)]
    for key in keys:
        put(bucket, key, b"")
    assert [info.key for info in bucket.list("many/")] == keys


def test_an_object_that_was_deleted_is_gone(bucket: Bucket) -> None:
    put(bucket, "key")
    bucket.delete("key")
    assert bucket.head("key") is None
    assert list(bucket.list("")) == []


def test_a_part_is_confirmed_where_the_server_says_its_sha256(site: Site) -> None:
    bucket = site.bucket()
    _, (part,) = sent(bucket, b"content")
    assert part.confirmed != site.weak
    # What the server says of another form is no sum.
    assert part.md5 in (md5(b"content").digest(), *([] if site.weak else [b""]))


@pytest.mark.parametrize(
    "kind",
    ["fake", "s3", *(pytest.param(one, marks=pytest.mark.long) for one in ("versitygw",))],
)
def test_a_lock_is_told_made_longer_and_never_shorter(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket: Bucket = FakeBucket()
    if kind != "fake":
        server: S3Server = request.getfixturevalue(kind)
        as_account(monkeypatch, server.owner)
        client, name = server.client(), f"locks-{os.getpid()}"
        client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
        place = {"url": f"s3://{name}/backup", "endpoint": server.endpoint, "addressing": "path"}
        bucket = open_bucket(RemoteSettings.model_validate(place))
    put(bucket, KEY)
    before = bucket.head(KEY)
    assert before is not None
    assert (before.lock, before.locked_until) == ("", None)
    for days in (2, 30):
        until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
        bucket.lock(KEY, "GOVERNANCE", until)
        told = bucket.head(KEY)
        assert told is not None
        assert (told.lock, told.locked_until) == ("GOVERNANCE", until)
    with pytest.raises(RemoteDenied):
        bucket.lock(KEY, "GOVERNANCE", datetime.now(UTC) + timedelta(days=1))
    again = bucket.head(KEY)
    assert again is not None
    assert again.locked_until == until
