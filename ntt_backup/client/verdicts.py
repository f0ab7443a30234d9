"""The remote's verdicts on its blobs become failures, and words."""

from __future__ import annotations

from typing import Final

from ntt_backup.model import Failure, Reason
from ntt_backup.wire import read_messages

_REASONS: Final = {
    read_messages.MISSING: Reason.REMOTE_MISSING,
    read_messages.WRONG: Reason.REMOTE_CORRUPT,
    read_messages.UNREADABLE: Reason.REMOTE_UNREADABLE,
}


def remote_failure(blobid: str, verdict: int, text: str) -> Failure:
    """Returns the failure that a verdict about the remote's copy of a blob means."""
    return Failure(blobid, _REASONS[verdict], text)


def hash_mismatch(size: int, found: bytes, where: str = "on the remote") -> str:
    """Returns the words for content that does not hash to its name. where: it lies."""
    return f"{size} bytes {where} hash to {found.hex()}"
