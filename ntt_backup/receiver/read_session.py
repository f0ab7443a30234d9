"""A session that reads: one question at a time, answered in frames as the client takes them.

An answer may be long (the names of 42 million blobs, a blob of gigabytes), so each is a generator
of frames, and the next frame is made when the client has taken most of the last. What a client may
ask is listed by `--allow`. Nothing that this module imports can write below the root.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from ntt_backup.receiver import send_blobs
from ntt_backup.receiver.b3sum import HOW_TO_GET
from ntt_backup.receiver.hash_blobs import HashJob
from ntt_backup.receiver.list_blobs import Listing
from ntt_backup.receiver.open_blob import BlobOpener
from ntt_backup.receiver.workspace import Refusal, Workspace, gone
from ntt_backup.wire import framing, read_messages
from ntt_backup.wire.write_messages import BLAKE3

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


class ReadSession:
    """Answers LIST, VERIFY, GET, SUMS and BLOCKS."""

    between_batches = True

    def __init__(self, workspace: Workspace, terms: Terms, connection: Connection) -> None:
        self._workspace = workspace
        self._terms = terms
        self._connection = connection
        self._opener = BlobOpener(workspace)
        self._frames: Generator[bytes, None, None] | None = None

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        return {
            framing.LIST: self._list,
            framing.VERIFY: self._verify,
            framing.GET: self._get,
            framing.SUMS: self._sums,
            framing.BLOCKS: self._blocks,
        }

    @property
    def busy(self) -> bool:
        """Whether the last question is not answered yet: then no other one is taken."""
        return self._frames is not None

    @property
    def working(self) -> bool:
        """Whether the client waits for this end, and not the other way round."""
        return self.busy and not self._connection.unread

    def advance(self) -> bool:
        """Says the next frame; returns False where that must wait for a thread or the client."""
        if self._connection.deaf:
            self._connection.ended = True
        if self._frames is None or self._connection.choked:
            return False
        for frame in self._frames:
            if frame:
                self._connection.say(frame)
            return bool(frame)
        self._frames = None
        return True

    def interrupt(self) -> None:
        """Leaves the rest of an answer unsaid."""
        if self._frames is not None:
            self._frames.close()
        self._frames = None

    def close(self) -> None:
        self.interrupt()
        self._opener.close()

    def _list(self, payload: memoryview) -> None:
        self._require("list")
        asked = read_messages.read_listing(payload)
        self._frames = Listing(self._workspace, asked, self._connection.show_life).frames()

    def _verify(self, payload: memoryview) -> None:
        self._require("verify")
        new_hasher, b3sum = self._terms.hashes.get(BLAKE3), self._terms.b3sum
        if new_hasher is None and b3sum is None:
            raise Refusal("refused", f"there is no BLAKE3 on this machine: {HOW_TO_GET}")
        digests = read_messages.read_digests(payload)
        job = HashJob(self._workspace, digests, new_hasher, b3sum, self._connection.wake)
        self._frames = job.frames()

    def _get(self, payload: memoryview) -> None:
        self._require("get")
        offset, digests = read_messages.read_getting(payload)
        self._frames = send_blobs.contents(self._opener, digests, offset)

    def _sums(self, payload: memoryview) -> None:
        self._require("get")
        self._frames = send_blobs.sums(self._opener, bytes(payload), self._connection.show_life)

    def _blocks(self, payload: memoryview) -> None:
        self._require("get")
        self._frames = send_blobs.blocks(self._opener, *read_messages.read_getting_blocks(payload))

    def _require(self, word: str) -> None:
        if word not in self._terms.allow:
            raise Refusal("refused", f"this receiver's --allow does not list {word}")
        if not self._workspace.placed:
            raise gone()
