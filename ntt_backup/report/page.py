"""The page is drawn as HTML, with the header that says what a browser may do with it.

Every text is escaped by the template engine, and made one line without control characters: names,
reasons and details come from outside. Style and script stand in the page, and no others are let in:
the browser knows them by their hashes. The bars of the page get their places and words here, and
the template makes the SVG of them. A picture is `WIDTH` x `HEIGHT` units, and is stretched to the
room that it has, so it has no text.
"""

from __future__ import annotations

import base64
import hashlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from ntt_backup import __version__
from ntt_backup.catalog.history import Hour
from ntt_backup.catalog.stats import Proved
from ntt_backup.dump.events import DumpFailed
from ntt_backup.errors import complete
from ntt_backup.events import SIDES, unreachable
from ntt_backup.formatting import about, duration, many, moment, printable, size, without_numbers
from ntt_backup.report.health import Health, HealthVerdict, known_failures, lives
from ntt_backup.report.target_facts import DAYS, TargetFacts

_LINES: Final = 5
_A_WEEK: Final = 7 * 86400
_LEAST_DAYS: Final = 7
# Lines about what stands in another place of the page.
_ELSEWHERE: Final = ("failed, ", str(DumpFailed.text), *map(unreachable, SIDES))
WIDTH: Final = 600
HEIGHT: Final = 100
_GAP: Final = 0.25  # Of the width of a bar.
_LEAST: Final = 1.5  # What is not nothing can be seen.


@dataclass(frozen=True, slots=True)
class Target:
    """A target as the template has it. verify: the command line that proves what is copied."""

    facts: TargetFacts
    verdict: HealthVerdict
    verify: str

    @classmethod
    def of(cls, facts: TargetFacts, verdict: HealthVerdict) -> Target:
        """Returns the target. Command lines get the options of this moment, see `complete`."""
        return cls(facts, verdict, complete("`ntt-backup-remote verify`"))


def worth_a_look(recent: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Returns the last lines that report a problem.

    A pause that has ended is left out, and what the findings and the table of failures say. Of
    lines that differ in numbers alone, such as consecutive retries, only the last line is returned.
    """
    found: dict[str, Sequence[str]] = {}
    for one in recent:
        _, level, line = one
        if line.startswith("resumed by "):
            found = {key: kept for key, kept in found.items() if not key.startswith("paused by ")}
        if level != "info" and not line.startswith(_ELSEWHERE):
            key = without_numbers(line)
            found.pop(key, None)
            found[key] = one
    return list(found.values())[-_LINES:]


def render(targets: Sequence[Target], now: datetime) -> str:
    """Returns the page."""
    worst = max((one.verdict.level for one in targets), default=Health.HEALTHY)
    return _template().render(
        targets=targets,
        now=now,
        worst=worst,
        host=socket.gethostname(),
        version=__version__,
        width=WIDTH,
        height=HEIGHT,
        ages=ages,
        last_days=last_days,
        last_hour=last_hour,
        known_failures=known_failures,
        lives=lives,
        worth_a_look=worth_a_look,
        css=Markup(_part("page.css")),  # noqa: S704  ours, and no part of it is from outside
        js=Markup(_part("page.js")),  # noqa: S704
    )


@cache
def policy() -> str:
    """Returns the Content-Security-Policy of the page."""
    return (
        f"default-src 'none'; style-src '{_hash('page.css')}'; script-src '{_hash('page.js')}';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )


def _hash(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_part(name).encode()).digest()).decode()


@cache
def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    engine = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.filters |= {
        "ago": _ago,
        "clock": lambda when: f"{when.astimezone():%H:%M:%S %Z}",
        "commands": _commands,
        "count": _count,
        "duration": duration,
        "moment": moment,
        "parsed": datetime.fromisoformat,
        "rate": rate,
        "share": _share,
        "short": lambda blobid: blobid if len(blobid) <= 16 else f"{blobid[:12]}…",
        "size": size,
        "words": lambda outcome: outcome.replace("_", " "),
    }
    return engine.from_string(_part("page.html"))


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def _commands(text: str) -> Markup:
    """Returns a text in which the parts between backticks are set as code."""
    typed = Markup("<code>{}</code>")
    parts = enumerate(printable(text).split("`"))
    return Markup("").join(typed.format(part) if nth % 2 else escape(part) for nth, part in parts)


def _count(number: int, estimated: bool = False) -> str:
    return f"≈ {about(number):,}" if estimated and number else f"{number:,}"


def _share(share: float) -> str:
    """Returns a percentage: 0 % and 100 % only where they are exact."""
    return f"{min(max(share, 0.01), 0.99) if 0 < share < 1 else share:.0%}"


def _ago(when: datetime) -> str:
    """Returns an age in one unit, or a date after a week."""
    past = (datetime.now(UTC) - when).total_seconds()
    if past >= _A_WEEK:
        return f"{when.astimezone():%Y-%m-%d}"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if past >= unit:
            return f"{int(past // unit)} {name} ago"
    return "just now"


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
    """A bar chart. says: A description for readers who cannot see it. top: Of a full bar."""

    bars: Sequence[Bar]
    says: str
    top: str
    first: str
    last: str


def last_hour(minutes: Iterable[Sequence[int]], now: datetime) -> Chart | None:
    """Returns the chart of the bytes sent per minute of the last hour; None without any."""
    sent = {one[0]: one[1] for one in minutes}
    end = int(now.timestamp()) // 60 * 60
    columns = []
    for place in range(end - 59 * 60, end + 1, 60):
        amount, label = sent.get(place, 0), f"{datetime.fromtimestamp(place).astimezone():%H:%M}"
        columns.append((label, amount, f"{label}: {size(amount)}, {rate(amount / 60)}", False))
    amounts = [amount for _, amount, *_ in columns]
    if not any(amounts):
        return None
    most = rate(max(amounts) / 60)
    return _chart(columns, f"{size(sum(amounts))} in the last hour, at most {most}", most)


def last_days(hours: Iterable[Hour], now: datetime) -> Chart | None:
    """Returns the chart of the content copied on each of the last days; None without any.

    Days are in local time. The first one is the first of which something is noted, but a week is
    shown at least. The chart marks the days on which something was unreachable.
    """
    by_day = {
        day: list(some) for day, some in groupby(hours, lambda one: one.hour.astimezone().date())
    }
    if not by_day:
        return None
    columns, today = [], now.astimezone().date()
    days = min(DAYS, max(_LEAST_DAYS, (today - min(by_day)).days + 1))
    for back in range(days - 1, -1, -1):
        day = today - timedelta(days=back)
        some, label = by_day.get(day, []), f"{day:%d %b}"
        amount, outage = sum(one.bytes for one in some), sum(one.outage_s for one in some)
        words = f"{label}: {many(sum(one.copied for one in some), 'blob')}, {size(amount)}"
        words += f", {many(sum(one.failed for one in some), 'failure')}"
        words += f", unreachable for {duration(outage)}" if outage else ""
        columns.append((label, amount, words, outage > 0))
    amounts = [amount for _, amount, *_ in columns]
    most = f"{size(max(amounts))} a day"
    return _chart(columns, f"{size(sum(amounts))} copied in {days} days, at most {most}", most)


def _chart(columns: Sequence[tuple[str, int, str, bool]], says: str, top: str) -> Chart:
    """Returns a chart. columns: The label, the amount and the words of each, and whether marked."""
    most, step = max(1, *(amount for _, amount, *_ in columns)), WIDTH / len(columns)
    width, bars = step * (1 - _GAP), []
    for nth, (_, amount, words, marked) in enumerate(columns):
        height = max(amount / most * HEIGHT, _LEAST) if amount else 0.0
        bars.append(Bar(nth * step, HEIGHT - height, width, height, "amount", words))
        if marked:
            bars.append(Bar(nth * step, HEIGHT - 3, width, 3, "away", words))
    return Chart(bars, says, top, columns[0][0], columns[-1][0])


def ages(proved: Proved) -> list[tuple[str, float, Bar]]:
    """Returns the shares of the copied blobs by the time of their last check.

    Each has its words, the share from 0 to 1, and its part of a bar across the picture.
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
        share = blobs / proved.blobs
        bar = Bar(x, 0, share * WIDTH, HEIGHT, kind, f"{words}: {share:.0%}")
        found.append((words, share, bar))
        x += share * WIDTH
    return found


def rate(per_second: float) -> str:
    """Returns bytes a second as `11.7 MB/s`."""
    return f"{size(int(per_second))}/s" if per_second >= 1 else "0 MB/s"
