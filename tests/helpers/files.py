"""Blobs below a root, all files that lie there, and content for them."""

from __future__ import annotations

import random
from pathlib import Path

from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.model import Blob


def put(root: Path, content: bytes) -> Blob:
    """Store content as a blob."""
    return put_as(root, blake3(content).hexdigest(), content)


def put_as(root: Path, blobid: str, content: bytes) -> Blob:
    """Store content under a name that need not be its hash."""
    path = root / relative_path(blobid)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Blob(blobid, len(content))


def tree(root: Path) -> dict[str, bytes]:
    """Path below root to content, for every file."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def noise(size: int, seed: int = 1) -> bytes:
    """Returns bytes that no compression makes fewer."""
    return random.Random(seed).randbytes(size)
