"""The ways to send that are compared: every strategy, and plain tars over ssh.

A strategy that is registered is measured from then on. The plain tars differ from each other in one
thing each, so that a difference has one cause. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ntt_backup.upload.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class Way:
    """How a worker sends its batches. strategy: None for a plain tar.

    codec: for a strategy, in place of run.codec; "" leaves that as it is set. compressed: by ssh.
    reconnect: a connection for each batch.
    """

    name: str
    strategy: str | None = None
    codec: str = ""
    compressed: bool = False
    reconnect: bool = False


PLAIN: Final = Way("tar-pipe")
UNCOMPRESSED: Final = Way("stream-none", strategy="stream", codec="none")
COMPRESSED: Final = Way("stream-zst", strategy="stream", codec="zstd-1")
WAYS: Final = (
    *(Way(name, strategy=name) for name in STRATEGIES),
    UNCOMPRESSED,
    COMPRESSED,
    PLAIN,
    Way("tar-ssh-C", compressed=True),
    Way("tar-reconnect", reconnect=True),
)


def choose(names: Sequence[str]) -> list[Way]:
    """Returns the ways of these names, all for none. Raises ValueError for an unknown name."""
    if unknown := sorted(set(names) - {way.name for way in WAYS}):
        known = ", ".join(way.name for way in WAYS)
        raise ValueError(f"{', '.join(unknown)}: none of {known}")
    return [way for way in WAYS if not names or way.name in names]
