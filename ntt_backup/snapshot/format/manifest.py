"""The manifest of a version has one line for each file, in the order of a walk.

It is JSON lines, compressed by zstd: a header, the entries, a trailer. Header and trailer are
frames of their own, and the last bytes tell how long the last one is, so both are read without the
rest. Entries are sorted by the components of their paths, so a walk and the last manifest are
merged line by line, and neither is ever in memory as a whole. What `lstat` says stands at the
beginning of an entry, in a fixed form: an entry that begins as it would begin now is taken over as
it is (`beginning`).
docs/snapshot-format.md is the contract.

What is read here may come from a hostile target: every length is bounded, every field has its type,
and the order holds. What a path may lead to is for those who write files to decide.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain as chained
from itertools import pairwise, starmap
from operator import lt
from typing import Any, Final, NamedTuple

import zstandard
from blake3 import blake3

from ntt_backup.pack.format import Sign, unsigned
from ntt_backup.snapshot.format.entry import (
    MAX_CONTAINERS,
    MAX_LINE,
    MAX_NUMBER,
    Entry,
    check_text,
    entries_of,
    is_sum,
    order,
    path_of,
    require,
    require_few,
)
from ntt_backup.snapshot.format.super_blocks import PackSum, ZstdStream
from ntt_backup.snapshot.names import MAX_PACKS, SnapshotDamaged, pack_name
from ntt_backup.wire.stored_names import begun, is_set, moment_of

FORMAT: Final = "ntt-snapshot 1"
# A version of each minute of a month.
MAX_CHAIN: Final = 50_000
# Bytes of a header's line: a chain of that length takes 1.5 MB. JSON of several megabytes takes
# thirty times as much memory while it is read.
MAX_HEADER: Final = 2 << 20
# Characters of the other texts in a header, together. Whoever lists versions holds all headers.
_MAX_TEXTS: Final = 128 << 10
# Most of it are digests, which no level makes smaller.
_LEVEL: Final = 1
_PIECE: Final = 1 << 16
# A frame that decompressors skip, with the length of the trailer's frame before it.
_END: Final = struct.Struct("<8sI")
_SKIPPED: Final = b"\x5e\x2a\x4d\x18\4\0\0\0"
END_BYTES: Final = _END.size


@dataclass(frozen=True, slots=True)
class Header:
    """Holds the header, which is the first line of a manifest.

    Attributes:
        parent: The version before this one; "" for a full version.
        chain: The versions that extents refer to, from the full version to this one.
        key: The key of the map's sums, 32 bytes in hex.
        roots: The paths that were requested.
        clock: The time of the host's clock at which the version was begun, in the form that the
            name of a version has; "" where the name itself tells that time.
        target: The target for which the version was taken, see `snapshot.origins`.
    """

    set: str
    version: str
    parent: str
    chain: tuple[str, ...]
    key: str
    roots: tuple[str, ...]
    host: str = ""
    clock: str = ""
    target: str = ""

    @property
    def begun(self) -> datetime:
        """Returns when it was begun. Its name is later where the clock was once ahead."""
        return begun(self.version) if not self.clock else moment_of(self.clock)

    def pack(self, version: int, number: int) -> str:
        """Returns the name of a pack, as `Extent` counts versions and packs."""
        return pack_name(self.set, self.chain[version], number)


@dataclass(frozen=True, slots=True)
class ManifestTrailer:
    """Holds the trailer of a manifest.

    Attributes:
        files: The number of entries.
        bytes: The size of all content in bytes, including holes.
        packs: The packs of this version, in their order.
        map_sha256: The SHA-256 of the file `map`, in hex.
        unsettled: The number of entries that are marked as unsettled.
        skipped: The number of files that could not be read or have no copy.
    """

    files: int
    bytes: int
    packs: tuple[PackSum, ...]
    map_size: int
    map_sha256: str
    unsettled: int = 0
    skipped: int = 0


class Seal(NamedTuple):
    """What stands in the last line of a manifest.

    Attributes:
        digest: BLAKE3 of all lines before the seal, in hex.
        signature: Of `signed`, by the host that made the manifest; "" where it had no key.
        header_sum: BLAKE3 of the header's line, 32 bytes.
        trailer_sum: BLAKE3 of the trailer's line, 32 bytes.
    """

    digest: str
    signature: str
    header_sum: bytes
    trailer_sum: bytes

    @property
    def signed(self) -> bytes:
        """Returns the bytes that a signature covers.

        The sums of the header and the trailer are separate parts of these bytes, since header and
        trailer are read without the entries between them.
        """
        return self.header_sum + self.trailer_sum + bytes.fromhex(self.digest)


_COUNTS: Final = ("files", "bytes", "map_size", "unsettled", "skipped")


class ManifestWriter:
    """Writes a manifest.

    Args:
        write: Accepts the bytes of the manifest in their order.
        header: The header.
        sign: Returns the signature of `Seal.signed`; "" for none.
    """

    def __init__(
        self, write: Callable[[bytes], object], header: Header, sign: Sign = unsigned
    ) -> None:
        self._write = write
        self._sign = sign
        self._zstd = _compressor().compressobj()
        self._digest = blake3()
        self._held: list[bytes] = []
        self._bytes = 0
        line = json.dumps({"format": FORMAT, **_fields(header)}).encode("ascii") + b"\n"
        self._digest.update(line)
        self._header_sum = blake3(line).digest()
        write(_compressor().compress(line))

    def add(self, line: bytes) -> None:
        """Writes an entry, which comes behind the last one in `order`."""
        self._held.append(line)
        self._bytes += len(line)
        if self._bytes >= _PIECE:
            self._flush()

    def end(self, trailer: ManifestTrailer) -> Seal:
        """Writes the trailer, and the seal, which it returns."""
        self._flush()
        line = json.dumps(_fields(trailer)).encode("ascii") + b"\n"
        self._digest.update(line)
        digest = self._digest.hexdigest()
        seal = Seal(digest, "", self._header_sum, blake3(line).digest())
        seal = seal._replace(signature=self._sign(seal.signed))
        said = {"blake3": digest, **({"signature": seal.signature} if seal.signature else {})}
        frame = _compressor().compress(line + json.dumps(said).encode("ascii") + b"\n")
        self._write(self._zstd.flush() + frame + _END.pack(_SKIPPED, len(frame)))
        return seal

    def _flush(self) -> None:
        self._held.append(b"")
        data = b"\n".join(self._held)
        self._held.clear()
        self._bytes = 0
        self._digest.update(data)
        if out := self._zstd.compress(data):
            self._write(out)


class ManifestReader:
    """Reads a manifest from its bytes. Raises SnapshotDamaged for whatever is not one.

    Attributes:
        header: The header, at once.
        header_sum: As in `Seal`.
        trailer: The trailer, once all entries were read. Only then is all of the manifest proved.
        seal: The seal, at the same time.
    """

    def __init__(self, data: Iterable[bytes]) -> None:
        self._digest = blake3()
        self._blocks = _whole_lines(ZstdStream(data), MAX_HEADER)
        self.trailer: ManifestTrailer | None = None
        self.seal: Seal | None = None
        first, end, rest = next(self._blocks, b"").partition(b"\n")
        self._digest.update(first + end)
        self.header_sum = blake3(first + end).digest()
        self._blocks = chained([rest] if rest else [], self._blocks)
        self.header = _header(_object(first))

    def lines(self) -> Iterator[bytes]:
        """Yields the entries' lines, in order."""
        last = b""
        for lines in self.batches():
            last = _in_order(last, [order(path_of(line)) for line in lines])
            yield from lines

    def entries(self) -> Iterator[Entry]:
        """Yields the entries in their order."""
        last = b""
        for lines in self.batches():
            entries = entries_of(lines, len(self.header.chain))
            last = _in_order(last, [order(entry.path) for entry in entries])
            yield from entries

    def batches(self) -> Iterator[list[bytes]]:
        """Yields the entries' lines, many at once. Neither they nor their order are looked at."""
        count = 0
        for block in self._blocks:
            # Only the header and what stands last begin so.
            end = 0 if block[:1] == b"{" else block.find(b"\n{") + 1 or len(block)
            if end:
                self._digest.update(block[:end])
                count += block.count(b"\n", 0, end)
            batch, rest = [block[:end].split(b"\n")[:-1]], block[end:]
            del block  # One line may have megabytes: only the caller holds it from here on.
            if end:
                yield batch.pop()
            if rest:
                break
        else:
            raise SnapshotDamaged("the manifest is cut off")
        last = [rest]
        del rest  # The trailer may have megabytes, too.
        self._end(last, count)

    def _end(self, last: list[bytes], count: int) -> None:
        """Reads trailer and seal.

        Args:
            last: The beginning of their lines, which is taken out.
            count: The number of entries before them.
        """
        for block in self._blocks:
            last.append(block)
            if sum(map(len, last)) > MAX_LINE:
                raise SnapshotDamaged("the trailer of the manifest is too long")
        seal = _take_seal(last, self.header_sum)
        self._digest.update(last[0])
        if seal.digest != self._digest.hexdigest():
            raise SnapshotDamaged("the checksum of the manifest is wrong")
        trailer = _trailer(_object(last.pop()))
        if trailer.files != count:
            raise SnapshotDamaged("the manifest has another number of entries than it says")
        self.trailer, self.seal = trailer, seal


def tail_size(end: bytes) -> int:
    """Returns the number of bytes that `ending_of` needs, by the last `END_BYTES` of a manifest.

    Raises:
        SnapshotDamaged: The bytes are not the end of a manifest.
    """
    if len(end) != END_BYTES or not end.startswith(_SKIPPED):
        raise SnapshotDamaged("the manifest is cut off")
    length = int(_END.unpack(end)[1])
    if length > MAX_LINE:
        raise SnapshotDamaged("the trailer of the manifest is too long")
    return length + END_BYTES


def ending_of(tail: bytes, header_sum: bytes = b"") -> tuple[ManifestTrailer, Seal]:
    """Returns trailer and seal, unproven. Raises SnapshotDamaged.

    Args:
        tail: The last `tail_size` bytes of a manifest.
        header_sum: As in `Seal`; without it nothing can be said about a signature.
    """
    last = [next(_whole_lines(ZstdStream([tail])), b"")]
    seal = _take_seal(last, header_sum)
    return _trailer(_object(last.pop())), seal


def _take_seal(last: list[bytes], header_sum: bytes) -> Seal:
    """Returns the seal, unproven. Raises SnapshotDamaged.

    Args:
        last: Pieces of the trailer's line and the seal's. The trailer's line is left in it, alone:
            it may have megabytes, and whoever reads it takes it out.
        header_sum: As in `Seal`.
    """
    lines = b"".join(last)
    line, end, rest = lines.partition(b"\n")
    if rest.count(b"\n") != 1 or rest[-1:] != b"\n":
        raise SnapshotDamaged("the manifest does not end with a seal")
    said = _object(rest)
    digest, signature = said.get("blake3"), said.get("signature", "")
    if type(digest) is not str or not is_sum(digest) or type(signature) is not str:
        raise SnapshotDamaged("the manifest has no seal")
    last[:] = [line + end]
    return Seal(digest, signature, header_sum, blake3(last[0]).digest())


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)


def _in_order(last: bytes, keys: list[bytes]) -> bytes:
    """Returns the last key. Raises SnapshotDamaged where one is not above that before it."""
    if not last < keys[0] or not all(starmap(lt, pairwise(keys))):
        raise SnapshotDamaged("the entries of the manifest are not in order")
    return keys[-1]


def _whole_lines(stream: ZstdStream, first: int = MAX_LINE) -> Iterator[bytes]:
    """Yields the lines of a stream, many together, each with its end.

    Args:
        stream: The lines.
        first: The most bytes of the first line, but for a piece.
    """
    most = first
    rest: list[bytes] = []
    length = 0
    while piece := stream.read(_PIECE):
        if end := piece.rfind(b"\n") + 1:
            whole = [b"".join((*rest, piece[:end]))]
            # Long lines are in memory no more often than need be.
            rest, length, most = [piece[end:]], len(piece) - end, MAX_LINE
            yield whole.pop()
        else:
            rest.append(piece)
            length += len(piece)
            if length > most:
                raise SnapshotDamaged("a line of the manifest is too long")
    if length:
        raise SnapshotDamaged("the manifest is cut off")


def _object(line: bytes) -> dict[str, Any]:
    try:
        require_few(line, 2 * MAX_CONTAINERS)
        text = line.decode()
        del line  # Where the caller has kept it no longer, either: it may have megabytes.
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged("a line of the manifest is not JSON") from error
    if not isinstance(found, dict):
        raise SnapshotDamaged("a line of the manifest is out of place")
    return found


def _fields(one: Header | ManifestTrailer) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


def _header(said: dict[str, Any]) -> Header:
    if said.get("format") != FORMAT:
        raise SnapshotDamaged("not a manifest, or one of a newer program")
    said = {"clock": "", "target": "", **said}  # Manifests had none at first.
    try:
        header = Header(**{name: said[name] for name in Header.__slots__})
        header = replace(header, chain=tuple(header.chain), roots=tuple(header.roots))
        require(len(header.chain) <= MAX_CHAIN)
        texts = (header.host, header.clock, header.target, *header.roots)
        require(sum(map(len, texts)) <= _MAX_TEXTS)
        check_text(header.host, header.target, *header.chain, *header.roots)
        require(is_set(header.set) and is_sum(header.key))
        for version in header.chain:
            begun(version)
        _ = header.begun
        require(len(set(header.chain)) == len(header.chain))
        require(header.chain[-1] == header.version)
        require(header.parent == (header.chain[-2] if header.chain[1:] else ""))
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotDamaged(f"the header of a manifest: {str(error)[:100]}") from error
    return header


def _trailer(said: dict[str, Any]) -> ManifestTrailer:
    try:
        trailer = ManifestTrailer(**{name: said[name] for name in ManifestTrailer.__slots__})
        packs = said.pop("packs")
        require(type(packs) is list)
        for at, one in enumerate(packs):  # In place: there may be a hundred thousand.
            packs[at] = PackSum(*one)
        trailer = replace(trailer, packs=tuple(packs))
        numbers = [getattr(trailer, name) for name in _COUNTS]
        numbers += [one.size for one in trailer.packs]
        require({*map(type, numbers)} == {int} and 0 <= min(numbers) <= max(numbers) < MAX_NUMBER)
        require(len(trailer.packs) <= MAX_PACKS)
        require(all(map(is_sum, (trailer.map_sha256, *(one.sha256 for one in trailer.packs)))))
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotDamaged(f"the trailer of a manifest: {str(error)[:100]}") from error
    return trailer
