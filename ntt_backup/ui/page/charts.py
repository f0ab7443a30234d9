"""The page's bars get their places and words; the template makes the SVG of them. Pure.

A picture is `WIDTH` x `HEIGHT` units and is stretched to the room that it has, so it has no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import groupby
from typing import Final

from ntt_backup.catalog.glance import Proved
from ntt_backup.catalog.history import Hour
from ntt_backup.format import duration, many, size

WIDTH: Final = 600
HEIGHT: Final = 100
_GAP: Final = 0.25  # Of the width of a bar.
_LEAST: Final = 1.5  # What is not nothing can be seen.


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle. kind: its class in the style sheet. says: its words for who points at it."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    says: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture. says: what it shows, for who does not see it. top: the amount of a full bar; first
    and last: the ends of the time.
    """

    bars: Sequence[Bar]
    says: str
    top: str
    first: str
    last: str


def last_hour(minutes: Iterable[Sequence[int]], now: datetime) -> Chart | None:
    """Returns what was sent in each minute of the last hour; None where nothing was."""
    sent = {one[0]: one[1] for one in minutes}
    end = int(now.timestamp()) // 60 * 60
    places = [end - 60 * back for back in range(59, -1, -1)]
    amounts = [sent.get(place, 0) for place in places]
    if not any(amounts):
        return None
    labels = [f"{datetime.fromtimestamp(place).astimezone():%H:%M}" for place in places]
    says = [
        f"{label}: {size(amount)}, {rate(amount / 60)}"
        for label, amount in zip(labels, amounts, strict=True)
    ]
    whole = f"{size(sum(amounts))} in the last hour, at most {rate(max(amounts) / 60)}"
    return Chart(_bars(amounts, says), whole, rate(max(amounts) / 60), labels[0], labels[-1])


def last_days(hours: Iterable[Hour], days: int, now: datetime) -> Chart | None:
    """Returns what was copied on each of the last days, local time, and on which of them something
    was away; None where nothing is known of them.
    """
    by_day = {day: list(some) for day, some in groupby(hours, _day)}
    if not by_day:
        return None
    places = [now.astimezone().date() - timedelta(days=back) for back in range(days - 1, -1, -1)]
    amounts, says, away = [], [], []
    for place in places:
        some = by_day.get(place, [])
        amounts.append(sum(one.bytes for one in some))
        outage = sum(one.outage_s for one in some)
        words = f"{place:%d %b}: {many(sum(one.copied for one in some), 'blob')}"
        words += f", {size(amounts[-1])}"
        words += f", {many(sum(one.failed for one in some), 'failure')}"
        says.append(words + (f", away for {duration(outage)}" if outage else ""))
        away.append(outage > 0)
    bars = _bars(amounts, says)
    step = WIDTH / days
    bars += [
        Bar(nth * step, HEIGHT - 3, step * (1 - _GAP), 3, "away", says[nth])
        for nth in range(days)
        if away[nth]
    ]
    most = max(amounts)
    whole = f"{size(sum(amounts))} copied in {days} days, at most {size(most)} a day"
    return Chart(bars, whole, f"{size(most)} a day", f"{places[0]:%d %b}", f"{places[-1]:%d %b}")


def ages(proved: Proved) -> list[tuple[str, float, Bar]]:
    """Returns the shares of the copied blobs by when they were last checked: their words, the share
    of 1, and the part of a bar across the picture.
    """
    kinds = (
        ("week", "in the last 7 days", proved.week),
        ("month", "7 to 30 days ago", proved.month - proved.week),
        ("quarter", "30 to 90 days ago", proved.quarter - proved.month),
        ("older", "longer ago", proved.ever - proved.quarter),
        ("never", "never", proved.blobs - proved.ever),
    )
    found, x = [], 0.0
    for kind, words, blobs in kinds:
        share = blobs / proved.blobs if proved.blobs else 0.0
        says = f"{words}: {share:.0%}"
        found.append((words, share, Bar(x, 0, share * WIDTH, HEIGHT, kind, says)))
        x += share * WIDTH
    return found


def _bars(amounts: Sequence[int], says: Sequence[str]) -> list[Bar]:
    most, step = max(max(amounts), 1), WIDTH / len(amounts)
    bars = []
    for nth, amount in enumerate(amounts):
        height = max(amount / most * HEIGHT, _LEAST) if amount else 0.0
        width = step * (1 - _GAP)
        bars.append(Bar(nth * step, HEIGHT - height, width, height, "amount", says[nth]))
    return bars


def rate(per_second: float) -> str:
    """Returns bytes a second as `11.7 MB/s`."""
    return f"{size(int(per_second))}/s" if per_second >= 1 else "0 MB/s"


def _day(hour: Hour) -> date:
    return hour.hour.astimezone().date()
