"""The pictures of the documents are those that the pages and the program make now."""

from __future__ import annotations

import re
from html import unescape

import pytest

from tests.pictures.__main__ import PICTURES, ROOT, TERMINALS, exact
from tests.pictures.diagrams import diagram
from tests.pictures.plots import of_bench

STALE = "`python -m tests.pictures` makes it"
DRAWN = """\
+-----+      +---------+
| one |----->| two     |
| a-b |      | x | y   |
+-----+      +---------+
   ^              |
   |              |
   +--------------+
"""


def words(picture: str) -> list[str]:
    return [unescape(one) for one in re.findall(r"<text[^>]*>([^<]*)<", picture)]


def test_drawn_pictures_and_plots_are_those_of_the_pages() -> None:
    for name, picture in exact().items():
        assert (PICTURES / f"{name}.svg").read_text() == picture, STALE


@pytest.mark.parametrize("name", TERMINALS)
def test_a_terminal_shows_what_the_program_draws(name: str) -> None:
    """Its words: what is around them differs from one version of rich to the next."""
    assert words((PICTURES / f"{name}.svg").read_text()) == words(TERMINALS[name]()), STALE


def test_no_picture_asks_another_host_and_each_is_on_a_page() -> None:
    pages = "".join(
        page.read_text() for page in (ROOT / "README.md", *PICTURES.parent.glob("*.md"))
    )
    for path in PICTURES.iterdir():
        assert f"pictures/{path.name}" in pages
        if path.suffix == ".svg":
            asks = r"url\((?!#)|(href|src)=|@import|font-face|<(script|image|foreignObject)"
            assert not re.search(asks, path.read_text()), path


def test_letters_become_boxes_arrows_and_words() -> None:
    made = diagram(DRAWN, "from one to two")
    assert words(made) == ["one", "two", "a-b", "x | y"]
    assert made.count('class="box"') == 2
    assert made.count('class="head"') == 2


def test_the_report_of_a_bench_becomes_bars() -> None:
    figures = [
        {"contender": "ntt", "seconds": {"median": 1.5}},
        {"contender": "x", "seconds": None},
    ]
    store, link = {"kind": "small", "blobs": 24_000}, {"name": "slow"}
    made = of_bench({"cases": [{"store": store, "link": link, "figures": figures}]})
    assert words(made)[2:] == ["small, slow: 24,000 blobs", "ntt", "1.5 s"]
