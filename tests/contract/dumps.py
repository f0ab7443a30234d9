"""A dump with content of a test's own is sent to a remote."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from ntt_backup.dump.record import DumpRecord
from ntt_backup.dump.remote_dir import RemoteDir

NAME = "20260304T120000Z-0badcafe.dump"


def record_of(content: bytes, number: int = 1) -> DumpRecord:
    return DumpRecord(
        format=1,
        number=number,
        target="remote",
        database="copyjob",
        server_version="16.4",
        program="16.4",
        host="alpha",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        fingerprint="",
        duration_s=1.5,
    )


def send_dump(place: RemoteDir, content: bytes, name: str = NAME) -> DumpRecord:
    """A dump with this content and name; its record."""
    upload, record = place.upload(name), record_of(content)
    upload.send(content)
    assert upload.finish() == (record.bytes, record.sha256)
    upload.name(replace(record, sealed=upload.sealed))
    return record
