"""The keeper of an embedded PostgreSQL starts the server, and stops it when nobody uses it.

Each process that uses the server holds a shared lock, which the kernel releases however the process
ends. The keeper waits for the exclusive lock. The keeper runs as long as the server does, so it is
a small program of its own that imports nothing of ours. Any process can start it, also one with
several threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
# A fast shutdown is asked for, then an immediate one, then the server is killed.
_STOPS: Final = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))


def keep(lock: int, argv: list[str], identity: dict[str, Any]) -> int:
    """Runs the server until no other process holds the lock; returns the server's exit code."""
    keeper, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def prepare() -> None:
        # If the keeper is killed, the server ends at once, and recovers at its next start.
        prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)

    server = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare, **identity
    )
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, lambda *_: server.send_signal(signal.SIGINT))

    def stop_when_unused() -> None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for signum, seconds in _STOPS:
            server.send_signal(signum)
            with suppress(subprocess.TimeoutExpired):
                server.wait(seconds)
                return

    threading.Thread(target=stop_when_unused, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(keep(*json.loads(sys.argv[1])))
