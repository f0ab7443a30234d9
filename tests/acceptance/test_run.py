"""`run` through the installed program: everything pending arrives, and is recorded."""

from __future__ import annotations

from tests.environment import Site


def test_once_sends_everything_and_then_nothing(site: Site) -> None:
    site.fill(300)
    first = site.run("run", "--once")
    assert first.returncode == 0, first.stderr + first.stdout
    site.assert_complete()
    second = site.run("run", "--once")
    assert second.returncode == 0
    assert site.events("run_stop")[-1]["copied"] == 0
