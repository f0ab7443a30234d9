"""The receiver's source goes to a remote where nothing of ours is installed.

The remote command is one short line, since `ps` and `systemctl status` show it, without anything
that csh or fish would read differently: no backslash, no dollar, no quote within the quotes. So the
loader in it is Python without a string literal (its few words are arguments), and without what old
Pythons could not parse: they must be able to say how old they are. It reads exactly the announced
number of bytes, since its reader holds no more than one byte ahead, so frames may follow at once.

What follows is a compressed program that imports the receiver's modules from their sources, before
any version that is installed on the remote. `install-receiver` writes the same as one file.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib import resources
from typing import Final

import ntt_backup

LOADER: Final = (
    "import io,os,sys;"
    "a=sys.argv;"
    "os.write(1,(chr(10)+chr(32).join(a[2:])+sys.version.split()[0]+chr(10)).encode());"
    # The current directory is no place to import from.
    "sys.path.pop(0);"
    "import zlib;"
    # Nothing comes to a Python that is too old.
    "b=io.BufferedReader(sys.stdin.buffer.raw,1).read(int(a[1]));"
    "exec(b and zlib.decompress(b))"
)
# What the remote command starts the loader with.
PYTHON: Final = "exec python3"
GREETING: Final = ("NTT-LOADER", "1", "python=")

# What follows the loader: an importer of the modules whose sources it holds.
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
    """Returns the remote command, and the bytes that follow once its loader has greeted."""
    program = f"sources = {_sources()!r}\n{_IMPORTER.format(start='serve')}"
    # Half as long as it takes to make it a fifteenth smaller, and nothing begins before it is done.
    data = zlib.compress(program.encode(), 4)
    words = " ".join(GREETING)
    return f"exec sh -c '{PYTHON} -E -c \"{LOADER}\" {len(data)} {words}'", data


def standalone() -> str:
    """Returns the receiver as one Python file, readable for who wants to know what a key runs."""
    parts = [_STANDALONE.format(version=ntt_backup.__version__)]
    for name, source in _sources().items():
        parts.append(f"sources[{name!r}] = r'''{source}'''\n")
    parts.append(_IMPORTER.format(start="main"))
    return "".join(parts)


def _sources() -> dict[str, str]:
    """Returns the sources of all modules that travel, by name."""
    sources = {"ntt_backup": f"__version__ = {ntt_backup.__version__!r}\n"}
    for package in _PACKAGES:
        for file in sorted(resources.files(ntt_backup).joinpath(package).iterdir(), key=str):
            if file.name.endswith(".py"):
                module = f"ntt_backup.{package}.{file.name[:-3]}".removesuffix(".__init__")
                sources[module] = file.read_text("utf-8")
    return sources
