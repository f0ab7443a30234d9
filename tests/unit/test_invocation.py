"""Commands in hints are lines that can be pasted: they say what the program was told before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ntt_backup
from ntt_backup import invocation
from ntt_backup.errors import BackupError, ConfigError

PACKAGE = Path(ntt_backup.__file__).parent
COMMANDS = "check|init-db|scan|run|status|requeue|verify|reconcile|restore|drill|dump|bench|demo"


@pytest.fixture
def called() -> Iterator[None]:
    invocation.note(["--config", "/etc/a b.toml", "--target", "offsite"])
    yield
    invocation.note([])


LINE = "ntt-backup-remote --config '/etc/a b.toml' --target offsite"


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("run `ntt-backup-remote init-db`", f"run `{LINE} init-db`"),
        ("ntt-backup-remote restore --to DIR; then scan", f"{LINE} restore --to DIR; then scan"),
        ("`ntt-backup-remote scan`, `ntt-backup-remote run`", f"`{LINE} scan`, `{LINE} run`"),
        ("install ntt-backup-remote, as root", "install ntt-backup-remote, as root"),
        ("mend it", "mend it"),
    ],
)
def test_a_hint_repeats_what_stood_before_the_command(hint: str, shown: str) -> None:
    assert ConfigError("it is wrong", hint=hint).hint == shown
    # It may be told on, by another process, as another error.
    assert BackupError("it is wrong", hint=shown).hint == shown


def test_a_hint_is_as_it_was_written_where_nothing_stood_before_the_command() -> None:
    assert ConfigError("x", hint="ntt-backup-remote run").hint == "ntt-backup-remote run"


def test_a_command_in_back_quotes_is_a_whole_line() -> None:
    """Half a line cannot be completed, nor pasted."""
    half = re.compile(rf"`(?:{COMMANDS})\b[^`]*`")
    found = {
        f"{path.relative_to(PACKAGE)}:{text.lineno}": text.value
        for path in PACKAGE.rglob("*.py")
        for text in words_of(ast.parse(path.read_text()))
        if isinstance(text.value, str) and half.search(text.value)
    }
    assert found == {}


def words_of(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every constant of a module that is no docstring."""
    nodes = list(ast.walk(tree))
    docstrings = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node
