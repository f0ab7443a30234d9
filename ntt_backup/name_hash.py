"""The hash of names: a blob is named by the BLAKE3 of its content, or by its SHA-256.

All names in a store are of one hash (`source.hash`), and so are all names on a target, whose marker
says which. A session sends the setting to the receiver, which compares it with the marker. A
command without a store reads the hash from the target or the pack. Content is compared with its
name in either case, and no content has the same name by the other hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

from blake3 import blake3

if TYPE_CHECKING:
    from typing import Protocol

    class NameHasher(Protocol):
        """An object of hashlib, as much of it as is needed."""

        def update(self, data: Any, /) -> object: ...
        def digest(self) -> bytes: ...
        def hexdigest(self) -> str: ...

    NewNameHasher = Callable[..., NameHasher]

HashOfNames = Literal["blake3", "sha256"]

NEW_HASHER: Final[Mapping[str, NewNameHasher]] = {"blake3": blake3, "sha256": sha256}
SHOWN: Final[Mapping[str, str]] = {"blake3": "BLAKE3", "sha256": "SHA-256"}


def hash_of_names(said: object) -> HashOfNames:
    """Returns the hash of names that a marker or a pack says; BLAKE3, where it says none."""
    return "sha256" if said == "sha256" else "blake3"
