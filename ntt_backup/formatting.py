"""Sizes, durations, times, counts and errors become printable text for people, or JSON."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from ntt_backup.errors import BackupError

_SHORT_S: Final = 9.95
# A number, with the unit of a duration where it has one.
_NUMBER: Final = re.compile(r"\d[\d.,]*( (s|min|h|d)\b)?( *\d+ (s|min|h)\b)*")
# The units of sizes, by whether they are powers of 1024.
_UNITS: Final = {False: "kB MB GB TB PB EB", True: "KiB MiB GiB TiB PiB EiB"}
_units: Final = {"iec": False}


def printable(text: str) -> str:
    """Returns foreign text as one line without escape sequences.

    Line ends become `; `; control, invisible and direction-changing characters are escaped.
    """
    line = "; ".join(part.rstrip() for part in text.splitlines() if part.strip())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in line
    )


def without_numbers(text: str) -> str:
    """Returns the text with a mark in the place of each number.

    Texts that differ in numbers alone say the same.
    """
    return _NUMBER.sub("#", text)


def use_iec(*, iec: bool) -> None:
    """Sets whether sizes and rates are shown in KiB and MiB (of 1024 bytes) from now on."""
    _units["iec"] = iec


def size(count: int) -> str:
    """Returns bytes as `212.3 MB`, with MB = 10^6 bytes; or as `202.5 MiB`, see `use_iec`."""
    base = 1024 if _units["iec"] else 1000
    if abs(count) < base:
        return many(count, "Byte")
    value = float(count)
    *smaller, largest = _UNITS[_units["iec"]].split()
    for unit in smaller:
        value /= base
        # Not the value itself: 999,960 bytes are 1.0 MB, not 1000.0 kB.
        if abs(round(value, 1)) < base:
            return f"{value:.1f} {unit}"
    return f"{value / base:.1f} {largest}"


def rate(mb_per_s: float) -> str:
    """Returns megabytes (10^6 bytes) a second as `12.0 MB/s`; or as `11.4 MiB/s`."""
    if _units["iec"]:
        return f"{mb_per_s * 1e6 / 2**20:.1f} MiB/s"
    return f"{mb_per_s:.1f} MB/s"


def duration(seconds: float) -> str:
    """Returns seconds in at most two units: `0.4 s`, `34 s`, `12 min 4 s`, `3 h 12 min`."""
    if seconds < _SHORT_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def moment(when: datetime, *, zone: bool = True) -> str:
    """Returns a time as `2026-03-04 06:06 CET` in the local time zone.

    A time in a year that the local time does not have is shown in its own zone.

    Args:
        when: The time.
        zone: Whether the time zone is shown.
    """
    local = when
    with suppress(OverflowError):
        local = when.astimezone()
    return f"{local:%Y-%m-%d %H:%M %Z}" if zone else f"{local:%Y-%m-%d %H:%M}"


def utc(when: datetime) -> str:
    """Returns a time for programs, in UTC: `2026-03-04T05:06:07.123Z`."""
    return when.astimezone(UTC).isoformat().replace("+00:00", "Z")


def json_value(value: object) -> object:
    """Returns a value for JSON: times in UTC, numbers with three decimals."""
    if isinstance(value, datetime):
        return utc(value)
    if isinstance(value, UUID):
        return str(value)
    return round(value, 3) if isinstance(value, float) else value


def about(count: int) -> int:
    """Returns an estimate rounded to its first three digits."""
    unit: int = 10 ** max(len(str(count)) - 3, 0)
    return (count + unit // 2) // unit * unit


def many(count: int, noun: str, plural: str = "") -> str:
    """Returns `1 blob` or `2 blobs`. plural: the plural, unless that is the noun and an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def amount(blobs: int, bytes_: int, *, estimated: bool = False) -> str:
    """Returns a number of blobs with their size, for people."""
    if estimated:
        return f"about {amount(about(blobs), bytes_)}"
    return f"{many(blobs, 'blob')}, {size(bytes_)}"


def render_error(error: BackupError) -> str:
    """Returns message and detail of an error on one line, and its hint on a second line."""
    lines = [f"error: {error}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(printable(line) for line in lines)
