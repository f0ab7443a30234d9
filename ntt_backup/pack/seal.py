"""Seals packs: only who has an identity of age reads what is in one.

The trailer may have a signature, which says who made the pack: a recipient is public.

A pack of version 1 is cut into pieces of 64 KiB, and each is sealed by ChaCha20-Poly1305. The nonce
is the piece's number and whether it is the last, as in age's own files, so pieces can be read by
themselves, and can neither be altered, nor reordered, nor left out. After them come the pack's key,
which age seals for the recipients, and a trailer.

A pack's key is drawn at random and used for one writing: the same blobs sealed again, perhaps with
one of them changed meanwhile, must not meet the same nonces.

The libraries are the extra `seal`, and are loaded when a pack is sealed or opened.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from ntt_backup.pack.format import (
    ID_BYTES,
    MAX_PACK,
    SEALED_VERSION,
    TAIL_BYTES,
    PackError,
    last_block,
    write_block,
)
from ntt_backup.pack.ustar import BLOCK

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

PIECE: Final = 1 << 16
SEALED_PIECE: Final = PIECE + 16
# What brings the trailer, the key, and 64 KiB of the pack's end at the least.
LAST_PIECES: Final = 2 * SEALED_PIECE + 4096
MAX_KEYS: Final = 1 << 14

_KEY_BYTES: Final = 32
_CONTEXT: Final = "ntt-pack 2 "
# After the magic and the version: bytes of the keys, size of the pack within, BLAKE3 of the keys,
# pack id, store id, name of the key that signed, MAC
_FIELDS_AT: Final = 10
_TRAILER: Final = struct.Struct("!2xIQ24x32s16s16s8s32s")
# What is signed: size, BLAKE3 of the keys, pack id, store id. Nobody but its maker knows the key of
# a pack, so its content is bound by them.
_SIGNED: Final = struct.Struct("!Q32s16s16s")
_UNSIGNED: Final = (bytes(8), bytes(32))

Buffer = bytes | bytearray | memoryview
Read = Callable[[int, int], bytes]
# Returns the signature of data, `NAME:MAC` in hex; "" where there is none.
Sign = Callable[[bytes], str]


def unsigned(_data: bytes) -> str:
    """Is the `Sign` of a host without a key."""
    return ""


class SealUnusable(Exception):
    """Nothing can be sealed or opened: a library is missing, or a key is no key. The text is one
    line for the operator, and shows no secret.
    """


class SealedForOthers(PackError):
    """The pack is whole, as far as can be told, and none of the identities opens it."""


class NotSealed(PackError):
    """The pack is not sealed, and has to be."""


class PackKey:
    """The key of one pack."""

    def __init__(self, key: bytes) -> None:
        self._naming = blake3(key, derive_key_context=f"{_CONTEXT}id").digest()
        self._cipher = _cipher(blake3(key, derive_key_context=f"{_CONTEXT}contents").digest())

    def pack_id(self, store_id: bytes) -> bytes:
        """Returns the id of the pack that is sealed by this key. It tells nothing of its blobs."""
        return blake3(store_id, key=self._naming).digest(length=ID_BYTES)

    def seal(self, piece: Buffer, number: int, *, last: bool) -> bytes:
        return self._cipher.encrypt(_nonce(number, last), piece, None)

    def open(self, sealed: Buffer, number: int, *, last: bool) -> bytes:
        """Returns a piece. Raises PackError where a bit of it was altered."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(_nonce(number, last), sealed, None)
        except InvalidTag:
            raise PackError("what is sealed in it was altered") from None


# Returns the key of a pack from what lies sealed in it. Raises PackError, and what its owner does.
OpenKey = Callable[[bytes], PackKey]


@dataclass(frozen=True, slots=True)
class Seal:
    """The trailer of a sealed pack. size: of the pack within. key_name and mac: of the signature;
    zeros where there is none.
    """

    keys_bytes: int
    size: int
    keys_sum: bytes
    pack_id: bytes
    store_id: bytes
    key_name: bytes = _UNSIGNED[0]
    mac: bytes = _UNSIGNED[1]

    @property
    def signed(self) -> bytes:
        """Returns the data that the signature is of."""
        return _SIGNED.pack(self.size, self.keys_sum, self.pack_id, self.store_id)

    @property
    def signature(self) -> str:
        """Returns the signature, `NAME:MAC` in hex; "" where there is none."""
        unsigned = (self.key_name, self.mac) == _UNSIGNED
        return "" if unsigned else f"{self.key_name.hex()}:{self.mac.hex()}"

    @property
    def sealed_bytes(self) -> int:
        """Returns how many bytes the pieces have. The keys come directly after them."""
        return sealed_size(self.size)


def sealed_size(size: int) -> int:
    """Returns how many bytes so many are once they are sealed: there is always one piece."""
    return size + (SEALED_PIECE - PIECE) * max(1, -(-size // PIECE))


def sealed_offset(offset: int) -> int:
    """Returns where the piece begins that has this byte of the pack within."""
    return offset // PIECE * SEALED_PIECE


def read_seal(tail: bytes, size: int) -> Seal | None:
    """Returns the trailer of a sealed pack of that size, whose last bytes are tail; None for a pack
    that is not sealed. Raises PackError.
    """
    version, block = last_block(tail, size)
    if version != SEALED_VERSION:
        return None
    seal = Seal(*_TRAILER.unpack_from(block, _FIELDS_AT))
    if not TAIL_BYTES <= seal.size <= MAX_PACK or seal.keys_bytes > MAX_KEYS:
        raise PackError("its trailer contradicts itself")
    if seal.sealed_bytes + seal.keys_bytes + TAIL_BYTES != size or any(tail[-2 * BLOCK :]):
        raise PackError("its trailer contradicts itself")
    return seal


class SealWriter:
    """Seals the bytes of a pack, which come in order, and passes them on to `write`. Raises
    SealUnusable.

    recipients: public keys of age, `age1...`. keys: the pack's key, sealed for them. pack_id: what
    the sealed pack is called. size: the bytes that were passed on so far. sign: signs the pack.
    """

    def __init__(
        self,
        write: Callable[[Buffer], object],
        store_id: bytes,
        recipients: Sequence[str],
        sign: Sign = unsigned,
    ) -> None:
        self._sign = sign
        self._write = write
        self._store_id = store_id
        key = secrets.token_bytes(_KEY_BYTES)
        self._key = PackKey(key)
        self.keys = _seal_key(key, recipients)
        self.pack_id = self._key.pack_id(store_id)
        self._number = 0
        self._held = bytearray()
        self.size = 0

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        if self._held:
            missing = PIECE - len(self._held)
            self._held += view[:missing]
            view = view[missing:]
            if not view:
                return
            self._seal(self._held, last=False)
            self._held.clear()
        # A full piece may be the last one: it waits for more, or for the end.
        while len(view) > PIECE:
            self._seal(view[:PIECE], last=False)
            view = view[PIECE:]
        self._held += view

    def end(self) -> None:
        """Seals the last piece, and adds nothing else."""
        self._seal(self._held, last=True)

    def close(self) -> None:
        """Seals the last piece, and adds the key and the trailer."""
        self.end()
        size = self._number * PIECE - PIECE + len(self._held)
        keys = self.keys
        self._put(keys)
        said = (size, blake3(keys).digest(), self.pack_id, self._store_id)
        name, _, mac = self._sign(_SIGNED.pack(*said)).partition(":")
        signature = (bytes.fromhex(name), bytes.fromhex(mac)) if name else _UNSIGNED
        fields = _TRAILER.pack(len(keys), *said, *signature)
        self._put(write_block(SEALED_VERSION, fields) + bytes(2 * BLOCK))

    def _seal(self, piece: Buffer, *, last: bool) -> None:
        self._put(self._key.seal(piece, self._number, last=last))
        self._number += 1

    def _put(self, data: bytes) -> None:
        self._write(data)
        self.size += len(data)


class Unsealed:
    """The pack within a sealed one. read gives bytes of the sealed one."""

    def __init__(self, read: Read, seal: Seal, key: PackKey) -> None:
        self._read = read
        self._seal = seal
        self._key = key

    @staticmethod
    def of(read: Read, seal: Seal, open_key: OpenKey) -> Unsealed:
        """Returns the pack, opened. Raises PackError, and what open_key raises."""
        keys = read(seal.sealed_bytes, seal.keys_bytes)
        if blake3(keys).digest() != seal.keys_sum:
            raise PackError("its key was altered")
        key = open_key(keys)
        if key.pack_id(seal.store_id) != seal.pack_id:
            raise PackError("its key is that of another pack")
        return Unsealed(read, seal, key)

    def over(self, read: Read) -> Unsealed:
        """Returns the same pack, read by other means."""
        return Unsealed(read, self._seal, self._key)

    def read(self, start: int, length: int) -> bytes:
        """Returns bytes of the pack, fewer at its end. Raises PackError."""
        size, end = self._seal.size, min(start + length, self._seal.size)
        if start >= end:
            return b""
        low = sealed_offset(start)
        high = min(sealed_offset(end - 1) + SEALED_PIECE, self._seal.sealed_bytes)
        sealed = memoryview(self._read(low, high - low))
        if len(sealed) != high - low:
            raise PackError(f"{len(sealed)} bytes instead of {high - low} at {low}: it is cut off")
        first, last = start // PIECE, (size - 1) // PIECE
        pieces = [
            self._key.open(sealed[at : at + SEALED_PIECE], number, last=number == last)
            for number, at in enumerate(range(0, len(sealed), SEALED_PIECE), first)
        ]
        pieces[-1] = pieces[-1][: end - (first + len(pieces) - 1) * PIECE]
        pieces[0] = pieces[0][start - first * PIECE :]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def known_recipients(recipients: Iterable[str]) -> list[Any]:
    """Returns public keys as the library has them. Raises SealUnusable."""
    library = age()
    try:
        return [library.x25519.Recipient.from_str(one) for one in recipients]
    except library.RecipientError as error:
        raise SealUnusable(f"these are no public keys of age: {error}") from None


def known_identities(identities: Iterable[str]) -> list[Any]:
    """Returns secret keys as the library has them. Raises SealUnusable."""
    library = age()
    try:
        return [library.x25519.Identity.from_str(one) for one in identities]
    except library.IdentityError:
        raise SealUnusable("it has a line that is no secret key of age") from None


def open_key(keys: bytes, identities: Iterable[str]) -> PackKey:
    """Returns the key of a pack. identities: secret keys of age, `AGE-SECRET-KEY-1...`. Raises
    SealedForOthers, PackError and SealUnusable.
    """
    known = known_identities(identities)
    try:
        key: bytes = age().decrypt(keys, known)
    except age().DecryptError:
        raise SealedForOthers("it is sealed for other identities than those given") from None
    if len(key) != _KEY_BYTES:
        raise PackError("its key has a wrong length")
    return PackKey(key)


def no_key(keys: bytes) -> PackKey:
    """Raises PackError: nothing is given that opens a pack."""
    raise SealedForOthers("it is sealed, and no identity is given")


def _seal_key(key: bytes, recipients: Sequence[str]) -> bytes:
    sealed: bytes = age().encrypt(key, known_recipients(recipients))
    if len(sealed) > MAX_KEYS:
        raise SealUnusable(f"{len(recipients)} recipients are too many for one pack")
    return sealed


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _cipher(key: bytes) -> ChaCha20Poly1305:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError:
        raise SealUnusable(_MISSING) from None
    return ChaCha20Poly1305(key)


def age() -> Any:
    """Returns the library. Raises SealUnusable."""
    try:
        import pyrage
    except ImportError:
        raise SealUnusable(_MISSING) from None
    return pyrage


_MISSING: Final = "sealing needs more libraries: pip install 'ntt-backup[seal]'"
