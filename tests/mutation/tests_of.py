"""Which tests may notice a change of a module: those of the module first, then wider ones."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

_DIRECTORIES: Final = ("unit", "integration", "contract")


@cache
def _imported(file: Path) -> frozenset[str]:
    """Returns what a module imports, by all names by which that may be meant."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(found)


@cache
def _seen_by(test: Path, root: Path) -> frozenset[str]:
    """Returns what a test module imports, and what the helpers import that it uses."""
    found = set(_imported(test))
    for name in _imported(test):
        helper = root / f"{name.replace('.', '/')}.py"
        if name.startswith("tests.") and helper.exists():
            found |= _imported(helper)
    return frozenset(found)


def tests_of(path: Path, root: Path, most: int) -> list[Path]:
    """Returns test modules, the likeliest first.

    Args:
        path: The module, relative to root.
        root: The directory of the project.
        most: How many test modules at most.
    """
    name = ".".join(path.with_suffix("").parts)
    package, stem = path.parts[1], path.stem
    users = {
        ".".join(one.relative_to(root).with_suffix("").parts)
        for one in (root / "ntt_backup").rglob("*.py")
        if name in _imported(one)
    }
    ranked = []
    for nth, directory in enumerate(_DIRECTORIES):
        for test in sorted((root / "tests" / directory).glob("test_*.py")):
            seen = _seen_by(test, root)
            direct, called = name in _imported(test), stem in test.stem
            wider = len(users & seen) + 3 * (package in test.stem) + (name in seen)
            if direct or called or wider:
                ranked.append((not called, not direct, nth, -wider, test))
    return [test for *_, test in sorted(ranked)][:most]
