"""Small changes of a module, each of which some test ought to notice.

A change is made in the source text at the place of a node, so that all other lines stay as they
are. Removed calls and dropped raises are kinds of their own, since those are what tests miss: all
of a module's results may be right without a sync, and without a refusal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DURABLE: Final = re.compile(r"sync|flush|close|durable|publish|unlink|rename")
_COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}


@dataclass(frozen=True)
class Mutant:
    """One change. begin and end: offsets in the source, in characters, of what `new` replaces.

    site: the line before which a call can be put that runs where the change would; statement: its
    text.
    """

    path: Path
    kind: str
    line: int
    begin: int
    end: int
    new: str
    text: str
    site: int
    statement: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What stays the same when lines move: module, kind, and the text of the line."""
        return (str(self.path), self.kind, self.text)

    def apply(self, source: str) -> str:
        return source[: self.begin] + self.new + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


def mutants(path: Path, source: str) -> list[Mutant]:
    """Returns all mutants of a module."""
    return list(_Finder(path, source).found())


class _Finder:
    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self._tree = ast.parse(source)
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        self._site = 1
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        # What stands outside of functions is done once, at the import.
        for function in ast.walk(self._tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in function.body:
                    if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                        yield from self._below(statement)

    def _below(self, node: ast.AST) -> Iterator[Mutant]:
        outer = self._site
        if isinstance(node, ast.stmt) and not self._text(node.lineno).startswith("elif"):
            self._site = node.lineno
        yield from self._of(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.JoinedStr):
                yield from self._below(child)
        self._site = outer

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.Constant):
                yield self._at(node.test, "negated condition", "not ({})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            kind = "removed sync" if _DURABLE.search(name) else "removed call"
            yield self._at(node, kind, "pass")
        elif isinstance(node, ast.Raise):
            yield self._at(node, "dropped raise", "pass")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            old, new = _COMPARISONS[type(node.ops[0])]
            yield from self._between(node.left, node.comparators[0], "comparison", old, new)
        elif isinstance(node, ast.BoolOp):
            swap = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from self._between(node.values[0], node.values[1], "and/or", *swap)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._at(node, "constant", str(not node.value))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield self._at(node, "constant", str(node.value + 1))

    def _between(
        self, left: ast.expr, right: ast.expr, kind: str, old: str, new: str
    ) -> Iterator[Mutant]:
        begin, end = self._offset(left, end=True), self._offset(right)
        word = re.search(rf"(?<![\w<>=!]){re.escape(old)}(?![\w<>=])", self._source[begin:end])
        if word is not None:
            at = begin + word.start()
            yield self._made(kind, left.lineno, at, at + len(old), new)

    def _at(self, node: ast.expr | ast.stmt, kind: str, new: str) -> Mutant:
        begin, end = self._offset(node), self._offset(node, end=True)
        new = new.replace("{}", self._source[begin:end])
        return self._made(kind, node.lineno, begin, end, new)

    def _made(self, kind: str, line: int, begin: int, end: int, new: str) -> Mutant:
        site, text = self._site, self._text(line)
        return Mutant(self._path, kind, line, begin, end, new, text, site, self._text(site))

    def _text(self, line: int) -> str:
        return self._lines[line - 1].strip()

    def _offset(self, node: ast.expr | ast.stmt, *, end: bool = False) -> int:
        line, column = (node.lineno, node.col_offset)
        if end:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            line, column = node.end_lineno, node.end_col_offset
        # The parser counts bytes.
        characters = len(self._lines[line - 1].encode()[:column].decode())
        return self._starts[line - 1] + characters
