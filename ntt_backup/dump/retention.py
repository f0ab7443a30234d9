"""A retention says which dumps or versions are kept: the last few, one a day, one a week. Pure.

A rule by age alone ("older than 30 days") empties the shelf when dumps begin to fail and nobody
notices. So nothing here looks at the clock: days and weeks are counted only where they have a dump,
and the newest is always kept.

Whoever may add to a target must not have good ones removed by that. What arrived at another time
than it says (`could_begin`), and what had expired and was put back (`replayed`), takes no place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, TypeVar

from ntt_backup.config.sections import DumpSettings, SnapshotSettings

T = TypeVar("T")
# How far the time that a dump or a version states may differ from its arrival.
LEEWAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Retention:
    """How many are kept: the newest `last`; the newest of each of `daily` days, `weekly` weeks."""

    last: int
    daily: int
    weekly: int

    @staticmethod
    def of(settings: DumpSettings | SnapshotSettings) -> Retention:
        """Returns what the settings say."""
        return Retention(settings.keep_last, settings.keep_daily, settings.keep_weekly)


def kept(dumps: Mapping[T, datetime], rule: Retention) -> frozenset[T]:
    """Returns the dumps that a retention rule keeps.

    The order of the dumps counts, not their times, since a clock may have been ahead once.

    Args:
        dumps: The time at which each dump was begun, by name, oldest first.
        rule: The retention rule. Days and weeks are those of UTC.
    """
    newest_first = list(dumps)[::-1]

    def moment(name: T) -> datetime:
        return dumps[name].astimezone(UTC)

    return frozenset(
        [
            *newest_first[: max(1, rule.last)],
            *_one_each(newest_first, rule.daily, lambda name: moment(name).date()),
            *_one_each(newest_first, rule.weekly, lambda name: moment(name).isocalendar()[:2]),
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
