"""A session that only reads: one question at a time, its answer in frames as the link takes them.

An answer may be long (the names of 42 million blobs, a blob of gigabytes), so each is a generator
of frames, and the receiver's loop takes the next one when the client has taken most of the last.
What a client may ask is what `--allow` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ntt_backup.receiver import send_blocks
from ntt_backup.receiver.b3sum import HOW_TO_GET, B3sum
from ntt_backup.receiver.hash_blobs import Verifying
from ntt_backup.receiver.list_blobs import Listing
from ntt_backup.receiver.open_blob import Stock
from ntt_backup.receiver.send_blobs import Giving
from ntt_backup.receiver.workspace import Ground, Refusal, gone
from ntt_backup.wire import framing, read_messages
from ntt_backup.wire.write_messages import BLAKE3

if TYPE_CHECKING:
    from ntt_backup.receiver.hashing import NewHasher


class Answering:
    """Takes questions, and has the frames of one answer at a time.

    allow: the words of `--allow`. wake is a descriptor that gets a byte when there is more to say,
    alive is called while one frame takes long.
    """

    def __init__(
        self,
        ground: Ground,
        allow: frozenset[str],
        hashes: dict[int, NewHasher],
        b3sum: B3sum | None,
        wake: int,
        alive: Callable[[], None],
    ) -> None:
        self._ground = ground
        self._allow = allow
        self._new_hasher = hashes.get(BLAKE3)
        self._b3sum = b3sum
        self._wake = wake
        self._alive = alive
        self._stock = Stock(ground)
        self._frames: Generator[bytes, None, None] | None = None

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        """What may be asked."""
        return {
            framing.LIST: self._list,
            framing.VERIFY: self._verify,
            framing.GET: self._get,
            framing.SUMS: self._sums,
            framing.BLOCKS: self._blocks,
        }

    @property
    def busy(self) -> bool:
        """Whether there is more to say about what was asked last."""
        return self._frames is not None

    def next(self) -> bytes | None:
        """The next frame; None where a thread must be waited for, or all is said."""
        if self._frames is not None:
            for frame in self._frames:
                return frame or None
            self._frames = None
        return None

    def close(self) -> None:
        """Nobody wants the rest."""
        if self._frames is not None:
            self._frames.close()
        self._frames = None
        self._stock.close()

    def _list(self, payload: memoryview) -> None:
        self._require("list")
        asked = read_messages.read_listing(payload)
        self._frames = Listing(self._ground, asked, self._alive).frames()

    def _verify(self, payload: memoryview) -> None:
        self._require("verify")
        if self._new_hasher is None and self._b3sum is None:
            raise Refusal("refused", f"there is no BLAKE3 on this machine: {HOW_TO_GET}")
        digests = read_messages.read_digests(payload)
        how = self._new_hasher, self._b3sum
        self._frames = Verifying(self._ground, digests, *how, self._wake).frames()

    def _get(self, payload: memoryview) -> None:
        self._require("get")
        offset, digests = read_messages.read_getting(payload)
        self._frames = Giving(self._stock, digests, offset).frames()

    def _sums(self, payload: memoryview) -> None:
        self._require("get")
        self._frames = send_blocks.sums(self._stock, bytes(payload), self._alive)

    def _blocks(self, payload: memoryview) -> None:
        self._require("get")
        self._frames = send_blocks.blocks(self._stock, *read_messages.read_getting_blocks(payload))

    def _require(self, word: str) -> None:
        if word not in self._allow:
            raise Refusal("refused", f"this receiver's --allow does not list {word}")
        if not self._ground.placed:
            raise gone()
