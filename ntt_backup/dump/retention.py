"""A retention says which dumps of the catalog are kept: the last few, one a day, one a week. Pure.

A rule by age alone ("older than 30 days") empties the shelf when dumps begin to fail and nobody
notices. So nothing here looks at the clock: days and weeks are counted only where they have a dump,
and the newest is always kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from ntt_backup.config.sections import DumpSettings, SnapshotSettings

T = TypeVar("T")


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
    """Returns those of dumps (a name, when it was begun; oldest first) that stay. Days and weeks
    are UTC's.

    Their order counts, not their times: a clock may have been ahead once.
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


def _one_each(newest_first: Iterable[T], count: int, period: Callable[[T], object]) -> list[T]:
    newest: dict[object, T] = {}
    for name in newest_first:
        newest.setdefault(period(name), name)
    return list(newest.values())[:count]
