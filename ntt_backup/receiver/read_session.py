"""A session that reads answers questions about blobs.

What a client may ask is listed by `--allow`. Nothing that this module imports can write below the
root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ntt_backup.receiver import send_blobs
from ntt_backup.receiver.hash_blobs import HashJob
from ntt_backup.receiver.hashing import HOW_TO_GET
from ntt_backup.receiver.list_blobs import Listing
from ntt_backup.receiver.open_blob import BlobOpener
from ntt_backup.receiver.question_session import QuestionSession
from ntt_backup.receiver.workspace import Refusal, Workspace, gone
from ntt_backup.wire import messages
from ntt_backup.wire.messages import BLAKE3

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.terms import Terms


class ReadSession(QuestionSession):
    """Answers LIST, VERIFY and GET."""

    def __init__(self, workspace: Workspace, terms: Terms, connection: Connection) -> None:
        super().__init__(terms, connection)
        self._workspace = workspace
        self._opener = BlobOpener(workspace)

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        return {
            messages.LIST: self._list,
            messages.VERIFY: self._verify,
            messages.GET: self._get,
        }

    def close(self) -> None:
        super().close()
        self._opener.close()

    def _list(self, payload: memoryview) -> None:
        self.require("list")
        asked = messages.LIST.read(payload)
        self.frames = Listing(self._workspace, asked, self.connection.show_life).frames()

    def _verify(self, payload: memoryview) -> None:
        self.require("verify")
        new_hasher, b3sum = self.terms.hashes.get(BLAKE3), self.terms.b3sum
        if new_hasher is None and b3sum is None:
            raise Refusal("refused", f"there is no BLAKE3 on this machine: {HOW_TO_GET}")
        digests = messages.VERIFY.read(payload)
        job = HashJob(self._workspace, digests, new_hasher, b3sum, self.connection.wake)
        self.frames = job.frames()

    def _get(self, payload: memoryview) -> None:
        self.require("get")
        offset, digests = messages.GET.read(payload)
        self.frames = send_blobs.contents(self._opener, digests, offset)

    def require(self, word: str) -> None:
        """Raises Refusal where `--allow` does not list the word, or `by-hash` is missing."""
        super().require(word)
        if not self._workspace.placed:
            raise gone()
