"""The least that a Python program does to restore a version: the second floor beside `restore`.

It loads the command line and the settings, reads all lines of the manifest as JSON, and reads,
unpacks, hashes, writes and dates each file. It proves no manifest, checks no value, trusts every
name, sets no owner and makes no link: `bare_restore.py SETTINGS VERSION DIRECTORY JOBS`, with the
directory of a full version whose files are new, and have an owner and a mode by themselves.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

_PIECE = 1 << 20
_AT_ONCE = 250
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def restore(version: str, to: str, part: int, parts: int) -> None:
    """Restores one of several parts of a version."""
    import zstandard
    from blake3 import blake3

    root = os.open(to, os.O_RDONLY | os.O_DIRECTORY)
    unpacker = zstandard.ZstdDecompressor()
    names = sorted(name for name in os.listdir(version) if name.startswith("pack-"))
    packs = [os.open(f"{version}/{name}", os.O_RDONLY) for name in names]
    above, directory, frame, content = "", root, (0, 0), memoryview(b"")
    for number, entries in enumerate(_entries(version, zstandard.ZstdDecompressor())):
        if number % parts != part:
            continue
        opened: list[int] = []
        for path, kind, mode, _, _, mtime, _, _, _, more in entries:
            if kind != "f":
                continue
            place, _, name = path.rpartition("/")
            if place != above or len(opened) == _AT_ONCE:
                _close(opened)
            if place != above:
                os.makedirs(f"{to}/{place}", exist_ok=True)
                os.close(directory)
                above, directory = place, os.open(f"{to}/{place}", os.O_RDONLY | os.O_DIRECTORY)
            extents, pieces = more["x"], []
            for at in range(0, len(extents), 7):
                _, length, _, pack, offset, stored, skip = extents[at : at + 7]
                if (pack, offset) != frame:
                    frame = (pack, offset)
                    stored_frame = os.pread(packs[pack - 1], stored, offset)
                    content = memoryview(unpacker.decompress(stored_frame))
                pieces.append(content[skip : skip + length])
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if blake3(data).hexdigest() != more["b3"]:
                sys.exit(f"{path} is another file")
            file = os.open(name, _NEW, mode, dir_fd=directory)
            opened.append(file)
            os.write(file, data)
            os.utime(file, ns=(mtime, mtime))
        _close(opened)


def _entries(version: str, unpacker: Any) -> Any:
    """Yields the entries, some thousands at once."""
    rest = b""
    with open(f"{version}/manifest", "rb") as file:
        reader = unpacker.stream_reader(file, read_across_frames=True)
        while piece := reader.read(_PIECE):
            whole, _, rest = (rest + piece).rpartition(b"\n")
            lines = whole.replace(b"\n", b",")
            yield [one for one in json.loads(b"[" + lines + b"]") if type(one) is list]


def _close(opened: list[int]) -> None:
    if opened:
        os.closerange(opened[0], opened[-1] + 1)
        opened.clear()


def main(settings: str, version: str, to: str, jobs: str) -> None:
    """Restores a version by several processes."""
    gc.set_threshold(200_000)
    import ntt_backup.cli.app  # noqa: F401
    from ntt_backup.config import RemoteConfig, load

    load(RemoteConfig, file=Path(settings))
    others = []
    for part in range(1, int(jobs)):
        if not (child := os.fork()):
            restore(version, to, part, int(jobs))
            os._exit(0)
        others.append(child)
    restore(version, to, 0, int(jobs))
    if any(os.waitpid(other, 0)[1] for other in others):
        sys.exit("a part was not restored")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
