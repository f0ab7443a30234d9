"""The program at the pace of a simulated time: a line of `sitecustomize` calls `quicken`.

Intervals that are settings are scaled in the settings. What the program has as constants, and what
an operator knows as hours and days, is divided by the same factor here.
"""

from __future__ import annotations

import select
import time
from datetime import timedelta
from importlib import import_module

# An outage of this many real seconds is a long one at any pace: on a busy machine the start of a
# receiver may take nearly as long.
LONG_OUTAGE = 30.0
# With the least value in seconds. A program of an earlier revision may lack some.
_CONSTANTS = {
    "catalog.proofs._A_DAY": 1.0,
    "daemon.checks._SOON_SECONDS": 1.0,
    "daemon.coordinator._IDLE_SECONDS": 1.0,
    "daemon.event_log.TOGETHER_SECONDS": 1.0,
    "daemon.run_history._IDLE_SECONDS": 1.0,
    "daemon.side_jobs.MOST_RETRY_SECONDS": 5.0,
    "daemon.side_jobs.RETRY_SECONDS": 2.0,
    "report.target_facts._SLOW_SECONDS": 1.0,
    "rollback_detection._TOLD_FOR": 1.0,
    "report.health._BETWEEN_RUNS": 1.0,
    "report.health._LONG_OUTAGE": LONG_OUTAGE,
    "snapshot.job._SOON_SECONDS": 1.0,
}


def quicken(factor: float) -> None:
    """Divides the constants of the program that runs. Where libfaketime moves the clock, each sleep
    fails by EINVAL.
    """
    for place, least in _CONSTANTS.items():
        module, _, name = place.rpartition(".")
        try:
            within = import_module(f"ntt_backup.{module}")
            value = getattr(within, name)
        except (AttributeError, ImportError):
            continue
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        scaled = min(seconds, max(least, seconds / factor))
        setattr(within, name, timedelta(seconds=scaled) if isinstance(value, timedelta) else scaled)

    def sleep(seconds: float) -> None:
        select.select((), (), (), seconds)

    time.sleep = sleep  # type: ignore[assignment]
