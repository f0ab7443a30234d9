"""Writes and reads files that are sealed by age, of which any range can be read by itself.

`age -d` opens them without this program.

The format is C2SP's age (https://c2sp.org/age) with X25519 recipients. After a header, which has
the key of the file sealed for each recipient, come chunks of 64 KiB, each sealed by
ChaCha20-Poly1305. The nonce is the number of the chunk and whether it is the last, so chunks can
neither be altered, nor reordered, nor left out.

Files that this program writes have `HEAD` bytes before the first chunk: a stanza that no recipient
reads fills the header. So the size of the content is known from the size of the file. The stanza
has a checksum of the others, which tells a damaged header from one for other identities.

The library is the extra `seal`, and is loaded when a file is sealed or opened.
"""

from __future__ import annotations

import hmac
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ntt_backup.pack.format import PackError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

Buffer = bytes | bytearray | memoryview

# Returns the content of a sealed file from its first HEAD bytes, and its size. Raises PackError,
# and what its owner does.
Unseal = Callable[[bytes, int], "AgeContent"]

CHUNK: Final = 1 << 16
SEALED_CHUNK: Final = CHUNK + 16
# Bytes of header and nonce.
HEAD: Final = 4096

_VERSION: Final = b"age-encryption.org/v1\n"
_X25519: Final = b"age-encryption.org/v1/X25519"
# A checksum of what is before it, and padding.
_FILLING: Final = b"-> ntt-backup %s %s\n\n"
_FILLED: Final = re.compile(rb"\n-> ntt-backup ([0-9a-f]{64}) x+\n\n---")
_KEY_BYTES: Final = 16
_NONCE_BYTES: Final = 16
_RECIPIENT: Final = "age"
_IDENTITY: Final = "age-secret-key-"
_BECH32: Final = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_GENERATORS: Final = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)


class SealUnusable(Exception):
    """Nothing can be sealed or opened: a library is missing, or a key is no key. The text is one
    line for the operator, and shows no secret.
    """


class SealedForOthers(PackError):
    """The file has a good header, as far as can be told, and none of the identities opens it."""


def sealed_size(size: int) -> int:
    """Returns the sealed size in bytes of `size` bytes. An empty file still has one chunk."""
    return HEAD + size + (SEALED_CHUNK - CHUNK) * max(1, -(-size // CHUNK))


def plain_size(sealed: int) -> int:
    """Returns the size in bytes of the content of a sealed file of `sealed` bytes."""
    body = max(0, sealed - HEAD)
    return max(0, body - (SEALED_CHUNK - CHUNK) * -(-body // SEALED_CHUNK))


def read_recipient(text: str) -> bytes:
    """Returns the public key of `age1...`. Raises SealUnusable."""
    try:
        return _bech32(text, _RECIPIENT)
    except ValueError as error:
        # A secret key that stands in the wrong place is not shown.
        shown = repr(text[:80]) if text.startswith(f"{_RECIPIENT}1") else "a recipient"
        raise SealUnusable(f"{shown} is no public key of age: {error}") from None


def read_identity(text: str) -> bytes:
    """Returns the secret key of `AGE-SECRET-KEY-1...`. Raises SealUnusable."""
    try:
        return _bech32(text.lower() if text.isupper() else text, _IDENTITY)
    except ValueError:
        raise SealUnusable("it has a line that is no secret key of age") from None


class NotSealed(PackError):
    """The file is not sealed, and has to be."""


def is_sealed(head: bytes) -> bool:
    """Returns whether a file that begins so is a file of age."""
    return head.startswith(_VERSION)


def no_identity(head: bytes, size: int) -> AgeContent:
    """Raises SealedForOthers. It is the `Unseal` of a caller without identities."""
    raise SealedForOthers("it is sealed, and no identity is given")


def require_recipients(recipients: Iterable[str]) -> None:
    """Raises SealUnusable where files cannot be sealed for the recipients."""
    for one in recipients:
        read_recipient(one)
        _cipher(bytes(32))


class AgeWriter:
    """Seals bytes that come in order, and passes them on.

    Args:
        write: Takes the bytes of the sealed file, in order.
        recipients: Public keys, `age1...`: at least one, at most 40.

    Attributes:
        size: Of the sealed file so far, in bytes.

    Raises:
        SealUnusable: The library is missing, a recipient is none, or there are too many.
    """

    def __init__(self, write: Callable[[Buffer], object], recipients: Sequence[str]) -> None:
        self._pass_on = write
        self.size = 0
        key, nonce = os.urandom(_KEY_BYTES), os.urandom(_NONCE_BYTES)
        self._cipher = _cipher(_derive(key, nonce, b"payload"))
        self._number = 0
        self._held = bytearray()
        self._put(_header(key, recipients) + nonce)

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        if self._held:
            missing = CHUNK - len(self._held)
            self._held += view[:missing]
            view = view[missing:]
            if not view:
                return
            self._seal(self._held, last=False)
            self._held.clear()
        # A full chunk may be the last one: it waits for more, or for the end.
        while len(view) > CHUNK:
            self._seal(view[:CHUNK], last=False)
            view = view[CHUNK:]
        self._held += view

    def close(self) -> None:
        """Seals the last chunk."""
        self._seal(self._held, last=True)

    def _seal(self, chunk: Buffer, *, last: bool) -> None:
        self._put(self._cipher.encrypt(_nonce(self._number, last), chunk, None))
        self._number += 1

    def _put(self, data: bytes) -> None:
        self._pass_on(data)
        self.size += len(data)


class AgeContent:
    """The content of a sealed file.

    Args:
        head: The first HEAD bytes of the file.
        sealed: The size of the file in bytes.
        identities: Secret keys, `AGE-SECRET-KEY-1...`.

    Raises:
        PackError: The file has no header of ours, or the header was altered.
        SealedForOthers: None of the identities opens the file.
        SealUnusable: The library is missing, or an identity is none.
    """

    def __init__(self, head: bytes, sealed: int, identities: Iterable[str]) -> None:
        self.size = plain_size(sealed)
        self._sealed = sealed
        key = _open_header(head[: HEAD - _NONCE_BYTES], identities)
        if len(head) < HEAD or sealed != sealed_size(self.size):
            raise PackError("its end is missing")
        self._cipher = _cipher(_derive(key, head[HEAD - _NONCE_BYTES : HEAD], b"payload"))

    def place(self, start: int, length: int) -> tuple[int, int]:
        """Returns where bytes of the content lie in the sealed file: the first byte of a chunk, and
        the number of bytes. Beyond the end of the content that is its last chunk.
        """
        last = max(0, self.size - 1) // CHUNK
        first, behind = (min(at // CHUNK, last) for at in (start, start + max(1, length) - 1))
        low = HEAD + first * SEALED_CHUNK
        return low, min(HEAD + (behind + 1) * SEALED_CHUNK, self._sealed) - low

    def open(self, start: int, length: int, sealed: Buffer) -> bytes:
        """Returns bytes of the content, fewer at its end. Raises PackError.

        Args:
            start: The first byte of the content.
            length: The number of bytes.
            sealed: The bytes of the sealed file at `place(start, length)`.
        """
        low, wanted = self.place(start, length)
        if len(sealed) != wanted:
            raise PackError(f"{len(sealed)} bytes instead of {wanted} at {low}: it is cut off")
        first, view = (low - HEAD) // SEALED_CHUNK, memoryview(sealed)
        chunks = [
            self._open(view[at : at + SEALED_CHUNK], number)
            for number, at in enumerate(range(0, wanted, SEALED_CHUNK), first)
        ]
        # What was not asked for is cut off before the chunks are copied into one.
        chunks[0] = chunks[0][start - first * CHUNK :]
        if (more := sum(map(len, chunks)) - length) > 0:
            chunks[-1] = chunks[-1][:-more]
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _open(self, sealed: Buffer, number: int) -> bytes:
        from cryptography.exceptions import InvalidTag

        last = number == max(0, self.size - 1) // CHUNK
        try:
            return self._cipher.decrypt(_nonce(number, last), sealed, None)
        except InvalidTag:
            raise PackError("what is sealed in it was altered") from None


# --- the header -----------------------------------------------------------------------------------


def _header(key: bytes, recipients: Sequence[str]) -> bytes:
    """Returns the header of a file with this key: HEAD bytes together with the nonce behind it."""
    begin = _VERSION + b"".join(_stanza(key, read_recipient(one)) for one in recipients)
    checksum = sha256(begin).hexdigest().encode()
    room = HEAD - len(begin + _FILLING % (checksum, b"")) - len(b"--- \n") - 43 - _NONCE_BYTES
    if room < 1:
        raise SealUnusable(f"{len(recipients)} recipients are too many: 40 have room")
    signed = begin + _FILLING % (checksum, b"x" * room) + b"---"
    return signed + b" " + _encode(_mac(key, signed)) + b"\n"


def _stanza(key: bytes, recipient: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    ephemeral = X25519PrivateKey.generate()
    share = ephemeral.public_key().public_bytes_raw()
    try:
        secret = ephemeral.exchange(X25519PublicKey.from_public_bytes(recipient))
    except ValueError:
        raise SealUnusable("a public key of age is invalid") from None
    wrap = _cipher(_derive(secret, share + recipient, _X25519))
    body = wrap.encrypt(bytes(12), key, None)
    return b"-> X25519 " + _encode(share) + b"\n" + _encode(body) + b"\n"


def _open_header(header: bytes, identities: Iterable[str]) -> bytes:
    """Returns the key of the file. header: all up to the nonce."""
    filled = _FILLED.search(header)
    begin = header[: filled.start() + 1] if filled else b""
    if not filled or filled[1] != sha256(begin).hexdigest().encode():
        raise PackError("it is no sealed file of this program, or its header was altered")
    known = [read_identity(one) for one in identities]
    _cipher(bytes(32))  # It says what to install.
    signed, mac = header[: filled.end()], header[filled.end() :]
    for share, body in _stanzas(begin):
        for identity in known:
            key = _unwrap(share, body, identity)
            if key is None:
                continue
            if mac != b" " + _encode(_mac(key, signed)) + b"\n":
                raise PackError("its header was altered")
            return key
    raise SealedForOthers("it is sealed for other identities than those given")


def _stanzas(header: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the share and the body of each stanza for an X25519 recipient."""
    lines = header.split(b"\n")
    for line, following in pairwise(lines):
        words = line.split(b" ")
        if words[:2] == [b"->", b"X25519"] and len(words) == 3:
            share, body = _decode(words[2]), _decode(following)
            if len(share) == 32 and len(body) == _KEY_BYTES + 16:
                yield share, body


def _unwrap(share: bytes, body: bytes, identity: bytes) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    secret = X25519PrivateKey.from_private_bytes(identity)
    recipient = secret.public_key().public_bytes_raw()
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(share))
        return _cipher(_derive(shared, share + recipient, _X25519)).decrypt(bytes(12), body, None)
    except (InvalidTag, ValueError):
        return None


def _mac(key: bytes, signed: bytes) -> bytes:
    return hmac.digest(_derive(key, b"", b"header"), signed, "sha256")


def _derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Returns 32 bytes by HKDF-SHA-256."""
    extracted = hmac.digest(salt or bytes(32), key, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")


def _encode(data: bytes) -> bytes:
    return b64encode(data).rstrip(b"=")


def _decode(text: bytes) -> bytes:
    """Returns what a text in base64 without padding encodes; nothing for any other text."""
    try:
        return b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except ValueError:
        return b""


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _cipher(key: bytes) -> ChaCha20Poly1305:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError:
        raise SealUnusable(
            "sealing needs the extra `seal`: pip install 'ntt-backup[seal]'"
        ) from None
    return ChaCha20Poly1305(key)


def _bech32(text: str, prefix: str) -> bytes:
    """Returns the 32 bytes of a key in Bech32 (BIP 173). Raises ValueError."""
    human, one, data = text.rpartition("1")
    if not one or human != prefix or text != text.lower():
        raise ValueError(f"it does not begin with {prefix}1")
    numbers = [_BECH32.find(char) for char in data]
    expanded = [*(ord(char) >> 5 for char in human), 0, *(ord(char) & 31 for char in human)]
    checksum = 1
    for number in [*expanded, *numbers]:
        top, checksum = checksum >> 25, (checksum & 0x1FFFFFF) << 5 ^ number
        for bit, generator in enumerate(_GENERATORS):
            checksum ^= generator if top >> bit & 1 else 0
    value = 0
    for number in numbers[:-6]:
        value = value << 5 | number
    bits = 5 * len(numbers[:-6])
    if min(numbers, default=-1) < 0 or checksum != 1 or bits != 260 or value & 15:
        raise ValueError("a character of it is wrong, or missing")
    return (value >> 4).to_bytes(32, "big")
