"""How this program was called, so that the next command it names can be pasted as it stands.

A hint is written where an error is raised, far below the command line, and says `ntt-backup-remote
init-db`. Pasted like that it would read another configuration, or work on another target. So the
options before the command are noted once, and every command line in a hint is completed by them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

# In words for people the program's name before a command is always a line to be typed.
_LINE: Final = re.compile(r"\bntt-backup-remote (?=[a-z])")
_options: list[str] = []


def note(options: Sequence[str]) -> None:
    """Keep the options that were given before the command."""
    _options[:] = options


def complete(text: str) -> str:
    """text with those options in every command line of ours."""
    words = " ".join(["ntt-backup-remote", *map(shlex.quote, _options), ""])
    return _LINE.sub(lambda _: words, text) if _options else text
