"""Values on the command line that people write with a unit: durations, parts, prefixes."""

from __future__ import annotations

import re
from typing import Any

import click

from ntt_backup.config import parse_duration


class Duration(click.ParamType[float]):
    """Seconds, from 90, 90s, 15min, 2h, 30d or 4w."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return parse_duration(str(value))
        except ValueError:
            self.fail(f"{value!r} is no duration such as 90s, 15min, 2h or 30d", param, ctx)


class Part(click.ParamType[float]):
    """A part of a whole, from 1% or 0.5%."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", str(value).strip())
        part = float(match[1]) / 100 if match else 0.0
        if not 0 < part <= 1:
            self.fail(f"{value!r} is no part such as 1% or 0.1%", param, ctx)
        return part


class HexPrefix(click.ParamType[str]):
    """How blobids begin: up to 64 lowercase hex digits."""

    name = "prefix"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"[0-9a-f]{0,64}", str(value)):
            self.fail(f"{value!r} is not how a blobid begins: 1 to 64 of 0-9a-f", param, ctx)
        return str(value)
