"""The receiver is started on the remote, and its greeting says what it is.

There are two ways. An account with a shell runs our loader, which asks for the receiver's program;
a forced command (`ntt-backup-receive`) runs the installed one, whatever was asked for. Only the
loader prints its line, so the program is sent only after that line.

The remote command is one short line, since `ps` and `systemctl status` show it, without anything
that csh or fish would read differently: no backslash, no dollar, no quote within the quotes. So the
loader in it is Python without a string literal (its few words are arguments), and without syntax
that old Pythons cannot parse: they must be able to print their version. The loader reads exactly
the announced number of bytes, since its reader holds at most one byte ahead, so frames may follow
at once.

The program is compressed, and imports the receiver's modules from their sources, before any version
that is installed on the remote. `install-receiver` writes the same as one file.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

import ntt_backup
from ntt_backup.client.channel import Channel
from ntt_backup.client.transport import PYTHON
from ntt_backup.errors import RemoteDenied, RemoteUnreachable, Unsupported
from ntt_backup.wire.framing import PROTOCOL, banner_sum

LOADER: Final = (
    "import io,os,sys;"
    "a=sys.argv;"
    "os.write(1,(chr(10)+chr(32).join(a[2:])+sys.version.split()[0]+chr(10)).encode());"
    # The current directory is no place to import from.
    "sys.path.pop(0);"
    "import zlib;"
    # A Python that is too old gets no program.
    "b=io.BufferedReader(sys.stdin.buffer.raw,1).read(int(a[1]));"
    "exec(b and zlib.decompress(b))"
)
GREETING: Final = ("NTT-LOADER", "1", "python=")

_GREETING_LINE: Final = re.compile(rb"^NTT-(LOADER|RECEIVE) (\d{1,9}) (\S.*)$")
_STARTING: Final = "starting the receiver"
_OLDEST_PYTHON: Final = (3, 8)
_NO_PYTHON: Final = re.compile(r"python3?: .*not found|python3: No such file", re.IGNORECASE)
# The last line that a broken Python, or one without ctypes or zlib, prints about our program.
_NO_PROGRAM: Final = re.compile(
    r"^(\w+\.)?(ImportError|ModuleNotFoundError|SyntaxError|AttributeError):"
)
_PYTHON_HINT: Final = "install python3 (3.8 or newer) on the remote, or set run.strategy to tar"


# The end of the program: an importer of the modules whose sources it holds.
_IMPORTER: Final = """\
import sys
from importlib.machinery import ModuleSpec
class Importer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Importer, is_package=True) if name in sources else None
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        name = module.__name__
        exec(compile(sources[name], "<" + name + ">", "exec"), module.__dict__)
sys.meta_path.insert(0, Importer)
from ntt_backup.receiver.__main__ import {start}
sys.exit({start}())
"""
_PACKAGES: Final = ("wire", "blobdir", "receiver")
_STANDALONE: Final = """\
#!/usr/bin/env python3
# ntt-backup-receive {version}: the receiver of ntt-backup as one file, for a forced command.
# Written by `ntt-backup-remote install-receiver --write`; what it speaks: docs/protocol.md.
import sys
if sys.version_info < (3, 8):
    sys.exit("ntt-backup-receive needs Python 3.8 or newer")
sources = {{}}
"""


@cache
def bundle() -> tuple[str, bytes]:
    """Returns the remote command, and the program to send once the loader has greeted."""
    program = f"sources = {_sources()!r}\n{_IMPORTER.format(start='serve')}"
    # A higher level takes twice as long at every start, for a program a fifteenth smaller.
    data = zlib.compress(program.encode(), 4)
    words = " ".join(GREETING)
    return f"exec sh -c '{PYTHON} -E -c \"{LOADER}\" {len(data)} {words}'", data


def standalone() -> str:
    """Returns the receiver as one readable Python file: operators see what a key may run."""
    parts = [_STANDALONE.format(version=ntt_backup.__version__)]
    for name, source in _sources().items():
        parts.append(f"sources[{name!r}] = r'''{source}'''\n")
    parts.append(_IMPORTER.format(start="main"))
    return "".join(parts)


def _sources() -> dict[str, str]:
    """Returns the sources of the modules that the receiver consists of, by name."""
    sources = {"ntt_backup": f"__version__ = {ntt_backup.__version__!r}\n"}
    for package in _PACKAGES:
        for file in sorted(resources.files(ntt_backup).joinpath(package).iterdir(), key=str):
            if file.name.endswith(".py"):
                module = f"ntt_backup.{package}.{file.name[:-3]}".removesuffix(".__init__")
                sources[module] = file.read_text("utf-8")
    return sources


@dataclass(frozen=True, slots=True)
class Banner:
    """The greeting of a receiver.

    Attributes:
        version: The version of ntt_backup.
        python: The version of Python.
        hashes: The hashes for a session, in the receiver's order of preference.
        checking: The means to check names of blobs: `blake3`, the program `b3sum`, or `none`.
        codecs: The codecs, in the receiver's order of preference.
        allowed: The words of its `--allow`.
    """

    version: str
    python: str
    hashes: tuple[str, ...]
    checking: str
    codecs: tuple[str, ...]
    allowed: frozenset[str]

    @property
    def hash(self) -> str:
        """The hash of the session. BLAKE3 comes first, since it proves the name of a blob."""
        return "blake3" if "blake3" in self.hashes else "sha256"

    @property
    def can_hash(self) -> bool:
        """Whether the receiver can compute BLAKE3."""
        return self.checking != "none"


def greet(channel: Channel, program: bytes, patience: float) -> Banner:
    """Starts the receiver behind a channel, and returns its greeting.

    program: the second result of `bundle`, for an account with a shell. patience: seconds to wait
    for each line.

    Raises:
        Unsupported: The remote's Python cannot run the receiver.
        RemoteDenied: The receiver speaks another protocol.
        BackupError: As `Channel.greet` raises.
    """
    try:
        said = channel.greet(b"", _GREETING_LINE, patience, doing=_STARTING)
    except RemoteDenied as error:
        if _NO_PYTHON.search(error.detail):
            raise Unsupported(
                "the remote has no python3", detail=error.detail, hint=_PYTHON_HINT
            ) from error
        raise
    if said[1] == b"LOADER":
        _require_python(_pairs(said[3]).get("python", ""))
        try:
            said = channel.greet(program, _GREETING_LINE, patience, doing=_STARTING)
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
            f" we are version {ntt_backup.__version__} with protocol {PROTOCOL}",
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
            hint=_PYTHON_HINT,
        )
