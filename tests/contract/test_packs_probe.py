"""The probe of a bucket, and the file that makes a bucket a store."""

from __future__ import annotations

import json
import re

import pytest

from ntt_backup.errors import RemoteCannotStore, RemoteDenied
from ntt_backup.objects.bucket import Bucket, ObjectInfo
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.packstore import marker
from ntt_backup.upload.strategies.packs_probe import BucketProbe
from ntt_backup.wire.framing import FORMAT
from tests.helpers.bucket_packs import packs_in
from tests.helpers.fake_bucket import FakeBucket
from tests.helpers.s3_proxy import S3Proxy, lose_answer
from tests.helpers.s3_servers import S3Server, as_account

OWNER = "0123456789ab"


@pytest.fixture(params=["fake", "s3"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    if request.param == "fake":
        return FakeBucket()
    return open_bucket(request.getfixturevalue("s3").bucket())


def test_a_bucket_is_a_store_once_it_was_made_one(bucket: Bucket) -> None:
    probe = BucketProbe(packs_in(bucket), OWNER)
    before = probe.facts()
    assert not before.placed
    assert before.system
    assert (before.skew_s or 0.0) < 60
    probe.make_place()
    assert probe.facts().placed
    made = marker.read(packs_in(bucket))
    assert made is not None
    assert len(made) == 16
    probe.make_place()
    assert marker.make(packs_in(bucket)) == made


def test_a_store_that_two_make_at_once_has_one_id() -> None:
    bucket = FakeBucket()
    first: list[bytes] = []

    def make_first(verb: str, key: str) -> None:
        if verb == "put" and not first:
            first.append(b"")
            first[0] = marker.make(packs_in(bucket))

    bucket.before = make_first
    assert marker.make(packs_in(bucket)) == first[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"format": 3, "store": "0" * 32}), "newer version"),
        (json.dumps({"format": 1, "store": "0" * 31}), "something else"),
        (json.dumps({"format": True}), "something else"),
        ("[]", "something else"),
        ("[" * 4000, "something else"),
        ("", "something else"),
    ],
)
def test_a_bucket_of_another_program_is_refused(text: str, words: str) -> None:
    bucket = FakeBucket()
    bucket.objects[FORMAT] = text.encode()
    with pytest.raises(RemoteDenied, match=words):
        BucketProbe(packs_in(bucket), OWNER).facts()


def test_a_trial_leaves_nothing_where_it_may_delete(bucket: Bucket) -> None:
    said = BucketProbe(packs_in(bucket), OWNER).try_out()
    assert "not append-only: overwriting and deleting are allowed" in said
    assert [*bucket.list(""), *bucket.uploads("")] == []


def test_a_run_looks_and_stores_nothing() -> None:
    bucket, asked = FakeBucket(), list[str]()
    bucket.before = lambda verb, _: asked.append(verb)
    BucketProbe(packs_in(bucket), OWNER).facts()
    assert asked == ["facts", "get_range"]


def test_a_trial_in_an_append_only_bucket_leaves_one_object_however_often() -> None:
    bucket = FakeBucket()
    bucket.append_only = True
    for _ in range(2):
        said = BucketProbe(packs_in(bucket), OWNER).try_out()
        assert "append-only: overwriting and deleting are refused" in said
        assert f"packs/trial-{OWNER} stays" in said
    assert [*bucket.objects] == [f"packs/trial-{OWNER}"]
    assert list(bucket.uploads("")) == []


def test_a_trial_says_what_a_policy_refuses_and_what_versioning_keeps(s3: S3Server) -> None:
    settings = s3.bucket(own=True)
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": f"arn:aws:s3:::{settings.bucket}/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    s3.client().put_bucket_policy(Bucket=settings.bucket, Policy=policy)
    s3.client().put_bucket_versioning(
        Bucket=settings.bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    bucket = open_bucket(settings)
    for _ in range(2):
        probe = BucketProbe(packs_in(bucket), OWNER)
        said = probe.try_out()
        assert "versioning is on" in said
        assert "not append-only: overwriting is allowed" in said
        assert "versioning keeps what was there before" in said
        assert [info.key for info in bucket.list("")] == [f"packs/trial-{OWNER}"]


def test_a_trial_says_in_what_a_server_is_weak() -> None:
    bucket = FakeBucket(weak=True)
    said = BucketProbe(packs_in(bucket), OWNER).try_out()
    assert "keeps no SHA-256" in said
    assert "ignores If-None-Match" in said
    assert "does not compare SHA-256" in said
    assert bucket.objects == {}


@pytest.mark.parametrize(
    ("opaque", "words"),
    [
        (False, "so the MD5 sums in its ETag are compared"),
        (True, "all that is sent is read back once, at the price of its traffic"),
    ],
)
def test_a_trial_says_how_what_is_sent_is_compared(opaque: bool, words: str) -> None:
    parts = BucketProbe(packs_in(FakeBucket(of_parts=True, opaque=True)), OWNER).try_out()
    assert "so those of its parts are compared" in parts
    bucket = FakeBucket(weak=True, opaque=opaque)
    assert words in BucketProbe(packs_in(bucket), OWNER).try_out()
    # Also where an earlier trial could not be removed.
    bucket.append_only = True
    for _ in range(2):
        assert words in BucketProbe(packs_in(bucket), OWNER).try_out()


def test_a_checksum_that_leaves_out_the_number_of_its_parts_is_right() -> None:
    bucket = Telling("-", "")
    assert "SHA-256" not in BucketProbe(packs_in(bucket), OWNER).try_out()


def test_a_checksum_of_another_form_is_no_damage() -> None:
    bucket = Telling("-", "-7")
    assert "its ETag are compared" in BucketProbe(packs_in(bucket), OWNER).try_out()


def test_a_checksum_of_other_content_is_damage() -> None:
    bucket = Telling(re.compile("^."), "_")
    with pytest.raises(RemoteCannotStore, match="something else than was sent"):
        BucketProbe(packs_in(bucket), OWNER).try_out()


def test_a_trial_whose_key_is_refused_since_one_was_deleted_takes_another() -> None:
    bucket = FakeBucket()
    bucket.marked.add(f"packs/trial-{OWNER}")
    probe = BucketProbe(packs_in(bucket), OWNER)
    assert "overwriting and deleting are allowed" in probe.try_out()
    assert bucket.objects == {}
    assert [*bucket.uploads("")] == []


@pytest.mark.parametrize("left", [None, b"other"])
def test_a_trial_that_is_gone_again_is_one_line(left: bytes | None) -> None:
    bucket = FakeBucket()

    def lose(verb: str, key: str) -> None:
        if verb == "get_range":
            bucket.objects.clear()
            bucket.objects.update({} if left is None else {key: left})

    bucket.before = lose
    with pytest.raises(RemoteCannotStore, match="something else than was sent"):
        BucketProbe(packs_in(bucket), OWNER).try_out()


class Telling(FakeBucket):
    """A bucket that tells checksums of another form: all from a mark on is replaced."""

    def __init__(self, mark: str | re.Pattern[str], other: str) -> None:
        super().__init__()
        self._mark, self._other = mark, other

    def _store(self, key: str, content: bytes, summed: str, etag: str) -> ObjectInfo:
        if isinstance(self._mark, str):
            begin, mark, _ = summed.partition(self._mark)
            summed = begin + (self._other if mark else "")
        else:
            summed = self._mark.sub(self._other, summed)
        return super()._store(key, content, summed, etag)


def test_a_store_in_an_archive_class_is_told() -> None:
    bucket = FakeBucket()
    marker.make(packs_in(bucket))
    bucket.archived.add(FORMAT)
    with pytest.raises(RemoteDenied, match="cannot be read") as caught:
        BucketProbe(packs_in(bucket), OWNER).facts()
    assert "thaw" in caught.value.hint


def test_a_trial_passes_where_an_answer_is_lost(s3: S3Server) -> None:
    with S3Proxy(s3) as proxy:
        for kind in ("create", "part", "complete", "put", "delete"):
            proxy.trouble(kind, lose_answer)
        bucket = open_bucket(s3.bucket(endpoint=proxy.endpoint))
        assert (
            "overwriting and deleting are allowed" in BucketProbe(packs_in(bucket), OWNER).try_out()
        )
        assert list(bucket.list("")) == []


def test_a_trial_goes_into_an_archive_class_unread() -> None:
    bucket = FakeBucket()
    bucket.archived.add(f"packs/trial-{OWNER}")
    assert (
        "not read back: it lies in an archive class"
        in BucketProbe(packs_in(bucket), OWNER).try_out()
    )


def test_a_trial_with_credentials_that_may_only_read_is_refused(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_account(monkeypatch, s3.reader)
    with pytest.raises(RemoteDenied) as caught:
        BucketProbe(packs_in(open_bucket(s3.bucket())), OWNER).try_out()
    assert caught.value.message == "the object store refuses to begin an upload"
    assert "s3:PutObject" in caught.value.hint
