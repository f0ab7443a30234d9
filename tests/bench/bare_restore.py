"""The least that a Python program does to restore a version: the second floor beside `restore`.

It keeps what a restore promises, each in the plainest way, in one loop. The directory is locked,
and the kernel permits no write elsewhere. The manifest is proved as a whole before anything is
written. Each line has its types and bounds, and stands behind the one before it. Directories are
entered one by one, and no link is followed; a name is one part of a path, and what is there is not
written over. Each super block has its checksum, each file its BLAKE3; a file that fails is told of,
and others go on. Owners and modes are right, and directories get theirs, with their times, last.

It only knows a full version without links, whose files and directories are new, are this user's,
and inherit nothing; others it refuses. Lines of directories, and of files in several super blocks,
are read by our own functions. `bare_restore.py SETTINGS VERSION DIRECTORY JOBS` takes the directory
of the version.
"""

import fcntl
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from re import compile as pattern
from typing import IO

_PIECE = 1 << 16
_RUN = 16
_MOST = 250
_MAX_CONTENT = 16 << 20
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINE = pattern(
    # Directory and name; owner and mode; mtime; size; digest; the frame; skip; any other line.
    r'\["(?:([ !#-.0-\[\]-~][ !#-\[\]-~]{0,997})/)?(?!\.\.?")([ !#-.0-\[\]-~]{1,255}+)","f",'
    r"([0-9]{1,4}+,[0-9]{1,9}+,[0-9]{1,9}+),([1-8][0-9]{18}|-?[0-9]{1,18}+),[0-9]{1,19}+,[0-9]{1,19}+,"
    r'([0-9]{1,8}+),\{"b3":"([^"]{64})","x":\[0,\5,'
    r"(0,[0-9]{1,5}+,[0-9]{1,18}+,[0-9]{1,8}+),([0-9]{1,8}+)\]\}\]\n|([^\n]*\n)"
)


def _texts(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a manifest, many together."""
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=8 << 20)
    rest = b""
    with unpacker.stream_reader(file, read_across_frames=True) as reader:
        while piece := reader.read(_PIECE):
            whole, end, rest = (rest + piece).rpartition(b"\n")
            yield whole + end
            if len(rest) > 128 << 20:
                sys.exit("a line is too long")


def prove(manifest: Path) -> None:
    """Ends the program where the manifest is not as it was written."""
    from blake3 import blake3

    digest, lines, tail = blake3(), 0, b""
    with manifest.open("rb") as file:
        for text in _texts(file):
            end = 0 if tail or (lines and text[:1] == b"{") else text.find(b"\n{") + 1 or len(text)
            digest.update(text[:end])
            lines += text.count(b"\n", 0, end)
            tail += text[end:]
    trailer, _, seal = tail.partition(b"\n")
    digest.update(trailer + b"\n")
    if json.loads(seal)["blake3"] != digest.hexdigest():
        sys.exit("the manifest is damaged")
    if json.loads(trailer)["files"] != lines - 1:
        sys.exit("the manifest has another number of lines")


def restore(version: Path, root: int, last: IO[bytes], part: int, parts: int) -> int:
    """Restores one of several parts of a version; returns how many files failed. last takes the
    lines of directories.
    """
    import zstandard
    from blake3 import blake3

    from ntt_backup.snapshot.format.entry import entries_of, order

    unpacker = zstandard.ZstdDecompressor(max_window_size=_MAX_CONTENT)
    own = [os.geteuid(), os.getegid()]
    levels = [("", root)]
    entered, owned, frame, packed, path = "", "", "", 0, ""
    directory, mode, pack_file, failed, content = root, 0, -1, 0, memoryview(b"")
    above: str | None = None
    before = ""
    # Files that are still open: only files are opened meanwhile, so their descriptors are a range.
    opened: list[int] = []

    def read(where: str) -> memoryview:
        nonlocal pack_file, packed
        _, pack, offset, stored = map(int, where.split(","))
        if pack != packed:
            _close(opened)
            packed = pack
            pack_file = os.open(version / f"pack-{pack:05}", os.O_RDONLY | os.O_CLOEXEC)
        if stored > _MAX_CONTENT + (1 << 17):
            raise ValueError("a super block is too large")
        data = os.pread(pack_file, stored, offset)
        said = zstandard.get_frame_parameters(data)
        if not said.has_checksum or said.content_size > _MAX_CONTENT:
            raise ValueError("a super block is damaged")
        return memoryview(unpacker.decompress(data, allow_extra_data=False))

    with (version / "manifest").open("rb") as file:
        for number, text in enumerate(_texts(file)):
            if number // _RUN % parts != part:
                continue
            for line in _LINE.findall(text.decode("ascii")):
                place, name, who, mtime, size, digest, where, skip, other = line
                extents = None
                if other:
                    if other[0] == "{":
                        continue
                    (entry,) = entries_of([other.encode()], 1)
                    place, _, name = entry.path.rpartition("/")
                    if entry.kind not in "fd" or entry.xattrs:
                        sys.exit(f"{entry.path} is no plain file")
                    who, mtime, size, digest = (
                        *(f"{entry.mode},{entry.uid},{entry.gid}", entry.mtime),
                        *(entry.size, entry.digest),
                    )
                    extents = entry.extents
                if place != above:
                    if above is not None:
                        path = f"{above}/{before}"
                    if path and not order(path) < order(f"{place}/{name}"):
                        sys.exit("the entries are not in order")
                    above = place
                elif not before < name:
                    sys.exit("the entries are not in order")
                before = name
                if other and entry.kind == "d":
                    last.write(other.encode())
                    above, path = None, f"{place}/{name}"
                    continue
                if place != entered:
                    _close(opened)
                    directory, entered = _enter(levels, place), place
                if who != owned:
                    owned = who
                    mode, *owner = map(int, who.split(","))
                    if owner != own or mode >= 0o1000:
                        sys.exit(f"{place}/{name} needs an owner")
                try:
                    if extents is None:
                        if where != frame:
                            content, frame = read(where), where
                        begin, length = int(skip), int(size)
                        data = content[begin : begin + length]
                    else:
                        pieces, length = [], size
                        for extent in extents:
                            where = ",".join(map(str, extent[2:6]))
                            if where != frame:
                                content, frame = read(where), where
                            pieces.append(content[extent[6] : extent[6] + extent[1]])
                        data = memoryview(b"".join(pieces))
                    if len(data) != length or blake3(data).hexdigest() != digest:
                        raise ValueError("it is another file")
                    fd = os.open(name, _NEW, mode, dir_fd=directory)
                    opened.append(fd)
                    if os.write(fd, data) != length:
                        raise ValueError("it was not written as a whole")
                    time = int(mtime)
                    os.utime(fd, ns=(time, time))
                except (OSError, ValueError, zstandard.ZstdError) as error:
                    print(f"{place}/{name}: {error}", file=sys.stderr)
                    failed += 1
                if len(opened) == _MOST:
                    _close(opened)
            _close(opened)
    last.flush()
    return failed


def _enter(levels: list[tuple[str, int]], path: str) -> int:
    """Returns a directory, which is made where it is missing; no link is followed."""
    while (at := levels[-1][0]) and path != at and not path.startswith(f"{at}/"):
        os.close(levels.pop()[1])
    for name in path[len(at) :].strip("/").split("/") if path != at else ():
        if name in ("", ".", "..") or len(name.encode("utf-8", "surrogateescape")) > 255:
            sys.exit(f"{path} leads elsewhere")
        above, fd = levels[-1]
        with suppress(FileExistsError):  # Made by another process.
            os.mkdir(name, 0o700, dir_fd=fd)
        inside = os.open(name, _DIRECTORY, dir_fd=fd)
        levels.append((f"{above}/{name}" if above else name, inside))
    return levels[-1][1]


def _close(opened: list[int]) -> None:
    if opened:
        os.closerange(opened[0], opened[-1] + 1)
        opened.clear()


def finish(root: int, last: IO[bytes]) -> None:
    """Gives directories their modes and times, once all in them is there."""
    from ntt_backup.snapshot.format.entry import entries_of, order

    last.seek(0)
    levels = [("", root)]
    entries = entries_of([line[:-1] for line in last], 1)
    for entry in sorted(entries, key=lambda one: order(one.path), reverse=True):
        fd = _enter(levels, entry.path)
        status = os.fstat(fd)
        if (status.st_uid, status.st_gid) != (entry.uid, entry.gid):
            sys.exit(f"{entry.path} needs an owner")
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime, entry.mtime))


def main(settings: str, version: str, to: str, jobs: str) -> None:
    """Restores a version by several processes."""
    gc.set_threshold(200_000)
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    import ntt_backup.cli.app  # noqa: F401
    from ntt_backup.blobdir.descriptors import syncfs
    from ntt_backup.config import RemoteConfig, load
    from ntt_backup.snapshot.restore.tree import confine

    load(RemoteConfig, file=Path(settings))
    root = os.open(to, _DIRECTORY)
    fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.umask(0)
    confine([to])
    prove(Path(version, "manifest"))
    others = []
    with tempfile.TemporaryFile("ab+", 1 << 20, dir=to) as last:
        for part in range(1, int(jobs)):
            if not (child := os.fork()):
                os._exit(bool(restore(Path(version), root, last, part, int(jobs))))
            others.append(child)
        failed = restore(Path(version), root, last, 0, int(jobs))
        if sum(os.waitpid(other, 0)[1] for other in others) + failed:
            sys.exit("some files were not restored")
        finish(root, last)
    syncfs(root)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
