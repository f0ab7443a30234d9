"""The keys of a bucket, relative to the prefix of the target's URL.

`packs/<aa>/<lo16>-<hi16>-<id32>.tar` is a pack: lo and hi are the first 8 bytes of its smallest and
largest blobid, so a listing alone tells where a blob may be.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ntt_backup.blobdir.layout import is_blobid, relative_path

FORMAT: Final = "format.json"
PACKS: Final = "packs/"
BLOBS: Final = "blobs/"
INDEX: Final = "index/"
DUMPS: Final = "pgdump/"
SNAPSHOTS: Final = "snapshots/"
# Beside the packs, so that what protects these is tried. No pack has such a key.
TRIALS: Final = f"{PACKS}trial-"

_PACK: Final = re.compile(
    r"packs/([0-9a-f]{2})/(\1[0-9a-f]{14})-([0-9a-f]{16})-([0-9a-f]{32})\.tar"
)


class PackKey(NamedTuple):
    """A pack's key, taken apart. low and high are 16 hex digits, pack_id 32."""

    low: str
    high: str
    pack_id: str

    @property
    def key(self) -> str:
        return f"{PACKS}{self.low[:2]}/{self.low}-{self.high}-{self.pack_id}.tar"

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
    def read(key: str) -> PackKey | None:
        """Returns what a key says; None for one that is no pack's."""
        found = _PACK.fullmatch(key)
        return None if found is None or found[2] > found[3] else PackKey(*found.groups()[1:])


def blob_key(blobid: str) -> str:
    """Returns the key of a blob that is an object of its own."""
    return BLOBS + relative_path(blobid)


def blobid_of(key: str) -> str | None:
    """Returns the blobid of an object's key; None for one that is no blob's."""
    blobid = key.rpartition("/")[2]
    return blobid if is_blobid(blobid) and key == blob_key(blobid) else None
