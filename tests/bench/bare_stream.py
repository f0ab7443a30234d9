"""The least that two Python programs do to send blobs and prove them: the floors beside a run.

*Bare streams*: the sender lists, reads and hashes each file of its directories, and writes it into
a stream; the receiver hashes each once more, and writes it. Nothing is answered, synced or named
later: `python -I bare_stream.py send STORE AA...`, `python -I bare_stream.py receive DIRECTORY`.

*A bare run* does what a run promises, too. The sender loads our command line and settings, and may
divide itself in two. For each batch, the blobs of some directories, it takes locks, asks the
catalog for the names, and opens each directory without following a symlink. The receiver writes the
files beside the store, syncs, gives whole directories their names, syncs, and answers; only then an
UPDATE marks them, by their names, as others may have been inserted between them. The next ones are
sent meanwhile. The pipes are as wide as ours. It tries nothing out before, tries nothing again, and
logs nothing; the remote is trusted, and each directory on it is new.

It is called by `python -I bare_stream.py run STORE URL SETTINGS COMMAND SENDERS DIRECTORIES LEVEL
AA...`: 1 or 2 SENDERS, DIRECTORIES in a batch, and the LEVEL of zstd, by which all of a sender is
one stream, 0 for none. The COMMAND starts `python -I bare_stream.py store DIRECTORY` on the remote,
or `unpack DIRECTORY` for such a stream, or `pack DIRECTORY`, which writes a file for each batch.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from io import BufferedReader, FileIO, RawIOBase
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

from blake3 import blake3

_MOST_BYTES = 1 << 20
_MOST_FILES = 250
_LOCK_SQL = "select pg_advisory_lock(get_byte(decode(unnest(%s::text[]), 'hex'), 0))"
_CLAIM_SQL = "select blobid from blobs where blobid between %s and %s and remote_copied is not true"
_MARK_SQL = """
    update blobs set remote_copied = true, remote_last_checked = now(), remote_copy_failed = false
    where blobid = any(%b)
"""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ENTRY = struct.Struct("!32sQ")  # The name and size of a file: no name can be a path.
_COMMIT = bytes(4)


def run(
    store: str, url: str, settings: str, command: str, how: list[int], parts: list[str]
) -> None:
    """Sends the blobs of some directories, and marks those that are stored. how: the number of
    senders, 1 or 2, of directories in a batch, and the level.
    """
    import psycopg  # noqa: F401

    import ntt_backup.cli.app  # noqa: F401
    from ntt_backup.config import RemoteConfig, load

    load(RemoteConfig, file=Path(settings))
    senders, batch, level = how
    middle = len(parts) // senders
    other = os.fork() if middle < len(parts) else None
    mine = parts[middle:] if other == 0 else parts[:middle]
    _send_and_mark(store, url, command, batch, level, mine)
    if other and os.waitpid(other, 0)[1]:
        sys.exit("the other sender has failed")


def _send_and_mark(
    store: str, url: str, command: str, batch: int, level: int, parts: list[str]
) -> None:
    from psycopg import connect

    sent: list[list[str]] = []
    with (
        subprocess.Popen(
            ["sh", "-c", command],
            _MOST_BYTES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=_MOST_BYTES,
        ) as remote,
        connect(url, autocommit=True) as catalog,
    ):
        out, answers = cast("IO[bytes]", remote.stdin), cast("IO[bytes]", remote.stdout)
        if level:
            out = _packed(out, level)
        for first in range(0, len(parts), batch):
            some = parts[first : first + batch]
            catalog.execute(_LOCK_SQL, [some])
            limits = [some[0], f"{some[-1]}g"]
            names = sorted(name for (name,) in catalog.execute(_CLAIM_SQL, limits))
            for part, below in groupby(names, lambda name: name[:2]):
                above = os.open(f"{store}/{part}", _DIRECTORY)
                for sub, here in groupby(below, lambda name: name[2:4]):
                    directory = os.open(sub, _DIRECTORY, dir_fd=above)
                    _send_files(out, "", list(here), directory)
                    os.close(directory)
                os.close(above)
            out.write(_COMMIT)
            out.flush()
            sent.append(names)
            if len(sent) == 2:
                _settle(answers, catalog, sent.pop(0))
        for names in sent:
            _settle(answers, catalog, names)


def _packed(out: IO[bytes], level: int) -> IO[bytes]:
    """Returns what compresses into a stream, as ours does from level 6 on."""
    import zstandard

    from ntt_backup.upload.strategies.codec import _OPTIONS

    options = zstandard.ZstdCompressionParameters.from_level(level, **_OPTIONS)
    return zstandard.ZstdCompressor(compression_params=options).stream_writer(out)


def _settle(answers: IO[bytes], catalog: Any, names: list[str]) -> None:
    if (stored := answers.readline()) != b"%d\n" % len(names):
        sys.exit(f"stored are {stored!r} of {len(names)} blobs")
    catalog.execute(_MARK_SQL, [names])


def send(out: IO[bytes], store: str, parts: list[str]) -> None:
    """Writes frames: the files of a directory, and the pieces of a large one."""
    for part in parts:
        for sub in os.listdir(f"{store}/{part}"):
            place = f"{store}/{part}/{sub}/"
            _send_files(out, place, os.listdir(place))


def _send_files(out: IO[bytes], place: str, names: list[str], directory: int | None = None) -> None:
    piece = _SPACE
    files: list[tuple[str, int]] = []
    contents: list[bytes] = []
    held = 0
    for name in names:
        file = os.open(place + name, _FILE, dir_fd=directory)
        size = os.readv(file, [piece])
        if size == _MOST_BYTES:
            _send_large(out, name, file, piece)
        else:
            content = bytes(piece[:size])
            _prove(name, blake3(content).hexdigest())
            files.append((name, size))
            contents.append(content)
            held += size
            if len(files) == _MOST_FILES or held > _MOST_BYTES:
                _write(out, files, contents)
                files, contents, held = [], [], 0
        os.close(file)
    _write(out, files, contents)


def _send_large(out: IO[bytes], name: str, file: int, piece: memoryview) -> None:
    left = size = os.fstat(file).st_size
    digest, count = blake3(), len(piece)
    _write(out, [(name, size)], [])
    while count:
        digest.update(piece[:count])
        out.write(piece[:count])
        left -= count
        count = os.readv(file, [piece[: min(left, len(piece))]]) if left else 0
    _prove(name, digest.hexdigest())


def _write(out: IO[bytes], files: list[tuple[str, int]], contents: list[bytes]) -> None:
    if files:
        table = [_ENTRY.pack(bytes.fromhex(name), size) for name, size in files]
        head = (len(table) * _ENTRY.size).to_bytes(4, "big")
        out.write(b"".join([head, *table, *contents]))


def receive(source: BufferedReader[Any], to: str) -> int:
    """Writes what the frames have into a directory, up to a commit or the end. Returns the number
    of files.
    """
    space = memoryview(bytearray(2 * _MOST_BYTES))
    written = 0
    while size := int.from_bytes(source.read(4), "big"):
        files = [(name.hex(), size) for name, size in _ENTRY.iter_unpack(source.read(size))]
        prefix = files[0][0]
        place = f"{prefix[:2]}/{prefix[2:4]}"
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
        written += len(files)
    return written


class _Unpacked(RawIOBase):
    """Unpacks a stream of zstd as it comes."""

    def __init__(self, file: FileIO) -> None:
        import zstandard

        from ntt_backup.wire.messages import STREAM_WINDOW_LOG

        unpacker = zstandard.ZstdDecompressor(max_window_size=1 << STREAM_WINDOW_LOG)
        self._reader = unpacker.stream_reader(file)

    def readable(self) -> bool:
        return True

    def readinto(self, space: Any) -> int:
        return self._reader.readinto1(space)


def keep(source: BufferedReader[Any], to: str) -> None:
    """Writes what comes beside the store, and gives it its names when it is told to commit."""
    from ntt_backup.blobdir.descriptors import syncfs

    fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, _MOST_BYTES)
    stage = f"{to}/stage-{os.getpid()}"
    os.mkdir(stage)
    fd = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
    while written := receive(source, stage):
        syncfs(fd)
        for part in os.listdir(stage):
            os.rename(f"{stage}/{part}", f"{to}/{part}")
        syncfs(fd)
        os.write(1, b"%d\n" % written)
    os.rmdir(stage)


def pack(source: BufferedReader[Any], to: str) -> None:
    """Writes the blobs of each batch, with their names, into one file, which is synced before it
    has its name. Answers as `keep` does.
    """
    fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, _MOST_BYTES)
    space = memoryview(bytearray(2 * _MOST_BYTES))
    directory = os.open(to, _DIRECTORY)
    written = 1
    while written:
        written, stage = 0, f"stage-{os.getpid()}"
        file = os.open(stage, _NEW, 0o644, dir_fd=directory)
        while size := int.from_bytes(source.read(4), "big"):
            table = source.read(size)
            files = [(name.hex(), size) for name, size in _ENTRY.iter_unpack(table)]
            os.write(file, table)
            if (total := sum(size for _, size in files)) > len(space):
                _receive_large(source, files[0][0], file, total, space)
            else:
                source.readinto(space[:total])
                at = 0
                for name, size in files:
                    _prove(name, blake3(space[at : at + size]).hexdigest())
                    at += size
                os.write(file, space[:total])
            written += len(files)
        if written:
            os.fsync(file)
            os.rename(stage, f"{files[0][0]}.pack", src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
            os.write(1, b"%d\n" % written)
        os.close(file)


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


_SPACE = memoryview(bytearray(_MOST_BYTES))

if __name__ == "__main__":
    # A large buffer: what ssh costs grows with the number of the writes.
    match sys.argv[1:]:
        case ["send", root, *parts]:
            with open(1, "wb", _MOST_BYTES) as out:
                send(out, root, parts)
        case ["run", root, url, settings, command, senders, batch, level, *parts]:
            run(root, url, settings, command, [int(senders), int(batch), int(level)], parts)
        case ["receive", to]:
            with BufferedReader(FileIO(0), _MOST_BYTES) as source:
                receive(source, to)
        case ["store", to]:
            with BufferedReader(FileIO(0), _MOST_BYTES) as source:
                keep(source, to)
        case ["pack", to]:
            with BufferedReader(FileIO(0), _MOST_BYTES) as source:
                pack(source, to)
        case ["unpack", to]:
            with BufferedReader(_Unpacked(FileIO(0)), _MOST_BYTES) as stream:
                keep(stream, to)
