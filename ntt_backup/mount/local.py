"""Packs are found in a directory of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.blobdir.open import closing
from ntt_backup.errors import MountImpossible
from ntt_backup.mount.erofs import MAX_DEVICES
from ntt_backup.mount.image import Source
from ntt_backup.pack.names import PackKey


def find(directory: Path, prefix: str) -> list[Source]:
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
