"""The greeting of a receiver starts it, and says what it is.

There are two beginnings. An account with a shell runs our loader, which asks for the receiver's
program; a forced command (`ntt-backup-receive`) runs the installed one, whatever was asked for. The
loader's line is the only difference, so the program is sent only after that line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ntt_backup import __version__
from ntt_backup.client.channel import Channel
from ntt_backup.errors import RemoteDenied, RemoteUnreachable, Unsupported
from ntt_backup.wire.framing import PROTOCOL, banner_sum

_LINE: Final = re.compile(rb"^NTT-(LOADER|RECEIVE) (\d{1,9}) (\S.*)$")
_DOING: Final = "starting the receiver"
_OLDEST_PYTHON: Final = (3, 8)
_NO_PYTHON: Final = re.compile(r"python3?: .*not found|python3: No such file", re.IGNORECASE)
# The last line that a broken Python, or one without ctypes or zlib, prints about our program.
_NO_PROGRAM: Final = re.compile(
    r"^(\w+\.)?(ImportError|ModuleNotFoundError|SyntaxError|AttributeError):"
)
_HINT: Final = "install python3 (3.8 or newer) on the remote, or set run.strategy to tar"


@dataclass(frozen=True, slots=True)
class Banner:
    """What the receiver says about itself. hashes and codecs are in its order of preference.
    checking: what it checks names with: `blake3`, the program `b3sum`, or `none`.
    """

    version: str
    python: str
    hashes: tuple[str, ...]
    checking: str
    codecs: tuple[str, ...]
    allowed: frozenset[str]

    @property
    def hash(self) -> str:
        """The hash of the session: BLAKE3 proves the name itself, so it goes first."""
        return "blake3" if "blake3" in self.hashes else "sha256"

    @property
    def can_hash(self) -> bool:
        """Whether it can compute BLAKE3."""
        return self.checking != "none"


def greet(channel: Channel, program: bytes, patience: float) -> Banner:
    """Starts the receiver behind a channel, and returns what it says of itself.

    program: its source, for an account with a shell. Raises Unsupported where the remote's Python
    cannot run it, RemoteDenied for one of another protocol, and what `Channel.greet` raises.
    """
    try:
        said = channel.greet(b"", _LINE, patience, doing=_DOING)
    except RemoteDenied as error:
        if _NO_PYTHON.search(error.detail):
            raise Unsupported(
                "the remote has no python3", detail=error.detail, hint=_HINT
            ) from error
        raise
    if said[1] == b"LOADER":
        _require_python(_pairs(said[3]).get("python", ""))
        try:
            said = channel.greet(program, _LINE, patience, doing=_DOING)
        except RemoteUnreachable as error:
            if _NO_PROGRAM.search(error.detail):
                raise Unsupported(
                    "the remote's python3 cannot run the receiver",
                    detail=error.detail,
                    hint="install all of Python's standard library on the remote, not"
                    " python3-minimal alone, or set run.strategy to tar",
                ) from error
            raise
    return _banner(said)


def _banner(said: re.Match[bytes]) -> Banner:
    pairs = _pairs(said[3])
    said_sum = pairs.get("sum")
    if said_sum is not None and said_sum != banner_sum(said[0].rpartition(b" ")[0]):
        raise RemoteUnreachable("the receiver's greeting was altered on its way")
    version = pairs.get("version", "unknown")
    if int(said[2]) != PROTOCOL:
        raise RemoteDenied(
            "the receiver on the remote speaks another protocol",
            detail=f"it is version {version} with protocol {int(said[2])};"
            f" we are version {__version__} with protocol {PROTOCOL}",
            hint="install the same version of ntt-backup at both ends",
        )
    hashes = tuple(pairs.get("hash", "").split(","))
    return Banner(
        version,
        pairs.get("python", "unknown"),
        hashes,
        # Older receivers do not say it: they check with the hash of the session.
        pairs.get("check", "blake3" if "blake3" in hashes else "none"),
        tuple(filter(None, pairs.get("codec", "").split(","))),
        frozenset(pairs.get("allow", "").split(",")),
    )


def _pairs(text: bytes) -> dict[str, str]:
    words = text.decode("ascii", "replace").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _require_python(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d{1,4}", version)[:2])
    if numbers < _OLDEST_PYTHON:
        raise Unsupported(
            "the remote's python3 is too old for the receiver",
            detail=f"it is {version or 'of unknown version'}",
            hint=_HINT,
        )
