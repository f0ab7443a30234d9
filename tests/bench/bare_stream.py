"""The least that two Python programs do to send blobs and prove them: the floor beside `run`.

The sender lists, reads and hashes each file of its directories, and writes it into a stream; the
receiver hashes each once more, and writes it. Neither has a receipt, syncs anything or gives a name
later. What the other says is trusted: `python -I bare_stream.py send STORE URL AA...`,
`python -I bare_stream.py receive DIRECTORY`. URL: of a catalog, where the plainest UPDATE marks
what was sent of each AA; may be empty.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable
from io import BufferedReader, FileIO
from typing import Any, BinaryIO

from blake3 import blake3

_MOST_BYTES = 1 << 20
_MOST_FILES = 250
_MARK_SQL = """
    update blobs set remote_copied = true, remote_last_checked = now(), remote_copy_failed = false
    where blobid between %s and %s
"""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def marker(url: str) -> Callable[[str], object]:
    """Returns what marks all blobs of one `aa` in a catalog, where there is one."""
    if not url:
        return lambda part: None
    from psycopg import connect

    catalog = connect(url, autocommit=True)
    return lambda part: catalog.execute(_MARK_SQL, [part, f"{part}g"])


def send(out: BinaryIO, store: str, parts: list[str], mark: Callable[[str], object]) -> None:
    """Writes frames: the files of a directory, and the pieces of a large one."""
    piece = memoryview(bytearray(_MOST_BYTES))
    for part in parts:
        for sub in os.listdir(f"{store}/{part}"):
            place = f"{part}/{sub}"
            directory = os.open(f"{store}/{place}", os.O_RDONLY | os.O_DIRECTORY)
            files: list[tuple[str, int]] = []
            contents: list[bytes] = []
            held = 0
            for name in os.listdir(directory):
                file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
                size = os.readv(file, [piece])
                if size == _MOST_BYTES:
                    _send_large(out, place, name, file, piece)
                else:
                    content = bytes(piece[:size])
                    _prove(name, blake3(content).hexdigest())
                    files.append((name, size))
                    contents.append(content)
                    held += size
                    if len(files) == _MOST_FILES or held > _MOST_BYTES:
                        _write(out, place, files, contents)
                        files, contents, held = [], [], 0
                os.close(file)
            _write(out, place, files, contents)
            os.close(directory)
        mark(part)


def _send_large(out: BinaryIO, place: str, name: str, file: int, piece: memoryview) -> None:
    left = size = os.fstat(file).st_size
    digest, count = blake3(), len(piece)
    _write(out, place, [(name, size)], [])
    while count:
        digest.update(piece[:count])
        out.write(piece[:count])
        left -= count
        count = os.readv(file, [piece[: min(left, len(piece))]]) if left else 0
    _prove(name, digest.hexdigest())


def _write(out: BinaryIO, place: str, files: list[tuple[str, int]], contents: list[bytes]) -> None:
    if files:
        head = marshal.dumps((place, files))
        out.write(b"".join([len(head).to_bytes(4, "big"), head, *contents]))


def receive(source: BufferedReader[Any], to: str) -> None:
    """Writes what the frames have into a directory."""
    space = memoryview(bytearray(2 * _MOST_BYTES))
    while size := int.from_bytes(source.read(4), "big"):
        place, files = marshal.loads(source.read(size))
        os.makedirs(f"{to}/{place}", exist_ok=True)
        directory = os.open(f"{to}/{place}", os.O_RDONLY | os.O_DIRECTORY)
        last, at = directory, 0
        total = sum(size for _, size in files)
        if total <= len(space):
            source.readinto(space[:total])
        for name, size in files:
            last = os.open(name, _NEW, 0o644, dir_fd=directory)
            if total <= len(space):
                content = space[at : at + size]
                _prove(name, blake3(content).hexdigest())
                os.write(last, content)
                at += size
            else:
                _receive_large(source, name, last, size, space)
        os.closerange(directory, last + 1)


def _receive_large(
    source: BufferedReader[Any], name: str, file: int, left: int, space: memoryview
) -> None:
    digest = blake3()
    while left:
        count = source.readinto(space[: min(left, _MOST_BYTES)])
        digest.update(space[:count])
        os.write(file, space[:count])
        left -= count
    _prove(name, digest.hexdigest())


def _prove(name: str, found: str) -> None:
    if name != found:
        sys.exit(f"{name} is {found}")


if __name__ == "__main__":
    # A large buffer: what ssh costs grows with the number of the writes.
    if sys.argv[1] == "send":
        with open(1, "wb", _MOST_BYTES) as out:
            send(out, sys.argv[2], sys.argv[4:], marker(sys.argv[3]))
    else:
        with BufferedReader(FileIO(0), _MOST_BYTES) as source:
            receive(source, sys.argv[2])
