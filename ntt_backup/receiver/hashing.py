"""This machine can compute these hashes: SHA-256, and BLAKE3 where one is installed.

The standard library has no BLAKE3, and pure Python would hash a megabyte a second. So the `blake3`
module is used, else BLAKE3's C library through ctypes, if it gives the right answer for a known
input. Where there is neither, the program `b3sum` can still check names.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ntt_backup.wire.messages import BLAKE3, SHA256

if TYPE_CHECKING:
    from typing import Protocol

    from ntt_backup.wire.framing import Buffer

    class Hasher(Protocol):
        """A hashlib object, as much of it as is needed."""

        def update(self, data: Buffer, /) -> object: ...

        def digest(self) -> bytes: ...

    # Of BLAKE3 they take `key` by its name as well.
    NewHasher = Callable[..., Hasher]

# BLAKE3's published test vectors for 1025 bytes: more than a chunk, so that its tree is used.
KNOWN_INPUT = bytes(number % 251 for number in range(1025))
KNOWN_OUTPUT = bytes.fromhex("d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444")
KNOWN_KEY = b"whats the Elvish word for friend"
KNOWN_KEYED = bytes.fromhex("357dc55de0c7e382c900fd6e320acc04146be01db6a8ce7210b7189bd664ea69")

HOW_TO_GET = (
    "install b3sum (apt-get install b3sum), or the module blake3 of its Python, or libblake3"
)

LIBRARIES = ("libblake3.so.0", "libblake3.so")

# blake3_hasher has 1912 bytes in version 1; there is room for one that has grown.
_STATE_BYTES = 4096


def available() -> dict[int, NewHasher]:
    """Returns what begins a hash, for every hash that can be computed, best first."""
    found: dict[int, NewHasher] = {}
    for look in (_module, _library):
        new = look()
        if new is not None and _is_right(new):
            found[BLAKE3] = new
            break
    found[SHA256] = hashlib.sha256
    return found


def under_key(key: bytes, blake3: NewHasher | None) -> NewHasher:
    """Returns what begins a sum under a key: keyed BLAKE3, or HMAC-SHA-256 without BLAKE3."""
    if blake3 is not None:
        return partial(blake3, key=key)
    import hmac

    return lambda data: hmac.new(key, data, "sha256")


def _is_right(new: NewHasher) -> bool:
    try:
        for options, output in (({}, KNOWN_OUTPUT), ({"key": KNOWN_KEY}, KNOWN_KEYED)):
            hasher = new(KNOWN_INPUT[:100], **options)
            hasher.update(memoryview(bytearray(KNOWN_INPUT))[100:])
            if hasher.digest() != output:
                return False
    except Exception:  # noqa: BLE001 - whatever a foreign module raises, it is of no use here
        return False
    return True


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
            state, data_and_size = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
            library.blake3_hasher_init.argtypes = (state,)
            library.blake3_hasher_init_keyed.argtypes = (state, ctypes.c_char_p)
            library.blake3_hasher_update.argtypes = (state, *data_and_size)
            library.blake3_hasher_finalize.argtypes = (state, *data_and_size)
        except (OSError, AttributeError):
            continue
        return partial(_LibraryHasher, library)
    return None


class _LibraryHasher:
    """A hash by BLAKE3's C library, with the methods of a hashlib object."""

    __slots__ = ("_library", "_state")

    def __init__(self, library: Any, data: Buffer, key: bytes | None = None) -> None:
        self._library = library
        self._state = ctypes.create_string_buffer(_STATE_BYTES)
        if key is None:
            library.blake3_hasher_init(self._state)
        else:
            library.blake3_hasher_init_keyed(self._state, key)
        self.update(data)

    def update(self, data: Buffer) -> None:
        view = memoryview(data)
        if view.readonly:
            self._library.blake3_hasher_update(self._state, view.tobytes(), len(view))
        elif len(view):
            content = (ctypes.c_char * len(view)).from_buffer(view)
            self._library.blake3_hasher_update(self._state, content, len(view))

    def digest(self) -> bytes:
        out = ctypes.create_string_buffer(32)
        self._library.blake3_hasher_finalize(self._state, out, 32)
        return out.raw
