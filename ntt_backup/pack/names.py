"""The names of packs, and of the large blobs that are files of their own, on every kind of target.

`packs/<aa>/<lo16>-<hi16>-<id32>.tar` is a pack: lo and hi are the first 8 bytes of its smallest and
largest blobid, so a listing alone tells where a blob may be. One whose blobids do not all begin
with the same byte is `packs/wide/...`: what may hold the blobs of a prefix is found by two short
listings, however many packs there are. A sealed pack ends with `.tar.age`, and its lo and hi tell
the first byte of its blobids alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.wire.stored_names import pack_directory, pack_parts

PACKS: Final = "packs/"
WIDE_PACKS: Final = "packs/wide/"
BLOBS: Final = "blobs/"
# Beside the packs, so that what protects these is tried. No pack has such a name.
TRIALS: Final = f"{PACKS}trial-"
# A blob of so many bytes is a file of its own, not in a pack.
LARGE_BLOB: Final = 64 * 1024**2

_SEALED: Final = "tar.age"


class PackKey(NamedTuple):
    """A pack's key, taken apart. low and high are 16 hex digits, pack_id 32. kind: `tar`, or
    `tar.age` of a sealed pack.
    """

    low: str
    high: str
    pack_id: str
    kind: str = "tar"

    @property
    def key(self) -> str:
        below = pack_directory(self.low, self.high)
        return f"{below}{self.low}-{self.high}-{self.pack_id}.{self.kind}"

    @property
    def sealed(self) -> bool:
        return self.kind == _SEALED

    def may_have(self, prefix: str) -> bool:
        """Returns whether the pack may have a blobid that begins so."""
        digits = len(self.low)
        return self.low <= prefix[:digits].ljust(digits, "f") and self.high >= prefix[
            :digits
        ].ljust(digits, "0")

    @staticmethod
    def of(lowest: bytes, highest: bytes, pack_id: bytes) -> PackKey:
        """Returns the key of a pack between two digests, both in it."""
        return PackKey(lowest[:8].hex(), highest[:8].hex(), pack_id.hex())

    @staticmethod
    def of_sealed(lowest: bytes, highest: bytes, pack_id: bytes) -> PackKey:
        """Returns the key of a sealed pack, which tells little of what is in it."""
        low, high = lowest[:1].hex().ljust(16, "0"), highest[:1].hex().ljust(16, "f")
        return PackKey(low, high, pack_id.hex(), _SEALED)

    @staticmethod
    def read(key: str) -> PackKey | None:
        """Returns what a key says; None for one that is no pack's."""
        pack = PackKey.read_name(key.rpartition("/")[2])
        return pack if pack is not None and pack.key == key else None

    @staticmethod
    def read_name(name: str) -> PackKey | None:
        """Returns what the last part of a key says, wherever it stands."""
        parts = pack_parts(name)
        return None if parts is None else PackKey(*parts)


def blob_key(blobid: str) -> str:
    """Returns the key of a blob that is an object of its own."""
    return BLOBS + relative_path(blobid)


def pack_directories(prefix: str) -> list[str]:
    """Returns the directories of the packs that may hold blobids with a prefix."""
    return [f"{PACKS}{prefix[:2]}/", WIDE_PACKS] if prefix[1:] else [PACKS]


def blob_directory(prefix: str) -> str:
    """Returns the directory of the large blobs that may have a prefix."""
    parts = [part for part in (prefix[:2], prefix[2:4]) if part[1:]]
    return BLOBS + "".join(f"{part}/" for part in parts)


def blobid_of(key: str) -> str | None:
    """Returns the blobid of an object's key; None for one that is no blob's."""
    blobid = key.rpartition("/")[2]
    return blobid if is_blobid(blobid) and key == blob_key(blobid) else None
