"""`ntt-backup-remote` and `python -m ntt_backup` begin and end here.

Loading the rest takes a moment. A Ctrl-C in that time ends the program as it does later, and shows
nobody the inside of it. What is loaded stays, so it is seldom looked through for what could be
thrown away, and not taken apart at the end: together that is a fifth of a second of every command,
and more than a short one does.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

# As many are made before the first look, more than a start makes. Python's own are 700.
_NEW_OBJECTS: Final = 200_000


def main() -> NoReturn:
    """Loads the command line, and does what it says."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if sys.getfilesystemencoding() != "utf-8":
        # Elsewhere names of files are bytes as UTF-8 reads them: in manifests, patterns and lists.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606
    gc.set_threshold(_NEW_OBJECTS)
    # pydantic would look through all that is installed for plugins, which would see our settings.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    from ntt_backup.cli import app

    code = app.main()
    atexit._run_exitfuncs()
    os._exit(code)


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
