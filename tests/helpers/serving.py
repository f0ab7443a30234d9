"""The status page is served as its command serves it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.environment import Environment
from tests.helpers.patience import PATIENCE


@contextmanager
def serving(env: Environment) -> Iterator[str]:
    """Yields the page's address."""
    argv = env.argv("serve", "--listen", "127.0.0.1:0")
    with subprocess.Popen(
        argv, env=env.environment(), stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 128 + signal.SIGTERM
