"""A retention says which dumps or versions are kept: the last few, one a day, week, month, year.

A rule by age alone ("older than 30 days") empties the shelf when dumps begin to fail and nobody
notices. So nothing here looks at the clock: days, weeks, months and years are counted only where
they have a dump, and the newest is always kept.

Whoever may add to a target must not have good ones removed by that. The time in the name of a dump
is a word of whoever made it: dumps with made-up times, planted beside the good ones, would take all
places that a rule of days and weeks has. So of dumps only those count that are of this host, and
none whose name and arrival, by the target's clock, are more than a day apart (`could_begin`): it
neither takes the place of another one nor is removed, whatever the reason, a clock that was wrong
or a target that was copied.

The record of a dump that had expired may be put back, with anything of its size behind it. Numbers
only go up, and the newest dump never expires: so what is put back arrives after a dump with a
higher number (`replayed`), and does not count either. Nothing but a key proves the number in a
record; a dump that is known by the ledger alone is judged by its name, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, TypeVar

from ntt_backup.config.sections import DumpSettings, SnapshotSettings
from ntt_backup.config.signing_key import Origin, SigningKeys
from ntt_backup.dump.record import Stored
from ntt_backup.dump.store import restorable

T = TypeVar("T")
# How far the time that a dump or a version states may differ from its arrival.
LEEWAY: Final = timedelta(days=1)
# A dump gets its name when it is complete: one over a slow link takes days.
_LONGEST: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Retention:
    """How many are kept: the newest `last`, and the newest of each of so many days, weeks, ..."""

    last: int
    daily: int
    weekly: int
    monthly: int = 0
    yearly: int = 0

    @staticmethod
    def of(settings: DumpSettings | SnapshotSettings) -> Retention:
        """Returns what the settings say."""
        return Retention(
            settings.keep_last,
            settings.keep_daily,
            settings.keep_weekly,
            settings.keep_monthly,
            settings.keep_yearly,
        )


def kept(dumps: Mapping[T, datetime], rule: Retention) -> frozenset[T]:
    """Returns the dumps that a retention rule keeps. Its days, weeks, ... are those of UTC.

    The order of the dumps counts, not their times, since a clock may have been ahead once.
    dumps: the time at which each dump was begun, by name, oldest first.
    """
    newest_first = list(dumps)[::-1]

    def moment(name: T) -> datetime:
        return dumps[name].astimezone(UTC)

    return frozenset(
        [
            *newest_first[: max(1, rule.last)],
            *_one_each(newest_first, rule.daily, lambda name: moment(name).date()),
            *_one_each(newest_first, rule.weekly, lambda name: moment(name).isocalendar()[:2]),
            *_one_each(
                newest_first, rule.monthly, lambda name: (moment(name).year, moment(name).month)
            ),
            *_one_each(newest_first, rule.yearly, lambda name: moment(name).year),
        ]
    )


def could_begin(begun: datetime, first: datetime, last: datetime) -> bool:
    """Returns whether a dump or a version may have been begun at a time.

    The time must be neither long before the first arrival nor after the last one.
    """
    return first - LEEWAY <= begun <= last + LEEWAY


def replayed(there: Iterable[tuple[str, datetime, Any]]) -> dict[str, str]:
    """Returns what arrived after something newer, each with the newest that was there before.

    Args:
        there: name, arrival, and what is higher for newer ones.
    """
    after: dict[str, str] = {}
    newest: tuple[Any, str] | None = None
    for _, together in groupby(sorted(there, key=lambda one: one[1]), key=lambda one: one[1]):
        came = [(age, name) for name, _, age in together]
        if newest is not None:
            after |= {name: newest[1] for age, name in came if age < newest[0]}
        newest = max(came) if newest is None else max(newest, *came)
    return after


def newest_before(limit: datetime, arrived: Mapping[str, datetime]) -> str:
    """Returns the last that had arrived by a time; "" where none had."""
    earlier = [name for name, at in arrived.items() if at <= limit]
    return max(earlier, key=lambda name: (arrived[name], name), default="")


def _one_each(newest_first: Iterable[T], count: int, period: Callable[[T], object]) -> list[T]:
    newest: dict[object, T] = {}
    for name in newest_first:
        newest.setdefault(period(name), name)
    return list(newest.values())[:count]


# --- the dumps of a catalog -----------------------------------------------------------------------


def of_host(
    dumps: Iterable[Stored], keys: SigningKeys, ledger: Collection[tuple[str, str]]
) -> list[Stored]:
    """Returns the dumps that this host's key has signed, or its catalog has noted.

    ledger: the name and the SHA-256 of each dump that the catalog has noted.
    """
    return [
        one
        for one in dumps
        if one.origin(keys) is Origin.OURS
        or (one.record is not None and (one.name, one.record.sha256) in ledger)
    ]


def signed(dumps: Iterable[Stored], keys: SigningKeys) -> list[Stored]:
    """Returns the dumps that this host's key has signed, which are restored without being named.

    A host without a key cannot tell its own dumps from others, so all dumps are returned.
    """
    return [one for one in dumps if not keys or one.origin(keys) is Origin.OURS]


def doubts(ours: Iterable[Stored], keys: SigningKeys) -> dict[str, str]:
    """Returns those dumps of this host that take no place of another one, with the reason."""
    dumps = list(ours)
    said = {
        one.name: "the time in its name is more than a day off its arrival"
        for one in dumps
        if _off_clock(one)
    }
    # What the target does not tell when it came cannot have come late.
    told = [(one, at) for one in dumps if one.name not in said and (at := one.arrived) is not None]
    by_name = replayed((one.name, at, one.begun) for one, at in told)
    known = {one.name for one, _ in told if one.origin(keys) is not Origin.OURS}
    after = {name: newer for name, newer in by_name.items() if name in known}
    told = [(one, at) for one, at in told if one.name not in after]
    after |= replayed((one.name, at, one.number) for one, at in told)
    return said | {name: f"it has arrived after {after[name]}, a newer one" for name in after}


def staying(
    ours: Sequence[Stored], name: str, now: datetime, rule: Retention, keys: SigningKeys
) -> frozenset[str]:
    """Returns the dumps that the retention rule itself keeps.

    The dumps that they need must be kept, too. An unreadable dump is kept as long as a readable one
    would be, but other dumps are kept in its place as well. Neither is true of a record without a
    dump.

    ours: the dumps of the catalog that this host knows. name: the new dump, which arrived now.
    """
    doubtful = doubts(ours, keys)
    in_order = sorted(ours, key=lambda one: (_arrival(one), one.age))
    count = [one for one in in_order if one.name not in doubtful and one.size is not None]
    good = {one.name for one in restorable(ours)}
    arrived = {one.name: _arrival(one) for one in count}
    sound = {name: at for name, at in arrived.items() if name in good}
    stay = {*kept({**arrived, name: now}, rule), *kept({**sound, name: now}, rule), *doubtful}
    # What was there before the first of them: nobody who came later can have a hand in it.
    for first in [one for one in in_order if one.name in doubtful][:1]:
        stay.add(newest_before(_arrival(first), sound))
    return frozenset(stay - {""})


def _arrival(one: Stored) -> datetime:
    """Returns when a dump arrived, as far as that is known."""
    return one.arrived or one.begun


def _off_clock(one: Stored) -> bool:
    """Returns whether the clock of a dump's maker and that of the target do not agree about it."""
    seconds = one.record.duration_s if one.record is not None else 0.0
    took = timedelta(seconds=min(max(seconds, 0.0), _LONGEST.total_seconds()))
    return not could_begin(one.begun, _arrival(one) - took, _arrival(one))
