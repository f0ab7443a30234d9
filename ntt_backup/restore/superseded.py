"""Tells whether a damaged pack is needed: it is not where other packs have all of its blobs.

Only its table says which blobs it has. But its name is a hash of them, so it can be told whether
what is still read of a damaged table names all of them. Where it does not, nobody knows.
"""

from __future__ import annotations

from typing import Final

from ntt_backup.objects.bucket import ObjectArchived, ObjectMissing, ObjectUnreadable
from ntt_backup.objects.patient import PatientBucket
from ntt_backup.objects.tables import PackObject, Tables, packs_for
from ntt_backup.pack.format import DIGEST_BYTES, ENTRY_BYTES, INDEX_MEMBER, MAX_ENTRIES, pack_id
from ntt_backup.pack.ustar import BLOCK, read_header

# The largest table, with a header before it and the trailer and the archive's end behind it.
_LARGEST_END: Final = (MAX_ENTRIES * ENTRY_BYTES // BLOCK + 5) * BLOCK


def is_superseded(bucket: PatientBucket, tables: Tables, pack: PackObject) -> bool:
    """Returns whether it is proved that other packs name all blobs of a damaged one."""
    digests = _damaged_table(bucket, pack)
    left, proved = set(digests), False
    others = [one for one in packs_for(bucket, digests) if one.key != pack.key] if digests else []
    for _, reader in tables.readable(others):
        # Each pack has the id of the store, which is a part of the hash.
        proved = proved or pack_id(reader.trailer.store_id, digests).hex() == pack.name.pack_id
        left = {digest for digest in left if reader.table.find(digest) is None}
        if proved and not left:
            return True
    return False


def _damaged_table(bucket: PatientBucket, pack: PackObject) -> list[bytes]:
    """Returns the digests that stand where the table should, as far as they are in order."""
    begin = max(0, pack.size - _LARGEST_END) // BLOCK * BLOCK
    try:
        end = bucket.read(pack.key, begin, pack.size - begin)
    except (ObjectMissing, ObjectArchived, ObjectUnreadable):
        return []
    for at in range(len(end) - BLOCK, -1, -BLOCK):
        member = read_header(end[at : at + BLOCK])
        if member is not None and member.name == INDEX_MEMBER:
            table = end[at + BLOCK : at + member.size]
            break
    else:
        return []
    digests: list[bytes] = []
    for start in range(0, len(table) - ENTRY_BYTES + 1, ENTRY_BYTES):
        digest = table[start : start + DIGEST_BYTES]
        if digests and digest <= digests[-1]:
            break  # What fills the last block.
        digests.append(digest)
    return digests
