"""Blobs: their contents, plain files below a root, and packs in memory."""

from __future__ import annotations

import io
import os
import random
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyrage
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.model import Blob
from ntt_backup.pack.age_encryption import AgeContent, AgeWriter, Unseal, is_sealed, no_identity
from ntt_backup.pack.format import Sign, pack_id, unsigned
from ntt_backup.pack.names import PackKey
from ntt_backup.pack.reader import PackReader
from ntt_backup.pack.writer import PackWriter


def put(root: Path, content: bytes) -> Blob:
    """Store content as a blob."""
    return put_as(root, blake3(content).hexdigest(), content)


def put_as(root: Path, blobid: str, content: bytes) -> Blob:
    """Store content under a name that need not be its hash."""
    path = root / relative_path(blobid)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Blob(blobid, len(content))


def path_of(root: Path, blobid: str) -> Path:
    """Returns the place of a blob."""
    return root / relative_path(blobid)


def tree(root: Path) -> dict[str, bytes]:
    """Path below root to content, for every file."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def files_with_looks(root: Path) -> dict[bytes, tuple[bytes, int, int]]:
    """Content, time of modification and permission bits of each file below a directory."""
    found = {}
    for above, _, names in os.walk(os.fsencode(root)):
        for name in names:
            path = os.path.join(above, name)
            status = os.lstat(path)
            with open(path, "rb") as file:
                below = os.path.relpath(path, os.fsencode(root))
                found[below] = (file.read(), status.st_mtime_ns, stat.S_IMODE(status.st_mode))
    return found


def noise(size: int, seed: int = 1) -> bytes:
    """Returns bytes that no compression makes fewer."""
    return random.Random(seed).randbytes(size)


STORE = bytes(range(16))
_WORDS = [bytes(random.Random(n).choices(b"abcdefghij", k=n % 9 + 3)) for n in range(2000)]


def text(seed: int, size: int) -> bytes:
    """Content that compresses, alike among blobs."""
    chance = random.Random(seed)
    return b" ".join(chance.choices(_WORDS, k=size // 5))[:size]


MIX = (
    b"",
    b"x",
    *(text(n, n * 37 % 9000) for n in range(1, 900)),
    *(noise(n, n) for n in (1, 511, 512, 513, 16383, 16384, 16385, 100_000, 1_500_000)),
)


def pack(
    contents: Iterable[bytes],
    *,
    compress: bool = True,
    sign: Sign = unsigned,
    identity: bytes | None = None,
) -> bytes:
    """A pack of these blobs. identity: its id, if not the one that follows from them."""
    named = {blake3(one).digest(): one for one in contents}
    return pack_as(named, compress=compress, sign=sign, identity=identity)


def pack_as(
    named: Mapping[bytes, bytes],
    *,
    compress: bool = True,
    sign: Sign = unsigned,
    identity: bytes | None = None,
) -> bytes:
    """A pack of these contents by the digests that it gives them, which may be wrong."""
    blobs = sorted(named.items())
    file = io.BytesIO()
    identity = identity or pack_id(STORE, [digest for digest, _ in blobs])
    writer = PackWriter(file.write, STORE, identity, compress=compress, sign=sign)
    for digest, content in blobs:
        writer.add(digest, memoryview(content))
    writer.close()
    assert writer.size == file.tell()
    return file.getvalue()


def sealed(contents: Iterable[bytes], recipients: Sequence[str]) -> bytes:
    """A pack of these blobs, sealed for recipients."""
    return seal(pack(contents), recipients)


def seal(data: bytes, recipients: Sequence[str], step: int = 100_000) -> bytes:
    """A pack, sealed; it is written in steps of so many bytes."""
    file = io.BytesIO()
    writer = AgeWriter(file.write, recipients)
    for at in range(0, len(data), step):
        writer.write(memoryview(data)[at : at + step])
    writer.close()
    assert writer.size == file.tell()
    return file.getvalue()


@dataclass(frozen=True)
class Person:
    """Who may open packs. public: the recipient."""

    public: str
    secret: str

    @staticmethod
    def new() -> Person:
        identity = pyrage.x25519.Identity.generate()
        return Person(str(identity.to_public()), str(identity))

    @property
    def opens(self) -> Unseal:
        return lambda head, size: AgeContent(head, size, [self.secret])

    def file(self, path: Path) -> Path:
        """A file with the identity, as age-keygen writes it."""
        path.write_text(f"# created: today\n# public key: {self.public}\n\n{self.secret}\n")
        return path


def ranges(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, length: data[start : start + length]


def reader(data: bytes, unseal: Unseal = no_identity) -> PackReader:
    return PackReader(ranges(data), len(data), unseal if is_sealed(data) else None)


def key_of(pack: PackReader) -> PackKey:
    """Its key in a bucket."""
    digests = [entry.digest for entry in pack.table]
    of = PackKey.of_sealed if pack.sealed else PackKey.of
    return of(digests[0], digests[-1], pack.trailer.pack_id)
