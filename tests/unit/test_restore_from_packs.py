"""Restore from packs: whole, in part, past damage, with few requests."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.cli.commands.restore import lines
from ntt_backup.client.throttle import SharedPace
from ntt_backup.config.bandwidth_timetable import parse_timetable
from ntt_backup.errors import BackupError, ConfigError, RemoteDenied, RemoteUnreachable
from ntt_backup.objects import s3
from ntt_backup.objects.bucket import ObjectArchived, ObjectMissing
from ntt_backup.pack.age_encryption import CHUNK, HEAD, SEALED_CHUNK
from ntt_backup.pack.format import Entry
from ntt_backup.pack.names import PackKey, blob_key
from ntt_backup.packstore import marker
from ntt_backup.restore.blobs import Restored, Thaw, Wanted, restore
from ntt_backup.wire.framing import FORMAT
from tests.helpers.blobs import Person, tree
from tests.helpers.bucket_packs import (
    blobid_of,
    bucket_settings,
    by_path,
    flip,
    packs_in,
    plant_pack,
    put_large,
    put_pack,
)
from tests.helpers.fake_bucket import FakeBucket
from tests.helpers.waiting import PATIENCE

MIB = 1 << 20


def blobs(count: int, seed: int = 1, most: int = 30_000) -> list[bytes]:
    chance = random.Random(seed)
    return [
        chance.randbytes(chance.choice((0, 1, 700, chance.randrange(most)))) for _ in range(count)
    ]


def run(tmp_path: Path, wanted: Wanted, **changes: Any) -> Restored:
    options: dict[str, Any] = {
        "workers": 2,
        "trust_size": False,
        "on_progress": lambda done: None,
        "on_outage": lambda error, seconds: None,
        **changes,
    }
    settings = bucket_settings(identity=options.pop("identity", None))
    return restore(settings, tmp_path / "back", wanted, **options)


def reasons(done: Restored) -> dict[str, str]:
    return {one.blobid: str(one.reason) for one in done.wrong.first}


def chosen(contents: Iterable[bytes]) -> Wanted:
    return Wanted(blobids=[blobid_of(one) for one in contents])


def test_everything_comes_back_and_a_second_call_fetches_nothing(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    several = [blobs(300, 1), blobs(300, 2), [random.Random(3).randbytes(20 * MIB)]]
    for some in several:
        put_pack(bucket, some)
    large = random.Random(4).randbytes(40 * MIB)
    put_large(bucket, large)
    everything = {*(one for some in several for one in some), large}

    parts = []
    done = run(tmp_path, Wanted(), on_progress=lambda done: parts.append(done.part))

    assert tree(tmp_path / "back") == by_path(everything)
    assert not done.wrong
    assert done.bytes >= sum(map(len, everything))
    assert done.part == pytest.approx(1)
    again = run(tmp_path, Wanted())
    assert (again.restored, again.bytes) == (0, 0)


def test_nothing_comes_from_a_bucket_without_a_store_and_that_is_an_error(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    with pytest.raises(RemoteUnreachable, match="the target holds no store of packs"):
        run(tmp_path, Wanted())
    marker.make(packs_in(bucket))
    assert run(tmp_path, Wanted()).exit_code == 0


def test_a_prefix_and_a_list_need_only_the_packs_that_may_hold_them(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    contents = blobs(2000, most=200)
    by_byte: dict[str, list[bytes]] = {}
    for one in contents:
        by_byte.setdefault(blobid_of(one)[:2], []).append(one)
    for some in by_byte.values():
        put_pack(bucket, some)
    wide = blobs(50, seed=9)
    put_pack(bucket, wide)
    prefix = blobid_of(contents[0])[:3]
    bucket.requests.clear()

    run(tmp_path, Wanted(prefix))

    expected = [one for one in {*contents, *wide} if blobid_of(one).startswith(prefix)]
    assert tree(tmp_path / "back") == by_path(expected)
    assert bucket.requests.total() <= 7
    some = random.Random(1).sample(contents, 5)
    absent = "0" * 64
    names = [*(blobid_of(one) for one in some), absent]
    done = run(tmp_path, Wanted(blobids=names))
    assert tree(tmp_path / "back") == by_path([*expected, *some])
    assert reasons(done) == {absent: "remote-missing"}


def test_four_thousand_small_files_of_a_prefix_take_few_requests(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    contents = {random.Random(number).randbytes(number % 6000) for number in range(4000)}
    put_pack(bucket, contents)
    bucket.requests.clear()
    run(tmp_path, Wanted("a"))
    assert bucket.requests.total() <= 20
    run(tmp_path, Wanted())
    assert tree(tmp_path / "back") == by_path(contents)
    assert bucket.requests.total() <= 30


def test_what_one_pack_has_not_right_is_taken_from_another(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    both, once = [random.Random(1).randbytes(20_000)], blobs(100, seed=3)
    first, entries = put_pack(bucket, both + once)
    put_pack(bucket, both + blobs(10, seed=4))
    place = {entry.digest.hex(): entry.offset for entry in entries}
    bad = max(once, key=len)
    flip(bucket, first.key, place[blobid_of(both[0])] + 7)
    flip(bucket, first.key, place[blobid_of(bad)] + 7)

    done = run(tmp_path, chosen([*both, *once]))

    assert reasons(done) == {blobid_of(bad): "remote-corrupt"}
    assert done.exit_code == 7
    assert tree(tmp_path / "back") == by_path(one for one in [*both, *once] if one != bad)


def test_packs_that_cannot_be_read_are_named_and_all_others_restored(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    good = blobs(100)
    put_pack(bucket, good)
    damaged, _ = put_pack(bucket, blobs(100, seed=2))
    flip(bucket, damaged.key, damaged.size - 1536 + 100)
    short, _ = put_pack(bucket, blobs(100, seed=3))
    bucket.objects[short.key] = bucket.objects[short.key][:-700]
    frozen, _ = put_pack(bucket, blobs(100, seed=4))
    bucket.archived.add(frozen.key)
    keys: list[str] = []

    done = run(tmp_path, Wanted(), on_archived=keys.append)

    assert reasons(done) == {damaged.key: "remote-corrupt", short.key: "remote-corrupt"}
    assert keys == [frozen.key]
    assert (done.archived, done.archived_bytes, done.exit_code) == (1, frozen.size, 7)
    assert tree(tmp_path / "back") == by_path(good)
    bucket.archived.clear()
    run(tmp_path, Wanted())
    assert tree(tmp_path / "back") == by_path([*good, *blobs(100, seed=4)])


def test_archived_packs_are_thawed_on_request_and_restored_later(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    put_pack(bucket, blobs(50))
    frozen, _ = put_pack(bucket, blobs(100, seed=4))
    large = random.Random(5).randbytes(MIB)
    alone = blob_key(put_large(bucket, large))
    bucket.archived |= {frozen.key, alone}

    asked = run(tmp_path, Wanted(), thaw=Thaw(3, "bulk"))
    assert bucket.thawing == {frozen.key: (3, "bulk"), alone: (3, "bulk")}
    assert (asked.archived, asked.thawing, asked.exit_code) == (2, 2, 7)
    assert "is thawing them, which takes hours" in lines(asked, tmp_path)[-1]
    assert run(tmp_path, chosen([large])).archived_bytes == frozen.size + len(large)
    # That it is under way is no error, and no failure of anything else.
    again = run(tmp_path, Wanted(), thaw=Thaw(5, "bulk"))
    assert (again.thawing, again.right, again.restored) == (2, asked.restored, 0)
    bucket.archived.clear()
    assert run(tmp_path, Wanted(), thaw=Thaw(5, "bulk")).exit_code == 0
    assert tree(tmp_path / "back") == by_path([*blobs(50), *blobs(100, seed=4), large])


@pytest.mark.parametrize("trouble", [ObjectMissing, ObjectArchived])
def test_what_cannot_be_thawed_any_more_ends_no_restore(
    bucket: FakeBucket, tmp_path: Path, trouble: type[Exception]
) -> None:
    frozen, _ = put_pack(bucket, blobs(50))
    put_pack(bucket, blobs(50, 2))
    bucket.archived.add(frozen.key)

    def refuse(verb: str, key: str) -> None:
        if verb == "thaw":
            raise trouble(key)

    bucket.before = refuse
    done = run(tmp_path, Wanted(), thaw=Thaw(3, "bulk"))

    assert (done.archived, done.thawing, done.exit_code) == (1, 0, 7)
    assert tree(tmp_path / "back") == by_path(blobs(50, 2))


def test_a_list_needs_no_pack_whose_blobs_others_have(bucket: FakeBucket, tmp_path: Path) -> None:
    wanted = blobs(100)
    frozen, _ = put_pack(bucket, [*wanted, b"one more"])
    put_pack(bucket, wanted)
    bucket.archived.add(frozen.key)
    assert run(tmp_path, chosen(wanted), thaw=Thaw(3, "bulk")).exit_code == 0
    assert bucket.thawing == {}


@pytest.mark.parametrize("place", [100, -1600], ids=["trailer", "offset in the table"])
def test_a_damaged_pack_is_not_needed_where_others_have_its_blobs(
    bucket: FakeBucket, tmp_path: Path, place: int
) -> None:
    old, again = blobs(300, most=3000), set(blobs(300, most=3000))
    damaged, entries = put_pack(bucket, old)
    at = damaged.size - 1536 + place
    if place < 0:  # Between the digests of two blobs.
        at = bucket.objects[damaged.key].rindex(entries[-1].digest) + 34
    flip(bucket, damaged.key, at)
    half = {content for content in again if blobid_of(content) < "8"}
    put_pack(bucket, [*half, b"new"])

    assert run(tmp_path, Wanted()).exit_code == 7
    put_pack(bucket, [*(again - half), b"newer"])
    done = run(tmp_path, Wanted())

    assert (done.exit_code, done.not_needed) == (0, [damaged.key])
    assert damaged.key in lines(done, tmp_path)[-1]
    assert tree(tmp_path / "back") == by_path([*again, b"new", b"newer"])


def test_tables_are_kept_and_a_damaged_cache_is_no_worse_than_none(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    contents = blobs(300)
    put_pack(bucket, contents)
    run(tmp_path, chosen(contents[:1]))
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept
    bucket.requests.clear()
    run(tmp_path, chosen(contents[:20]))
    assert bucket.requests["get_range"] == 2  # The marker; its table is at hand.
    for path in kept:
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))

    run(tmp_path, chosen(contents))

    assert tree(tmp_path / "back") == by_path(contents)


def test_outages_are_waited_for_once_the_bucket_was_reached(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    contents = blobs(300)
    put_pack(bucket, contents)
    calls = 0

    def every_third(verb: str, key: str) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RemoteUnreachable("the object store is away")

    bucket.before = every_third
    told: list[BackupError] = []
    run(tmp_path, Wanted(), on_outage=lambda error, seconds: told.append(error))
    assert tree(tmp_path / "back") == by_path(contents)
    assert told

    def always(verb: str, key: str) -> None:
        raise RemoteUnreachable("the object store is away")

    bucket.before = always
    with pytest.raises(RemoteUnreachable):
        run(tmp_path, Wanted())
    bucket.before = lambda verb, key: None

    def denied(verb: str, key: str) -> None:
        if verb == "get_range":
            raise RemoteDenied("no right")

    bucket.before = denied
    (tmp_path / "back").rename(tmp_path / "earlier")
    with pytest.raises(RemoteDenied):
        run(tmp_path, Wanted())


def test_what_the_bucket_has_and_does_not_give_is_left_out(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    shared, alone = blobs(3, most=20_000), blobs(100, seed=2)
    stuck, _ = put_pack(bucket, alone + shared)
    put_pack(bucket, shared)
    large = put_large(bucket, random.Random(1).randbytes(20 * MIB))

    asked: Counter[str] = Counter()

    def refuse(verb: str, key: str) -> None:
        asked[key] += verb == "get_range"
        if large in key or (key == stuck.key and asked[key] > 1):
            raise RemoteUnreachable("the object store answers 500")

    bucket.before = refuse
    done = run(tmp_path, Wanted())
    expected = {blobid_of(one) for one in alone if one and one not in shared}
    assert reasons(done) == dict.fromkeys({*expected, large}, "remote-unreadable")
    assert by_path(shared).items() <= tree(tmp_path / "back").items()
    assert reasons(run(tmp_path, Wanted(blobids=[large]))) == {large: "remote-unreadable"}


@pytest.mark.parametrize("damaged", ["object", "pack"])
def test_a_large_blob_that_is_also_in_a_pack_is_restored_from_what_is_right(
    bucket: FakeBucket, tmp_path: Path, damaged: str
) -> None:
    large = random.Random(4).randbytes(20 * MIB)
    put_large(bucket, large)
    pack, (entry,) = put_pack(bucket, [large])
    key = blob_key(blobid_of(large)) if damaged == "object" else pack.key
    flip(bucket, key, entry.offset + 9)
    for wanted in (Wanted(), Wanted(blobids=[blobid_of(large)])):
        done = run(tmp_path, wanted)
        assert (reasons(done), tree(tmp_path / "back")) == ({}, by_path([large]))
        shutil.rmtree(tmp_path / "back")


@pytest.mark.parametrize("good", ["pack", "sealed pack", "object"])
@pytest.mark.parametrize("way", ["all", "prefix", "list"])
def test_a_blob_that_a_planted_pack_names_is_restored_from_each_other_place(
    bucket: FakeBucket, tmp_path: Path, good: str, way: str
) -> None:
    owner, contents = Person.new(), [*blobs(300), random.Random(2).randbytes(5 * MIB)]
    many = set(contents)
    if good == "object":
        for one in many:
            put_large(bucket, one)
    else:
        put_pack(bucket, many, owner if good == "sealed pack" else None)
    for more in (b"first", b"second", b"third"):
        plant_pack(bucket, [*many, more])
    damaged = b"in one place, and wrong there"
    plant_pack(bucket, [damaged])
    wanted = {
        "all": Wanted(),
        "prefix": Wanted(blobid_of(contents[-1])[:1]),
        "list": chosen([*many, damaged]),
    }[way]
    expected = {one for one in many if blobid_of(one).startswith(wanted.prefix)}

    done = run(tmp_path, wanted, identity=owner.file(tmp_path / "key"))

    assert tree(tmp_path / "back") == by_path(expected)
    assert (done.restored, done.right) == (len(expected), 0)
    if way != "prefix":
        assert reasons(done)[blobid_of(damaged)] == "remote-corrupt"
    assert not reasons(done).keys() & {blobid_of(one) for one in many}


def test_a_pack_that_must_be_thawed_is_told_where_a_planted_one_names_its_blob(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    wanted = blobs(20, most=200)
    good, _ = put_pack(bucket, wanted)
    plant_pack(bucket, [*wanted, b"beside"])
    bucket.archived.add(good.key)
    assert run(tmp_path, chosen(wanted), thaw=Thaw(3, "bulk")).archived == 1
    assert bucket.thawing.keys() == {good.key}


def test_a_blob_is_read_in_pieces_from_the_place_that_a_planted_pack_hides(
    bucket: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes that somebody plants must not take the memory of the largest blob."""
    large = random.Random(1).randbytes(40 * MIB)
    put_pack(bucket, [large])
    plant_pack(bucket, [large, b"beside"])
    most, get_range = 0, bucket.get_range

    def measured(key: str, start: int, length: int) -> bytes:
        nonlocal most
        most = max(most, length)
        return get_range(key, start, length)

    monkeypatch.setattr(bucket, "get_range", measured)
    run(tmp_path, Wanted())
    assert tree(tmp_path / "back") == by_path([large])
    assert most <= 16 * MIB


def test_blobs_that_several_packs_have_are_counted_once(bucket: FakeBucket, tmp_path: Path) -> None:
    contents = set(blobs(300, most=300))
    for more in (b"first", b"second", b"third"):
        put_pack(bucket, [*contents, more])
    done = run(tmp_path, Wanted(), workers=1)
    assert (done.restored, done.right) == (len(contents) + 3, 0)


def test_a_pack_with_other_blobs_than_its_name_says_is_damaged(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    """Else it would stand for the blobs of a damaged pack where nobody reads it."""
    contents = blobs(300, most=300)
    good, entries = put_pack(bucket, contents)
    flip(bucket, good.key, bucket.objects[good.key].rindex(entries[-1].digest) + 34)
    own = PackKey.read(plant_pack(bucket, [*contents, b"beside"]))
    assert own is not None
    planted = own._replace(low=own.low, high=own.low).key
    bucket.objects[planted] = bucket.objects.pop(own.key)
    prefix = next(one for one in map(blobid_of, contents) if one[:2] != own.low[:2])[:2]
    assert run(tmp_path, Wanted(prefix)).exit_code == 7
    done = run(tmp_path, Wanted())
    assert done.not_needed == []
    assert reasons(done) == {good.key: "remote-corrupt", planted: "remote-corrupt"}


def test_answers_that_break_off_are_asked_for_again(
    bucket: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = blobs(300)
    put_pack(bucket, contents)
    real, calls = bucket.get_range, 0

    def short(key: str, start: int, length: int) -> bytes:
        nonlocal calls
        calls += 1
        found = real(key, start, length)
        return found[: len(found) // 2] if calls % 2 else found

    monkeypatch.setattr(bucket, "get_range", short)
    assert not run(tmp_path, Wanted()).wrong
    assert tree(tmp_path / "back") == by_path(contents)


def test_a_large_blob_is_resumed_and_a_wrong_part_fetched_again(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    content = random.Random(1).randbytes(70 * MIB)
    blobid = put_large(bucket, content)
    read = 0

    def stop(verb: str, key: str) -> None:
        nonlocal read
        read += verb == "get_range" and key != FORMAT
        if read > 2:
            raise RemoteDenied("the key was revoked")

    bucket.before = stop
    with pytest.raises(RemoteDenied):
        run(tmp_path, Wanted())
    bucket.before = lambda verb, key: None
    (part,) = (tmp_path / "back" / ".ntt-restore" / "partial").iterdir()
    assert part.stat().st_size == 32 * MIB

    done = run(tmp_path, Wanted())

    assert done.bytes == 38 * MIB
    assert tree(tmp_path / "back") == by_path([content])
    (tmp_path / "back" / blobid[:2] / blobid[2:4] / blobid).unlink()
    flip(bucket, blob_key(blobid), 1)
    assert reasons(run(tmp_path, Wanted())) == {blobid: "remote-corrupt"}


def test_a_large_blob_that_is_damaged_in_its_pack_leaves_no_part(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    """A blob of a pack is always read from its beginning: no later call resumes a part of it."""
    content = random.Random(1).randbytes(70 * MIB)
    pack, _ = put_pack(bucket, [content])

    def lose_the_end(verb: str, key: str) -> None:
        if verb == "get_range" and key == pack.key and bucket.requests["get_range"] > 3:
            raise ObjectMissing(key)

    bucket.before = lose_the_end
    done = run(tmp_path, Wanted())

    assert reasons(done) == {blobid_of(content): "remote-unreadable"}
    assert done.bytes > 0
    assert not (tmp_path / "back").exists()


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("size", [MIB, 10])
def test_a_part_that_is_longer_than_its_object_is_fetched_again(
    bucket: FakeBucket, tmp_path: Path, size: int
) -> None:
    """The object is right, or was cut."""
    content = random.Random(1).randbytes(MIB)
    blobid = put_large(bucket, content)
    bucket.objects[blob_key(blobid)] = content[:size]
    partial = tmp_path / "back" / ".ntt-restore" / "partial"
    partial.mkdir(parents=True)
    (partial / blobid).write_bytes(bytes(2 * MIB))

    done = run(tmp_path, Wanted())

    right = size == len(content)
    assert reasons(done) == ({} if right else {blobid: "remote-corrupt"})
    assert tree(tmp_path / "back") == (by_path([content]) if right else {})
    assert bucket.requests["get_range"] <= 2


# --- sealed packs ---------------------------------------------------------------------------------


def test_what_is_sealed_comes_back_by_an_identity(bucket: FakeBucket, tmp_path: Path) -> None:
    owner = Person.new()
    sealed, plain = blobs(300, 1), blobs(50, 2)
    large = random.Random(3).randbytes(20 * MIB)
    for some in (sealed, [large]):
        put_pack(bucket, some, owner)
    known = [*plain, *sealed[:40]]
    put_pack(bucket, known)
    keys = {"identity": owner.file(tmp_path / "key")}

    done = run(tmp_path, Wanted(), **keys)

    assert not done.wrong
    assert tree(tmp_path / "back") == by_path([*sealed, *plain, large])
    wanted = sealed[40:60]
    for name in ("first", "by the cache"):
        (tmp_path / name).mkdir()
        done = run(tmp_path / name, chosen(wanted), **keys)
        assert not done.wrong
        assert tree(tmp_path / name / "back") == by_path(wanted)
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    kept = b"".join(path.read_bytes() for path in files)
    assert kept
    secret = {blobid_of(one) for one in sealed} - {blobid_of(one) for one in known}
    assert not [one for one in secret if bytes.fromhex(one) in kept]


def test_without_the_right_identity_one_line_says_so(bucket: FakeBucket, tmp_path: Path) -> None:
    put_pack(bucket, blobs(10), Person.new())
    stranger = Person.new().file(tmp_path / "key")

    with pytest.raises(ConfigError, match="no identity is given") as missing:
        run(tmp_path, Wanted())
    with pytest.raises(ConfigError, match="for other identities than those in") as wrong:
        run(tmp_path, Wanted(), identity=stranger)

    assert (missing.value.exit_code, wrong.value.exit_code) == (2, 2)


def test_a_pack_that_is_sealed_for_others_costs_that_pack_alone(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    owner, good = Person.new(), blobs(20, 1)
    put_pack(bucket, good, owner)
    foreign, _ = put_pack(bucket, blobs(20, 2), Person.new())

    done = run(tmp_path, Wanted(), identity=owner.file(tmp_path / "key"))

    assert reasons(done) == {foreign.key: "remote-unreadable"}
    assert tree(tmp_path / "back") == by_path(good)


def test_a_damaged_piece_costs_the_blobs_in_it(bucket: FakeBucket, tmp_path: Path) -> None:
    owner = Person.new()
    contents = [random.Random(seed).randbytes(50_000) for seed in range(40)]
    pack, entries = put_pack(bucket, contents, owner)
    hit = {one.digest.hex() for one in entries if touches(one, 20)}
    flip(bucket, pack.key, HEAD + 20 * SEALED_CHUNK + 5)

    done = run(tmp_path, Wanted(), identity=owner.file(tmp_path / "key"))

    assert reasons(done) == dict.fromkeys(hit, "remote-corrupt")
    right = [one for one in contents if blobid_of(one) not in hit]
    assert tree(tmp_path / "back") == by_path(right)


def touches(entry: Entry, piece: int) -> bool:
    """Whether a byte of it lies in that piece."""
    return entry.offset // CHUNK <= piece <= (entry.offset + entry.stored - 1) // CHUNK


def test_a_limit_is_one_for_all_that_comes_from_the_bucket(
    bucket: FakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pack(bucket, [b"content"])
    paces: list[SharedPace | None] = []

    def open_bucket(_remote: object, _pace: object, fetch: SharedPace | None) -> FakeBucket:
        paces.append(fetch)
        return bucket

    monkeypatch.setattr(s3, "open_bucket", open_bucket)
    assert run(tmp_path, Wanted(), bwlimit=parse_timetable("1KiB")).restored == 1
    assert run(tmp_path, Wanted()).right == 1

    limited, unlimited = paces
    assert limited is not None
    assert limited.pause() == 0
    assert 0 < limited.take_now(1 << 20) <= 4096
    assert unlimited is None
