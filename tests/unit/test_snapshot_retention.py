"""Which versions of a set go: never one that another needs, at no instant of the removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.config.signing_key import Origin
from ntt_backup.dump.retention import Retention
from ntt_backup.filestore.contract import StoredFile
from ntt_backup.snapshot import retention
from ntt_backup.snapshot.format.manifest import Header
from ntt_backup.snapshot.names import MANIFEST, MAP, FileName
from ntt_backup.snapshot.retention import ForgetPlan, Known, doubts, plan
from ntt_backup.snapshot.versions import Version, VersionFacts
from ntt_backup.wire.stored_names import begun

NOW = datetime(2026, 3, 31, 12, tzinfo=UTC)


def name(begun: datetime, number: int = 0) -> str:
    return f"{begun:%Y%m%dT%H%M%SZ}-{number:08x}"


def version(name: str, *, whole: bool = True, arrived: datetime | None = None) -> Version:
    files = [MANIFEST, MAP, "pack-00001"] if whole else ["pack-00001"]
    return Version(
        "db",
        name,
        tuple(
            StoredFile(str(FileName("db", name, one)), 10, arrived or begun(name)) for one in files
        ),
    )


def planned(
    versions: Sequence[Version], chains: Mapping[str, Sequence[str]], rule: Retention
) -> ForgetPlan:
    times = {one: begun(one) for one in chains}
    return plan(versions, Known(chains, times, times), rule, NOW)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Version], dict[str, list[str]]]:
    """Versions of which each is full, or builds on any before it; some were never finished."""
    versions: list[Version] = []
    chains: dict[str, list[str]] = {}
    hours = draw(st.lists(st.integers(1, 90 * 24), unique=True, max_size=20))
    for number, age in enumerate(sorted(hours, reverse=True)):
        one = version(name(NOW - timedelta(hours=age), number), whole=draw(st.integers(0, 4)) > 0)
        versions.append(one)
        if one.whole:
            parent = draw(st.sampled_from(["", *chains]))
            chains[one.name] = [*chains.get(parent, []), one.name]
    return versions, chains


rules = st.builds(Retention, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@given(histories(), rules)
def test_no_version_that_is_there_lacks_what_it_needs_at_any_instant_of_a_removal(
    history: tuple[list[Version], dict[str, list[str]]], rule: Retention
) -> None:
    versions, chains = history
    found = planned(versions, chains, rule)
    files = {file.name for one in versions for file in one.files}
    of = {one.name: {file.name for file in one.files} for one in versions}
    for removed in ("", *found.names):
        files.discard(removed)
        for one in chains:
            if str(FileName("db", one, MANIFEST)) in files:
                assert all(of[needed] <= files for needed in chains[one])
    # Nothing of what goes is left, and the newest always stays.
    left = {FileName.read(one).version for one in files}
    assert not left & {one.name for one in (*found.gone, *found.dead)}
    assert left >= set(list(chains)[-1:])
    assert len(found.names) == len(set(found.names))


def test_a_chain_goes_as_a_whole_and_one_that_is_needed_says_for_which() -> None:
    days = [name(NOW - timedelta(days=age)) for age in (9, 8, 7, 3, 2, 1)]
    first, second = days[:3], days[3:]
    chains = {one: list(part[: part.index(one) + 1]) for part in (first, second) for one in part}
    found = planned([version(one) for one in days], chains, Retention(1, 0, 0))
    assert [one.name for one in found.gone] == first
    assert [(one.name, why) for one, why in found.needed] == [(one, days[5]) for one in days[3:5]]
    assert found.size == 90


def test_what_was_never_finished_goes_when_no_take_can_be_at_it_any_more() -> None:
    old, full, young = (name(NOW - timedelta(hours=age)) for age in (50, 49, 3))
    running, newest = name(NOW - timedelta(hours=2)), name(NOW - timedelta(hours=1))
    chains = {one: [one] for one in (full, young, newest)}
    versions = [version(one, whole=one in chains) for one in (old, full, young, running, newest)]
    found = planned(versions, chains, Retention(1, 0, 0))
    assert [one.name for one in found.dead] == [old]
    assert [one.name for one in found.gone] == [full]
    # The take that is under way may build on it.
    assert [(one.name, why) for one, why in found.needed] == [(young, running)]


def test_what_was_never_finished_goes_in_time_after_a_clock_that_was_ahead() -> None:
    ahead = NOW + timedelta(days=365)
    first, left, second, running, third = (name(ahead + timedelta(seconds=n)) for n in range(5))
    times = {
        one: NOW - timedelta(hours=age) for one, age in ((first, 72), (second, 48), (third, 2))
    }
    came = {**times, left: NOW - timedelta(hours=60), running: NOW - timedelta(hours=5)}
    versions = [
        version(one, whole=one in times, arrived=came[one])
        for one in (first, left, second, running, third)
    ]
    known = Known({one: [one] for one in times}, times, times)
    found = plan(versions, known, Retention(1, 0, 0), NOW)
    assert [one.name for one in found.dead] == [left]
    assert [one.name for one in found.gone] == [first]


def test_the_first_version_of_a_set_may_take_weeks() -> None:
    running = version(name(NOW - timedelta(days=20)), whole=False)
    assert planned([running], {}, Retention(1, 0, 0)).names == []


def test_a_version_that_has_lost_another_is_not_counted_among_those_that_are_kept() -> None:
    sound, broken = name(NOW - timedelta(days=2)), name(NOW - timedelta(days=1))
    chains = {sound: [sound], broken: [name(NOW - timedelta(days=5)), broken]}
    found = planned([version(one) for one in chains], chains, Retention(1, 0, 0))
    assert (found.gone, found.dead) == ([], [])


def test_files_that_a_version_needs_stay_even_if_the_manifest_beside_them_is_lost() -> None:
    first, second = name(NOW - timedelta(days=2)), name(NOW - timedelta(days=1))
    versions = [version(first, whole=False), version(second)]
    found = planned(versions, {second: [first, second]}, Retention(1, 0, 0))
    assert found.names == []


def test_many_versions_of_strangers_within_an_hour_are_a_crowd() -> None:
    """And neither those before and behind it, nor those of this host."""
    minutes = {"a": 0, "b": 59, "c": 60, "d": 90, "e": 119, "f": 181, "ours": 95}
    found = [
        SimpleNamespace(
            version=SimpleNamespace(name=one, arrived=NOW + timedelta(minutes=after)),
            origin=Origin.OURS if one == "ours" else Origin.UNKNOWN,
        )
        for one, after in minutes.items()
    ]
    assert retention._crowd(cast(Any, found), 2) == {"a": 3, "b": 4, "c": 4, "d": 4, "e": 4}
    assert retention._crowd(cast(Any, found), 3) == dict.fromkeys("bcde", 4)
    assert retention._crowd(cast(Any, found), 4) == {}


def test_the_newest_version_before_the_oldest_that_is_doubtful_stays() -> None:
    """Whoever plants versions has none removed that was there before, whatever is taken later."""
    days = [name(NOW - timedelta(days=age)) for age in range(9, 0, -1)]
    good, planted, later = days[:3], days[3:6], days[6:]
    times = {one: begun(one) for one in days}
    known = Known(
        {one: [one] for one in days},
        times,
        times,
        frozenset({*good, *later}),
        dict.fromkeys(planted, "it is not of this host"),
    )
    found = plan([version(one) for one in days], known, Retention(1, 0, 0), NOW)
    assert [one.name for one in found.kept] == [days[8]]
    assert [(one.name, why) for one, why in found.needed] == [(good[2], planted[0])]
    assert [one.name for one in found.gone] == [*good[:2], *later[:2]]


def test_with_a_key_every_version_of_a_stranger_is_doubtful_and_without_one_few_are_not() -> None:
    found = [
        VersionFacts(
            version(one := name(NOW - timedelta(hours=age))),
            Header("db", one, "", (one,), "00" * 32, ("/etc",)),
            None,
        )
        for age in (6, 4, 2)
    ]
    assert doubts(found, signed=False) == []
    assert doubts(found, signed=True) == [(one, "not of this host") for one in found]
