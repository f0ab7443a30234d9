"""The ways to send that are compared: every strategy of the registry, and what they are up against.

A strategy that registers is measured from then on. The others are plain tars over ssh with one
thing changed each, so that a difference has one cause.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ntt_backup.upload.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class Way:
    """How a worker sends its batches: in words, see docs/benchmarks.md. strategy: of the registry,
    None for a plain tar.

    codec: of `plain.CODECS`, or for a strategy of run.codec, where "" leaves that as it is set.
    compressed: by ssh. reconnect: a connection a batch. stored: the archive lies on disk before it
    is sent. tools: what both sides need besides tar.
    """

    name: str
    strategy: str | None = None
    codec: str = ""
    compressed: bool = False
    reconnect: bool = False
    stored: bool = False
    tools: tuple[str, ...] = ()


PLAIN: Final = Way("tar-pipe")
VARIATIONS: Final = (
    PLAIN,
    Way("tar-gz", codec="gz", tools=("gzip",)),
    Way("tar-zst-1", codec="zst-1", tools=("zstd",)),
    Way("tar-zst-3", codec="zst-3", tools=("zstd",)),
    Way("stream-none", strategy="stream", codec="none"),
    Way("stream-zst", strategy="stream", codec="zstd-1"),
    Way("tar-ssh-C", compressed=True),
    Way("tar-reconnect", reconnect=True),
    Way("tar-stored", stored=True),
)


def registered() -> list[Way]:
    """A way for each strategy that there is."""
    return [Way(name, strategy=name) for name in STRATEGIES]


def choose(names: Sequence[str], absent: Iterable[str]) -> tuple[list[Way], dict[str, str]]:
    """The ways of these names, all for none; and why some cannot be measured.

    absent: tools that a side lacks. Raises ValueError for a name that there is not.
    """
    every = [*registered(), *VARIATIONS]
    if unknown := sorted(set(names) - {way.name for way in every}):
        known = ", ".join(way.name for way in every)
        raise ValueError(f"{', '.join(unknown)}: none of {known}")
    wanted = [way for way in every if not names or way.name in names]
    lacking = {way.name: sorted(set(way.tools) & set(absent)) for way in wanted}
    skipped = {
        name: f"no {', '.join(tools)} here or there" for name, tools in lacking.items() if tools
    }
    return [way for way in wanted if way.name not in skipped], skipped
