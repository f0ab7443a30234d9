"""This machine keeps the last whole dump of a series, so that the next can be increments on it.

It is a help and nothing more: where it is missing, damaged or not the newest one, a whole dump is
made. It holds what pg_dump wrote, compressed and by segments, for the user of the program only.
"""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final

import zstandard
from blake3 import blake3

from ntt_backup.config import RemoteConfig
from ntt_backup.dump.series import Segment
from ntt_backup.objects.cache import directory_for

# Of each segment: BLAKE3, mark, size, bytes of its frame.
_ENTRY: Final = struct.Struct("<32sIII")
# At the end: SHA-256 of the text, number of segments, BLAKE3 of the entries and these two.
_END: Final = struct.Struct("<32sQ32s")
_NEW: Final = ".new-"


def directory_of(settings: RemoteConfig, database: str) -> Path:
    """Returns where the last whole dump of a database for the target is kept."""
    return directory_for("dumps", settings.remote, settings.target, database)


class LastText:
    """The whole dump, by its segments; see `series.Base`."""

    def __init__(self, file: IO[bytes], entries: list[tuple[bytes, int, int, int]]) -> None:
        self._file = file
        self._entries = entries
        self._places: list[int] = []
        at = 0
        for entry in entries:
            self._places.append(at)
            at += entry[3]
        self.digests = [entry[0] for entry in entries]
        self.marks = [entry[1] for entry in entries]
        self.sizes = [entry[2] for entry in entries]

    @staticmethod
    def find(directory: Path, name: str, sha256: str) -> LastText | None:
        """Returns the dump of that name and text, if it is here."""
        with suppress(OSError, struct.error), ExitStack() as opened:
            file = opened.enter_context((directory / name).open("rb"))
            size = os.fstat(file.fileno()).st_size
            end = os.pread(file.fileno(), _END.size, max(0, size - _END.size))
            text, count, proof = _END.unpack(end)
            begin = size - _END.size - count * _ENTRY.size
            if text.hex() == sha256 and begin >= 0:
                data = os.pread(file.fileno(), count * _ENTRY.size, begin)
                if blake3(data + end[:-32]).digest() == proof:
                    opened.pop_all()
                    return LastText(file, list(_ENTRY.iter_unpack(data)))
        return None

    def segment(self, number: int) -> Segment | None:
        digest, mark, size, stored = self._entries[number]
        try:
            frame = os.pread(self._file.fileno(), stored, self._places[number])
        except OSError:
            return None
        return Segment(digest, mark, size, frame) if len(frame) == stored else None

    def text(self, number: int) -> bytes | None:
        found = self.segment(number)
        with suppress(zstandard.ZstdError):
            if found is not None and zstandard.frame_content_size(found.frame) == found.size:
                text = zstandard.ZstdDecompressor().decompress(found.frame)
                return text if blake3(text).digest() == found.digest else None
        return None

    def close(self) -> None:
        self._file.close()


class NewText:
    """Keeps the segments of a whole dump while it is made. Nothing is kept where that cannot be."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / f"{_NEW}{os.getpid()}"
        self._file: IO[bytes] | None = None
        self._entries = bytearray()
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in directory.glob(f"{_NEW}*"):
                left.unlink()
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "wb")

    def add(self, segment: Segment) -> None:
        self._entries += _ENTRY.pack(segment.digest, segment.mark, segment.size, len(segment.frame))
        self._write(segment.frame)

    def keep(self, name: str, sha256: str) -> None:
        """Makes it the last one, under the dump's name, and removes the one before."""
        end = bytes.fromhex(sha256) + struct.pack("<Q", len(self._entries) // _ENTRY.size)
        self._write(self._entries + end + blake3(self._entries + end).digest())
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
            self._path.replace(self._directory / name)
            for other in self._directory.iterdir():
                if other.name != name:
                    other.unlink()
        except OSError:
            self._remove()

    def give_up(self) -> None:
        """Removes what was kept. Never raises."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
            self._remove()

    def _write(self, data: bytes | bytearray) -> None:
        try:
            if self._file is not None:
                self._file.write(data)
        except OSError:
            self.give_up()

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()
