"""The page is drawn as HTML, with the header that says what a browser may do with it.

Every text is escaped by the template engine, and made one line without control characters: names,
reasons and details come from outside. Style and script stand in the page, and no others are let in:
the browser knows them by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from ntt_backup import __version__
from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.history import Run
from ntt_backup.errors import complete
from ntt_backup.format import about, duration, moment, printable, size
from ntt_backup.ui.page import charts
from ntt_backup.ui.page.facts import DAYS, Facts
from ntt_backup.ui.page.verdict import Level, Verdict, judge, lives

_LINES: Final = 5
_A_WEEK: Final = 7 * 86400
# A number, with the unit of a duration where it has one.
_NUMBER: Final = re.compile(r"\d[\d.,]*( (s|min|h|d)\b)?( *\d+ (s|min|h)\b)*")


@dataclass(frozen=True, slots=True)
class Target:
    """A target as the template has it."""

    facts: Facts
    verdict: Verdict
    living: Sequence[Run]
    hour: charts.Chart | None
    days: charts.Chart | None
    ages: Sequence[tuple[str, float, charts.Bar]]
    reasons: Sequence[tuple[str, int, bool]]
    examples: Mapping[str, Sequence[FailedBlob]]
    recent: Sequence[Sequence[str]]
    verify: str

    @classmethod
    def of(cls, facts: Facts, now: datetime) -> Target:
        """Judges and draws. The command lines in it get the options of this moment."""
        daemon, totals, proved = facts.daemon or {}, facts.totals, facts.proved
        failed = totals.failed_by_reason.items() if totals else ()
        again = totals.pending_by_reason.items() if totals else ()
        examples = defaultdict(list)
        for one in facts.examples:
            examples[one.reason].append(one)
        lines = _worth_a_look(daemon.get("recent", ()))
        return cls(
            facts,
            judge(facts, now),
            [run for run in facts.runs if lives(facts, run)],
            charts.last_hour(daemon.get("minutes", ()), now),
            charts.last_days(facts.hours, DAYS, now),
            charts.ages(proved) if proved is not None and proved.blobs else (),
            [(*one, False) for one in failed] + [(*one, True) for one in again],
            examples,
            lines[-_LINES:],
            complete("`ntt-backup-remote verify`"),
        )


def _worth_a_look(recent: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Returns the lines that say what is wrong: no pause that has ended, and of lines that differ
    in numbers alone, such as tries in a row, the last one.
    """
    found: dict[str, Sequence[str]] = {}
    for one in recent:
        _, level, line = one
        if line.startswith("resumed by "):
            found = {key: kept for key, kept in found.items() if not key.startswith("paused by ")}
        if level != "info":
            key = _NUMBER.sub("#", line)
            found.pop(key, None)
            found[key] = one
    return list(found.values())


def render(targets: Sequence[Target], now: datetime) -> str:
    """Returns the page."""
    worst = max((one.verdict.level for one in targets), default=Level.WELL)
    return _template().render(
        targets=targets,
        now=now,
        worst=worst,
        host=socket.gethostname(),
        version=__version__,
        width=charts.WIDTH,
        height=charts.HEIGHT,
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
        "rate": charts.rate,
        "share": _share,
        "short": lambda blobid: blobid if len(blobid) <= 16 else f"{blobid[:12]}…",
        "size": size,
        "words": lambda outcome: outcome.replace("_", " "),
    }
    return engine.from_string(_part("page.html"))


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def _commands(text: str) -> Markup:
    """Returns a text in which what stands between backticks is typed."""
    typed = Markup("<code>{}</code>")
    parts = enumerate(printable(text).split("`"))
    return Markup("").join(typed.format(part) if nth % 2 else escape(part) for nth, part in parts)


def _count(number: int, estimated: bool = False) -> str:
    return f"≈ {about(number):,}" if estimated and number else f"{number:,}"


def _share(share: float) -> str:
    """Returns a percentage that says neither all nor nothing where it is not so."""
    return f"{min(max(share, 0.01), 0.99) if 0 < share < 1 else share:.0%}"


def _ago(when: datetime) -> str:
    """Returns how long ago it was in one unit, as a glance takes it in; a date after a week."""
    past = (datetime.now(UTC) - when).total_seconds()
    if past >= _A_WEEK:
        return f"{when.astimezone():%Y-%m-%d}"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if past >= unit:
            return f"{int(past // unit)} {name} ago"
    return "just now"
