"""A reader of packs made after docs/pack-format.md: for the model, nothing of the program reads."""

from __future__ import annotations

import io
import tarfile

import pyrage
import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

_ENTRY_BYTES = 48
_PIECE_BYTES = 65536
_TAG_BYTES = 16


class Damaged(Exception):
    """It is no pack as a whole."""


def opened(pack: bytes, secret: str) -> bytes:
    """The pack within a sealed one, with zeros for its damaged pieces; others are as they were."""
    trailer = pack[-1536:-1024]
    if trailer[:10] != b"NTTPACK\n\0\2":
        return pack
    size, of_keys, store_id = _number(trailer[16:24]), _number(trailer[12:16]), trailer[96:112]
    pieces = max(1, -(-size // _PIECE_BYTES))
    end = size + _TAG_BYTES * pieces
    keys = pack[end : end + of_keys]
    if (
        blake3(trailer[:480]).digest() != trailer[480:]
        or blake3(keys).digest() != trailer[48:80]
        or end + of_keys + 1536 != len(pack)
        or any(pack[-1024:])
    ):
        raise Damaged("its seal")
    key = pyrage.decrypt(keys, [pyrage.x25519.Identity.from_str(secret)])
    contents, naming = (
        blake3(key, derive_key_context=f"ntt-pack 2 {what}").digest() for what in ("contents", "id")
    )
    if blake3(store_id, key=naming).digest(length=16) != trailer[80:96]:
        raise Damaged("its name")
    cipher, within = ChaCha20Poly1305(contents), bytearray()
    for number in range(pieces):
        sealed = pack[len(within) + _TAG_BYTES * number : end][: _PIECE_BYTES + _TAG_BYTES]
        nonce = number.to_bytes(11, "big") + bytes([number == pieces - 1])
        try:
            within += cipher.decrypt(nonce, sealed, None)
        except InvalidTag:
            within += bytes(len(sealed) - _TAG_BYTES)
    return bytes(within)


def read_pack(pack: bytes) -> tuple[dict[str, bytes], int]:
    """Blobid to content of what is right in a pack, and how many entries its table has."""
    trailer = pack[-1536:-1024]
    if trailer[:10] != b"NTTPACK\n\0\1" or blake3(trailer[:480]).digest() != trailer[480:]:
        raise Damaged("its trailer")
    begin, length = _number(trailer[16:24]), _number(trailer[24:32])
    table = pack[begin : begin + length]
    if blake3(table).digest() != trailer[48:80] or length != _ENTRY_BYTES * _number(trailer[12:16]):
        raise Damaged("its table")
    at = _number(trailer[32:40])
    dictionary = zstandard.ZstdCompressionDict(pack[at : at + _number(trailer[40:48])])
    found = {}
    for place in range(0, length, _ENTRY_BYTES):
        entry = table[place : place + _ENTRY_BYTES]
        offset, raw, codec = _number(entry[32:38]), _number(entry[43:47]), entry[47]
        content = pack[offset : offset + _number(entry[38:43])]
        if codec:
            known = dictionary if codec == 2 else None
            try:
                opened = zstandard.ZstdDecompressor(dict_data=known)
                content = opened.decompress(content, max_output_size=raw)
            except zstandard.ZstdError:
                continue
        if blake3(content).digest() == entry[:32]:
            found[entry[:32].hex()] = content
    return found, length // _ENTRY_BYTES


def members(pack: bytes) -> dict[str, bytes]:
    """Blobid to content of the blobs that `tar xf` would extract."""
    with tarfile.open(fileobj=io.BytesIO(pack)) as archive:
        return {
            one.name.rpartition("/")[2]: pack[one.offset_data : one.offset_data + one.size]
            for one in archive
            if one.name.startswith("by-hash/")
        }


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")
