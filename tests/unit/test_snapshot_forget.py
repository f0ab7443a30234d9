"""`forget` may be interrupted anywhere: what is there can be restored, the rest goes later."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ntt_backup.cli.commands.snapshot import forget_lines
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.dump.retention import Retention
from ntt_backup.errors import ConfigError, RemoteDenied, RemoteUnreachable
from ntt_backup.filestore.contract import StoredFile
from ntt_backup.filestore.pins import put_pin, read_pins, remove_pins
from ntt_backup.formatting import moment
from ntt_backup.snapshot.format.manifest import END_BYTES
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.snapshot.origins import NO_KEYS, Origins
from ntt_backup.snapshot.retention import ForgetPlan, doubts, expire, plan_of
from ntt_backup.snapshot.verify import verify
from ntt_backup.snapshot.versions import (
    Version,
    facts,
    names_of_host,
    newest_of_host,
    versions,
)
from tests.helpers.blobs import noise
from tests.helpers.memory_store import MemoryStore
from tests.helpers.snapshots import VERSION, directory, put_version
from tests.unit.taker import KEYS, NOW, OTHERS, Taker

RULE = Retention(1, 0, 0)


@pytest.fixture
def taker(tmp_path: Path) -> Taker:
    return Taker(tmp_path / "tree", tmp_path / "cache")


@pytest.fixture
def taken(taker: Taker) -> Taker:
    """Two chains, a day apart: of three versions, and of two."""
    for number in range(5):
        taker.write("file", noise(70_000, number))
        taker.take(full=number in (0, 3))
        taker.now += timedelta(hours=12)
    return taker


def whole(taker: Taker) -> list[Version]:
    return [one for one in versions(taker.repository, "s") if one.whole]


def test_forget_removes_a_chain_that_no_kept_version_needs(taken: Taker) -> None:
    before = taken.repository.size
    gone = expire(taken.repository, "s", RULE, taken.now)
    assert len(gone.gone) == 3
    assert before - taken.repository.size == gone.size > 0
    assert len(versions(taken.repository, "s")) == 2
    assert verify(taken.repository, "s", 1.0).exit_code == 0
    assert expire(taken.repository, "s", RULE, taken.now).names == []


def test_versions_after_one_of_a_clock_that_was_ahead_count_as_their_own_days(taker: Taker) -> None:
    """Their names come behind its own, so all of them name its day."""
    taker.write("file", b"content")
    true = taker.now
    # The target's clock was right all the time.
    taker.repository.clock = lambda: true
    for day in (400, -399, *[1] * 9):
        taker.now += timedelta(days=day)
        true = max(true, taker.now if day < 400 else true)
        taker.take()
    found = whole(taker)
    headers = [one.header for one in facts(taker.repository, found) if one.header is not None]
    gone = expire(taker.repository, "s", Retention(1, 4, 0), taker.now, taker.origins)

    assert [one.name for one in gone.kept] == [one.name for one in found[-4:]]
    # What nobody can tell from a planted one does not go by itself.
    assert [one.name for one, _ in gone.doubtful] == [found[0].name]
    assert len({one.name[:8] for one in found}) == 1
    # The first of true days began a chain, which the others went on with.
    assert [bool(one.parent) for one in headers] == [False, False, *[True] * 9]
    told = forget_lines(gone)
    for one, header in zip(found, headers, strict=True):
        assert any(f"{one}  {moment(header.begun)}," in line for line in told)


def test_forget_interrupted_anywhere_leaves_only_versions_that_can_be_restored(
    taken: Taker,
) -> None:
    files = dict(taken.repository.files)
    steps = len(expire(taken.repository, "s", RULE, taken.now).names)
    for step in range(steps):
        taken.repository.files = dict(files)
        left = step

        def stop(verb: str, _: str) -> None:
            nonlocal left
            left -= verb == "remove"
            if left < 0:
                raise RemoteUnreachable("the link is down")

        taken.repository.before = stop
        with pytest.raises(RemoteUnreachable):
            expire(taken.repository, "s", RULE, taken.now)
        taken.repository.before = lambda *_: None
        assert len(taken.repository.files) == len(files) - step
        assert verify(taken.repository, "s", 1.0).exit_code == 0
        assert len(whole(taken)) == max(2, 5 - step)
        # The next one removes what this one has left.
        expire(taken.repository, "s", RULE, taken.now + timedelta(days=1))
        assert len(versions(taken.repository, "s")) == len(whole(taken)) == 2


def test_a_version_that_cannot_be_read_ends_no_forget_and_stays(taken: Taker) -> None:
    """Any byte that somebody adds is one, and so is a version of a newer program."""
    manifest = whole(taken)[1].manifest
    assert manifest is not None
    taken.repository.files[manifest.name] = b"of a newer program"
    files = dict(taken.repository.files)
    found = expire(taken.repository, "s", RULE, taken.now)
    versions = [*found.kept, *(one for one, _ in found.needed), *(one for one, _ in found.doubtful)]
    # It stays, and so does what it may build on.
    assert len(found.gone) == 1
    left = {file.name for one in versions for file in one.files}
    assert taken.repository.files == {name: files[name] for name in left}
    newest = whole(taken)[-1]
    assert verify(taken.repository, str(newest), 1.0).exit_code == 0


DAYS = 6
DAILY = Retention(2, 10, 0)


@pytest.fixture(params=[KEYS, NO_KEYS], ids=["key", "no key"])
def good(taker: Taker, request: pytest.FixtureRequest) -> Taker:
    """A full version of each day, which all are kept."""
    taker.keys = request.param
    for number in range(DAYS):
        taker.write("file", noise(70_000, number))
        taker.take(full=True)
        taker.now += timedelta(days=1)
    return taker


def plant(taker: Taker, tmp_path: Path, count: int, keys: SigningKeys = NO_KEYS) -> list[str]:
    """Adds empty versions with clocks over as many days, all within a minute."""
    enemy = Taker(tmp_path / "empty", tmp_path / "cache of the enemy")
    enemy.repository, enemy.keys = taker.repository, keys
    taker.repository.clock = lambda: taker.now
    names = []
    for number in range(count):
        enemy.now = taker.now - timedelta(days=number)
        names.append(enemy.take(full=True).version)
    return names


@pytest.mark.parametrize("keys", [NO_KEYS, OTHERS, KEYS], ids=["unsigned", "other", "stolen key"])
@pytest.mark.parametrize("forgetting", [False, True], ids=["host", "pruning host"])
def test_planted_versions_with_clocks_over_days_have_no_good_one_removed(
    good: Taker, tmp_path: Path, forgetting: bool, keys: SigningKeys
) -> None:
    """Also where the one that forgets knows nothing but the target and the key."""
    mine = {one.name for one in whole(good)}
    bad = plant(good, tmp_path, 20, keys)
    origins = Origins(good.keys) if forgetting else good.origins
    problems: list[str] = []
    found = expire(
        good.repository,
        "s",
        DAILY,
        good.now,
        origins,
        problem=lambda what, _: problems.append(what),
    )
    left = {one.name for one in whole(good)}
    assert left >= mine
    assert found.gone == []
    # They stay, too: what a stranger says is never a reason to remove.
    assert left >= set(bad)
    if keys != good.keys or keys == NO_KEYS:
        assert problems == ["20 doubtful versions"]
    # The next takes of this host go on, and have the good ones removed in their time.
    for day in range(12):
        good.now += timedelta(days=1)
        good.write("file", noise(70_000, 99 + day))
        good.take(full=True)
        expire(good.repository, "s", DAILY, good.now, good.origins)
    assert verify(good.repository, "s", 1.0).exit_code == 0
    assert len({one.name for one in whole(good)} - set(bad)) <= 10 + 2


def test_doubtful_versions_go_when_that_is_asked_for_and_count_when_the_target_is_trusted(
    taker: Taker, tmp_path: Path
) -> None:
    taker.keys = KEYS
    taker.write("file", b"content")
    taker.take(full=True)
    bad = plant(taker, tmp_path, 5)
    mine = [one.name for one in whole(taker) if one.name not in bad]

    def ask(**how: bool) -> ForgetPlan:
        return plan_of(taker.repository, "s", RULE, taker.now, taker.origins, **how)

    assert [one.name for one in ask().kept] == mine
    assert (ask().gone, len(ask().doubtful)) == ([], 5)
    dropped = ask(drop=True)
    assert {one.name for one in dropped.gone} == set(bad)
    assert [one.name for one in dropped.kept] == mine
    trusted = ask(trust=True)
    # The newest by its own word, and the newest of this host.
    assert {one.name for one in trusted.kept} == {*mine, bad[0]}
    assert (len(trusted.gone), trusted.doubtful) == (4, [])


def test_a_schedule_explains_how_many_versions_arrive_within_an_hour(taker: Taker) -> None:
    taker.write("file", b"content")
    for _ in range(12):
        taker.now += timedelta(minutes=9)
        taker.take()
    found = list(facts(taker.repository, whole(taker)))
    assert len(doubts(found, signed=False)) == 12
    assert doubts(found, signed=False, every=600) == []
    assert len(doubts(found, signed=False, every=3600)) == 12
    # What this host made is not among them.
    known = list(facts(taker.repository, whole(taker), taker.origins))
    assert doubts(known, signed=False) == []


def test_what_says_another_time_than_that_of_its_arrival_is_doubted(taker: Taker) -> None:
    taker.write("file", noise(1000))
    began = taker.now
    taker.take()
    one = whole(taker)[0]
    for first, last, doubted in ((0, 0, 0), (0, 300, 0), (23, 23, 0), (25, 25, 1), (-25, -25, 1)):
        for file in one.files:
            hours = last if file.name.endswith("manifest") else first
            taker.repository.arrived[file.name] = began + timedelta(hours=hours)
        found = list(facts(taker.repository, whole(taker)))
        assert len(doubts(found, signed=False)) == doubted, (first, last)


def files_of(taker: Taker, names: set[str]) -> dict[str, bytes]:
    return {
        name: content
        for name, content in taker.repository.files.items()
        if name.split("/")[1] in names
    }


def put(taker: Taker, files: dict[str, bytes]) -> None:
    """Adds files as a stranger who may add to the target does: they arrive now."""
    taker.now += timedelta(minutes=1)
    taker.repository.files |= files
    taker.repository.arrived |= dict.fromkeys(files, taker.now)


LAST = Retention(3, 0, 0)


@pytest.mark.parametrize("alone", [True, False], ids=["manifests", "whole versions"])
@pytest.mark.parametrize("keys", [KEYS, NO_KEYS], ids=["key", "no key"])
def test_expired_versions_that_are_put_back_have_no_good_one_removed(
    taker: Taker, keys: SigningKeys, alone: bool
) -> None:
    """They are genuine, and say a time of the same day; but newer ones had arrived before."""
    taker.keys = keys
    for number in range(8):
        taker.write("file", noise(70_000, number))
        taker.take(full=True)
    names = [one.name for one in whole(taker)]
    old = files_of(taker, set(names[:5]))
    good = files_of(taker, set(names[5:]))
    expire(taker.repository, "s", LAST, taker.now, taker.origins)
    assert taker.repository.files == good
    # Of the right size, which the manifest tells, and nothing else.
    put(
        taker,
        {
            name: content if name.endswith("/manifest") else bytes(len(content))
            for name, content in old.items()
            if name.endswith("/manifest") or not alone
        },
    )
    found = expire(taker.repository, "s", LAST, taker.now, taker.origins)
    assert [one.name for one in found.kept] == names[5:]
    assert [one.name for one, _ in found.doubtful] == names[:5]
    assert {why for _, why in found.doubtful} == {f"it has arrived after {names[-1]}, a newer one"}
    assert found.gone == []
    assert taker.repository.files.items() >= good.items()
    asked = plan_of(taker.repository, "s", LAST, taker.now, taker.origins, drop=True)
    assert [one.name for one in asked.gone] == names[:5]
    # They push nothing out later, either.
    for number in range(2):
        taker.write("file", noise(70_000, 50 + number))
        taker.take(full=True)
        found = expire(taker.repository, "s", LAST, taker.now, taker.origins)
        assert {one.name for one in found.gone} == {names[5 + number]}


def test_versions_for_another_target_of_this_host_take_no_place(tmp_path: Path) -> None:
    """They are signed by this host, whole, and newer than all that it has stored here."""
    here, there = (Taker(tmp_path / one, tmp_path / f"{one} cache") for one in ("a", "b"))
    for taker, target in ((here, "a"), (there, "b")):
        taker.keys, taker.target = KEYS, target
    here.write("file", noise(70_000))
    for _ in range(3):
        here.take(full=True)
    good = dict(here.repository.files)
    there.now = here.now
    for _ in range(5):
        there.take(full=True)
    here.now = there.now
    put(here, there.repository.files)
    for origins in (here.origins, Origins(KEYS, target="a")):
        found = expire(here.repository, "s", LAST, here.now, origins)
        assert found.gone == []
        assert {why for _, why in found.doubtful} == {"of another target of this host"}
        assert here.repository.files.items() >= good.items()
    # The same by the name of the other target.
    assert len(expire(here.repository, "s", LAST, here.now, there.origins).doubtful) == 3


@pytest.mark.parametrize("lacks", ["pack-00001", "map"])
def test_a_version_that_lacks_a_file_takes_the_place_of_no_whole_one(
    taker: Taker, lacks: str
) -> None:
    for number in range(3):
        taker.write("file", noise(70_000, number))
        taker.take(full=number < 2)
    first, second, third = (one.name for one in whole(taker))
    torn = f"s/{third if lacks == 'map' else second}/{lacks}"
    taker.repository.files[torn] = taker.repository.files[torn][:-1]
    found = expire(taker.repository, "s", RULE, taker.now, taker.origins)
    # The last one is kept by its place, and the one that can be restored instead of it.
    sound = second if lacks == "map" else first
    assert {one.name for one in found.kept} == {sound, third}


def test_a_trailer_that_is_longer_than_the_end_that_is_fetched_is_read_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repository = put_version(MemoryStore(), [directory("a")])
    [known] = facts(repository, versions(repository, "etc"))
    assert known.trailer is not None
    monkeypatch.setattr("ntt_backup.snapshot.versions._END", END_BYTES)
    assert list(facts(repository, versions(repository, "etc"))) == [known]


def test_a_version_without_a_manifest_or_with_an_empty_one_has_no_trailer() -> None:
    empty = StoredFile(f"etc/{VERSION}/manifest", 0, NOW)
    without = [Version("etc", VERSION, files) for files in ((), (empty,))]
    [known] = facts(MemoryStore(), without)
    assert known.trailer is None
    assert known.problem


def _denied(verb: str, name: str) -> None:
    raise RemoteDenied("no get")


def test_the_names_of_this_host_are_those_that_it_made_and_the_newest_that_it_signed(
    taker: Taker, tmp_path: Path
) -> None:
    """What others have planted, also under a name that this host gave, is not among them."""
    taker.keys = KEYS
    taker.write("file", b"content")
    mine = [taker.take(full=True).version for _ in range(3)]
    by_sum, by_key = taker.origins, Origins(KEYS)

    def found(origins: Origins) -> set[str]:
        return set(names_of_host(taker.repository, "s", origins))

    assert found(by_sum) == {*mine}
    assert found(by_key) == {mine[-1]}
    taker.keys = OTHERS
    theirs = Taker(tmp_path / "other", tmp_path / "other cache")
    theirs.keys, theirs.now = OTHERS, taker.now
    theirs.write("file", b"evil")
    planted = theirs.take(full=True).version
    put(taker, theirs.repository.files)
    assert found(by_sum) == {*mine}
    assert found(by_key) == {mine[-1]}
    assert found(Origins(NO_KEYS)) == set()
    whole = versions(taker.repository, "s")
    taker.repository.before = _denied
    with pytest.raises(RemoteDenied):
        newest_of_host(taker.repository, whole, by_key)
    taker.repository.before = lambda *_: None
    # The newest is another's under a name of ours.
    name, of_theirs = f"s/{mine[-1]}/manifest", f"s/{planted}/manifest"
    taker.repository.files[name] = taker.repository.files[of_theirs]
    assert mine[-1] not in found(by_sum)


def pin(taker: Taker, version: Version, keys: SigningKeys = KEYS) -> str:
    """Pins a version by the keys of a host; returns the name of the pin."""
    before = {*taker.repository.files}
    put_pin(taker.repository, SNAPSHOTS, version.path, keys, "why")
    (name,) = {*taker.repository.files} - before
    return name


@pytest.fixture
def days(taker: Taker) -> Taker:
    """Two chains of this host with a key, a day apart, each of two versions."""
    taker.keys = KEYS
    for number in range(4):
        taker.write("file", noise(70_000, number))
        taker.take(full=number in (0, 2))
        taker.now += timedelta(hours=12)
    return taker


def gone(taker: Taker, **how: bool) -> list[str]:
    """The versions that would be removed, of which the last one alone is to be kept."""
    found = plan_of(taker.repository, "s", RULE, taker.now, taker.origins, **how)
    return [one.name for one in found.gone]


def test_a_pinned_version_stays_with_what_it_needs_and_takes_no_place(days: Taker) -> None:
    first, second, third, last = whole(days)
    assert gone(days) == [first.name, second.name]
    pin(days, second)
    found = expire(days.repository, "s", RULE, days.now, days.origins)
    assert [*found.gone] == []
    assert found.pinned == {second.name}
    assert [one.name for one in found.kept] == [second.name, last.name]
    assert [one.name for one, _ in found.needed] == [first.name, third.name]
    assert any(f"{second}" in line and ", pinned" in line for line in forget_lines(found))
    assert verify(days.repository, "s", 1.0).exit_code == 0
    # It stays on a new machine that has the key, and on one whose key is lost.
    for keys in (KEYS, NO_KEYS):
        origins = Origins(keys)
        assert plan_of(days.repository, "s", RULE, days.now, origins, trust=True).gone == []
    # And whatever else is removed.
    assert second.name in {one.name for one in whole(days)}
    remove_pins(days.repository, [name for one in whole(days) for name in one.pins])
    assert gone(days) == [first.name, second.name]


def test_a_pin_that_this_host_has_not_signed_keeps_nothing_and_is_told(days: Taker) -> None:
    """Whoever may add files could fill the target otherwise."""
    first, second, *_ = whole(days)
    strange = [pin(days, first, OTHERS)]
    # One that this host has signed for another version, and one that it did not sign.
    good = pin(days, second)
    days.repository.files[f"{first.path}/{good.rpartition('/')[2]}"] = b""
    days.repository.files[f"{first.path}/pin-{KEYS.name}-{'0' * 64}"] = b""
    days.repository.remove([good])
    told: list[tuple[str, str]] = []
    found = expire(
        days.repository,
        "s",
        RULE,
        days.now,
        days.origins,
        problem=lambda what, why: told.append((what, why)),
    )
    assert [one.name for one in found.gone] == [first.name, second.name]
    assert told[0][0] == "3 pins"
    assert not {*strange} & {*days.repository.files}


def test_a_pin_whose_content_is_overwritten_keeps_its_version(days: Taker) -> None:
    """A writer to a bucket that is not append-only can do that, and shorten no retention by it."""
    first = whole(days)[0]
    name = pin(days, first)
    for content in (b"", b"{", b'{"host": "a", "reason": "b", "signature": "c"}', b"[" * 4000):
        days.repository.files[name] = content
        assert read_pins(days.repository, SNAPSHOTS, [name], KEYS) == {first.path: ""}
        assert first.name not in gone(days)


def test_a_doubtful_version_that_is_pinned_is_not_dropped(days: Taker) -> None:
    days.keys = OTHERS  # The host has another key now.
    second = whole(days)[1]
    assert second.name in gone(days, drop=True)
    pin(days, second, OTHERS)
    assert gone(days, drop=True) == [] == gone(days)


def test_a_host_without_a_key_pins_nothing(days: Taker) -> None:
    with pytest.raises(ConfigError, match="there is none"):
        pin(days, whole(days)[0], NO_KEYS)
    with pytest.raises(ConfigError, match="too long"):
        put_pin(days.repository, SNAPSHOTS, whole(days)[0].path, KEYS, "x" * 301)
    put_pin(days.repository, SNAPSHOTS, whole(days)[0].path, KEYS, "\U0001f512" * 300)
