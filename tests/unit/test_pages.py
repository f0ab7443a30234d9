"""The pages: what they link to, and what names them elsewhere, is there."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.config.command_settings import TABLES
from tests.helpers import documents

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
ELSEWHERE = ("ntt_backup", "systemd", "bin", "docs/monitoring")
NAMED = re.compile(r"/(?:ntt-backup|docs)/([a-z-]+\.md)")
# A path of the repository that a page names, from its root or below `ntt_backup/`.
PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|sh|sql|toml)|(?:[\w.-]+/)+)`")
NOT_HERE = {"by-hash/", ".ntt-incoming/", "dist/"}
# How a hint names a chapter, also where its string goes on in the next line.
CHAPTER = re.compile(r"""["']([A-Z][^"']+)["'] in docs/([a-z-]+\.md)""")

# The tables of messages, whose cells in the first column quote the program.
MESSAGES = ("first-aid.md", "object-stores.md")
ERRORS = "## Errors and what to do"


def headings(page: Path) -> list[str]:
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    return re.findall(r"(?m)^#+ (.*)$", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings(page)}


def links(page: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield file, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        target = (page.parent / file) if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


def test_pages_and_chapters_that_are_named_elsewhere_exist() -> None:
    for top in ELSEWHERE:
        for path in (ROOT / top).rglob("*"):
            if not path.is_file() or path.suffix == ".pyc":
                continue
            text = re.sub(r"[\"']\n\s*[\"']", "", path.read_text(errors="replace"))
            for name in NAMED.findall(text):
                assert (DOCS / name).exists(), f"{path}: {name}"
            for chapter, name in CHAPTER.findall(text):
                assert chapter in headings(DOCS / name), f"{path}: {chapter}"


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/design.md", "CONTRIBUTING.md"])
def test_every_path_that_a_page_names_exists(name: str) -> None:
    for path in set(PATH.findall((ROOT / name).read_text())) - NOT_HERE:
        assert (ROOT / path).exists() or (ROOT / "ntt_backup" / path).exists(), path


def test_the_page_of_the_helpers_of_the_tests_lists_each_module_once() -> None:
    helpers = ROOT / "tests" / "helpers"
    listed = re.findall(r"(?m)^\| `(\w+\.py)` \|", (helpers / "README.md").read_text())
    modules = [path.name for path in helpers.glob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(modules)


@pytest.mark.parametrize("name", ["security.md", "reliability.md", "object-stores.md"])
def test_every_test_that_a_page_names_exists(name: str) -> None:
    text = (DOCS / name).read_text()
    file = ""
    named = re.findall(r"`(?:tests/)?((?:\w+/)+test_\w+\.py)?(?:::(test_\w+))?`", text)
    for path, test in named:
        file = path or file
        if path:
            assert (ROOT / "tests" / path).is_file(), path
        if test:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
    assert name != "security.md" or named


@pytest.mark.parametrize("name", ["security.md", "reliability.md"])
def test_every_claim_of_a_table_names_its_test(name: str) -> None:
    """A row of a table with a column `test` names one, which the test before this one looks up."""
    columns: list[str] = []
    claims = 0
    for line in (DOCS / name).read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not columns or not cells:
            columns = cells
        elif columns[-1] == "test" and not set(cells[0]) <= {"-"}:
            assert "::test_" in cells[-1], line
            claims += 1
    assert claims


def sources() -> str:
    """Returns all sources, with strings that go on in the next line joined, and no placeholders."""
    texts = (path.read_text() for path in (ROOT / "ntt_backup").rglob("*.py"))
    joined = (re.sub(r"[\"']\s*\n\s*[fr]?[\"']", "", text) for text in texts)
    return re.sub(r"\{[^{}]*\}", "\0", "\n".join(joined))


def test_every_message_that_a_page_explains_is_in_the_program() -> None:
    """Dots in a quotation stand for what differs from case to case."""
    program = sources()
    for name in MESSAGES:
        rows = re.findall(r"(?m)^\| (`.*?) \|", (DOCS / name).read_text().partition(ERRORS)[2])
        assert rows, name
        for quoted in re.findall(r"`([^`]+)`", "\n".join(rows)):
            for part in quoted.split("..."):
                assert part.strip(" ,.:") in program, f"{name}: {quoted}"


def test_every_setting_and_every_event_has_its_row() -> None:
    table = (DOCS / "settings.md").read_text()
    sample = (ROOT / "systemd" / "backup-remote.toml").read_text()
    for section, model in TABLES.items():
        for name, field in model.model_fields.items():
            if field.alias is None:  # Else it is a table of its own.
                assert re.search(rf"`({section}\.)?{name}`", table), f"{section}.{name}"
                assert re.search(rf"(?m)^#?\s*{name} =", sample), f"{section}.{name}"
    log = (DOCS / "log.md").read_text()
    for one in json.loads(documents.events_text())["oneOf"]:
        event = one["$ref"].rpartition("/")[2]
        assert f"`{event}`" in log, event


def test_the_readme_lists_the_pages_in_the_parts_of_the_site() -> None:
    nav = (ROOT / "bin" / "packaging" / "site" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    readme = (ROOT / "README.md").read_text().partition("\n## The documents\n")[2]
    site = re.split(r"(?m)^  - (.+):$", nav)[1:]
    listed = re.split(r"(?m)^([A-Z][\w ]+):$", readme)[1:]
    assert listed[::2] == site[::2] == ["Start", "Tasks", "Reference", "How it works"]
    for part, entries, lines in zip(site[::2], site[1::2], listed[1::2], strict=True):
        pages = [page for page in re.findall(r"- (\S+\.md)", entries) if (DOCS / page).exists()]
        assert re.findall(r"\]\(docs/([^)]+\.md)\)", lines) == pages, part


def test_the_site_gets_the_help_of_each_command() -> None:
    """mkdocs, which takes seconds, builds the site in the next test."""
    site = runpy.run_path(str(ROOT / "bin" / "packaging" / "site" / "build.py"))
    said = site["commands"]()
    assert "ntt-backup-remote snapshot restore [OPTIONS]" in said
    assert site["with_links"]("[a](docs/verify.md#b)", "README.md") == "[a](verify.md#b)"
    assert site["with_indentation"]("- a\n  - b") == "- a\n    - b\n"


@pytest.mark.long
def test_the_site_is_built_and_has_each_page(tmp_path: Path) -> None:
    """Without a network; a link or an anchor that leads nowhere is an error of mkdocs."""
    pytest.importorskip("material")
    build = ROOT / "bin" / "packaging" / "site" / "build.py"
    done = subprocess.run(
        [sys.executable, build, tmp_path / "site"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    made = {str(path.relative_to(tmp_path / "site")) for path in tmp_path.rglob("*.html")}
    pages = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    assert made >= pages | {"index.html", "command-help.html", "changelog.html"}
    said = (tmp_path / "site" / "command-help.html").read_text()
    assert "ntt-backup-remote snapshot restore [OPTIONS]" in said
