"""Words for people are put right for one as for many, wherever they are said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ntt_backup
from ntt_backup.format import many

PACKAGE = Path(ntt_backup.__file__).parent
# Said of a number, and wrong where that is 1.
PLURAL = re.compile(
    r" (?:(?:more|pending|trial|good|round|prefix) )*"
    r"(?:batches|blobs|connections|directories|dumps|files|ranges|rows|strays|tables|trips|workers"
    r"|are|were|have)\b(?!/)"
)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 blobs"), (1, "1 blob"), (2, "2 blobs"), (1_000, "1,000 blobs")]
)
def test_one_is_singular(count: int, text: str) -> None:
    assert many(count, "blob") == text


def test_a_plural_or_a_verb_of_its_own() -> None:
    assert [many(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]
    assert [many(n, "blob is", "blobs are") for n in (1, 2)] == ["1 blob is", "2 blobs are"]


def test_no_message_says_a_plural_of_a_number_that_may_be_one() -> None:
    """The remote half says its numbers to programs."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{value.lineno}:{word}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name not in ("receiver", "wire", "blobdir")
        for text in ast.walk(ast.parse(path.read_text()))
        if isinstance(text, ast.JoinedStr)
        for value, word in _said_of_numbers(text)
    ]
    assert wrong == []


def _said_of_numbers(text: ast.JoinedStr) -> list[tuple[ast.FormattedValue, str]]:
    """Values that look like counts, with the plural that follows."""
    return [
        (value, match[0])
        for value, after in zip(text.values, text.values[1:], strict=False)
        if isinstance(value, ast.FormattedValue)
        and isinstance(after, ast.Constant)
        and (match := PLURAL.match(str(after.value)))
        and _is_count(value)
    ]


def _is_count(value: ast.FormattedValue) -> bool:
    """A number with separators, a length, or one that is named as a count."""
    source = ast.unparse(value.value)
    separated = value.format_spec is not None and ":," in ast.unparse(value)
    return separated or source.startswith("len(") or source.endswith(("count", "checked", "total"))
