"""How tests wait: for a condition, and how long at most.

A wait ends as soon as its condition holds, so patience costs nothing where all is well; a test
that gives up early fails on a machine that is only busy. NTT_TEST_PATIENCE sets another figure, in
seconds. What a test says about time is not for here: that is the outcome, and stands in the test.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import pytest

PATIENCE: Final = float(os.environ.get("NTT_TEST_PATIENCE", "600"))


def wait_until(
    condition: Callable[[], object],
    what: str,
    timeout: float = PATIENCE,
    log: Callable[[], str] = str,
) -> None:
    """Return once condition() is true; fail, naming what was waited for, when it never is.

    A condition that has not come soon is looked at less often: to look may take a query, or a walk
    through all processes, and takes the processor from what is waited for.

    Args:
        condition: Is called until it returns what is true.
        what: The condition, for the failure.
        timeout: Seconds.
        log: Returns what a server has logged, for the failure.
    """
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        waited = time.monotonic() - began
        if waited > timeout:
            pytest.fail(f"waited {timeout:.0f} s for {what}\n{log()}")
        pause.wait(min(0.1, max(0.02, waited / 10)))


def await_silence(sent: Callable[[], int]) -> None:
    """Return once nothing has been sent for a second, but for signs of life."""
    seen, since = sent(), time.monotonic()

    def silent() -> bool:
        nonlocal seen, since
        if (now := sent()) > seen + 1000:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 1.0

    wait_until(silent, "the end of what was sent")
