"""What the coordinator makes of a word: of a worker's, or of a command's at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup.client.throttle import Limit
from ntt_backup.config import Settings
from ntt_backup.daemon.coordinator import _Coordinator
from ntt_backup.daemon.progress import OpenOutages, RunProgress
from ntt_backup.daemon.run_control import RunControl
from ntt_backup.daemon.signals import SignalInbox
from ntt_backup.events import Outage
from ntt_backup.process.messages import Answered, Drained


@pytest.mark.parametrize("watch", [False, True])
def test_all_workers_end_as_soon_as_one_sees_that_nothing_is_pending(watch: bool) -> None:
    """They do not wait for its goodbye to the remote; a run that watches goes on."""
    stops: list[bool] = []
    run: Any = _Coordinator.__new__(_Coordinator)
    run._watch = watch
    run._progress = RunProgress(0.0, 2)
    run._workers = SimpleNamespace(stop=lambda: stops.append(True))
    run._receive(SimpleNamespace(worker=0), [Drained()])
    assert stops == ([] if watch else [True])


@pytest.mark.parametrize("settled", [False, True])
def test_all_that_wait_for_a_side_go_on_as_soon_as_it_answers_one_worker(settled: bool) -> None:
    """A side job, too: by itself it would wait for up to `run.backoff_cap`."""
    woken: list[str] = []
    run: Any = _Coordinator.__new__(_Coordinator)
    run._progress = RunProgress(0.0, 2)
    run._outages = OpenOutages()
    run._emit = lambda *_: None
    run._control = SimpleNamespace(connect=lambda side: None)
    run._jobs = {"dump": SimpleNamespace(answer=woken.append)}
    run._workers = [
        SimpleNamespace(
            worker=one, running=True, hurry=lambda one=one: woken.append(f"worker {one}")
        )
        for one in (0, 1, 2)
    ]
    for one in (0, 1):
        away = Outage(worker=one, what="remote", reason="", detail="", attempt=1, wait_s=60.0)
        run._outages.take(away, 0.0)
    run._receive(run._workers[1], [Answered(what="remote", settled=settled)])
    assert woken == ["worker 0", "worker 1", "remote"]


def test_a_run_can_be_asked_before_its_first_wait(tmp_path: Path) -> None:
    """Else a command that comes while the catalog is slow would say that no daemon runs."""
    settings = Settings(
        source={"root": tmp_path},
        remote={"url": "file:///srv/backup"},
        control={"socket": tmp_path / "a.sock"},
    )
    seen: list[bool] = []
    run: Any = _Coordinator.__new__(_Coordinator)
    run._settings, run._watch, run._emit = settings, True, lambda *_: None
    run._workers = SimpleNamespace(limit=Limit(None, 1), kill=lambda: None)
    run._jobs = {}
    run._control = RunControl(
        settings, "run", run._workers, run._jobs, RunProgress(0.0, 1), SignalInbox(), run._emit
    )
    run._preflight = lambda: seen.append((tmp_path / "a.sock").is_socket())
    run._finish = lambda: 0
    try:
        run.go()
    finally:
        run._control.close()
    assert seen == [True]
