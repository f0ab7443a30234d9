"""Mounts packs, those in a directory or on a target, or the tree of a snapshot's version."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Final

from ntt_backup.config.sealing import SealPolicy
from ntt_backup.errors import MountImpossible
from ntt_backup.filestore.contract import FileArchived, FileMissing, FileStore, SharedStore
from ntt_backup.filestore.local_cache import Cache
from ntt_backup.mount import kernel
from ntt_backup.mount.image import Built, Options, Source, build, find_packs, sealed
from ntt_backup.mount.version import SuperBlockCache, VersionTree, write_lines
from ntt_backup.mount.volumes import Volume, lay_out
from ntt_backup.pack.format import PackError
from ntt_backup.packstore.tables import LargeBlob, Tables, large_blobs_of, packs_of
from ntt_backup.process.durable import durable_file
from ntt_backup.process.spawn import Fork, wait_for
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.versions import choose, open_manifest

_READY_SECONDS: Final = 60.0


def mount_packs(packs: Path, directory: Path, options: Options) -> Built:
    """Mounts the packs of one directory on another; both are absolute paths. The image is in
    scratch. No process stays. Raises MountImpossible.
    """
    kernel.require_erofs(kernel.FILES_SINCE)
    kernel.require_mount_point(directory)
    sources = find_packs(packs, options.prefix)
    with _image(options.scratch) as file:
        built = build(file, [one.size for one in sources], sources, options)
        _require_some(built)
        # The kernel takes names of 255 bytes.
        below = packs if packs.is_dir() else packs.parent
        with chdir(below):
            image = f"/proc/self/fd/{file.fileno()}"
            names = [os.path.relpath(one.name, below) for one in sources]
            kernel.attach(image, [*names, image], directory)
    return built


def write_image(packs: Path, image: Path, options: Options, *, replace: bool) -> Built:
    """Writes the image of packs, a directory of them or one, to a file, which appears whole. Its
    devices are the packs in the order of their paths, and then itself. replace: a file that is
    there is replaced, but never one of the packs. Raises OSError, and MountImpossible.
    """
    sources = find_packs(packs, options.prefix)
    if image.exists() and any(image.samefile(one.name) for one in sources):
        raise MountImpossible(f"{image} is one of the packs", hint="name another file")
    with durable_file(image, replace=replace) as file:
        built = build(file, [one.size for one in sources], sources, options)
        _require_some(built)
    return built


def mount_target(
    open_packs: Callable[[], SharedStore],
    directory: Path,
    options: Options,
    *,
    cache: Cache | None = None,
    policy: SealPolicy | None = None,
) -> Built:
    """Mounts the packs of a target on a directory, an absolute path. A process stays until it is
    unmounted. cache: tables that this machine keeps. policy: what need not be sealed. Raises
    MountImpossible, and what a store raises.
    """
    kernel.require_erofs(kernel.BLOCKS_SINCE)
    kernel.require_mount_point(directory)
    fuse = _fuse()
    store = _Mountable(open_packs())
    tables = Tables(store, cache, policy=policy)
    volumes: list[Volume] = []
    sources: list[Source] = []
    for one, volume, start in lay_out(
        chain(packs_of(store, options.prefix), large_blobs_of(store, options.prefix))
    ):
        if not volumes or volumes[-1] is not volume:
            volumes.append(volume)
        read = partial(store.fetch, one.key)
        if isinstance(one, LargeBlob):
            source = Source(one.key, one.size, read, len(volumes), start, one.digest)
        elif one.name.sealed:  # Whatever it is: only `tables` would see that it is not.
            raise sealed(one.key)
        else:
            opened = partial(tables.open, one)
            source = Source(one.key, one.size, read, len(volumes), start, open=opened)
        sources.append(source)
    with _image(options.scratch) as file:
        built = build(file, [one.size for one in volumes], sources, options)
        _require_some(built)
        store.close()  # Its threads would not be copied.
        show = partial(fuse.serve, directory, volumes, lambda: open_packs().fetch)
        with _started(show) as server, ExitStack() as stack:
            shown = f"/proc/{server.pid}/root{directory}"
            devices = [kernel.loop_device(f"{shown}/{n}", stack) for n in range(len(volumes))]
            image = f"/proc/self/fd/{file.fileno()}"
            # A block device can be used once only.
            whole, itself = kernel.loop_device(image, stack), kernel.loop_device(image, stack)
            kernel.attach(whole, [*devices, itself], directory)
            os.write(server.stdin_fd, fuse.GO)
    return built


@dataclass(frozen=True, slots=True)
class Mounted:
    """A version whose tree is mounted. files: its entries, directories too; bytes of all files.
    origin: who made the version.
    """

    set: str
    version: str
    files: int
    bytes: int
    origin: str


def mount_version(
    open_store: Callable[[], FileStore],
    wanted: str,
    directory: Path,
    origins: Origins,
    *,
    scratch: Path,
    tell: Callable[[str], object] = lambda _: None,
) -> Mounted:
    """Mounts the tree of a version, which wanted names as `versions.choose` knows it, on a
    directory, an absolute path. A process stays until it is unmounted. tell: as there.

    scratch: the directory of a file with the manifest's lines. Raises MountImpossible,
    SnapshotDamaged, and what a store raises.
    """
    kernel.require_fuse()
    kernel.require_mount_point(directory)
    fuse = _fuse()
    with (
        _writing("the manifest", scratch, "some 200 bytes for each file of the version"),
        tempfile.NamedTemporaryFile(dir=scratch) as file,
    ):
        with closing(open_store()) as store:
            manifest = open_manifest(store, choose(store, wanted, origins, tell))
            starts = write_lines(manifest, file)
        header, trailer = manifest.header, manifest.trailer
        assert trailer is not None  # since the lines have ended
        assert manifest.seal is not None
        origin = origins.of_seal(header, manifest.seal)

        def show() -> int:
            tree = VersionTree(Path(file.name), starts)
            served: int = fuse.serve_version(directory, tree, SuperBlockCache(header, open_store))
            return served

        with _started(show) as server:
            os.write(server.stdin_fd, fuse.GO)
    return Mounted(header.set, header.version, trailer.files, trailer.bytes, str(origin))


@contextmanager
def _started(show: Callable[[], int]) -> Iterator[Fork]:
    """Yields a process that shows files, once it is ready. The process stays, and is ended where
    the block raises an error.
    """
    server = Fork(show, "ntt-mount", stays=True)
    try:
        _await(server, _fuse().READY)
        yield server
    except BaseException:
        server.end()
        raise


def _await(server: Fork, word: bytes) -> None:
    said = b""
    deadline = time.monotonic() + _READY_SECONDS
    while word not in said:
        left = deadline - time.monotonic()
        wait_for(reading=server.fds, timeout=max(left, 0))
        server.drain_stderr()
        data = server.read()
        if data == b"" or left <= 0:
            server.drain_stderr()
            raise MountImpossible("cannot mount by FUSE", detail=server.stderr.text.strip())
        said += data or b""


def _fuse() -> ModuleType:
    """Returns the module that needs FUSE. Raises MountImpossible."""
    try:
        from ntt_backup.mount import fuse
    except (ImportError, OSError) as error:
        raise MountImpossible(
            "this mount needs mfusepy and libfuse",
            detail=str(error),
            hint="pip install 'ntt-backup[mount]', and the system's package fuse3",
        ) from error
    return fuse


class _Mountable:
    """Reads a store. Raises MountImpossible, PackError, and what else a store raises."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self.list, self.close = store.list, store.close

    def fetch(self, name: str, start: int, length: int) -> bytes:
        try:
            return self._store.fetch(name, start, length)
        except FileArchived as error:
            raise MountImpossible(
                f"{name} lies in an archive class",
                hint="have it thawed first: ntt-backup-remote restore --thaw DAYS asks for that",
            ) from error
        except FileMissing as error:
            raise PackError("it is gone") from error


@contextmanager
def _image(scratch: Path) -> Iterator[BinaryIO]:
    """Yields the file of an image, which has no name. Raises MountImpossible."""
    needs = "150 bytes a blob, and the size of all blobs below 16 KiB"
    with _writing("the image", scratch, needs), tempfile.TemporaryFile(dir=scratch) as file:
        yield file


@contextmanager
def _writing(what: str, scratch: Path, needs: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MountImpossible(
            f"cannot write {what} in {scratch}",
            detail=error.strerror or str(error),
            hint=f"name another directory by --scratch: it needs {needs}",
        ) from error


def _require_some(built: Built) -> None:
    if not built.blobs:
        raise MountImpossible("no blobs can be mounted", hint="see what was left out, and --prefix")
