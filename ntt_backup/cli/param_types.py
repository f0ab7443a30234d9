"""Values on the command line have types: durations, sizes, parts of a whole, prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from ntt_backup.config import parse_duration, parse_size
from ntt_backup.config.timetable import parse


class Parsed(click.ParamType):  # type: ignore[type-arg] # No click before 8.4 lets it have one.
    """A value that a function reads from text, or raises ValueError. needed: what it must be."""

    def __init__(self, name: str, parse: Callable[[str], Any], needed: str) -> None:
        self.name = name
        self._parse = parse
        self._needed = needed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(str(value))
        except ValueError:
            self.fail(f"{value!r} is not {self._needed}", param, ctx)


def _part(text: str) -> float:
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", text.strip())
    if match is None or not 0 < float(match[1]) <= 100:
        raise ValueError(text)
    return float(match[1]) / 100


def _hex_prefix(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{0,64}", text):
        raise ValueError(text)
    return text


DURATION = Parsed("duration", parse_duration, "a duration such as 90s, 15min, 2h or 30d")
PART = Parsed("percent", _part, "a part such as 1% or 0.1%")
SIZE = Parsed("size", parse_size, "a size such as 500MB, 10GiB or 1TB")
RATE = Parsed("rate", parse, "a rate such as 10MB, or a timetable such as 08:00 4MB, 19:00 off")
HEX_PREFIX = Parsed("prefix", _hex_prefix, "the beginning of a blobid: 1 to 64 of 0-9a-f")
