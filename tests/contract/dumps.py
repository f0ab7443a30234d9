"""A dump with content of a test's own is sent to a remote."""

from __future__ import annotations

import hashlib

from ntt_backup.dump.record import DumpRecord
from ntt_backup.dump.store import publish_dump
from ntt_backup.filestore.contract import FileStore

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


def send_dump(store: FileStore, content: bytes, name: str = NAME) -> DumpRecord:
    """A dump with this content and name; its record. What goes wrong ends it as a job does."""
    upload, record = store.write(name), record_of(content)
    try:
        for at in range(0, len(content), 1 << 20):
            upload.add(content[at : at + (1 << 20)])
        assert upload.finish() == (record.bytes, bytes.fromhex(record.sha256))
        publish_dump(store, upload, name, record)
    except BaseException:
        upload.discard()
        raise
    return record
