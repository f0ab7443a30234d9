"""A reader of packs made after docs/pack-format.md: for the model, nothing of the program reads."""

from __future__ import annotations

import base64
import io
import tarfile
from itertools import pairwise

import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_ENTRY_BYTES = 48
_CHUNK_BYTES = 65536
_TAG_BYTES = 16
_VERSION = b"age-encryption.org/v1"


class Damaged(Exception):
    """It is no pack as a whole."""


def opened(pack: bytes, secret: str) -> bytes:
    """The pack within a sealed one, with zeros for its damaged chunks; others are as they were."""
    if not pack.startswith(_VERSION):
        return pack
    header, dashes, rest = pack.partition(b"\n---")
    mac, newline, body = rest.partition(b"\n")
    if not dashes or not newline or len(body) < 16 + _TAG_BYTES:
        raise Damaged("its header")
    key = _file_key(header, secret)
    proof = HMAC(_derived(key, b"", b"header"), SHA256())
    proof.update(header + dashes)
    if base64.b64encode(proof.finalize()).rstrip(b"=") != mac[1:]:
        raise Damaged("its header")
    cipher = ChaCha20Poly1305(_derived(key, body[:16], b"payload"))
    within, sealed = bytearray(), body[16:]
    chunks = range(0, len(sealed), _CHUNK_BYTES + _TAG_BYTES)
    for number, at in enumerate(chunks):
        chunk = sealed[at : at + _CHUNK_BYTES + _TAG_BYTES]
        nonce = number.to_bytes(11, "big") + bytes([number == len(chunks) - 1])
        try:
            within += cipher.decrypt(nonce, chunk, None)
        except InvalidTag:
            within += bytes(max(0, len(chunk) - _TAG_BYTES))
    return bytes(within)


def _file_key(header: bytes, secret: str) -> bytes:
    """The key of a file of age."""
    digits = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
    value = 0
    for char in secret.lower().rpartition("1")[2][:-6]:
        value = value << 5 | digits.index(char)
    ours = X25519PrivateKey.from_private_bytes((value >> 4).to_bytes(32, "big"))
    lines = header.split(b"\n")
    for line, following in pairwise(lines):
        if line.startswith(b"-> X25519 "):
            share = base64.b64decode(line.split()[2] + b"=")
            salt = share + ours.public_key().public_bytes_raw()
            shared = ours.exchange(X25519PublicKey.from_public_bytes(share))
            wrap = ChaCha20Poly1305(_derived(shared, salt, _VERSION + b"/X25519"))
            try:
                return wrap.decrypt(bytes(12), base64.b64decode(following + b"="), None)
            except InvalidTag:
                continue
    raise Damaged("its key")


def _derived(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, info).derive(key)


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
