"""A pack has headers of an ustar archive: they are written, and read where it is damaged."""

from __future__ import annotations

from typing import Final, NamedTuple

BLOCK: Final = 512

_NAME_BYTES: Final = 100
_SIZE: Final = slice(124, 136)
_CHECKSUM: Final = slice(148, 156)
_MAGIC: Final = slice(257, 263)
# A size of up to 11 octal digits is written as such; larger ones by GNU's base 256.
_OCTAL_BELOW: Final = 1 << 33
_BASE_256: Final = 0x80
# The mode, both ids, and the time; the checksum is reckoned as if it were spaces.
_BEFORE_SIZE: Final = b"0000444\0" + b"0000000\0" * 2
_AFTER_SIZE: Final = b"00000000000\0" + b" " * 8 + b"0"
_REST: Final = (b"\0" * _NAME_BYTES + b"ustar\x0000" + b"\0" * 64 + b"0000000\0" * 2).ljust(
    355, b"\0"
)


class Member(NamedTuple):
    """A member of an archive, as its header says. size is in bytes."""

    name: str
    size: int


def write_header(name: str, size: int) -> bytes:
    """Returns the header of a regular file that anyone may read, of no owner and no time. name has
    at most 100 letters of ASCII.
    """
    written = b"%011o\0" % size if size < _OCTAL_BELOW else b"\x80" + size.to_bytes(11, "big")
    path = name.encode("ascii").ljust(_NAME_BYTES, b"\0")
    header = bytearray(path + _BEFORE_SIZE + written + _AFTER_SIZE + _REST)
    header[_CHECKSUM] = b"%06o\0 " % sum(header)
    return bytes(header)


def read_header(block: bytes) -> Member | None:
    """Returns what a header says; None for a block that is none."""
    if block[_MAGIC] != b"ustar\0":
        return None
    summed = bytearray(block)
    summed[_CHECKSUM] = b" " * 8
    try:
        if _octal(block[_CHECKSUM]) != sum(summed):
            return None
        written = block[_SIZE]
        base_256 = written[0] == _BASE_256
        size = int.from_bytes(written[1:], "big") if base_256 else _octal(written)
        return Member(block[:_NAME_BYTES].rstrip(b"\0").decode("ascii"), size)
    except ValueError:
        return None


def _octal(field: bytes) -> int:
    text = field.strip(b"\0 ")
    if not text.isdigit():
        raise ValueError(text)
    return int(text, 8)


def padding(size: int) -> int:
    """Returns how many zero bytes follow a member of that size."""
    return -size % BLOCK
