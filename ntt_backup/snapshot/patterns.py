"""Patterns say which paths of a manifest are left out of a take, or restored."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ntt_backup.errors import ConfigError


def matcher(patterns: Sequence[str]) -> Callable[[str], object] | None:
    """Returns a function that says whether a path of a manifest fits; None without patterns.

    `*` stands for any characters but a slash, `?` for one, `[a-z]` and `[!a-z]` for one of these,
    `**` for anything. A pattern with a slash before it is for the whole path, any other for the end
    of one, from a slash on. Raises ConfigError.
    """
    if not patterns:
        return None
    try:
        return re.compile("|".join(map(_expression, patterns)), re.DOTALL).fullmatch
    except re.error as error:
        raise ConfigError(
            f"a pattern for paths cannot be read: {', '.join(patterns)}",
            detail=str(error),
            hint="known are * (any characters but a slash), ** (anything), ? and [a-z] (one each)",
        ) from error


def _expression(pattern: str) -> str:
    begin = "" if pattern.startswith("/") else "(?:.*/)?"
    tokens = re.finditer(r"(\*\*/)|(\*\*)|(\*)|(\?)|\[(!?)([^]]+)\]|(.)", pattern.strip("/"), re.S)
    text = ""
    for deep, all_, some, one, negated, of, char in (token.groups() for token in tokens):
        if of:
            # Each end of a range by itself: of a set with -- in it Python warns.
            ranges = re.sub("(?s)(.)(?:(-)(.))?", _range, of)
            text += f"(?!/)[{'^' if negated else ''}{ranges}]"
        else:
            wild = (deep and "(?:.*/)?") or (all_ and ".*") or (some and "[^/]*")
            text += wild or (one and "[^/]") or re.escape(char)
    return f"{begin}{text}"


def _range(found: re.Match[str]) -> str:
    first, to, last = (found[group] or "" for group in (1, 2, 3))
    return f"{re.escape(first)}{to}{re.escape(last)}"
