"""Which hashes this machine has: BLAKE3 where a module or a library is found, SHA-256 always.

The standard library has no BLAKE3, and one in pure Python would manage a megabyte a second. So it
is looked for: the `blake3` module, else BLAKE3's own C library through ctypes. What is found must
give the right answer for a known input before it is trusted with more. Where there is neither, the
program `b3sum` can still check names.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ntt_backup.receiver.b3sum import KNOWN_INPUT, KNOWN_OUTPUT
from ntt_backup.wire.write_messages import BLAKE3, SHA256

if TYPE_CHECKING:
    from typing import Protocol

    from ntt_backup.wire.framing import Buffer

    class Hasher(Protocol):
        """What hashlib gives, as much of it as is needed."""

        def update(self, data: Buffer, /) -> object: ...

        def digest(self) -> bytes: ...

    NewHasher = Callable[[Buffer], Hasher]

LIBRARIES = ("libblake3.so.0", "libblake3.so")

# blake3_hasher has 1912 bytes in version 1; there is room for one that has grown.
_STATE_BYTES = 4096


def available() -> dict[int, NewHasher]:
    """How to begin a hash, for every kind there is, best first."""
    found: dict[int, NewHasher] = {}
    for look in (_module, _library):
        new = look()
        if new is not None and _is_right(new):
            found[BLAKE3] = new
            break
    found[SHA256] = hashlib.sha256
    return found


def _is_right(new: NewHasher) -> bool:
    try:
        hasher = new(KNOWN_INPUT[:100])
        hasher.update(memoryview(bytearray(KNOWN_INPUT))[100:])
        return hasher.digest() == KNOWN_OUTPUT
    except Exception:  # noqa: BLE001 - whatever a foreign module raises, it is of no use here
        return False


def _module() -> NewHasher | None:
    try:
        from blake3 import blake3
    except Exception:  # noqa: BLE001 - a broken installation is none
        return None
    new: NewHasher = blake3
    return new


def _library() -> NewHasher | None:
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            library.blake3_hasher_init.argtypes = [ctypes.c_void_p]
            library.blake3_hasher_update.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
            ]
            library.blake3_hasher_finalize.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
            ]
        except (OSError, AttributeError):
            continue
        return _of(library)
    return None


def _of(library: Any) -> NewHasher:
    def new(data: Buffer) -> Hasher:
        return _LibraryHasher(library, data)

    return new


class _LibraryHasher:
    """BLAKE3's C library in the shape of a hashlib object."""

    __slots__ = ("_library", "_state")

    def __init__(self, library: Any, data: Buffer) -> None:
        self._library = library
        self._state = ctypes.create_string_buffer(_STATE_BYTES)
        library.blake3_hasher_init(self._state)
        self.update(data)

    def update(self, data: Buffer) -> None:
        view = memoryview(data)
        if view.readonly:
            self._library.blake3_hasher_update(self._state, view.tobytes(), len(view))
        elif len(view):
            place = (ctypes.c_char * len(view)).from_buffer(view)
            self._library.blake3_hasher_update(self._state, place, len(view))

    def digest(self) -> bytes:
        out = ctypes.create_string_buffer(32)
        self._library.blake3_hasher_finalize(self._state, out, 32)
        return out.raw
