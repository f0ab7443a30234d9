"""The beginning of `ntt-backup-remote`, and of `python -m ntt_backup`.

Loading the rest takes a third of a second. A Ctrl-C in that time ends the program as it does later,
and shows nobody the inside of it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Load the command line, and do what it says."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from ntt_backup import cli

    cli.main()


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
