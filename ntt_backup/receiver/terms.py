"""The terms of a session say what a client may do, and what this machine can compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.receiver.hashing import HOW_TO_GET
from ntt_backup.wire.messages import BLAKE3

if TYPE_CHECKING:
    from ntt_backup.receiver.b3sum import B3sum
    from ntt_backup.receiver.codec import Decompress
    from ntt_backup.receiver.hashing import NewHasher

ALLOWED = ("put", "list", "verify", "get", "replace", "dump", "snapshot", "packs", "prune")
REQUIRED = ("blake3", "sha256")


class Terms(NamedTuple):
    """Says what a client may do. root: the only one that it may name; None for any. allow and
    require: the words of `--allow` and `--require`. b3sum: the program that checks names where no
    hasher of BLAKE3 does.
    """

    root: str | None
    allow: frozenset[str]
    idle_timeout: float
    hashes: dict[int, NewHasher]
    codecs: dict[int, Decompress]
    b3sum: B3sum | None = None
    require: frozenset[str] = frozenset()

    @property
    def checked_with(self) -> str:
        """What the names of blobs are checked with: `blake3` in this Python, `b3sum`, or `none`."""
        if BLAKE3 in self.hashes:
            return "blake3"
        return "none" if self.b3sum is None else "b3sum"

    @property
    def lacking(self) -> str:
        """What is required but missing, and how to get it; empty where nothing is missing."""
        if "blake3" not in self.require or self.checked_with != "none":
            return ""
        return f"--require blake3 is given, but this machine has no BLAKE3: {HOW_TO_GET}"
