"""Lets this thread, and all that it starts from then on, write below some directories only.

It is a second wall behind `tree`: whatever a manifest says, and whatever mistake is made with it,
the kernel permits no write elsewhere. It needs Linux 5.13 with Landlock, and is left out where that
is missing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

# The same numbers on every architecture but alpha.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_NO_NEW_PRIVS: Final = 38
# What of LANDLOCK_ACCESS_FS_* changes something: writing, removing, making; since version 2 moving
# between directories, since version 3 truncating.
_WRITE_FILE: Final = 1 << 1
_CHANGES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_SINCE: Final = {2: 1 << 13, 3: 1 << 14}

# What ssh and others open to write; nothing is kept there.
_OF_PROGRAMS: Final = ("/dev/null", "/dev/tty")

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def confine(directories: Sequence[str | os.PathLike[str]]) -> bool:
    """Returns whether writing is confined now. What is open already can still be written."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    handled = _CHANGES | sum(bit for since, bit in _SINCE.items() if version >= since)
    attributes = _Ruleset(handled)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    if ruleset < 0:
        return False
    with ExitStack() as stack:
        stack.callback(os.close, ruleset)
        for path in (*directories, *_OF_PROGRAMS):
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            stack.callback(os.close, fd)
            rule = _Beneath(_WRITE_FILE if path in _OF_PROGRAMS else handled, fd)
            if _libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0):
                return False
        if _libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0:
            return True
        # Without the right to do so, only a process that gains no rights may.
        _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        return int(_libc.syscall(_RESTRICT_SELF, ruleset, 0)) == 0
