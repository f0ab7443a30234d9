"""Unpacks blobs of a pack into a blob directory: staged, compared with their names, published.

The stage is a directory of ours that nobody else writes to, on the file system of the blob
directory. It is filled as `aa/bb/<blobid>`, so a directory that is new is published by one rename.
All paths are made of binary digests: whatever a pack says, none can lead elsewhere.

The inner loop is kept short. A file costs one `open`, one `write` and one `close`, which is where
some file systems tell that there is no room; a pack is read in windows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.open import BlobDirectory, NotAFile, closing, names_in, open_below
from ntt_backup.blobdir.publish import Publisher
from ntt_backup.blobdir.staging import remove_tree, write_all
from ntt_backup.pack.format import RAW, Entry, PackError
from ntt_backup.pack.reader import other_content
from ntt_backup.wire.write_messages import REFUSED

_WINDOW: Final = 1 << 20
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_UNREADABLE: Final = "the pack cannot be read where it lies"


@dataclass(slots=True)
class Unpacked:
    """Holds what came of some blobs. right: blobs that were there already. size: what was written.
    wrong: the digests of those that could not be unpacked, with a few words.
    """

    unpacked: int = 0
    right: int = 0
    size: int = 0
    wrong: list[tuple[bytes, str]] = field(default_factory=list)


class Unpacker:
    """Unpacks from a pack into the blob directory root, by way of stage; these are descriptors of
    the caller's. read_into(buffer, offset) reads the pack, content decompresses. Methods raise
    OSError for what is about the blob directory.

    verify: compares each blob with its name before it is published. What the blob directory has is
    always compared.
    """

    def __init__(
        self,
        read_into: Callable[[memoryview, int], int],
        content: Callable[[Entry, bytes], bytes],
        root: int,
        stage: int,
        *,
        verify: bool,
    ) -> None:
        self._read_into = read_into
        self._content = content
        self._stage = stage
        self._verify = verify
        self._existing = _Existing(root)
        self._root = root
        self._window = memoryview(bytearray(_WINDOW))

    def close(self) -> None:
        self._existing.close()

    def stage(self, entries: Sequence[Entry]) -> Unpacked:
        """Writes into the stage what the blob directory lacks."""
        done = Unpacked()
        # The inner loop: nothing is looked up or called that one of most blobs can do without.
        open_, write, close = os.open, os.write, os.close
        stage, window, verify = self._stage, self._window, self._verify
        made: set[str] = set()
        prefix, above, place, known = b"", "", "", False
        low = high = 0
        for entry in sorted(entries, key=itemgetter(1)):
            digest, offset, stored, _, codec = entry
            name = digest.hex()
            if digest[:2] != prefix:
                prefix, above = digest[:2], name[:2]
                place = f"{above}/{name[2:4]}"
                known = self._existing.has(place)
            if known and self._existing.is_right(entry):
                done.right += 1
                continue
            if place not in made:
                if above not in made:
                    os.mkdir(above, 0o755, dir_fd=stage)
                    made.add(above)
                os.mkdir(place, 0o755, dir_fd=stage)
                made.add(place)
            path = f"{place}/{name}"
            if codec == RAW and stored > _WINDOW:
                self._stage_large(entry, path, done)
                continue
            if offset < low or offset + stored > high:
                if stored > len(window):
                    window = self._window = memoryview(bytearray(stored))
                low, high = offset, offset + self._fill(offset, stored)
                if offset + stored > high:
                    done.wrong.append((digest, _UNREADABLE))
                    continue
            found: bytes | memoryview = window[offset - low : offset - low + stored]
            if codec != RAW:
                try:
                    found = self._content(entry, bytes(found))
                except PackError as error:
                    done.wrong.append((digest, str(error)))
                    continue
            if verify and blake3(found).digest() != digest:
                done.wrong.append((digest, other_content(digest)))
                continue
            size = len(found)
            fd = open_(path, _CREATE, 0o644, dir_fd=stage)
            try:
                if size and (written := write(fd, found)) != size:
                    write_all(fd, memoryview(found)[written:])
            finally:
                close(fd)
            done.unpacked += 1
            done.size += size
        return done

    def publish(self) -> list[tuple[bytes, str]]:
        """Publishes all that is staged, which the caller has synced; returns what could not be,
        because a directory stands in its place.
        """
        refused: list[tuple[bytes, str]] = []
        device = os.fstat(self._root).st_dev
        publisher = Publisher(self._root, device, may_replace=True)
        try:
            for above in sorted(names_in(self._stage)):
                if publisher.move(bytes.fromhex(above), self._stage, above):
                    continue
                with closing(open_below(self._stage, above)) as fd:
                    for below in names_in(fd):
                        if not publisher.move(bytes.fromhex(above + below), fd, below):
                            refused += _publish_files(publisher, fd, below)
                remove_tree(self._stage, above)
        finally:
            publisher.close()
            self._existing.forget()
        return refused

    def _fill(self, offset: int, wanted: int) -> int:
        """Reads from offset on; returns how many bytes the window has, at least those wanted unless
        they cannot be read.
        """
        # The second time without what lies after it, which may be bad.
        for length in (len(self._window), wanted):
            with suppress(OSError, PackError):
                return self._read_into(self._window[:length], offset)
        return 0

    def _stage_large(self, entry: Entry, path: str, done: Unpacked) -> None:
        """Stages a blob that is not held in memory."""
        hasher = blake3()
        at, end = entry.offset, entry.offset + entry.stored
        with closing(os.open(path, _CREATE, 0o644, dir_fd=self._stage)) as fd:
            while at < end and (count := self._fill(at, min(_WINDOW, end - at))):
                piece = self._window[: min(count, end - at)]
                if self._verify:
                    hasher.update(piece)
                write_all(fd, piece)
                at += len(piece)
        if at == end and not (self._verify and hasher.digest() != entry.digest):
            done.unpacked += 1
            done.size += entry.stored
            return
        os.unlink(path, dir_fd=self._stage)
        done.wrong.append((entry.digest, other_content(entry.digest) if at == end else _UNREADABLE))


class _Existing:
    """Tells what a blob directory has; a directory that it lacks is asked for once."""

    def __init__(self, root: int) -> None:
        self._blobs = BlobDirectory(root)
        self._names: dict[str, set[str]] = {}
        self._buffer = memoryview(bytearray(_WINDOW))

    def close(self) -> None:
        self._blobs.close()

    def forget(self) -> None:
        """Forgets which directories there are: some were published."""
        self._names.clear()

    def has(self, place: str) -> bool:
        """Returns whether there is a directory `aa/bb`."""
        above, below = place.split("/")
        names = self._names.get(above)
        if names is None:
            names = self._names[above] = self._look(above)
        return below in names

    def is_right(self, entry: Entry) -> bool:
        """Returns whether the blob is there, and every byte of it right."""
        try:
            fd, status = self._blobs.open_blob(entry.digest.hex())
            with closing(fd):
                return status.st_size == entry.raw and self._hash(fd) == entry.digest
        except (OSError, NotAFile):
            return False

    def _look(self, above: str) -> set[str]:
        try:
            return set(names_in(self._blobs.directory(above)))
        except OSError:  # Publishing will meet it too, and tell.
            return set()

    def _hash(self, fd: int) -> bytes:
        hasher = blake3()
        while count := os.readv(fd, [self._buffer]):
            hasher.update(self._buffer[:count])
        return hasher.digest()


def _publish_files(publisher: Publisher, above: int, below: str) -> list[tuple[bytes, str]]:
    refused = []
    with closing(open_below(above, below)) as fd:
        for name in names_in(fd):
            taken = publisher.publish(bytes.fromhex(name), fd, name.encode())
            if taken is not None and taken[0] == REFUSED:
                refused.append((bytes.fromhex(name), taken[1]))
    return refused
