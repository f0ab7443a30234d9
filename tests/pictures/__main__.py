"""Makes the pictures of docs/pictures: `python -m tests.pictures`.

The page is photographed where there is a Chromium. `python -m tests.pictures FILE.json` draws what
`tests/bench/run --json FILE.json` has measured as FILE.svg, and nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from unittest import mock

from ntt_backup.report.health import judge
from ntt_backup.report.page import Target, render
from tests.helpers.views import PROGRAMS, browsing
from tests.pictures import plots, scene, terminal
from tests.pictures.diagrams import diagram

ROOT: Final = Path(__file__).parents[2]
PICTURES: Final = ROOT / "docs" / "pictures"
# The pages whose diagrams are drawn with letters, below the picture that is made of them.
DRAWN: Final = {
    "overview": "README.md",
    "processes": "docs/architecture.md",
    "batch": "docs/architecture.md",
    "targets": "docs/architecture.md",
}
TERMINALS: Final[Mapping[str, Callable[[], str]]] = {
    "live": terminal.live_view,
    "watch": terminal.watched,
}
_PLOTS: Final = {"times": plots.times, "catalog": plots.catalog, "blob": plots.blob}


def exact() -> dict[str, str]:
    """Returns the pictures, by name, that are made of nothing but the pages."""
    made = {name: draw() for name, draw in _PLOTS.items()}
    for name, page in DRAWN.items():
        text = (ROOT / page).read_text()
        found = re.search(
            rf"!\[([^]]+)\]\(\S*pictures/{name}\.svg\)\n+<details.*?^```\n(.*?)^```$",
            text,
            re.M | re.S,
        )
        assert found is not None, name
        made[name] = diagram(found[2], " ".join(found[1].split()))
    return made


def _photograph() -> None:
    """Writes the page of one target in both themes."""
    now = datetime.now(UTC)
    facts = scene.targets(now)[0]
    with (
        tempfile.TemporaryDirectory() as scratch,
        mock.patch("socket.gethostname", return_value="alpha"),
    ):
        page = Path(scratch, "page.html")
        page.write_text(render([Target.of(facts, judge(facts, now))], now))
        with browsing(Path(scratch, "profile")) as browser:
            for theme in ("light", "dark"):
                browser.look(page.as_uri(), width=1000, dark=theme == "dark")
                browser.screenshot(PICTURES / f"page-{theme}.png", height=830)


def main(results: list[str]) -> None:
    for name in results:
        Path(name).with_suffix(".svg").write_text(
            plots.of_bench(json.loads(Path(name).read_text()))
        )
    if results:
        return
    PICTURES.mkdir(exist_ok=True)
    made = exact() | {name: draw() for name, draw in TERMINALS.items()}
    for name, picture in made.items():
        (PICTURES / f"{name}.svg").write_text(picture)
    if any(map(shutil.which, PROGRAMS)):
        _photograph()


if __name__ == "__main__":
    main(sys.argv[1:])
