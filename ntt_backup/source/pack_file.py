"""Writes blobs of the store into one pack file, each compared with its name while it is read.

The file appears whole or not at all, see `process.durable`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.walk import Stray, StrayKind
from ntt_backup.config.sealing import seal_writer
from ntt_backup.errors import SOME_FAILED, ConfigError, SourceError
from ntt_backup.model import Blob, Failure, Failures
from ntt_backup.pack.format import MAX_ENTRIES, pack_id
from ntt_backup.pack.writer import PackWriter
from ntt_backup.process.durable import durable_file
from ntt_backup.source.reader import BadSourceBlob, Reader, TooLarge
from ntt_backup.source.store import Store

# The store of a pack that is made by hand, which belongs to no target.
_NO_STORE: Final = bytes(16)
_BUFFER: Final = 1 << 23


@dataclass(slots=True)
class Packed:
    """The result so far.

    Attributes:
        bytes: The bytes of content.
        size: The bytes of the file.
        part: The part of the work that is done, from 0 to 1.
        wrong: The blobs that could not be packed.
    """

    pack_id: str = ""
    blobs: int = 0
    bytes: int = 0
    size: int = 0
    part: float | None = None
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong else 0


def list_store(store: Store, prefix: str) -> Iterator[str]:
    """Yields the blobids in the store that begin with a prefix, in order.

    Raises:
        SourceError: The store cannot be read.
        ConfigError: A directory cannot be listed.
    """
    with store.tree() as tree:
        for directory in tree.directories(first=prefix, last=prefix):
            found = [directory] if isinstance(directory, Stray) else tree.entries(directory)
            names = []
            for one in found:
                if isinstance(one, str):
                    names.append(one)
                elif one.kind is StrayKind.UNREADABLE:
                    raise ConfigError(
                        f"cannot list {store.root / one.path}",
                        detail=one.detail,
                        hint="let this user read it",
                    )
            yield from sorted(name for name in names if name.startswith(prefix))


def pack_blobs(
    store: Store,
    blobids: Sequence[str],
    to: Path,
    recipients: Sequence[str] = (),
    *,
    compress: bool,
    replace: bool,
    on_progress: Callable[[Packed], None],
) -> Packed:
    """Packs blobs into a file. A blob that is missing or wrong is left out, and reported.

    Args:
        store: The store.
        blobids: The blobs, sorted and all different.
        to: The file.
        recipients: The public keys that the pack is sealed for; none: it is not sealed.
        compress: Whether blobs are compressed.
        replace: Whether an existing file is replaced at the end.
        on_progress: Receives the result so far after each blob.

    Raises:
        SourceError: The store cannot be read, or a blob was changed meanwhile.
        ConfigError: There are too many blobs.
        OSError: The file cannot be written.
    """
    if len(blobids) > MAX_ENTRIES:
        raise ConfigError(
            f"a pack has at most {MAX_ENTRIES:,} blobs, and these are more",
            hint="make one for each --prefix",
        )
    began = time.monotonic()
    done = Packed()
    buffer = memoryview(bytearray(_BUFFER))
    with durable_file(to, replace=replace) as file, Reader(store) as reader:
        digests: list[bytes] = []
        seal = seal_writer(file.write, recipients) if recipients else None
        write = file.write if seal is None else seal.write
        writer = PackWriter(write, _NO_STORE, b"", compress=compress, names=store.hash)
        for number, blobid in enumerate(blobids, 1):
            found = reader.read(Blob(blobid), buffer)
            if isinstance(found, TooLarge):
                found = _add_large(reader, writer, found.blob, buffer)
            elif not isinstance(found, Failure):
                writer.add(bytes.fromhex(blobid), buffer[:found])
            if isinstance(found, Failure):
                done.wrong.add(found)
            else:
                digests.append(bytes.fromhex(blobid))
                done.blobs += 1
                done.bytes += found
            done.part = number / len(blobids)
            done.duration_s = time.monotonic() - began
            on_progress(done)
        # Not earlier, since wrong blobs are not in the pack.
        writer.pack_id = pack_id(_NO_STORE, digests)
        writer.close()
        done.pack_id, done.size = writer.pack_id.hex(), writer.size
        if seal is not None:
            seal.close()
            done.size = seal.size
    done.duration_s = time.monotonic() - began
    return done


def _add_large(reader: Reader, writer: PackWriter, blob: Blob, buffer: memoryview) -> int | Failure:
    """Packs a blob that does not fit into memory.

    The blob is read twice, since the pack cannot take back a wrong blob.
    """
    examined = reader.examine(blob, verify=True)
    if isinstance(examined, Failure):
        return examined
    sized = examined[0]
    assert sized.size is not None
    writer.begin(bytes.fromhex(blob.blobid), sized.size)
    try:
        for piece in reader.pieces(sized, lambda: buffer):
            writer.more(piece)
    except BadSourceBlob as error:
        raise SourceError(
            f"{blob.blobid} was changed while it was packed",
            detail=error.failure.detail,
            hint="pack it again",
        ) from error
    return sized.size
