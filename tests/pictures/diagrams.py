"""A diagram that is drawn with letters becomes an SVG.

Lines are `-`, `=` and `|`, corners `+`, and ends of arrows `<`, `>`, `^` and `v`. All else is text:
a piece of it begins at its place, and ends at a line or two blanks. A closed rectangle is a box,
and the first line in a box its title.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from tests.pictures.drawing import svg, text

_WIDE: Final = 8.0
_HIGH: Final = 19.0
_MARGIN: Final = 16.0
_RUN: Final = re.compile(r"(?<![\w-])[-=]{2,}(?![\w-])|(?<=\+)[-=](?=\+)")


class _Sheet:
    """The letters, and which of them are lines. A place is a row and a column."""

    def __init__(self, drawn: str) -> None:
        self.rows = drawn.rstrip("\n").splitlines()
        self.flat = {
            (y, x) for y, row in enumerate(self.rows) for run in _RUN.finditer(row)
            for x in range(*run.span())
        }  # fmt: skip
        self.upright = {
            (y, x) for y, row in enumerate(self.rows) for x, letter in enumerate(row)
            if letter == "|" and (self.at(y - 1, x) in "|+v^" or self.at(y + 1, x) in "|+v^")
        }  # fmt: skip
        self.corners = {
            (y, x) for y, row in enumerate(self.rows) for x, letter in enumerate(row)
            if letter == "+" and (self._sides(y, x) or self._ends(y, x))
        }  # fmt: skip
        self.heads = {
            (y, x): letter for y, row in enumerate(self.rows) for x, letter in enumerate(row)
            if (letter == ">" and (y, x - 1) in self.flat)
            or (letter == "<" and (y, x + 1) in self.flat)
            or (letter == "v" and (y - 1, x) in self.upright)
            or (letter == "^" and (y + 1, x) in self.upright)
        }  # fmt: skip

    def at(self, y: int, x: int) -> str:
        """Returns the letter of a place; a blank where there is none."""
        return self.rows[y][x] if 0 <= y < len(self.rows) and 0 <= x < len(self.rows[y]) else " "

    def _sides(self, y: int, x: int) -> bool:
        return bool({(y, x - 1), (y, x + 1)} & self.flat)

    def _ends(self, y: int, x: int) -> bool:
        return bool({(y - 1, x), (y + 1, x)} & self.upright)

    def pieces(self, *, flat: bool) -> Iterator[tuple[int, int, int]]:
        """Yields the lines: row, or column, and begin and end in half letters."""
        along = self.flat if flat else self.upright
        halves: dict[int, set[int]] = defaultdict(set)
        for y, x in along:
            line, at = (y, x) if flat else (x, y)
            halves[line] |= {2 * at, 2 * at + 1}
        meets = self.corners | self.heads.keys() | self.flat | self.upright
        for y, x in meets - along:
            line, at = (y, x) if flat else (x, y)
            for side in (-1, 1):
                beside = (y, x + side) if flat else (y + side, x)
                if beside in along:
                    halves[line].add(2 * at + (side + 1) // 2)
        for line, found in sorted(halves.items()):
            begin = last = min(found)
            for half in [*sorted(found), max(found) + 9]:
                if half > last + 1:
                    yield line, begin, last + 1
                    begin = half
                last = half

    def boxes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields the smallest closed rectangle at each corner: top, left, bottom, right."""
        flat, upright = self.flat | self.corners, self.upright | self.corners
        for top, left in sorted(self.corners):
            found = [
                (bottom, right)
                for bottom, right in self.corners
                if bottom > top + 1 and right > left + 1
                and {(top, left), (top, right), (bottom, left)} <= self.corners
                and all({(top, x), (bottom, x)} <= flat for x in range(left, right))
                and {(top + 1, left), (bottom - 1, left)} <= self.upright
                and all({(y, left), (y, right)} <= upright for y in range(top, bottom))
            ]  # fmt: skip
            if found:
                yield (top, left, *min(found, key=lambda end: (end[0] - top) * (end[1] - left)))


def diagram(drawn: str, says: str) -> str:
    """Returns the SVG of a diagram. says: What it shows, in words."""
    sheet = _Sheet(drawn)
    boxes = list(sheet.boxes())
    lines = sheet.flat | sheet.upright | sheet.corners | sheet.heads.keys()
    parts = []
    for flat, unit, other in ((True, _WIDE, _HIGH), (False, _HIGH, _WIDE)):
        for along, begin, end in sheet.pieces(flat=flat):
            near, far = _MARGIN + begin / 2 * unit, _MARGIN + end / 2 * unit
            across = _MARGIN + (along + 0.5) * other
            path = f"M{near:g} {across:g}H{far:g}" if flat else f"M{across:g} {near:g}V{far:g}"
            parts.append(f'<path class="line" d="{path}"/>')
    for top, left, bottom, right in boxes:  # They cover the lines that they are made of.
        x, y = _place(top, left)
        size = f'width="{(right - left) * _WIDE:g}" height="{(bottom - top) * _HIGH:g}"'
        parts.append(f'<rect class="box" x="{x:g}" y="{y:g}" {size} rx="4"/>')
    for (row, column), letter in sorted(sheet.heads.items()):
        x, y = _place(row, column)
        turn = {">": 0, "v": 90, "<": 180, "^": 270}[letter]
        if letter in "v^" and (row + (down := 1 if letter == "v" else -1), column) in lines:
            parts.append(f'<path class="line" d="M{x:g} {y:g}v{down * (_HIGH - 6):g}"/>')
            y += down * (_HIGH - 6)
        shape = f'transform="translate({x:g} {y:g}) rotate({turn})" d="M-4-4.5L5 0L-4 4.5z"'
        parts.append(f'<path class="head" {shape}/>')
    titles = {(top + 1, x) for top, left, _, right in boxes for x in range(left, right)}
    for row, letters in enumerate(sheet.rows):
        left_over = "".join(" " if (row, x) in lines else one for x, one in enumerate(letters))
        for piece in re.finditer(r"\S+(?: \S+)*", left_over):
            x, y = _place(row, piece.start())
            kind = "text bold" if (row, piece.start()) in titles else "text"
            inside = any(t < row < b and le < piece.start() < r for t, le, b, r in boxes)
            parts.append(text(x - _WIDE / 2, y + 4.5, piece[0], kind if inside else "soft"))
    width = max(map(len, sheet.rows)) * _WIDE + 2 * _MARGIN
    return svg(width, len(sheet.rows) * _HIGH + 2 * _MARGIN, says, parts)


def _place(row: int, column: int) -> tuple[float, float]:
    """Returns the middle of a letter."""
    return _MARGIN + (column + 0.5) * _WIDE, _MARGIN + (row + 0.5) * _HIGH
