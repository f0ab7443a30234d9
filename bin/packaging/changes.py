#!/usr/bin/env python3
"""Puts the files of changes.d into CHANGELOG.md, or prints what it says of a version.

bin/packaging/changes.py release 1.2.3    # called by bin/release
bin/packaging/changes.py show 1.2.3       # the text of the version, as notes of a release
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The kinds of changes, in the order in which a reader needs them, and their headings.
KINDS = {"first": "Do first", "changed": "Changed", "new": "New", "fixed": "Fixed"}
_SECTION = r"(?ms)^## {}( \(.*?\))?\n(?P<text>.*?)(?=^## |\Z)"


def fragments(root: Path) -> dict[str, list[Path]]:
    """Returns the files of changes.d by their kind.

    Raises:
        SystemExit: A file has a name or a form that no entry has.
    """
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted((root / "changes.d").glob("*")):
        if path.name == "README.md":
            continue
        name = re.fullmatch(r"[\w-]+\.(\w+)\.md", path.name)
        if name is None or name[1] not in KINDS:
            sys.exit(f"{path}: is called NAME.KIND.md, with a kind of {', '.join(KINDS)}")
        text = path.read_text()
        if not re.fullmatch(r"(?:- \S.{,117}\n(?:  \S.{,117}\n)*)+", text):
            sys.exit(f"{path}: an entry begins with '- ', and has at most 120 characters a line")
        found[name[1]].append(path)
    return found


def section(text: str, version: str) -> re.Match[str] | None:
    """Returns the section of a version in the text of the changelog, or None."""
    return re.search(_SECTION.format(re.escape(version)), text)


def release(root: Path, version: str) -> None:
    """Moves all that is new into the section of a version, which gets the date of today.

    A section that a person has written stays at the head of it. Called again without anything new,
    it changes nothing.

    Args:
        root: The checkout.
        version: The version, such as 1.2.3.

    Raises:
        SystemExit: Nothing is new, or a file of changes.d has a wrong form.
    """
    changelog = root / "CHANGELOG.md"
    text, found = changelog.read_text(), fragments(root)
    unreleased, before = section(text, "Unreleased"), section(text, version)
    if unreleased is None:
        sys.exit("CHANGELOG.md has no section '## Unreleased'")
    parts = [unreleased["text"].strip()]
    for kind, paths in found.items():
        if paths:
            entries = "".join(path.read_text() for path in paths)
            parts.append(f"### {KINDS[kind]}\n\n{entries.strip()}")
    new = [part for part in parts if part]
    if not new and (before is None or before[1]):
        if before is None:
            sys.exit(
                f"nothing is new: neither changes.d nor CHANGELOG.md says anything of {version}"
            )
        return
    if before is not None:
        text = text.replace(before[0], "")
        new.insert(0, before["text"].strip())
    heading = f"## {version} ({datetime.now(UTC):%Y-%m-%d})"
    made = "\n\n".join(["## Unreleased", heading, *new]) + "\n"
    head, _, tail = text.partition(unreleased[0])
    changelog.write_text(f"{head}{made}\n{tail}".rstrip() + "\n")
    for paths in found.values():
        for path in paths:
            path.unlink()


def main(argv: list[str]) -> None:
    match argv:
        case ["release", version]:
            release(ROOT, version)
        case ["show", version]:
            found = section((ROOT / "CHANGELOG.md").read_text(), version)
            if found is None:
                sys.exit(f"CHANGELOG.md says nothing of {version}")
            print(found["text"].strip())
        case _:
            sys.exit("usage: changes.py release|show VERSION")


if __name__ == "__main__":
    main(sys.argv[1:])
