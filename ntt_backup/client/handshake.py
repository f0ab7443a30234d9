"""From a connection to a receiver that is ready: the banners, and what the two sides agree on.

There are two beginnings. An account with a shell runs our loader, which asks for the receiver's
program; a forced command (`ntt-backup-receive`) runs the installed one, whatever we asked for. The
loader's line is the only difference, so the program is sent when it has been seen, and not before.

 The lines are described in docs/protocol.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

from ntt_backup import __version__
from ntt_backup.client.channel import Channel
from ntt_backup.client.error_text import explain_batch, explain_gone, explain_root
from ntt_backup.errors import (
    BackupError,
    RemoteCannotStore,
    RemoteDenied,
    RemoteNonsense,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import PROTOCOL, banner_sum

_LINE: Final = re.compile(rb"^NTT-(LOADER|RECEIVE) (\d{1,9}) (\S.*)$")
_OLDEST_PYTHON: Final = (3, 8)
_NO_PYTHON: Final = re.compile(r"python3?: .*not found|python3: No such file", re.IGNORECASE)
# The last line of what a Python without ctypes or zlib, or one that broke, says about our program.
_NO_PROGRAM: Final = re.compile(
    r"^(\w+\.)?(ImportError|ModuleNotFoundError|SyntaxError|AttributeError):"
)
_HINT: Final = "install python3 (3.8 or newer) there, or set run.strategy to tar"


@dataclass(frozen=True, slots=True)
class Banner:
    """What the receiver says about itself. hashes and codecs are in its order of preference.
    checking: what it checks names with, `blake3` itself, the program `b3sum`, or `none`.
    """

    version: str
    python: str
    hashes: tuple[str, ...]
    checking: str
    codecs: tuple[str, ...]
    allowed: frozenset[str]

    @property
    def hash(self) -> str:
        """The one to use: BLAKE3 proves the name itself, so it goes before all others."""
        return "blake3" if "blake3" in self.hashes else "sha256"

    @property
    def can_hash(self) -> bool:
        """Whether it can compute BLAKE3."""
        return self.checking != "none"


class Caller(Protocol):
    """Who asks for which root: what both kinds of session name themselves by."""

    @property
    def root(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def slot(self) -> str: ...


def hello(caller: Caller, banner: Banner, **more: write_messages.Field) -> bytes:
    """The HELLO frame. more: what only one kind of session says."""
    fields: dict[str, write_messages.Field] = {
        "protocol": PROTOCOL,
        "root": caller.root,
        "owner": caller.owner,
        "run": caller.run_id,
        "slot": caller.slot,
        "hash": banner.hash,
        **more,
    }
    return write_messages.fields(framing.HELLO, fields)


def greet(channel: Channel, program: bytes, patience: float) -> Banner:
    """Have the receiver started. Raises Unsupported where no Python there can run it, RemoteDenied
    for one that speaks another protocol, and what `Channel.greet` raises.
    """
    doing = "starting the receiver"
    try:
        said = channel.greet(b"", _LINE, patience, doing=doing)
        if said[1] == b"LOADER":
            _require_python(_pairs(said[3]).get("python", ""))
            said = _start(channel, program, patience, doing)
    except RemoteDenied as error:
        if _NO_PYTHON.search(error.detail):
            raise Unsupported(
                "the remote has no python3", detail=error.detail, hint=_HINT
            ) from error
        raise
    return _banner(said)


def _start(channel: Channel, program: bytes, patience: float, doing: str) -> re.Match[bytes]:
    try:
        return channel.greet(program, _LINE, patience, doing=doing)
    except RemoteUnreachable as error:
        if _NO_PROGRAM.search(error.detail):
            raise Unsupported(
                "the remote's python3 cannot run the receiver",
                detail=error.detail,
                hint="install all of Python's standard library there, not python3-minimal alone, or"
                " set run.strategy to tar",
            ) from error
        raise


def refusal(code: str, text: str) -> BackupError:
    """What an ERROR frame means here."""
    if code == "gone":
        return explain_gone(text)
    if code == "root":
        return explain_root(text)
    if code == "storage":
        return explain_batch(text)
    if code == "place":
        return RemoteCannotStore(
            "what is below remote.path cannot be used",
            detail=text,
            hint="by-hash must be a directory there, on the file system of remote.path",
        )
    if code == "refused":
        return RemoteDenied(
            "the receiver there refuses",
            detail=text,
            hint="see the forced command of our key in the remote's authorized_keys: its --root,"
            " --allow and --require",
        )
    if code == "protocol":
        # The banner has settled the version: what arrives there is not what was sent.
        return RemoteNonsense(
            "the receiver there does not understand what reaches it",
            detail=text,
            hint="if this happens again: something between here and there alters what it carries",
        )
    return RemoteNonsense("the receiver there gave up", detail=f"{code}: {text}")


def _banner(said: re.Match[bytes]) -> Banner:
    pairs = _pairs(said[3])
    said_sum = pairs.get("sum")
    if said_sum is not None and said_sum != banner_sum(said[0].rpartition(b" ")[0]):
        raise RemoteUnreachable("the receiver's greeting was altered on its way")
    version = pairs.get("version", "unknown")
    if int(said[2]) != PROTOCOL:
        raise RemoteDenied(
            "the receiver installed there speaks another protocol",
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
