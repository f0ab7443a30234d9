"""What the coordinator makes of a worker's word that nothing is pending."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup.daemon.coordinator import _Run
from ntt_backup.daemon.progress import Progress
from ntt_backup.process.messages import Drained


@pytest.mark.parametrize("watch", [False, True])
def test_all_workers_end_as_soon_as_one_sees_that_nothing_is_pending(watch: bool) -> None:
    """They do not wait for its goodbye to the remote; a run that watches goes on."""
    stops: list[bool] = []
    run: Any = _Run.__new__(_Run)
    run._watch = watch
    run._progress = Progress(0.0, 2)
    run._workers = SimpleNamespace(stop=lambda: stops.append(True))
    run._receive(SimpleNamespace(worker=0), [Drained()])
    assert stops == ([] if watch else [True])
