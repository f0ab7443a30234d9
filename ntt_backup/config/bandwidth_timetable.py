"""A timetable limits the bandwidth by the time of the week: `run.bwlimit`. Pure functions.

A rate alone is in effect always. `08:00 4MB/s, 19:00 off` is for every day; `mon-fri 08:00 4MB/s,
mon-fri 19:00 off, sat-sun off` names days. A rate is in effect until the next one. A day that is
named anywhere has only the entries that name it. An entry without a time begins at 00:00. Commas
and blanks both separate, and `Mon-08:00,512kB`, the syntax of rclone, is read as `mon 08:00 512kB`.

The time is local time. So an hour that a clock change skips has no effect, and an hour that is
repeated has the same rate twice.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

from pydantic import BeforeValidator

from ntt_backup.config.values import Needs, parse_size, refused
from ntt_backup.formatting import size

_LEAST: Final = 1024
_MOST: Final = 10**15
_EXAMPLE: Final = "08:00 4MB/s, 19:00 off"
_NAMES: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY: Final = 24 * 60
_ONE_OF: Final = f"({'|'.join(_NAMES)})"
_DAYS: Final = re.compile(rf"{_ONE_OF}(?:-{_ONE_OF})?")
_TIME: Final = re.compile(r"(\d|[01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Timetable:
    """The rates of a week.

    Attributes:
        text: The text that the operator wrote.
        changes: The minutes of the week, from Monday 00:00, at which a rate begins, with the rate
            in bytes a second, None for no limit. Sorted, at least one.
    """

    text: str
    changes: tuple[tuple[int, int | None], ...]

    def at(self, when: datetime) -> int | None:
        """Returns the rate at a local time in bytes a second; None for no limit."""
        return self.changes[self._index(when)][1]

    def next(self, when: datetime) -> tuple[str, int | None] | None:
        """Returns the time of the next change after a local time, and the rate from then on.

        The time is `19:00` or `Mon 08:00`, the rate in bytes a second, None for no limit. The
        result is None if the rate never changes.
        """
        index, now = self._index(when), self.at(when)
        for step in range(1, len(self.changes) + 1):
            minute, rate = self.changes[(index + step) % len(self.changes)]
            if rate != now:
                day, rest = divmod(minute, _DAY)
                name = "" if self._is_daily else f"{_NAMES[day].capitalize()} "
                return f"{name}{rest // 60:02}:{rest % 60:02}", rate
        return None

    def _index(self, when: datetime) -> int:
        minute = when.weekday() * _DAY + when.hour * 60 + when.minute
        # Before the first change of the week the last rate of the week is in effect: index -1.
        return bisect_right(self.changes, minute, key=lambda change: change[0]) - 1

    @property
    def _is_daily(self) -> bool:
        changes = [(minute % _DAY, rate) for minute, rate in self.changes]
        return changes == changes[: len(changes) // 7] * 7

    def __str__(self) -> str:
        return self.text


def parse_timetable(value: object) -> Timetable:
    """Returns the timetable for a rate, `off`, or the text of a timetable. Raises ValueError."""
    if isinstance(value, Timetable):
        return value
    if not isinstance(value, str):
        return Timetable(str(value), ((0, _rate(value)),))
    text = re.sub(r"(\d)\s+(?=[kmgt]?i?b)", r"\1", value.strip().lower())
    text = re.sub(rf"\b{_ONE_OF}-(?=\d)", r"\1 ", text)
    words = re.split(r"[,\s]+", text)
    if len(words) == 1:
        return Timetable(value.strip(), ((0, _rate(text)),))
    daily: dict[int, int | None] = {}
    own: dict[int, dict[int, int | None]] = {}
    for days, minute, rate in _entries(words):
        for plan in [own.setdefault(day, {}) for day in days] if days else [daily]:
            if minute in plan:
                raise refused("one rate from each time on is needed, not two")
            plan[minute] = rate
    plans = enumerate(own.get(day, daily) for day in range(7))
    changes = [(day * _DAY + minute, rate) for day, plan in plans for minute, rate in plan.items()]
    return Timetable(value.strip(), tuple(sorted(changes, key=lambda change: change[0])))


def describe_limit(timetable: Timetable, when: datetime) -> str:
    """Returns the rate at a local time and the next change, for people."""
    said = limit_text(timetable.at(when))
    if (following := timetable.next(when)) is not None:
        said += f" until {following[0]}, then {limit_text(following[1])}"
    return said


def limit_text(rate: int | None) -> str:
    """Returns a rate for people; None for no limit."""
    return "no limit" if rate is None else f"at most {size(rate)}/s"


Bandwidth = Annotated[
    Timetable,
    BeforeValidator(parse_timetable),
    Needs(
        "a rate (12MB/s, bytes a second; off), or a timetable of times, days and rates"
        f" ({_EXAMPLE}; mon-fri 08:00 4MB/s, mon-fri 19:00 off),"
    ),
]


def _entries(words: list[str]) -> Iterator[tuple[list[int], int, int | None]]:
    """Yields the days (none for all), the minute of the day, and the rate from then on."""
    days: list[int] = []
    minute = None
    for word in words:
        if (match := _DAYS.fullmatch(word)) is not None and minute is None:
            first = _NAMES.index(match[1])
            last = _NAMES.index(match[2] or match[1])
            # sat-mon includes the end of the week.
            days += [day % 7 for day in range(first, last + 1 + 7 * (last < first))]
        elif (match := _TIME.fullmatch(word)) is not None and minute is None:
            minute = int(match[1]) * 60 + int(match[2])
        elif days or minute is not None:
            yield days, minute or 0, _rate(word)
            days, minute = [], None
        else:
            _rate(word)  # A word that is not a rate either has an error of its own.
            raise refused(f"a time before each rate is needed, as in {_EXAMPLE}")
    if days or minute is not None:
        raise refused(f"a rate after each time is needed, as in {_EXAMPLE}")


def _rate(value: object) -> int | None:
    if value == "off":
        return None
    rate = parse_size(value)
    if not _LEAST <= rate <= _MOST:
        raise refused(f"a rate from {_LEAST} to {_MOST} bytes a second is needed, or off")
    return rate
