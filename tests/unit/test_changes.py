"""The CHANGELOG: files of changes.d become the section of a version."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
CHANGES: dict[str, Any] = runpy.run_path(str(PROJECT / "bin" / "packaging" / "changes.py"))
HEAD = "# Changelog\n\nWhat is new.\n\n## Unreleased\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with two new things and an older version."""
    (tmp_path / "changes.d").mkdir()
    (tmp_path / "changes.d" / "README.md").write_text("How.\n")
    (tmp_path / "changes.d" / "b.new.md").write_text("- B\n  is new.\n")
    (tmp_path / "changes.d" / "a.first.md").write_text("- Do A.\n")
    (tmp_path / "CHANGELOG.md").write_text(HEAD + "\n## 1.0.0 (2026-01-02)\n\n- Old.\n")
    return tmp_path


def changelog(root: Path) -> str:
    return re.sub(r"\(20\d\d-\d\d-\d\d\)", "(DAY)", (root / "CHANGELOG.md").read_text())


def test_a_version_gets_all_that_is_new_by_its_kind(root: Path) -> None:
    CHANGES["release"](root, "1.1.0")
    made = HEAD + (
        "\n## 1.1.0 (DAY)\n\n### Do first\n\n- Do A.\n\n### New\n\n- B\n  is new.\n"
        "\n## 1.0.0 (DAY)\n\n- Old.\n"
    )
    assert changelog(root) == made
    assert [path.name for path in (root / "changes.d").iterdir()] == ["README.md"]
    # Called once more after what failed later.
    CHANGES["release"](root, "1.1.0")
    assert changelog(root) == made


def test_what_a_person_has_written_of_a_version_stays_at_its_head(root: Path) -> None:
    text = (
        "# Changelog\n\n## Unreleased\n\n- Late.\n\n## 2.0\n\nIt is good.\n\n## 1.0 (2026-01-02)\n"
    )
    (root / "CHANGELOG.md").write_text(text)
    CHANGES["release"](root, "2.0")
    assert changelog(root) == (
        "# Changelog\n\n## Unreleased\n\n## 2.0 (DAY)\n\nIt is good.\n\n- Late.\n\n"
        "### Do first\n\n- Do A.\n\n### New\n\n- B\n  is new.\n\n## 1.0 (DAY)\n"
    )


def test_a_version_in_which_nothing_is_new_is_refused(root: Path) -> None:
    for path in (root / "changes.d").glob("*.*.md"):
        path.unlink()
    before = changelog(root)
    with pytest.raises(SystemExit, match="nothing is new"):
        CHANGES["release"](root, "1.1.0")
    assert changelog(root) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "- A.\n"),
        ("a.odd.md", "- A.\n"),
        ("a.new.md", "A.\n"),
        ("a.new.md", "- A.\nB.\n"),
        ("a.new.md", f"- {'A' * 119}\n"),
    ],
)
def test_a_file_that_is_no_entry_is_refused(root: Path, name: str, text: str) -> None:
    (root / "changes.d" / name).write_text(text)
    with pytest.raises(SystemExit, match=re.escape(str(root / "changes.d" / name))):
        CHANGES["fragments"](root)


def test_the_files_of_this_checkout_are_entries() -> None:
    CHANGES["fragments"](PROJECT)
    text = (PROJECT / "CHANGELOG.md").read_text()
    assert CHANGES["section"](text, "Unreleased") is not None
    assert CHANGES["section"](text, "1.0.0") is not None
