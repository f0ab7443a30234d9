"""Puts the pages of the site together and has mkdocs build them.

The pages of docs/ are taken as they are. Pages of other directories get a place among them, and the
reference of commands is made from the program.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from ntt_backup.cli.app import cli

ROOT = Path(__file__).resolve().parents[3]
# Files of the repository that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "tests/power/README.md": "power-cuts.md",
    "systemd/backup-remote.toml": "sample.md",
}
_LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def place_of(page: str) -> str:
    """Returns the path in the site of a page of the repository."""
    return PAGES.get(page, page.removeprefix("docs/"))


def with_links(text: str, page: str) -> str:
    """Returns the text of a page of the repository with the links of the site.

    Args:
        text: The text.
        page: The path of the page in the repository.
    """
    above = Path(page).parent

    def changed(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if "://" in target:
            return link[0]
        path = (ROOT / above / target).resolve()
        if not path.is_relative_to(ROOT):
            return link[0]
        depth = len(Path(place_of(page)).parts) - 1
        return f"]({'../' * depth}{place_of(str(path.relative_to(ROOT)))}{anchor})"

    return _LINK.sub(changed, text)


def with_indentation(text: str) -> str:
    """Returns the text with what belongs to the entry of a list indented by four for each level.

    mkdocs wants that; elsewhere the width of the mark is enough, which is two or three.
    """
    lines, fence = [], None
    for line in text.splitlines():
        bare = line.lstrip(" ")
        indent = len(line) - len(bare)
        if fence is None:
            wanted = 4 * ((indent + 2) // 4) if indent else 0
            if bare.startswith("```"):
                fence = wanted - indent
        else:
            wanted = indent + fence
            if bare.startswith("```"):
                fence = None
        lines.append(" " * max(0, wanted) + bare)
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Returns the page of all commands, from their help."""
    text = ["# Help of all commands\n", "The help of each command, as the program prints it.\n"]

    def add(command: click.Command, parent: click.Context | None, name: str) -> None:
        context = click.Context(command, info_name=name, parent=parent, terminal_width=100)
        words = context.command_path.removeprefix("ntt-backup-remote ")
        text.append(f"## {words}\n\n```text\n{command.get_help(context)}\n```\n")
        if isinstance(command, click.Group):
            for one in command.list_commands(context):
                below = command.get_command(context, one)
                if below is not None and not below.hidden:
                    add(below, context, one)

    add(cli, None, "ntt-backup-remote")
    return "\n".join(text)


def main(to: Path) -> int:
    """Builds the site in a directory. Returns the exit code of mkdocs."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        work, docs = Path(scratch), Path(scratch) / "docs"
        shutil.copytree(ROOT / "docs", docs)
        for path in docs.rglob("*.md"):
            page = str(Path("docs") / path.relative_to(docs))
            path.write_text(with_indentation(with_links(path.read_text(), page)))
        for page, place in PAGES.items():
            text = (ROOT / page).read_text()
            if page.endswith(".toml"):
                text = f"# A sample of all settings\n\n```toml\n{text}```\n"
            (docs / place).write_text(with_indentation(with_links(text, page)))
        (docs / "command-help.md").write_text(commands())
        shutil.copy(Path(__file__).with_name("mkdocs.yml"), work)
        argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--clean"]
        argv += ["--site-dir", str(to.resolve())]
        return subprocess.run(argv, cwd=work, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
