"""Patterns say which files are left out of a take, and which files of a version are restored."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ntt_backup.errors import ConfigError
from ntt_backup.snapshot.format.entry import HARD_LINK
from ntt_backup.snapshot.format.manifest import ManifestReader


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


class PathChoice:
    """Chooses the files of a manifest that fit patterns, and counts the bytes of their content.

    A file is chosen if its path or a directory above it fits one of the patterns, see `matcher`.
    The target of a chosen hard link is chosen, too.

    Raises:
        ConfigError: Nothing fits one of the patterns.
    """

    def __init__(self, patterns: Sequence[str], manifest: ManifestReader) -> None:
        self._fits = matcher(patterns) or (lambda _: None)
        self._parent = ""
        self._below = False
        self._linked: set[str] = set()
        self._parents: set[str] = set()
        self.bytes = 0
        unmet = {one: matcher([one]) for one in patterns}
        for entry in manifest.entries():
            for one in [one for one, fits in unmet.items() if fits is None or fits(entry.path)]:
                del unmet[one]
            if self.has(entry.path):
                self.bytes += entry.size
                if entry.kind == HARD_LINK and not self.has(entry.target):
                    self._linked.add(entry.target)
                    self._add_parents(entry.target)
                self._add_parents(entry.path)
        if unmet:
            name = f"{manifest.header.set}@{manifest.header.version}"
            raise ConfigError(
                f"nothing in {name} matches {', '.join(map(repr, unmet))}",
                hint=f"see ntt-backup-remote snapshot show {name} --files",
            )

    def has(self, path: str) -> bool:
        """Returns whether a file is restored."""
        parent = path.rpartition("/")[0]
        if parent != self._parent:
            self._parent = parent
            parts = parent.split("/")
            above = ("/".join(parts[: n + 1]) for n in range(len(parts)))
            self._below = any(self._fits(one) for one in above)
        return self._below or path in self._linked or bool(self._fits(path))

    def has_directory(self, path: str) -> bool:
        """Returns whether a directory is restored, or something below it."""
        return path in self._parents or self.has(path)

    def _add_parents(self, path: str) -> None:
        while path := path.rpartition("/")[0]:
            self._parents.add(path)
