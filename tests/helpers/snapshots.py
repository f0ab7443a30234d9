"""Versions of snapshot sets, made without a disk: what is in them is for the test to decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from blake3 import blake3

from ntt_backup.snapshot.format.block_map import MapWriter
from ntt_backup.snapshot.format.entry import DIRECTORY, FILE, Entry, order
from ntt_backup.snapshot.format.manifest import Header, ManifestTrailer, ManifestWriter
from ntt_backup.snapshot.format.super_blocks import SuperBlockWriter
from ntt_backup.snapshot.names import MANIFEST, MAP, FileName
from ntt_backup.snapshot.restore.files import RestoreOptions
from ntt_backup.snapshot.restore.version import RestoredVersion
from ntt_backup.snapshot.restore.version import restore as restore_version
from tests.helpers.memory_store import MemoryStore

VERSION = "20260102T030405Z-0123abcd"

Made = tuple[Entry, Sequence[tuple[int, bytes]]]


def put_version(
    repository: MemoryStore,
    entries: Sequence[Made],
    *,
    set: str = "etc",
    chain: Sequence[str] = (VERSION,),
    map: bytes = b"",
) -> MemoryStore:
    """Puts the last version of a chain: each entry with its content, by where that begins. map: the
    sums in its map, which it has none without. Returns the repository.
    """
    packs = SuperBlockWriter(repository, set, chain[-1], index=len(chain) - 1)
    for entry, content in entries:
        for start, data in content:
            packs.add(start, data, entry.extents)
    sums = packs.end()
    written = bytearray()
    parent = chain[-2] if chain[1:] else ""
    header = Header(set, chain[-1], parent, tuple(chain), "00" * 32, ("/srv",))
    manifest = ManifestWriter(written.extend, header)
    for entry, _ in sorted(entries, key=lambda one: order(one[0].path)):
        manifest.add(entry.line())
    stored = bytearray()
    if map:
        writer = MapWriter(stored.extend)
        writer.add(map)
        writer.end()
        repository.files[str(FileName(set, chain[-1], MAP))] = bytes(stored)
    size, digest = sum(one.size for one, _ in entries), sha256(stored).hexdigest()
    manifest.end(ManifestTrailer(len(entries), size, sums, len(stored), digest))
    repository.files[str(FileName(set, chain[-1], MANIFEST))] = bytes(written)
    return repository


def directory(path: str) -> Made:
    return Entry(path, DIRECTORY, 0o755), ()


def file(path: str, content: bytes = b"content", mode: int = 0o644) -> Made:
    digest = blake3(content).hexdigest()
    return Entry(path, FILE, mode, mtime=1, size=len(content), digest=digest), [(0, content)]


def restore(
    repository: MemoryStore,
    to: Path,
    wanted: str = "etc",
    *patterns: str,
    jobs: int = 1,
    on_progress: Callable[[RestoredVersion], object] = lambda _: None,
    **options: bool,
) -> RestoredVersion:
    """Restores a version from a repository in memory, which may be used again."""

    def opened() -> MemoryStore:
        repository.closed = False
        return repository

    done = restore_version(
        opened,
        wanted,
        to,
        RestoreOptions(**options),
        jobs=jobs,
        patterns=patterns,
        trust=True,
        on_progress=on_progress,
    )
    repository.closed = False
    return done
