"""A fair sample of the catalog's blobs, without reading the catalog.

`order by random()` reads and sorts 42 million rows, TABLESAMPLE takes whole pages, whose rows were
inserted together. Blobids are hashes: a walk along the index from any point meets blobs of all ages
and sizes as they come. A few walks, spread evenly, are a sample.

Reads only.
"""

from __future__ import annotations

from typing import Final

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.pending import columns, walk_indexes
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.model import Blob

_POINTS: Final = 64
_DIGITS: Final = 4


def sample(conn: Connection, target: str, limit: int) -> list[Blob]:
    """About limit blobs, or all where there are fewer; none twice, none that is failed."""
    query = statement("sample_from", **columns(target), size=fragment("read_size"))
    found: dict[str, Blob] = {}
    with translated(conn, "draw a sample"), conn.transaction():
        walk_indexes(conn, local=True)
        for number in range(_POINTS):
            point = f"{number * 16**_DIGITS // _POINTS:0{_DIGITS}x}"
            values = {"point": point, "limit": -(-limit // _POINTS)}
            for blobid, size in conn.execute(query, values):
                found[blobid] = Blob(blobid, size)
    return list(found.values())
