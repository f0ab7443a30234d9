"""verify and reconcile of packs: what is lost is pending again, the ledger can be refilled."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup.audit import verify
from ntt_backup.audit.reconcile import Comparison, Difference, reconcile
from ntt_backup.audit.remote_names import PackNames
from ntt_backup.audit.verify import Findings, Question
from ntt_backup.audit.verify_packs import verify_packs
from ntt_backup.blobdir.layout import marker_text
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import Ledger, iter_packs
from ntt_backup.cli.commands.verify import lines
from ntt_backup.config import RemoteConfig, Settings
from ntt_backup.config.signing_key import OF_PACKS, SigningKey, SigningKeys
from ntt_backup.errors import CatalogUnavailable, ConfigError, RemoteUnreachable
from ntt_backup.filestore.by_directory import FileStoreByDirectory
from ntt_backup.model import Blob, StoredPack
from ntt_backup.objects import s3
from ntt_backup.pack import names as keys
from ntt_backup.pack.format import Sign
from ntt_backup.source.store import SourceTree
from tests.helpers.blobs import Person, put
from tests.helpers.bucket_packs import (
    blobid_of,
    bucket_settings,
    flip,
    plant_pack,
    put_large,
    put_pack,
)
from tests.helpers.fake_bucket import FakeBucket

TARGET = "remote"


def contents(count: int, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.randrange(1, 30_000)) for _ in range(count)]


def register(conn: Connection, blobs: list[bytes]) -> list[Blob]:
    rows = [Blob(blobid_of(one), len(one)) for one in blobs]
    with conn.cursor() as cursor:
        cursor.executemany(
            "insert into blobs (blobid, size) values (%s, %s) on conflict do nothing",
            [(one.blobid, one.size) for one in rows],
        )
    return rows


def back_up(
    conn: Connection,
    bucket: FakeBucket,
    blobs: list[bytes],
    seal_for: Person | None = None,
    sign: Sign = lambda _: "",
) -> StoredPack:
    """Puts blobs into a pack and into the ledger, as a run does."""
    pack, _ = put_pack(bucket, blobs, seal_for, sign)
    Ledger(conn, TARGET).record(register(conn, blobs), [], [pack])
    return pack


def pending(conn: Connection) -> set[str]:
    rows = conn.execute("select blobid from blobs where remote_copied is not true")
    return {blobid for (blobid,) in rows}


def unproved(conn: Connection) -> set[str]:
    rows = conn.execute("select pack_id from ntt_backup.packs where checked_at is null")
    return {pack_id for (pack_id,) in rows}


def verified(
    conn: Connection,
    *,
    code: int = 0,
    identity: Path | None = None,
    host: Path | None = None,
    recipients: Sequence[str] = (),
    **question: Any,
) -> Findings:
    found = verify_packs(
        conn,
        bucket_settings(identity=identity, host=host, recipients=recipients),
        Question(**question),
        on_progress=lambda found: None,
        on_outage=lambda error, seconds: None,
    )
    conn.execute("close all")  # As with the connection of one command.
    assert found.exit_code == code
    return found


def test_a_look_finds_what_is_missing_and_what_is_another_object(
    catalog: Connection, bucket: FakeBucket
) -> None:
    shared = contents(5, 9)
    sets = [contents(40, 1) + shared, contents(40, 2), contents(40, 3) + shared]
    gone, short, _ = [back_up(catalog, bucket, one) for one in sets]
    assert verified(catalog).complete
    del bucket.objects[gone.key]
    bucket.objects[short.key] = bucket.objects[short.key][1:]
    bucket.requests.clear()

    found = verified(catalog, code=7)

    lost = {blobid_of(one) for one in contents(40, 1) + contents(40, 2)}
    assert pending(catalog) == lost
    assert (found.requeued, found.lost_packs, found.bytes) == (80, 2, 0)
    # Which of two packs that overlap held a blob, nobody knows any more.
    assert found.wrong.counts.total() == 80
    assert [pack.blobs for pack in iter_packs(catalog, TARGET)] == [45]
    # The next run sends them, and nothing is wrong any more.
    back_up(catalog, bucket, contents(40, 1) + contents(40, 2))
    assert verified(catalog).complete
    assert not pending(catalog)


def test_a_look_compares_checksums_of_one_form_only(
    catalog: Connection, bucket: FakeBucket
) -> None:
    """A store that copies an object sent in parts may keep the sum of the whole afterwards."""
    pack, _ = put_pack(bucket, contents(20, 1))
    in_parts = replace(pack, checksum=f"{pack.checksum[::-1]}-2")
    Ledger(catalog, TARGET).record(register(catalog, contents(20, 1)), [], [in_parts])
    other = back_up(catalog, bucket, contents(20, 2))
    assert verified(catalog).complete
    bucket.overwrite(other.key, bytes(other.size), sha256(bytes(other.size)).digest())

    assert verified(catalog, code=7).lost_packs == 1

    assert pending(catalog) == {blobid_of(one) for one in contents(20, 2)}


def test_a_file_that_is_compared_by_its_size_is_not_recorded_as_checked(
    catalog: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target sums files, and has no BLAKE3, so that no sum of a large blob can be compared."""
    monkeypatch.setattr("ntt_backup.audit.verify_packs.LARGE_BLOB", 1000)
    monkeypatch.setattr(FileStoreByDirectory, "prove", lambda *_: "")
    content = bytes(2000)
    path = tmp_path / keys.blob_key(blobid_of(content))
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (tmp_path / "packs").mkdir()
    (tmp_path / "format.json").write_bytes(marker_text("0" * 32))
    Ledger(catalog, TARGET).record(register(catalog, [content]), [], [])
    (before,) = catalog.execute("select remote_last_checked from blobs").fetchall()
    settings = RemoteConfig.model_validate(
        {"remote": {"url": f"file://{tmp_path}", "layout": "packs"}}
    )
    found = verify_packs(
        catalog,
        settings,
        Question(),
        on_progress=lambda found: None,
        on_outage=lambda error, seconds: None,
    )
    assert (found.checked, found.by_size, found.exit_code) == (1, 1, 0)
    assert catalog.execute("select remote_last_checked from blobs").fetchall() == [before]


@pytest.mark.parametrize(
    ("kept", "noticed"), [("md5:{etag}", True), ("etag:{etag}", False), ("", False), ("x-2", False)]
)
def test_a_look_counts_what_it_compares_by_size_alone(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch, kept: str, noticed: bool
) -> None:
    bucket = FakeBucket(weak=True)
    monkeypatch.setattr(s3, "open_bucket", lambda *_, **__: bucket)
    pack, _ = put_pack(bucket, contents(20, 1))
    large = put_large(bucket, bytes(keys.LARGE_BLOB))
    info = bucket.head(pack.key)
    assert info is not None
    proof = kept.format(etag=info.etag)
    known = [*register(catalog, contents(20, 1)), Blob(large, keys.LARGE_BLOB)]
    catalog.execute("insert into blobs (blobid, size) values (%s, %s)", [large, keys.LARGE_BLOB])
    Ledger(catalog, TARGET).record(known, [], [replace(pack, checksum=proof)])

    found = verified(catalog)

    assert found.complete
    # Nobody but its name tells what is in a large blob.
    assert found.by_size == 1 + (0 if proof.endswith(info.etag) else 20)
    assert "by the size of their files alone" in "\n".join(lines(found, Question()))
    # An object of the same size in its place.
    bucket.overwrite(pack.key, bytes(pack.size), sha256(bytes(pack.size)).digest())
    if noticed:
        swapped = verified(catalog, code=7)
        assert (swapped.lost_packs, swapped.by_size) == (1, 1)
        assert pending(catalog) == {blobid_of(one) for one in contents(20, 1)}
    else:
        assert verified(catalog).by_size == 21
    assert verified(catalog, way="download", code=0 if noticed else 7).by_size == 0


def test_reading_finds_flipped_bytes_and_damaged_tables(
    catalog: Connection, bucket: FakeBucket
) -> None:
    once, both = contents(60, 1), contents(2, 2)
    pack, entries = put_pack(bucket, once + both)
    Ledger(catalog, TARGET).record(register(catalog, once + both), [], [pack])
    other = back_up(catalog, bucket, both + contents(20, 3))
    places = {entry.digest.hex(): entry for entry in entries}
    bad = max(once, key=len)
    for content in (bad, both[0]):
        flip(bucket, pack.key, places[blobid_of(content)].offset + 5)
    assert verified(catalog).complete

    found = verified(catalog, way="download", code=7)

    assert pending(catalog) == {blobid_of(bad)}
    assert found.wrong.counts == {"remote-corrupt": 1}
    assert found.checked == found.total == pack.blobs + other.blobs
    assert found.bytes >= sum(map(len, once))
    assert not unproved(catalog)
    flip(bucket, pack.key, pack.size - 1400)
    found = verified(catalog, way="download", code=7)
    assert found.lost_packs == 1
    assert pending(catalog) == {blobid_of(one) for one in once}


def test_a_pack_whose_name_in_the_ledger_can_be_none_is_lost(
    catalog: Connection, bucket: FakeBucket
) -> None:
    back_up(catalog, bucket, contents(5, 1))
    catalog.execute("update ntt_backup.packs set key = 'packs/old'")

    found = verified(catalog, way="download", code=7)

    assert (found.checked, found.total, found.lost_packs) == (5, 5, 1)
    assert "LOST: 1 pack, missing or damaged as a whole" in lines(found, Question("download"))


def test_a_lost_pack_that_a_run_stores_anew_meanwhile_stays_in_the_ledger(
    catalog: Connection, bucket: FakeBucket
) -> None:
    """The same blobs make the same pack."""
    blobs = contents(5, 1)
    pack, other = back_up(catalog, bucket, blobs), back_up(catalog, bucket, contents(5, 2))
    del bucket.objects[pack.key]

    def run(found: Findings) -> None:
        if found.requeued == len(blobs) and pack.key not in bucket.objects:
            back_up(catalog, bucket, blobs)

    verify_packs(
        catalog,
        bucket_settings(),
        Question(),
        on_progress=run,
        on_outage=lambda error, seconds: None,
    )

    assert {one.key for one in iter_packs(catalog, TARGET)} == {pack.key, other.key}
    assert not pending(catalog)


def test_what_was_read_before_an_error_is_recorded(catalog: Connection, bucket: FakeBucket) -> None:
    right, wrong = back_up(catalog, bucket, contents(20, 1)), back_up(catalog, bucket, [b"content"])
    flip(bucket, wrong.key, 515)

    def fail(found: Findings) -> None:
        if found.checked == 21:
            raise CatalogUnavailable("somebody stopped it")

    with pytest.raises(CatalogUnavailable, match="somebody stopped it"):
        verify_packs(
            catalog,
            bucket_settings(),
            Question("download"),
            on_progress=fail,
            on_outage=lambda error, seconds: None,
        )

    assert pending(catalog) == {blobid_of(b"content")}
    assert right.pack_id not in unproved(catalog)


def test_reading_finds_a_pack_that_is_longer_than_what_was_sent(
    catalog: Connection, bucket: FakeBucket
) -> None:
    blobs = contents(20, 1)
    pack = back_up(catalog, bucket, blobs)
    bucket.objects[pack.key] += bytes(512)
    assert verified(catalog, way="download", code=7).lost_packs == 1
    assert pending(catalog) == {blobid_of(one) for one in blobs}


def test_a_check_that_is_limited_goes_on_with_what_was_checked_longest_ago(
    catalog: Connection, bucket: FakeBucket
) -> None:
    packs = [back_up(catalog, bucket, contents(20, seed)) for seed in range(6)]
    most = sum(pack.size for pack in packs) // 2
    limits: dict[str, Any] = {"way": "download", "max_bytes": most}
    for _ in range(2):
        before = len(unproved(catalog))
        found = verified(catalog, **limits)
        assert 0 < found.bytes <= most
        assert not found.complete
        assert len(unproved(catalog)) < before
    left = 20 * len(unproved(catalog))
    assert verified(catalog, way="download", older_than=3600.0).total == left
    assert not unproved(catalog)
    assert verified(catalog, way="download", older_than=3600.0).total == 0
    assert verified(catalog, way="download", max_duration=0.0).checked == 0
    assert verified(catalog, fraction=1.0).checked == 120
    assert verified(catalog, fraction=0.0000001).checked == 0


def test_a_pack_that_is_larger_than_the_limit_holds_up_no_other(
    catalog: Connection, bucket: FakeBucket
) -> None:
    large, small = back_up(catalog, bucket, contents(60, 1)), back_up(catalog, bucket, [b"small"])
    catalog.execute("update ntt_backup.packs set checked_at = now() - interval '9 days' * blobs")
    found = verified(catalog, way="download", max_bytes=large.size - 1)
    assert (found.checked, found.left_out, found.complete) == (small.blobs, large.blobs, False)
    assert verified(catalog, way="download", max_bytes=large.size + small.size).complete


def test_a_prefix_of_a_pack_is_checked_without_the_rest(
    catalog: Connection, bucket: FakeBucket
) -> None:
    blobs = contents(200, 1)
    pack, entries = put_pack(bucket, blobs)
    Ledger(catalog, TARGET).record(register(catalog, blobs), [], [pack])
    for entry in entries:
        if not entry.digest.hex().startswith("a"):
            flip(bucket, pack.key, entry.offset)
    found = verified(catalog, way="download", prefix="a")
    assert found.complete
    assert found.checked == sum(blobid_of(one).startswith("a") for one in blobs)
    assert unproved(catalog)


def test_large_blobs_are_checked_by_themselves(
    catalog: Connection, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntt_backup.audit.verify_packs.LARGE_BLOB", 100_000)
    large = [random.Random(seed).randbytes(150_000) for seed in range(3)]
    Ledger(catalog, TARGET).record(register(catalog, large), [])
    names = [put_large(bucket, one) for one in large]
    back_up(catalog, bucket, contents(10, 1))
    assert verified(catalog).checked == 13
    flip(bucket, keys.blob_key(names[0]), 9)
    del bucket.objects[keys.blob_key(names[1])]
    assert verified(catalog, code=7).wrong.counts == {"remote-missing": 1}
    assert verified(catalog, way="download", code=7).wrong.counts == {"remote-corrupt": 1}
    assert pending(catalog) == set(names[:2])
    # The next run finds their keys taken, and sends them as packs.
    packs = [back_up(catalog, bucket, [one]) for one in large[:2]]
    for way in ("there", "download"):
        assert verified(catalog, way=way).checked == 13
    flip(bucket, packs[0].key, 600)
    assert verified(catalog, way="download", code=7).wrong.counts == {"remote-corrupt": 1}
    assert pending(catalog) == set(names[:1])


@pytest.mark.parametrize("way", ["there", "download"])
def test_blobs_that_are_too_large_for_the_column_of_sizes_are_checked(
    catalog: Connection, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("ntt_backup.audit.verify_packs.LARGE_BLOB", 100_000)
    catalog.execute("alter table blobs alter column size type numeric(6)")
    small, large = contents(3, 1), [random.Random(seed).randbytes(1_000_000) for seed in range(2)]
    back_up(catalog, bucket, small)
    names = [put_large(bucket, one) for one in large]
    for name in names:
        catalog.execute("insert into blobs (blobid) values (%s)", [name])
    Ledger(catalog, TARGET).record([Blob(name, 1_000_000) for name in names], [])
    assert verified(catalog, way=way).checked == 5

    # What is read counts, though nobody knew how much it would be.
    limited = verified(catalog, way=way, max_bytes=1_500_000)
    assert (limited.checked, limited.complete) == ((5, True) if way == "there" else (4, False))
    del bucket.objects[keys.blob_key(names[0])]
    assert verified(catalog, way=way, code=7).wrong.counts == {"remote-missing": 1}
    assert pending(catalog) == {names[0]}


def test_a_lost_pack_is_told_beside_archived_ones(catalog: Connection, bucket: FakeBucket) -> None:
    gone, cold = back_up(catalog, bucket, contents(40, 1)), back_up(catalog, bucket, contents(9, 2))
    del bucket.objects[gone.key]
    bucket.archived.add(cold.key)

    found = verified(catalog, code=7)

    assert (found.lost_packs, found.requeued) == (1, 0)
    (lost,) = found.wrong.first
    assert lost.blobid == gone.key
    assert f"{cold.key} is in an archive class" in lost.detail
    bucket.archived.clear()
    verified(catalog, code=7)
    assert pending(catalog) == {blobid_of(one) for one in contents(40, 1)}


def test_a_pack_of_which_the_bucket_tells_nothing_hides_no_other(
    catalog: Connection, bucket: FakeBucket
) -> None:
    stuck, _ = back_up(catalog, bucket, contents(9, 1)), back_up(catalog, bucket, contents(9, 2))

    def refuse(verb: str, key: str) -> None:
        if key == stuck.key:
            raise RemoteUnreachable("the object store answers 503")

    bucket.before = refuse
    for way in ("there", "download"):
        found = verified(catalog, way=way, code=7)
        assert found.wrong.counts == {"remote-unreadable": 1}
        assert (found.checked, found.complete) == (18, True)
    assert not pending(catalog)


def test_an_empty_bucket_marks_nothing(catalog: Connection, bucket: FakeBucket) -> None:
    back_up(catalog, bucket, contents(10, 1))
    bucket.objects.clear()
    bucket.objects[f"{keys.TRIALS}0123456789ab"] = b"of a check"
    with pytest.raises(RemoteUnreachable, match="has no packs"):
        verified(catalog)
    assert not pending(catalog)
    assert list(iter_packs(catalog, TARGET))


# --- what somebody has planted --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "way"),
    [
        ("objects", "there"),
        ("garbage in objects", "download"),
        ("pack", "download"),
        ("garbage in a pack", "there"),
    ],
)
def test_blobs_of_a_lost_pack_are_pending_whatever_somebody_has_put_under_their_names(
    catalog: Connection, bucket: FakeBucket, planted: str, way: str
) -> None:
    blobs, alone, other = contents(30, 1), contents(1, 2), contents(5, 3)
    lost = [back_up(catalog, bucket, blobs), back_up(catalog, bucket, alone)]
    back_up(catalog, bucket, other)
    for pack in lost:
        del bucket.objects[pack.key]
    if "objects" in planted:
        for one in blobs + alone:
            data = bytes(len(one)) if "garbage" in planted else b""
            bucket.put(keys.blob_key(blobid_of(one)), data, sha256(data).digest())
    else:
        plant_pack(bucket, [*blobs, *alone, b"beside"], None if "garbage" in planted else b"x")

    assert verified(catalog, way=way, code=7).requeued == 31

    assert pending(catalog) == {blobid_of(one) for one in blobs + alone}
    assert [pack.blobs for pack in iter_packs(catalog, TARGET)] == [5]


def test_what_was_read_in_a_pack_that_the_ledger_lacks_is_checked_from_then_on(
    catalog: Connection, bucket: FakeBucket
) -> None:
    """A run has left it that died, or somebody has put it there."""
    blobs = contents(30, 1)
    gone = back_up(catalog, bucket, blobs)
    back_up(catalog, bucket, contents(5, 2))
    left, _ = put_pack(bucket, [*blobs[:20], b"beside"])
    plant_pack(bucket, [*blobs, b"planted"])
    del bucket.objects[gone.key]

    assert verified(catalog, way="download", code=7).requeued == 10

    assert pending(catalog) == {blobid_of(one) for one in blobs[20:]}
    assert sorted(pack.blobs for pack in iter_packs(catalog, TARGET)) == [5, 21]
    del bucket.objects[left.key]
    verified(catalog, code=7)
    assert pending(catalog) == {blobid_of(one) for one in blobs}


def test_a_pack_that_this_host_has_not_signed_stands_for_no_lost_one(
    catalog: Connection, bucket: FakeBucket, tmp_path: Path, compared: Callable[..., Any]
) -> None:
    """reconcile has recorded it, and its sizes fit."""
    owner, ours, blobs = Person.new(), SigningKey.of(bytes(32)), contents(30, 1)
    key, host = owner.file(tmp_path / "key"), tmp_path / "host.key"
    host.write_text(f"ntt-host-key-1 {ours.secret.hex()}\n")
    host.chmod(0o600)
    sign = partial(SigningKeys([ours], host).sign, OF_PACKS)
    twice = back_up(catalog, bucket, blobs[:10], owner, sign)
    gone = back_up(catalog, bucket, blobs, owner, sign)
    plant_pack(bucket, [*blobs, b"beside"], None, owner)
    compared(blobs, apply=True, identity=key)
    assert sorted(pack.blobs for pack in iter_packs(catalog, TARGET)) == [10, 30, 31]
    del bucket.objects[gone.key]

    verified(catalog, identity=key, host=host, code=7)

    assert twice.key in bucket.objects
    assert pending(catalog) == {blobid_of(one) for one in blobs[10:]}


def test_a_large_blob_was_in_no_lost_pack_of_several(
    catalog: Connection, bucket: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an object of its own from before the bucket was sealed, and is checked as that."""
    for module in ("verify_packs", "remote_names"):
        monkeypatch.setattr(f"ntt_backup.audit.{module}.LARGE_BLOB", 100_000)
    owner, large = Person.new(), random.Random(1).randbytes(150_000)
    put_large(bucket, large)
    Ledger(catalog, TARGET).record(register(catalog, [large]), [])
    gone = back_up(catalog, bucket, contents(300, 1), owner)
    del bucket.objects[gone.key]
    key = owner.file(tmp_path / "key")
    assert verified(catalog, identity=key, recipients=[owner.public], code=7).requeued == 300
    assert blobid_of(large) not in pending(catalog)


def test_a_large_blob_whose_pack_is_lost_is_read_where_its_own_object_is(
    catalog: Connection, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("verify_packs", "remote_names"):
        monkeypatch.setattr(f"ntt_backup.audit.{module}.LARGE_BLOB", 100_000)
    large = [random.Random(seed).randbytes(150_000) for seed in range(2)]
    packs = [back_up(catalog, bucket, [one]) for one in large]
    for pack, content in zip(packs, (large[0], bytes(150_000)), strict=True):
        key = keys.blob_key(pack.low)
        bucket.put(key, content, sha256(content).digest())
        del bucket.objects[pack.key]
    back_up(catalog, bucket, contents(5, 3))
    verified(catalog, way="download", code=7)
    assert pending(catalog) == {blobid_of(large[1])}
    assert verified(catalog, way="download").checked == 6


def test_a_large_blob_whose_object_is_gone_is_pending_though_a_planted_pack_names_it(
    catalog: Connection, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntt_backup.audit.verify_packs.LARGE_BLOB", 100_000)
    large = random.Random(1).randbytes(150_000)
    Ledger(catalog, TARGET).record(register(catalog, [large]), [])
    plant_pack(bucket, [large, b"beside"])
    assert verified(catalog, code=7).wrong.counts == {"remote-missing": 1}
    assert pending(catalog) == {blobid_of(large)}


def test_a_check_whose_time_ends_goes_on_with_lost_packs_next_time(
    catalog: Connection, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = [back_up(catalog, bucket, contents(5, seed)) for seed in range(3)]
    lost = min(packs, key=lambda pack: pack.key)
    del bucket.objects[lost.key]
    clock = [0.0]
    monkeypatch.setattr(verify, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    of_packs = PackNames.below

    def below(names: PackNames, *args: Any) -> Any:
        clock[0] += step
        return of_packs(names, *args)

    monkeypatch.setattr(PackNames, "below", below)
    step = 11.0
    found = verified(catalog, code=7, max_duration=10.0)
    assert (found.lost_packs, found.complete) == (1, False)
    assert 0 < found.requeued < 5
    assert len(list(iter_packs(catalog, TARGET))) == 3

    step, clock[0] = 0.0, 0.0
    assert found.requeued + verified(catalog, code=7, max_duration=10.0).requeued == 5
    assert len(pending(catalog)) == 5
    assert lost.key not in {one.key for one in iter_packs(catalog, TARGET)}


def test_an_unreadable_pack_waits_for_its_turn(catalog: Connection, bucket: FakeBucket) -> None:
    packs = [back_up(catalog, bucket, contents(20, seed)) for seed in range(3)]
    first = min(packs, key=lambda pack: pack.key)
    bucket.archived.add(first.key)
    most = max(pack.size for pack in packs)
    for code in (7, 0, 0, 7):
        verified(catalog, code=code, way="download", max_bytes=most)
    assert unproved(catalog) == {first.pack_id}


# --- reconcile ------------------------------------------------------------------------------------


@pytest.fixture
def compared(
    catalog: Connection, bucket: FakeBucket, tmp_path: Path
) -> Callable[..., tuple[Comparison, dict[str, int]]]:
    """Compares; returns what was seen, and the differences that there are."""
    store = tmp_path / "store"
    store.mkdir()

    def compare(
        stored: list[bytes],
        *,
        apply: bool = False,
        identity: Path | None = None,
        on_progress: Callable[[Comparison], None] = lambda seen: None,
        on_wait: Callable[[], None] = lambda: None,
        **sealing: Any,
    ) -> tuple[Comparison, dict[str, int]]:
        for one in stored:
            put(store, one)
        settings = Settings.model_validate(
            {
                **bucket_settings(identity=identity, **sealing).model_dump(include={"run", "pack"}),
                "source": {"root": str(store)},
                "remote": {"url": "s3://bucket/backup", "endpoint": "http://127.0.0.1:1"},
            }
        )
        seen = reconcile(
            catalog,
            settings,
            apply=apply,
            on_wait=on_wait,
            on_progress=on_progress,
            on_difference=lambda what, name, remark: None,
            on_outage=lambda error, seconds: None,
        )
        return seen, {what: count for what, count in seen.differences.items() if count}

    return compare


def test_an_empty_ledger_is_refilled_from_the_packs(
    catalog: Connection,
    bucket: FakeBucket,
    compared: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ntt_backup.audit.remote_names.LARGE_BLOB", 100_000)
    first, second, unsent = contents(50, 1), contents(50, 2), contents(3, 3)
    large = [random.Random(4).randbytes(150_000)]
    packs = [put_pack(bucket, first)[0], put_pack(bucket, second + first[:3])[0]]
    put_large(bucket, large[0])
    everything = first + second + unsent + large
    register(catalog, everything)

    seen, kinds = compared(everything)
    assert kinds == {Difference.UNMARKED: 101, Difference.UNRECORDED: 2}
    assert pending(catalog) == {blobid_of(one) for one in everything}
    seen, _ = compared(everything, apply=True)

    assert seen.marked == 101
    assert pending(catalog) == {blobid_of(one) for one in unsent}
    assert {one.pack_id: one for one in iter_packs(catalog, TARGET)} == {
        one.pack_id: one for one in packs
    }
    assert compared(everything)[1] == {}


@pytest.mark.parametrize("recorded", [False, True], ids=["tables are read", "packs are listed"])
def test_a_comparison_can_be_ended_while_packs_are_listed_or_read(
    catalog: Connection, bucket: FakeBucket, compared: Callable[..., Any], recorded: bool
) -> None:
    for seed in range(4):
        back_up(catalog, bucket, contents(2, seed))
    if not recorded:
        catalog.execute("delete from ntt_backup.packs")
    waits = iter(range(3))

    def end() -> None:
        if next(waits, None) is None:
            raise TimeoutError

    seen: list[Comparison] = []
    with pytest.raises(TimeoutError):
        compared([b"one"], apply=True, on_wait=end, on_progress=seen.append)
    assert seen == []


def test_what_was_found_before_an_error_is_applied(
    catalog: Connection, bucket: FakeBucket, compared: Callable[..., Any]
) -> None:
    there, gone = contents(5, 1), contents(5, 2)
    put_pack(bucket, there)
    Ledger(catalog, TARGET).record(register(catalog, gone), [])
    register(catalog, there)

    def fail(seen: Comparison) -> None:
        if seen.part == 1:
            raise CatalogUnavailable("somebody stopped it")

    with pytest.raises(CatalogUnavailable, match="somebody stopped it"):
        compared(there + gone, apply=True, on_progress=fail)
    assert pending(catalog) == {blobid_of(one) for one in gone}


def test_what_no_pack_names_is_pending_again(
    catalog: Connection, bucket: FakeBucket, compared: Callable[..., Any]
) -> None:
    first, second = contents(50, 1), contents(50, 2)
    gone = back_up(catalog, bucket, first)
    damaged = back_up(catalog, bucket, second)
    good = back_up(catalog, bucket, first[:10] + contents(5, 3))
    del bucket.objects[gone.key]
    flip(bucket, damaged.key, damaged.size - 1400)
    everything = first + second + contents(5, 3)

    seen, kinds = compared(everything, apply=True)

    assert kinds == {
        Difference.LOST: 90,
        Difference.PACK_LOST: 1,
        Difference.STRAY_REMOTE: 1,
    }
    assert (seen.requeued, seen.exit_code) == (90, 7)
    assert pending(catalog) == {blobid_of(one) for one in first[10:] + second}
    assert {one.key for one in iter_packs(catalog, TARGET)} == {damaged.key, good.key}
    bucket.objects.clear()
    with pytest.raises(RemoteUnreachable):
        compared(everything, apply=True)


@pytest.mark.parametrize("sealing", [False, True])
def test_an_object_that_no_run_stores_so_is_a_stray_and_not_taken_for_a_blob(
    catalog: Connection,
    bucket: FakeBucket,
    tmp_path: Path,
    compared: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    sealing: bool,
) -> None:
    monkeypatch.setattr("ntt_backup.audit.remote_names.LARGE_BLOB", 100_000)
    owner, small = Person.new(), contents(20, 1)
    old, large = (random.Random(seed).randbytes(150_000) for seed in (2, 3))
    for one in [*small, large]:
        data = bytes(len(one))
        bucket.put(keys.blob_key(blobid_of(one)), data, sha256(data).digest())
    bucket.came(keys.blob_key(put_large(bucket, old)), datetime(2026, 1, 2, tzinfo=UTC))
    put_pack(bucket, [b"beside"], owner if sealing else None)
    everything = [*small, old, large]
    register(catalog, everything)
    options: dict[str, Any] = {
        "apply": True,
        "identity": owner.file(tmp_path / "key"),
        "recipients": [owner.public] if sealing else [],
    }

    seen, kinds = compared(everything, **options)

    unsealed = 2 if sealing else 0
    assert kinds[Difference.STRAY_REMOTE] == 20 + unsealed
    assert seen.marked == 2 - unsealed
    # All that is marked is looked at.
    monkeypatch.setattr("ntt_backup.audit.verify_packs.LARGE_BLOB", 100_000)
    found = verified(
        catalog, identity=options["identity"], way="download", code=0 if sealing else 7
    )
    assert found.wrong.counts.total() == (0 if sealing else 1)
    assert pending(catalog) == {blobid_of(one) for one in everything} - (
        set() if sealing else {blobid_of(old)}
    )
    if sealing:
        assert compared(everything, **options, unsealed_until=date(2026, 1, 3))[0].marked == 1


def test_a_size_that_a_planted_pack_makes_up_requeues_nothing(
    catalog: Connection, bucket: FakeBucket, compared: Callable[..., Any]
) -> None:
    blobs = contents(30, 1)
    back_up(catalog, bucket, blobs)
    for more in (b"one", b"two", b"three"):
        plant_pack(bucket, [*blobs, more])
    seen, kinds = compared(blobs, apply=True)
    assert (seen.requeued, seen.exit_code, seen.on_remote) == (0, 0, 33)
    assert kinds == {Difference.UNRECORDED: 3, Difference.UNKNOWN: 3}
    assert not pending(catalog)
    # The good one is lost. The ledger has the planted ones, and their sizes do not fit.
    bucket.objects = {key: data for key, data in bucket.objects.items() if b"one" not in data}
    (good,) = [one.key for one in iter_packs(catalog, TARGET) if one.blobs == 30]
    del bucket.objects[good]
    verified(catalog, code=7)
    assert pending(catalog) == {blobid_of(one) for one in blobs}


def test_nothing_is_marked_that_is_in_no_pack_of_the_ledger(
    catalog: Connection,
    bucket: FakeBucket,
    compared: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No check would look at it."""
    monkeypatch.setattr("ntt_backup.audit.reconcile._RANGE_ROWS", -1)
    blobs = contents(300, 1)
    register(catalog, blobs)
    put_pack(bucket, [b"beside"])

    def plant(seen: Comparison) -> None:
        if seen.part < 0.005:
            put_pack(bucket, blobs)

    assert compared(blobs, apply=True, on_progress=plant)[0].marked == 0
    assert len(pending(catalog)) == 300
    assert compared(blobs, apply=True)[0].marked == 300
    assert not pending(catalog)


def test_a_pack_that_a_run_stores_while_all_is_compared_is_known(
    catalog: Connection, bucket: FakeBucket, compared: Callable[..., Any]
) -> None:
    blobs = contents(300, 1)
    put_pack(bucket, [b"beside"])

    def run(seen: Comparison) -> None:
        if seen.part < 0.005:
            back_up(catalog, bucket, blobs)

    assert compared(blobs, apply=True, on_progress=run)[0].exit_code == 0
    assert not pending(catalog)


def test_a_pack_that_was_replaced_is_not_learned_anew(
    catalog: Connection, bucket: FakeBucket, compared: Callable[..., Any]
) -> None:
    blobs = contents(30, 1)
    pack = back_up(catalog, bucket, blobs)
    back_up(catalog, bucket, contents(5, 2))
    del bucket.objects[pack.key]
    assert plant_pack(bucket, blobs) == pack.key

    seen, kinds = compared(blobs + contents(5, 2), apply=True)

    assert (seen.requeued, kinds) == (30, {Difference.UNRECORDED: 1, Difference.LOST: 30})
    assert verified(catalog, code=7).lost_packs == 1


def test_what_was_found_damaged_is_not_marked_because_its_pack_names_it(
    catalog: Connection, bucket: FakeBucket, compared: Callable[..., Any]
) -> None:
    blobs, unsent = contents(30, 1), contents(5, 2)
    pack, entries = put_pack(bucket, blobs)
    Ledger(catalog, TARGET).record(register(catalog, blobs), [], [pack])
    put_pack(bucket, unsent)
    register(catalog, unsent)
    bad = next(one for one in entries if one.digest.hex() == blobid_of(max(blobs, key=len)))
    flip(bucket, pack.key, bad.offset + 5)
    verified(catalog, way="download", code=7)

    seen, kinds = compared(blobs + unsent, apply=True)

    assert kinds == {Difference.UNMARKED: 6, Difference.UNRECORDED: 1}
    assert seen.marked == 5
    assert pending(catalog) == {bad.digest.hex()}


def test_a_file_of_the_store_that_cannot_be_looked_at_hides_no_other(
    catalog: Connection,
    bucket: FakeBucket,
    compared: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs = contents(20, 1)
    back_up(catalog, bucket, blobs)
    odd, files = blobid_of(blobs[3]), SourceTree._files

    class Damaged:
        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def damaged(tree: SourceTree, directory: str) -> Iterator[Any]:
        for blobid, entry in map(tuple, files(tree, directory)):
            yield blobid, Damaged() if blobid == odd else entry

    monkeypatch.setattr(SourceTree, "_files", damaged)
    seen, kinds = compared(blobs)
    assert kinds == {Difference.STRAY_STORE: 1, Difference.SOURCELESS: 1}
    assert seen.in_store == 19
    assert "Input/output error" in seen.examples[Difference.STRAY_STORE][0]


# --- sealed packs ---------------------------------------------------------------------------------


def test_sealed_packs_are_looked_at_by_anybody_and_read_by_an_identity(
    catalog: Connection, bucket: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntt_backup.audit.verify_packs.LARGE_BLOB", 100_000)
    owner = Person.new()
    key, other = owner.file(tmp_path / "key"), Person.new().file(tmp_path / "other")
    large = [random.Random(7).randbytes(150_000)]
    packs = [
        back_up(catalog, bucket, one, owner) for one in (contents(40, 1), contents(40, 2), large)
    ]

    # Nobody looks for an object of the large blob's own.
    assert verified(catalog).checked == 81
    for identity, said in ((None, "no identity is given"), (other, "for other identities")):
        with pytest.raises(ConfigError, match=said):
            verified(catalog, identity=identity, way="download")
        catalog.execute("close all")
    assert not pending(catalog)
    found = verified(catalog, identity=key, way="download")
    assert (found.checked, found.complete) == (81, True)
    assert not unproved(catalog)

    flip(bucket, packs[0].key, 70_000)
    bad = verified(catalog, identity=key, way="download", code=7).wrong.counts
    assert bad.keys() == {"remote-corrupt"}
    assert len(pending(catalog)) == bad.total() < 20
    del bucket.objects[packs[1].key]
    # Who has no identity is told at least what is lost, and it stays in the ledger.
    found = verified(catalog, code=7)
    assert (found.lost_packs, found.requeued) == (1, 0)
    (lost,) = found.wrong.first
    assert lost.blobid == packs[1].key
    assert "known by --identity alone" in lost.detail
    verified(catalog, identity=key, code=7)
    assert pending(catalog) >= {blobid_of(one) for one in contents(40, 2)}
    assert len(list(iter_packs(catalog, TARGET))) == 2


def test_a_pack_that_somebody_has_sealed_for_others_ends_no_check(
    catalog: Connection, bucket: FakeBucket, tmp_path: Path, compared: Callable[..., Any]
) -> None:
    owner, other = Person.new(), Person.new()
    key, wrong = owner.file(tmp_path / "key"), other.file(tmp_path / "wrong")
    lost, kept, replaced = contents(30, 1), contents(30, 2), contents(30, 3)
    packs = [back_up(catalog, bucket, one, owner) for one in (lost, kept)]
    packs.append(back_up(catalog, bucket, replaced, Person.new()))  # As for a recipient of earlier.
    put_pack(bucket, contents(30, 4), Person.new())
    everything = lost + kept + replaced

    seen, kinds = compared(everything, apply=True, identity=key)
    assert kinds[Difference.UNREADABLE] == 30
    assert kinds[Difference.STRAY_REMOTE] == 2
    assert (seen.exit_code, seen.requeued) == (7, 0)
    assert not pending(catalog)

    del bucket.objects[packs[0].key]
    with pytest.raises(ConfigError, match="for other identities"):
        compared(everything, apply=True, identity=wrong)
    assert not pending(catalog)
    # What the third pack may have is not known to be lost.
    verified(catalog, identity=key, code=7)
    assert pending(catalog) < {blobid_of(one) for one in lost}
    assert len(list(iter_packs(catalog, TARGET))) == 3
    del bucket.objects[packs[2].key]
    verified(catalog, identity=key, code=7)
    assert pending(catalog) == {blobid_of(one) for one in lost + replaced}
    # Nothing that this host has stored is left: the planted pack tells nothing of the identity.
    del bucket.objects[packs[1].key]
    verified(catalog, identity=key, code=7)
    assert pending(catalog) == {blobid_of(one) for one in everything}


def test_a_large_blob_that_is_gone_is_told_beside_sealed_packs_without_an_identity(
    catalog: Connection, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntt_backup.audit.verify_packs.LARGE_BLOB", 100_000)
    large = random.Random(1).randbytes(150_000)
    Ledger(catalog, TARGET).record(register(catalog, [large]), [])
    prefix = blobid_of(large)[:2]
    beside = next(one for one in contents(2000, 3) if blobid_of(one).startswith(prefix))
    back_up(catalog, bucket, [beside], Person.new())

    assert verified(catalog, code=7).wrong.counts == {"remote-missing": 1}

    assert pending(catalog) == {blobid_of(large)}


def test_a_ledger_is_refilled_from_sealed_packs_by_an_identity(
    catalog: Connection, bucket: FakeBucket, tmp_path: Path, compared: Callable[..., Any]
) -> None:
    owner, blobs = Person.new(), contents(50, 1)
    key, other = owner.file(tmp_path / "key"), Person.new().file(tmp_path / "other")
    # The second one is what a run has left that died before it was recorded.
    packs = [put_pack(bucket, blobs, owner)[0] for _ in range(2)]
    register(catalog, blobs)

    for identity, said in ((None, "no identity is given"), (other, "for other identities")):
        with pytest.raises(ConfigError, match=said):
            compared(blobs, apply=True, identity=identity)
    assert len(pending(catalog)) == 50
    seen, _ = compared(blobs, apply=True, identity=key)

    assert seen.marked == 50
    assert not pending(catalog)
    assert {one.pack_id: one for one in iter_packs(catalog, TARGET)} == {
        one.pack_id: one for one in packs
    }
    assert compared(blobs, identity=key)[1] == {}
