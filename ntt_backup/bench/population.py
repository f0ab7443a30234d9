"""Blobs to measure with: drawn from the catalog, found in the store, and read once."""

from __future__ import annotations

from typing import Final

from ntt_backup import identity
from ntt_backup.bench.sample import Sample
from ntt_backup.catalog import connection
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.catalog.selection import sample
from ntt_backup.config import Settings
from ntt_backup.errors import SourceError
from ntt_backup.format import many
from ntt_backup.model import Blob
from ntt_backup.source.inspection import Store

_POPULATION: Final = 100_000


def population(settings: Settings) -> list[Blob]:
    """Returns some blobs of the catalog with their sizes. Raises SourceError for none."""
    conn = connection.connect(settings.catalog.url, identity.application("bench"))
    try:
        verify_schema(conn, settings.target, "bench")
        drawn = sample(conn, settings.target, _POPULATION)
    finally:
        conn.close()
    blobs = [blob for blob in Store(settings.source.root).measure(drawn) if blob.size is not None]
    if not blobs:
        raise SourceError(
            "there is nothing to draw a sample from",
            detail=f"of {many(len(drawn), 'blob')} of the catalog none has a size, neither in the"
            " catalog nor in the store",
            hint="see `ntt-backup-remote status`, and source.root",
        )
    return blobs


def readable(settings: Settings, drawn: Sample) -> tuple[Sample, int]:
    """Reads the sample, so that it is in memory; returns the blobs that are sound, and how many are
    not. Raises SourceError where the store as a whole cannot be read.
    """
    checked = Store(settings.source.root).inspect(drawn.blobs, verify=True)
    return Sample(tuple(checked.ready), drawn.missing), len(checked.failed)
