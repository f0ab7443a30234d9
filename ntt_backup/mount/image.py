"""Makes the image of packs: which blobs they have, and where. What cannot be pointed at is copied.

A blob that is stored as it is, at a multiple of 512 bytes, stays where it is. All others (small
ones, which lie back to back in packs, and compressed ones) are read, compared with their names, and
kept in the image. Memory does not grow with the number of packs: what is known of the blobs goes to
temporary files, one for each first byte, before it is sorted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import IO, BinaryIO, Final, NamedTuple

from ntt_backup.blobdir.descriptors import closing
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.errors import MountImpossible
from ntt_backup.mount.erofs import BLOCK, MAX_BLOB, MAX_DEVICES, RECORD, ImageWriter
from ntt_backup.name_hash import NEW_HASHER
from ntt_backup.pack.age_encryption import HEAD, SealedForOthers, is_sealed
from ntt_backup.pack.format import DIGEST_BYTES, MAX_RAW, RAW, Entry, PackError
from ntt_backup.pack.names import PackKey
from ntt_backup.pack.reader import PackReader, Range, merge, other_content
from ntt_backup.packstore.tables import ahead

_READERS: Final = 8
# Ranges that lie this close together are read as one, up to the size of a dense member.
_GAP: Final = 1 << 16
_RANGE: Final = 1 << 22
# What is known of the blobs of one first byte is kept in memory up to this size.
_SPOOL_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Source:
    """A file that has blobs: a pack, or where digest is given, that blob alone.

    name: for messages. read(start, length) returns its bytes. It begins at byte `start` of a
    device; start is a multiple of 512. open: another way to the pack's table. Raises
    MountImpossible for one that is too large.
    """

    name: str
    size: int
    read: Callable[[int, int], bytes]
    device: int
    start: int = 0
    digest: bytes = b""
    open: Callable[[], PackReader] | None = None

    def __post_init__(self) -> None:
        if self.size > MAX_BLOB:
            raise MountImpossible(f"{self.name} is too large for a mount: it has 1 TiB or more")


@dataclass(slots=True)
class Built:
    """An image. copied: blobs whose content it holds. left_out: packs and blobs that it lacks,
    because they are damaged. part: of the packs, from 0 to 1, that were read.
    """

    packs: int = 0
    blobs: int = 0
    bytes: int = 0
    copied: int = 0
    left_out: int = 0
    image_bytes: int = 0
    part: float = 0.0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Options:
    """Says how to make an image. scratch: a directory for what is kept meanwhile. prefix: the image
    has only blobs that begin with it. on_left_out is told of each pack and each blob that is
    damaged: the image lacks them.
    """

    scratch: Path
    prefix: str
    on_left_out: Callable[[str], object]
    on_progress: Callable[[Built], object] = lambda built: None


class _Run(NamedTuple):
    """Blobs of a pack that are read with one request."""

    source: Source
    reader: PackReader
    wanted: Range


class _Builder:
    def __init__(self, image: ImageWriter, options: Options, files: ExitStack) -> None:
        self.built = Built()
        self._image = image
        self._low = bytes.fromhex(options.prefix.ljust(2 * DIGEST_BYTES, "0"))
        self._high = bytes.fromhex(options.prefix.ljust(2 * DIGEST_BYTES, "f"))
        self._options = options
        self._files = files
        self._known: dict[int, IO[bytes]] = {}

    def runs(self, pool: Executor, sources: Sequence[Source]) -> Iterator[_Run]:
        """Yields what must be copied, and takes what need not be."""
        opened = ahead(pool, _open, sources, _READERS)
        for number, (source, reader) in enumerate(opened, 1):
            self.built.part = number / len(sources)
            self._options.on_progress(self.built)
            if isinstance(reader, PackError):
                self._leave_out(f"{source.name}: {reader}")
            elif reader is None:
                if self._low <= source.digest <= self._high:
                    block = source.start // BLOCK
                    self._note([_record(source.digest, source.device, block, source.size)])
            else:
                self.built.packs += 1
                yield from self._runs_of(source, reader)

    def _runs_of(self, source: Source, reader: PackReader) -> Iterator[_Run]:
        records: list[bytes] = []
        copies: list[Entry] = []
        for entry in reader.table:
            if not self._low <= entry.digest <= self._high:
                continue
            block, rest = divmod(source.start + entry.offset, BLOCK)
            if entry.codec == RAW and entry.stored and not rest:
                records.append(_record(entry.digest, source.device, block, entry.stored))
            elif entry.stored > MAX_RAW:
                self._leave_out(f"{source.name}: {entry.digest.hex()} is not where it could be")
            else:
                copies.append(entry)
        self._note(records)
        for wanted in merge(sorted(copies, key=attrgetter("offset")), _GAP, _RANGE):
            yield _Run(source, reader, wanted)

    def copy(self, run: _Run, data: bytes | PackError) -> None:
        """Keeps in the image what a run has."""
        image = self._image
        records: list[bytes] = []
        for entry in run.wanted.entries:
            try:
                if isinstance(data, PackError):
                    raise data
                at = entry.offset - run.wanted.start
                content = run.reader.content(entry, data[at : at + entry.stored])
                if NEW_HASHER[run.reader.names](content).digest() != entry.digest:
                    raise PackError(other_content(entry.digest))
            except PackError as problem:
                self._leave_out(f"{run.source.name}: {problem}")
                continue
            records.append(_record(entry.digest, image.itself, image.store(content), len(content)))
        self.built.copied += len(records)
        self._note(sorted(records))

    def records(self) -> Iterator[bytes]:
        """Yields what is known of the blobs, in their order."""
        for _, file in sorted(self._known.items()):
            file.seek(0)
            data = file.read()
            yield from sorted(
                data[at : at + RECORD.size] for at in range(0, len(data), RECORD.size)
            )

    def _note(self, records: Sequence[bytes]) -> None:
        for first, group in groupby(records, itemgetter(0)):
            file = self._known.get(first)
            if file is None:
                file = self._files.enter_context(
                    tempfile.SpooledTemporaryFile(_SPOOL_BYTES, dir=str(self._options.scratch))  # noqa: SIM115
                )
                self._known[first] = file
            file.write(b"".join(group))

    def _leave_out(self, text: str) -> None:
        self.built.left_out += 1
        self._options.on_left_out(text)


def build(
    file: BinaryIO, devices: Sequence[int], sources: Sequence[Source], options: Options
) -> Built:
    """Writes the image of the sources' blobs. devices: their sizes. What a source's `read` raises
    ends it, except PackError.
    """
    image = ImageWriter(file, devices)
    with ThreadPoolExecutor(_READERS) as pool, ExitStack() as files:
        builder = _Builder(image, options, files)
        for run, data in ahead(pool, _read, builder.runs(pool, sources), _READERS):
            builder.copy(run, data)
        tree = image.write_tree(builder.records())
    built = builder.built
    built.blobs, built.bytes, built.image_bytes = tree.blobs, tree.bytes, image.size
    return built


def _open(source: Source) -> PackReader | PackError | None:
    if source.digest:
        return None
    try:
        if source.open is not None:
            return source.open()
        if is_sealed(source.read(0, HEAD) if source.size else b""):
            raise sealed(source.name)
        return PackReader(source.read, source.size)
    except SealedForOthers:
        raise sealed(source.name) from None
    except PackError as problem:
        return problem


def sealed(name: str) -> MountImpossible:
    """Returns the error for a pack that is sealed."""
    return MountImpossible(f"{name} is sealed: that cannot be mounted")


def _read(run: _Run) -> bytes | PackError:
    try:
        return run.reader.range(run.wanted.start, run.wanted.length)
    except PackError as problem:
        return problem


def _record(digest: bytes, device: int, block: int, size: int) -> bytes:
    return RECORD.pack(digest, device, block, size >> 32, size & 0xFFFFFFFF)


# --- the packs of a directory ---------------------------------------------------------------------


def find_packs(directory: Path, prefix: str) -> list[Source]:
    """Returns the packs below a directory (`*.tar`) and the files there that are named as blobids,
    each as a device of its own. Left out is what by its name has no blob of that prefix. Instead of
    a directory one pack may be named.

    Raises MountImpossible.
    """
    found = [directory] if directory.is_file() else _files(directory)
    paths = sorted(path for path in found if _may_have(path.name, prefix))
    if not paths:
        raise MountImpossible(f"no packs in {directory}", hint="name the directory of the packs")
    if len(paths) > MAX_DEVICES:
        raise MountImpossible(
            f"{len(paths):,} files are more than one mount can have ({MAX_DEVICES:,})",
            hint="mount a part of them by --prefix",
        )
    return list(_sources(paths))


def _sources(paths: Sequence[Path]) -> Iterator[Source]:
    for number, path in enumerate(paths, 1):
        digest = bytes.fromhex(path.name) if is_blobid(path.name) else b""
        with _readable(path):
            size = path.stat().st_size
        yield Source(str(path), size, _reader(path), number, digest=digest)


def _files(directory: Path) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise MountImpossible(f"cannot read {error.filename}", detail=str(error.strerror))

    for place, _, names in os.walk(directory, onerror=stop):
        for name in names:
            if name.endswith((".tar", ".tar.age")) or is_blobid(name):
                yield Path(place, name)


def _may_have(name: str, prefix: str) -> bool:
    if is_blobid(name):
        return name.startswith(prefix)
    key = PackKey.read_name(name)
    return key is None or key.may_have(prefix)


def _reader(path: Path) -> Callable[[int, int], bytes]:
    def read(start: int, length: int) -> bytes:
        with (
            _readable(path),
            closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd,
        ):
            return os.pread(fd, length, start)

    return read


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MountImpossible(f"cannot read {path}", detail=str(error.strerror)) from error
