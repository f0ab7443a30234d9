"""Long arrays of texts go to the server as parameters in the form that costs it least.

The server parses the text of an array byte by byte; in binary form it only copies the elements. The
driver's own dumper of lists in that form looks at each element in Python, which costs as much.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Final

from psycopg import adapters
from psycopg.adapt import Dumper
from psycopg.pq import Format

_HEAD: Final = struct.Struct("!iiIii")  # dimensions, nulls or not, type, length, first index
_LENGTH: Final = struct.Struct("!i")
_TEXT: Final = adapters.types["text"]


class TextArray(list[str]):
    """Holds the texts of one array that is a parameter of a statement."""


class _TextArrayDumper(Dumper):
    """Writes a `TextArray` in the binary form, and in the connection's encoding."""

    format = Format.BINARY
    oid = _TEXT.array_oid

    def dump(self, obj: TextArray) -> bytes:
        encoding = self.connection.info.encoding if self.connection else "utf-8"
        texts = [one.encode(encoding) for one in obj]
        lengths = map(_LENGTH.pack, map(len, texts))
        head = _HEAD.pack(1, 0, _TEXT.oid, len(texts), 1)
        return head + b"".join(chain.from_iterable(zip(lengths, texts, strict=True)))


adapters.register_dumper(TextArray, _TextArrayDumper)
