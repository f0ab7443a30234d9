"""Small blobs on their way into a pack: gathered, and compressed where a sample says it pays.

The first blobs of a pack are its sample: some of them train a dictionary, the others tell what is
saved with it, and without. A dictionary is part of its pack, so it must save more than its own
length. The answer holds for the whole pack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import zstandard

from ntt_backup.pack.format import DENSE_MEMBER_BYTES, RAW, ZSTD, ZSTD_DICTIONARY

_LEVEL: Final = 3
# Of the bytes that train, and of those that tell.
_TRAINING: Final = 1 << 20
_PROBE: Final = 1 << 18
# What is trained on less than this repeats it, and says nothing about the rest.
_LEAST_TRAINING: Final = 1 << 16
_DICTIONARY: Final = 1 << 15
# The parameters of zstd's trainer; to look for better ones takes a hundred times as long.
_SEGMENT: Final = 1024
_D: Final = 8
# A saving that is worth decompressing for: a part of the whole.
_WORTH: Final = 0.03

Compress = Callable[[bytes], bytes]


class DenseBlob(NamedTuple):
    """A blob in a dense member. offset counts from the member's first byte."""

    digest: bytes
    offset: int
    stored: int
    raw: int
    codec: int


class Dense:
    """Gathers small blobs until `full`, in the order in which they are added.

    compress: whether blobs may be compressed at all. dictionary: what the last of the blobs that
    were taken need; b"" as long as none is needed.
    """

    def __init__(self, *, compress: bool) -> None:
        self.dictionary = b""
        self._codec = RAW
        self._compress: Compress | None = None
        self._undecided = compress
        self._gathered: list[tuple[bytes, bytes]] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._gathered)

    @property
    def full(self) -> bool:
        """Whether enough is gathered for a member."""
        return self._bytes >= DENSE_MEMBER_BYTES

    def add(self, digest: bytes, content: bytes) -> None:
        self._gathered.append((digest, content))
        self._bytes += len(content)

    def take(self) -> tuple[bytes, list[DenseBlob]]:
        """Returns a member's content and what is in it, and forgets both."""
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        if self._undecided:
            self._undecided = False
            self._decide([content for _, content in gathered])
        parts: list[bytes] = []
        blobs: list[DenseBlob] = []
        at = 0
        for digest, content in gathered:
            part, codec = content, RAW
            if self._compress is not None:
                packed = self._compress(content)
                if len(packed) < len(content):
                    part, codec = packed, self._codec
            parts.append(part)
            blobs.append(DenseBlob(digest, at, len(part), len(content), codec))
            at += len(part)
        return b"".join(parts), blobs

    def _decide(self, contents: list[bytes]) -> None:
        """Sets the codec for the whole pack."""
        total = sum(map(len, contents))
        training, probe = _sample(contents, total)
        if not probe:
            return
        plain = _compressor(None)
        least = _packed(probe, None) * (1 - _WORTH)
        if (packed := _packed(probe, plain)) < least:
            self._codec, self._compress, least = ZSTD, plain, packed
        if sum(map(len, training)) < _LEAST_TRAINING:
            return
        try:
            words = zstandard.train_dictionary(
                _DICTIONARY, [*training], k=_SEGMENT, d=_D, level=_LEVEL
            )
        except zstandard.ZstdError:  # Too few blobs, or all of them alike.
            return
        words.precompute_compress(level=_LEVEL)
        trained = _compressor(words)
        saved = least - _packed(probe, trained)
        if saved * total > len(words) * sum(map(len, probe)):
            self._codec, self._compress = ZSTD_DICTIONARY, trained
            self.dictionary = words.as_bytes()


def _sample(contents: list[bytes], total: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the blobs that train, at most three quarters of all, and some of those after them."""
    wanted = min(_TRAINING, total * 3 // 4)
    number, size = 0, 0
    while size < wanted:
        size += len(contents[number])
        number += 1
    training = contents[:number]
    probe: list[bytes] = []
    size = 0
    for content in contents[number:]:
        probe.append(content)
        size += len(content)
        if size >= _PROBE:
            break
    return training, probe


def _compressor(words: zstandard.ZstdCompressionDict | None) -> Compress:
    # What a frame would say of its content stands in the table, and the name is its checksum.
    return zstandard.ZstdCompressor(
        level=_LEVEL,
        dict_data=words,
        write_content_size=False,
        write_checksum=False,
        write_dict_id=False,
    ).compress


def _packed(probe: list[bytes], compress: Compress | None) -> int:
    """Returns the bytes that these blobs would take."""
    if compress is None:
        return sum(map(len, probe))
    return sum(min(len(one), len(compress(one))) for one in probe)
