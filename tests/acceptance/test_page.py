"""`serve` as an operator has it: started beside a run, asked by a browser."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from ntt_backup.report.health import judge
from ntt_backup.report.page import Target, policy, render
from ntt_backup.report.web_server import PageServer, Shown
from tests.helpers.environment import Environment
from tests.helpers.views import browsing, serving
from tests.helpers.waiting import PATIENCE, wait_until
from tests.pictures import scene


def figures(url: str, target: str = "remote") -> dict[str, str]:
    """The large figures of a target, as the page shows them."""
    with urlopen(url, timeout=PATIENCE) as answer:
        page = answer.read().decode()
    (one,) = re.findall(rf'<article id="target-{target}".*?</article>', page, re.DOTALL)
    return dict(re.findall(r"<dt>(\w+)</dt><dd><b>([^<]*)</b>", one))


def health(url: str) -> tuple[int, str]:
    try:
        with urlopen(url + "healthz", timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_says_what_the_rows_say_before_and_after_a_run(env: Environment) -> None:
    for number in range(20):
        env.put(b"kept %d" % number)
    for number in range(3):
        env.path(env.put(b"lost %d" % number)).unlink()
    env.write_config(**{"targets.attic": {"url": f"file://{env.root}/attic"}})
    with serving(env) as url:
        assert health(url)[1].splitlines()[1:] == [
            "attic: Action required: The table blobs lacks attic_copied, attic_last_checked,"
            " attic_copy_failed"
        ]
        env.call("--target", "attic", "init-db")
        words = "Action required: 23 blobs are not copied yet, and there never was a run\n"
        both = (503, f"remote: {words}attic: {words}")
        wait_until(lambda: health(url) == both, "what both targets wait for")
        assert figures(url) == {"copied": "0", "pending": "23", "failed": "0"}
        env.run("run", expect=7)
        wanted = {"copied": str(len(env.copied())), "pending": "0", "failed": "3"}
        assert wanted["copied"] == "20"
        wait_until(lambda: figures(url) == wanted, "the page to say what the rows say")
        assert health(url)[1].startswith("remote: Action required: 3 blobs could not be copied\n")
        headlines = health(url)[1].splitlines()
    said = env.call("why", expect=7).stdout.splitlines()
    assert [line for line in said if line[:1] != " "] == headlines
    assert "`ntt-backup-remote" in said[1]


def test_why_ends_with_the_code_of_what_is_so(env: Environment) -> None:
    env.fill(2)
    env.run("run")
    told = json.loads(env.call("why", "--json", expect=0).stdout)
    assert told["targets"]["remote"]["level"] == "healthy"
    assert told["exit_code"] == 0
    env.write_config(catalog={"url": "postgresql:///?host=/nowhere"})
    assert env.call("why", expect=4).stdout.startswith("remote: Action required: ")


def test_the_page_shows_a_daemon_at_work(env: Environment) -> None:
    env.fill_slowly(60, rate="150kB/s")
    with env.running("run", "--watch"), serving(env) as url:
        wait_until(lambda: "speed" in figures(url), "the speed of the daemon")


# Of all texts that are seen, how the colour of one stands out from what is behind it: the least.
_CONTRAST = r"""
(() => {
  const parse = text => text.match(/[\d.]+/g).slice(0, 3).map(Number);
  const linear = c => c <= 0.03928 * 255 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const light = text => {
    const [r, g, b] = parse(text).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = one => getComputedStyle(one);
  let least = [99, ""];
  for (const one of document.body.querySelectorAll("*")) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !one.getClientRects().length || one.closest("svg, script")) continue;
    let behind = one;
    while (/, 0\)$/.test(style(behind).backgroundColor)) behind = behind.parentElement;
    const under = light(style(behind).backgroundColor), text = light(style(one).color);
    const ratio = (Math.max(text, under) + 0.05) / (Math.min(text, under) + 0.05);
    if (ratio < least[0]) least = [ratio, one.className + " " + one.textContent.slice(0, 40)];
  }
  return least;
})()
"""
# A phone's window grows with what it has to show, its screen does not.
_TOO_WIDE = "document.documentElement.scrollWidth - screen.width"


@pytest.mark.long
def test_a_browser_shows_it_well_while_a_run_works_and_after(
    env: Environment, tmp_path: Path
) -> None:
    blobids = env.fill_slowly(60, rate="150kB/s")
    gone = env.put(b"gone")
    env.path(gone).unlink()
    with (
        env.running("run", "--watch") as run,
        serving(env) as url,
        browsing(tmp_path / "profile") as browser,
    ):
        idle = (None, "0 MB/s")
        wait_until(lambda: figures(url).get("speed") not in idle, "the daemon to be seen at work")
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            browser.look(url, width=width, dark=dark)
            assert browser.tell(_TOO_WIDE) <= 0
            ratio, where = browser.tell(_CONTRAST)
            assert ratio >= 4.5, where
            browser.screenshot(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
        assert browser.tell("document.querySelectorAll('tbody tr').length") >= 2
        env.await_copied(set(blobids))

        # Nobody touches it: the page renews itself.
        copied, failed = f"{len(env.copied())}", "1"
        words = "[...document.querySelectorAll('dd b')].slice(0, 3).map(b => b.textContent).join()"
        wait_until(lambda: browser.tell(words) == f"{copied},0,{failed}", "the renewed page")
        assert "Action required" in browser.tell("document.title")
        run.send_signal(signal.SIGTERM)
        run.wait(PATIENCE)
        stopped = "document.body.textContent.includes('No daemon runs on this host')"
        wait_until(lambda: browser.tell(stopped), "the page to say that the daemon has gone")

        browser.look(url, width=390, dark=True, scripts=False)
        assert browser.tell(_TOO_WIDE) <= 0
        assert figures(url) == {"copied": copied, "pending": "0", "failed": failed}
        assert browser.problems == []


# Its version is the one that `npm install --global axe-core` has brought.
_RULES = """
var runOnly = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
axe.run(document, {runOnly}).then(found => ({
  passed: found.passes.length,
  violations: found.violations.map(one => [one.id, one.nodes.map(node => node.html)]),
}))
"""


@pytest.mark.long
def test_no_rule_of_wcag_is_violated(tmp_path: Path) -> None:
    """WCAG 2.2 AA, as far as axe can tell, and the focus, on a page that has all parts."""
    npm = shutil.which("npm") or pytest.skip("there is no npm")
    argv = [npm, "root", "--global"]
    root = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    axe = Path(root, "axe-core", "axe.min.js")
    if not axe.exists():
        pytest.skip("there is no axe-core")
    now = datetime.now(UTC)
    text = render([Target.of(one, judge(one, now)) for one in scene.targets(now)], now)
    server = PageServer("127.0.0.1:0", lambda: Shown(text, policy(), "", True))
    threading.Thread(target=server.serve, daemon=True).start()
    with browsing(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            browser.look(server.url, width=width, dark=dark)
            browser.tell(axe.read_text() + ";0")
            found = browser.tell(_RULES)
            assert found["violations"] == [], (width, dark)
            assert found["passed"] > 10
            assert browser.tell(_TOO_WIDE) <= 0

        # Who moves by the keyboard is where he was when the page has renewed itself.
        browser.tell(
            "document.querySelector('nav a').focus(); document.querySelector('nav').id = 1"
        )
        wait_until(lambda: not browser.tell("document.querySelector('nav').id"), "a new page")
        assert browser.tell("document.activeElement.hash") == "#target-offsite"
        assert browser.problems == []
    server.shutdown()
    server.server_close()
