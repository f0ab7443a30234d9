"""A tree is taken into a repository in memory, and its versions are looked at."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from blake3 import blake3

from ntt_backup.config.signing_key import SigningKey, SigningKeys
from ntt_backup.snapshot.format.entry import Entry
from ntt_backup.snapshot.format.manifest import ManifestTrailer
from ntt_backup.snapshot.format.super_blocks import read_super_block
from ntt_backup.snapshot.origins import NO_KEYS, Origins
from ntt_backup.snapshot.take.last_version import Copies
from ntt_backup.snapshot.take.new_version import Report, Taken, take
from ntt_backup.snapshot.take.walk import SnapshotSet
from ntt_backup.snapshot.versions import open_manifest, versions
from tests.helpers.memory_store import MemoryStore

BLOCK = 8 << 10
NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
# Of this host, and of another one.
KEYS, OTHERS = (SigningKeys([SigningKey.of(bytes([n]) * 32)], Path(f"key{n}")) for n in (1, 2))


class Taker:
    """A tree, a repository, and takes of the one to the other."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.repository = MemoryStore()
        self.repository.clock = lambda: self.now
        self.copies = Copies(cache)
        self.now = NOW
        self.keys = NO_KEYS
        self.target = ""
        self.problems: dict[str, str] = {}
        self.set = SnapshotSet("s", (str(root),))
        cache.mkdir(parents=True)
        root.mkdir(parents=True)

    def take(self, **how: bool) -> Taken:
        self.problems = {}
        self.now += timedelta(minutes=1)
        report = Report(problem=self.problems.__setitem__)
        return take(
            self.repository,
            self.set,
            copies=self.copies,
            origins=self.origins,
            now=self.now,
            report=report,
            **how,
        )

    @property
    def origins(self) -> Origins:
        return self.copies.origins(self.keys, self.target)

    def write(self, name: str, content: bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def entries(self, version: str = "") -> dict[str, Entry]:
        """The entries below the root, of the newest version."""
        found = [one for one in versions(self.repository, "s") if one.whole]
        chosen = next(one for one in reversed(found) if one.name.startswith(version))
        self.manifest = open_manifest(self.repository, chosen)
        below = f"{str(self.root)[1:]}/"
        return {
            one.path.removeprefix(below): one
            for one in self.manifest.entries()
            if one.path.startswith(below)
        }

    @property
    def trailer(self) -> ManifestTrailer:
        assert self.manifest.trailer is not None
        return self.manifest.trailer

    def content(self, entry: Entry) -> bytes:
        """The content of a file as it would be restored, which has the digest of the manifest."""
        data = bytearray(entry.size)
        for one in entry.extents:
            name = self.manifest.header.pack(one.version, one.pack)
            frame = self.repository.files[name][one.offset : one.offset + one.stored]
            part = read_super_block(frame)[one.skip : one.skip + one.length]
            assert len(part) == one.length
            data[one.start : one.start + one.length] = part
        assert blake3(data).hexdigest() == entry.digest
        return bytes(data)

    def contents(self, version: str = "") -> dict[str, bytes]:
        return {
            name: self.content(one)
            for name, one in self.entries(version).items()
            if one.kind == "f"
        }


def rewrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
