"""The keys of a bucket, relative to the prefix of the target's URL.

`packs/<aa>/<lo16>-<hi16>-<id32>.tar` is a pack: lo and hi are the first 8 bytes of its smallest and
largest blobid, so a listing alone tells where a blob may be. One whose blobids do not all begin
with the same byte is `packs/wide/...`: what may hold the blobs of a prefix is found by two short
listings, however many packs there are. A sealed pack ends with `.tar.age`, and its lo and hi tell
the first byte of its blobids alone.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ntt_backup.blobdir.layout import is_blobid, relative_path

FORMAT: Final = "format.json"
PACKS: Final = "packs/"
WIDE_PACKS: Final = "packs/wide/"
BLOBS: Final = "blobs/"
DUMPS: Final = "pgdump/"
SNAPSHOTS: Final = "snapshots/"
# Beside the packs, so that what protects these is tried. No pack has such a key.
TRIALS: Final = f"{PACKS}trial-"
# A blob of so many bytes is an object of its own, not in a pack.
LARGE_BLOB: Final = 64 * 1024**2

_SEALED: Final = "tar.age"
_PACK: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{32})\.(tar|tar\.age)")


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
        below = f"{PACKS}{self.low[:2]}/" if self.low[:2] == self.high[:2] else WIDE_PACKS
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
        found = _PACK.fullmatch(name)
        return None if found is None or found[1] > found[2] else PackKey(*found.groups())


def blob_key(blobid: str) -> str:
    """Returns the key of a blob that is an object of its own."""
    return BLOBS + relative_path(blobid)


def pack_prefixes(prefix: str) -> list[str]:
    """Returns what the keys of packs begin with that may hold blobids with this prefix."""
    if not prefix:
        return [PACKS]
    return [PACKS + (f"{prefix[:2]}/" if prefix[1:] else prefix), WIDE_PACKS]


def blob_prefix(prefix: str) -> str:
    """Returns what the keys of blobs begin with whose blobids have this prefix."""
    parts = [part for part in (prefix[:2], prefix[2:4]) if part]
    below = BLOBS + "".join(f"{part}/" if part[1:] else part for part in parts)
    return below + prefix if prefix[4:] else below


def blobid_of(key: str) -> str | None:
    """Returns the blobid of an object's key; None for one that is no blob's."""
    blobid = key.rpartition("/")[2]
    return blobid if is_blobid(blobid) and key == blob_key(blobid) else None
