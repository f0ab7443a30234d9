"""The receiver's source on its way to a remote where nothing of ours is installed.

The remote command is one short line without anything that csh or fish would read differently: no
backslash, no dollar, no quote within the quotes. So the loader in it is Python without a string
literal (its few words are arguments), and without what old Pythons could not parse: they must be
able to say how old they are. It reads exactly the announced number of bytes, so that frames may
follow at once.

What follows is a compressed program that defines the modules of `ntt_backup.receiver` from their
source. The names are registered before anything is imported, so an installed version on that
machine is not mixed in. The same modules as one file are what `install-receiver` writes.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib import resources
from typing import Final

import ntt_backup

LOADER: Final = (
    "import os,sys;"
    "n=int(sys.argv[1]);"
    "w=chr(10)+chr(32).join(sys.argv[2:])+sys.version.split()[0]+chr(10);"
    "os.write(1,w.encode());"
    "sys.version_info<(3,8)and sys.exit(1);"
    # The current directory is no place to import from.
    "sys.path=[p for p in sys.path if p];"
    "import zlib;"
    "b=bytearray();"
    "all(len(b)<n and not b.extend(os.read(0,n-len(b)))for i in range(n));"
    "len(b)<n and sys.exit(1);"
    "exec(zlib.decompress(bytes(b)))"
)
GREETING: Final = ("NTT-LOADER", "1", "python=")

_PROGRAM_MODULE: Final = "ntt_backup.receiver.__main__"
_DEFINE: Final = """\
def module(name, source):
    found = types.ModuleType(name)
    found.__path__ = []
    sys.modules[name] = found
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, found)
    exec(compile(source, "<" + name + ">", "exec"), found.__dict__)
"""
_PROGRAM: Final = """\
import sys, types
{define}
for name, source in {modules!r}:
    module(name, source)
sys.exit(sys.modules[{program!r}].serve())
"""
# Each after those it imports.
_ORDER: Final = (
    "wire.framing",
    "wire.write_messages",
    "wire.read_messages",
    "receiver.codec",
    "receiver.b3sum",
    "receiver.hashing",
    "blobdir.syscalls",
    "receiver.terms",
    "receiver.workspace",
    "receiver.connection",
    "receiver.partial",
    "receiver.staged_batch",
    "receiver.publish",
    "receiver.group_commit",
    "receiver.large_blob",
    "receiver.staging",
    "receiver.name_check",
    "receiver.write_session",
    "receiver.open_blob",
    "receiver.list_blobs",
    "receiver.hash_blobs",
    "receiver.send_blobs",
    "receiver.read_session",
    "receiver.session",
    "receiver.__main__",
)


_STANDALONE: Final = """\
#!/usr/bin/env python3
# ntt-backup-receive {version}: the receiver of ntt-backup as one file, for a forced command.
# Written by `ntt-backup-remote install-receiver --write`; what it speaks: docs/protocol.md.
import sys, types
if sys.version_info < (3, 8):
    sys.exit("ntt-backup-receive needs Python 3.8 or newer")
{define}"""


@cache
def bundle() -> tuple[str, bytes]:
    """(the remote command, the bytes that follow once its loader has greeted)."""
    program = _PROGRAM.format(define=_DEFINE, modules=_modules(), program=_PROGRAM_MODULE)
    data = zlib.compress(program.encode(), 9)
    words = " ".join(GREETING)
    return f"exec sh -c 'exec python3 -E -c \"{LOADER}\" {len(data)} {words}'", data


def standalone() -> str:
    """The receiver as one Python file, to be installed: readable, since somebody may want to read
    what a key of theirs will run.
    """
    parts = [_STANDALONE.format(version=ntt_backup.__version__, define=_DEFINE)]
    for name, source in _modules():
        parts.append(f"module({name!r}, r'''{source}''')\n")
    parts.append(f"sys.exit(sys.modules[{_PROGRAM_MODULE!r}].main())\n")
    return "".join(parts)


def _modules() -> list[tuple[str, str]]:
    """Names and sources, each after those it imports."""
    package = resources.files(ntt_backup)
    return [
        ("ntt_backup", f"__version__ = {ntt_backup.__version__!r}\n"),
        *(
            (f"ntt_backup.{name}", "")
            for name in sorted({name.partition(".")[0] for name in _ORDER})
        ),
        *(
            (
                f"ntt_backup.{name}",
                package.joinpath(f"{name.replace('.', '/')}.py").read_text("utf-8"),
            )
            for name in _ORDER
        ),
    ]
