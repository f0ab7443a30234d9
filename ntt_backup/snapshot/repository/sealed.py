"""Files of snapshots in a bucket are sealed: only an identity of age opens them.

A head of a fixed length holds the file's key, sealed for the recipients; behind it come the pieces
of a sealed pack, so any range is read by itself, and the length of the content is known from that
of the object. docs/object-stores.md is the contract.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from blake3 import blake3

from ntt_backup.config.sealing import Keyring, seal_writer
from ntt_backup.errors import ConfigError
from ntt_backup.pack.format import PackError
from ntt_backup.pack.seal import (
    PIECE,
    SEALED_PIECE,
    Read,
    Seal,
    Unsealed,
)
from ntt_backup.snapshot.repository.contract import Buffer, NewFile

SUFFIX: Final = ".sealed"
HEAD_BYTES: Final = 4096
_MAGIC: Final = b"NTTSEAL\x01"
# Magic, bytes of the keys, BLAKE3 of the keys
_HEAD: Final = struct.Struct("!8sH32s")
# Of no store: the keys of files of snapshots name no pack.
_STORE: Final = bytes(16)


class SealedFile:
    """A file that is sealed on its way; see `contract.NewFile`."""

    def __init__(self, file: NewFile, recipients: Sequence[str]) -> None:
        self._file = file
        seal = seal_writer(file.add, _STORE, recipients)
        assert seal is not None
        self._seal, keys = seal, seal.keys
        if len(keys) > HEAD_BYTES - _HEAD.size:
            raise ConfigError(
                f"{len(recipients)} recipients are too many for a snapshot",
                hint="name fewer in pack.recipients: 30 have room",
            )
        self._digest = sha256()
        head = _HEAD.pack(_MAGIC, len(keys), blake3(keys).digest())
        file.add((head + keys).ljust(HEAD_BYTES, b"\0"))

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        self._seal.write(data)

    def finish(self) -> bytes:
        self._seal.end()
        self._file.finish()
        return self._digest.digest()

    def give_up(self) -> None:
        self._file.give_up()


def plain_size(size: int) -> int:
    """Returns how many bytes are within a sealed file of that size."""
    body = max(0, size - HEAD_BYTES)
    return max(0, body - (SEALED_PIECE - PIECE) * -(-body // SEALED_PIECE))


def opened(read: Read, size: int, keyring: Keyring) -> Unsealed:
    """Returns what is within a sealed file of that size. Raises PackError, SealedForOthers too, and
    ConfigError where no identity is given.
    """
    head = read(0, HEAD_BYTES)
    magic, length, digest = _HEAD.unpack_from(head.ljust(HEAD_BYTES, b"\0"))
    keys = head[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or blake3(keys).digest() != digest:
        raise PackError("it is no sealed file of a snapshot, or its key was altered")
    key = keyring.open(keys)
    seal = Seal(length, plain_size(size), b"", b"", _STORE)
    return Unsealed(lambda start, count: read(HEAD_BYTES + start, count), seal, key)
