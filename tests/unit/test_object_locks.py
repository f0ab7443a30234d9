"""Object locks are renewed in a bucket in memory, and their end is told before it comes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ntt_backup.audit.object_locks import TargetLock, known_lock, look_at_lock, protect
from ntt_backup.config import Settings
from ntt_backup.errors import ConfigError, RemoteDenied, RemoteUnreachable
from ntt_backup.objects.bucket import Protection
from ntt_backup.packstore import marker
from ntt_backup.report import check
from ntt_backup.report.health import Health, judge
from ntt_backup.report.target_facts import TargetFacts
from ntt_backup.wire.framing import FORMAT
from tests.helpers.bucket_packs import packs_in
from tests.helpers.fake_bucket import FakeBucket

NOW = datetime.now(UTC)
KEYS = [
    "packs/aa/one.tar",
    "blobs/aa/bb/large",
    "pgdump/20260304T120000Z-0badcafe.dump",
    "snapshots/db/20260304T120000Z-0badcafe/manifest",
    FORMAT,
]
LOCKS = Protection("on", "on", 30, "COMPLIANCE")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "source": {"root": str(tmp_path)},
            "remote": {"url": "s3://bucket/backup"},
            "log": {"jsonl": str(tmp_path / "log.jsonl")},
        }
    )


@pytest.fixture
def bucket() -> FakeBucket:
    """A bucket with a store, and with what is no part of it."""
    bucket = FakeBucket()
    bucket.said = LOCKS
    marker.make(packs_in(bucket))
    for key in (*KEYS[:-1], "packs/trial-0", "of-others"):
        bucket.objects[key] = b"content"
    return bucket


def ends(bucket: FakeBucket) -> dict[str, datetime | None]:
    found = {key: bucket.head(key) for key in bucket.objects}
    return {key: info.locked_until for key, info in found.items() if info is not None}


def days(count: float) -> timedelta:
    return timedelta(days=count)


def test_all_of_a_store_is_locked_and_longer_locks_stay(
    settings: Settings, bucket: FakeBucket
) -> None:
    later = NOW + days(200)
    bucket.lock(KEYS[1], "GOVERNANCE", later)
    until = NOW + days(90)
    done = protect(settings, bucket, until)
    assert (done.objects, done.renewed) == (5, 4)
    assert ends(bucket) == {**dict.fromkeys(KEYS, until), KEYS[1]: later} | {
        "packs/trial-0": None,
        "of-others": None,
    }
    modes = {key: info.lock for key in KEYS if (info := bucket.head(key)) is not None}
    assert modes == {**dict.fromkeys(KEYS, "COMPLIANCE"), KEYS[1]: "GOVERNANCE"}
    before = bucket.requests["lock"]
    assert protect(settings, bucket, until).renewed == 0
    assert bucket.requests["lock"] == before


def test_what_was_not_locked_to_the_end_is_not_called_so(
    settings: Settings, bucket: FakeBucket
) -> None:
    def cut(verb: str, key: str) -> None:
        if (verb, key) == ("lock", KEYS[3]):
            raise RemoteUnreachable("the link is down")

    bucket.before = cut
    with pytest.raises(RemoteUnreachable):
        protect(settings, bucket, NOW + days(90))
    assert known_lock(settings) is None
    assert ends(bucket)[FORMAT] is None
    bucket.before = lambda *_: None
    bucket.after = lambda verb, key: verb == "list" and bucket.objects.pop(KEYS[0], None)
    protect(settings, bucket, NOW + days(90))  # What is removed meanwhile is no error.
    assert known_lock(settings) is not None


def test_a_bucket_without_locks_and_one_without_a_store_are_refused(
    settings: Settings, bucket: FakeBucket
) -> None:
    bucket.said = Protection("on", "off")
    with pytest.raises(ConfigError, match="no object lock"):
        protect(settings, bucket, NOW + days(90))
    bucket.said = LOCKS
    del bucket.objects[FORMAT]
    with pytest.raises(RemoteDenied, match="no store"):
        protect(settings, bucket, NOW + days(90))


def test_the_first_lock_that_ends_is_that_of_the_marker_or_of_what_arrives(
    settings: Settings, bucket: FakeBucket
) -> None:
    """And another host sees the marker alone."""
    assert look_at_lock(settings, bucket) is None
    protect(settings, bucket, NOW + days(90))
    known = known_lock(settings)
    assert known is not None
    assert known.renewed
    assert abs(known.until - datetime.now(UTC) - days(30)) < timedelta(minutes=5)
    assert look_at_lock(settings, bucket) == known
    # Somebody else has locked it again.
    bucket.lock(FORMAT, "COMPLIANCE", NOW + days(300))
    seen = look_at_lock(settings, bucket)
    assert seen is not None
    assert (seen.until, seen.renewed) == (NOW + days(300), False)
    moved = settings.model_copy(
        update={"remote": settings.remote.model_copy(update={"url": "s3://another"})}
    )
    assert known_lock(moved) is None


@pytest.mark.parametrize(
    ("since", "until", "soon"),
    [
        (-300, 15, False),
        (-300, 13, True),
        (-300, -1, True),
        # A short term is told of in its last quarter.
        (-4, 2, False),
        (-6, 1, True),
    ],
)
def test_a_lock_that_ends_soon_is_an_alert(
    settings: Settings,
    bucket: FakeBucket,
    monkeypatch: pytest.MonkeyPatch,
    since: int,
    until: int,
    soon: bool,
) -> None:
    now = datetime.now(UTC)
    end = now + days(until)
    lock = TargetLock(settings.remote.url, now + days(since), end, end)
    facts = TargetFacts(settings, lock=lock, silence=ConfigError("no daemon runs"))
    verdict = judge(facts, now)
    assert (verdict.level == Health.ACTION_REQUIRED) is soon
    assert any("protect --for 90d" in point.do for point in verdict.points) is soon
    bucket.lock(FORMAT, "COMPLIANCE", end)
    bucket.came(FORMAT, now + days(since))
    monkeypatch.setattr(check, "open_bucket", lambda _: bucket)
    step = check.object_locks(settings)
    assert bool(step.warning) is soon
    assert known_lock(settings) == lock
    assert TargetFacts.of_host(settings).lock == lock


def test_check_says_what_cannot_be_seen(
    settings: Settings, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "open_bucket", lambda _: bucket)
    assert "no lock is seen" in check.object_locks(settings).text
    for said, words in (("off", "is off"), ("", "not told by the bucket")):
        bucket.said = Protection("on", said)
        assert words in check.object_locks(settings).text
