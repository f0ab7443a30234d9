"""The compression of `stream`, which follows the data and the link.

Most blobs do not compress (pictures, archives, media); some do, by a factor of three. So with
`run.codec = auto` a sample of each pack is tried, and where samples do not shrink they are taken
ever more rarely: incompressible data costs almost nothing, and a change is noticed within a few
MiB.

The level follows the bottleneck. While the sender waits for the link and this machine has idle CPU,
a higher level sends more; where compressing takes the time, or no CPU is idle, as on a link that is
as fast as the machine, a lower one does. Each pack is compressed by itself: one context for a whole
session made text and sources 2 to 8 % smaller at two thirds of the speed, which the next level does
as well.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import zstandard

from ntt_backup.errors import Unsupported
from ntt_backup.wire.write_messages import RAW, ZLIB, ZSTD

SAMPLE_BYTES: Final = 32 * 1024
LONGEST_PAUSE: Final = 16
# What a sample must shrink to: less gain is not worth the time, also on a fast link.
_PAYS: Final = {ZSTD: 0.85, ZLIB: 0.6}

# Of zstd. Above level 12 a core sends less than 10 MB/s.
_LEVELS: Final = (1, 3, 6, 9, 12)
_FIRST_STEP: Final = 2

Parts = Sequence[memoryview]
Compress = Callable[[Parts], bytes]


class Load(NamedTuple):
    """The sum of all CPUs' seconds since the machine's start: the idle ones, and all."""

    idle: float
    all: float


def cpu_load() -> Load:
    """Returns the load from /proc/stat; without that file, CPUs that are never idle."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)[1:9]
    except OSError:
        return Load(0.0, time.monotonic())
    user, nice, system, idle, waiting, *rest = map(int, words)
    return Load(idle + waiting, user + nice + system + idle + waiting + sum(rest))


class Effort:
    """Chooses a step of compression, 0 for none: higher while the link is the bottleneck, lower
    while the CPU is.

    It goes one step at a time, after `PERIOD` seconds and `FRAMES` frames at least. A step that was
    too high is not tried again for a while, which doubles each time.
    """

    PERIOD: Final = 1.0
    FRAMES: Final = 4
    # Shares of the time that were spent waiting for the link, or compressing.
    _MUCH: Final = 0.3
    _LITTLE: Final = 0.1
    # Shares of the CPU that are idle.
    _SPARE: Final = 0.25
    _USED_UP: Final = 0.05
    _FIRST_PAUSE: Final = 16.0

    def __init__(
        self,
        steps: int,
        first: int,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], Load] = cpu_load,
    ) -> None:
        self.step = first
        self._steps = steps
        self._clock = clock
        self._load = load
        self._too_much: dict[int, tuple[float, float]] = {}
        self._begin()

    def _begin(self) -> None:
        self._since = self._clock()
        self._before = self._load()
        self._waited = self._worked = 0.0
        self._frames = 0

    def note(self, worked: float, waited: float, *, counts: bool) -> None:
        """Notes the cost of a frame: seconds of compressing, seconds until the link had it.
        counts: it was compressed as this step says.
        """
        self._worked += worked
        self._waited += waited
        self._frames += counts
        now = self._clock()
        lasted = now - self._since
        if lasted < self.PERIOD or self._frames < self.FRAMES:
            return
        idle, everything = (b - a for a, b in zip(self._before, self._load(), strict=True))
        spare = idle / everything if everything else 0.0
        waits, works = self._waited / lasted, self._worked / lasted
        cpu_limits = spare < self._USED_UP or (works > 1 - self._MUCH and waits < self._LITTLE)
        if self.step and cpu_limits and works > self._LITTLE:
            _, pause = self._too_much.get(self.step, (0.0, self._FIRST_PAUSE / 2))
            self._too_much[self.step] = (now + 2 * pause, 2 * pause)
            self.step -= 1
        elif waits > self._MUCH and spare > self._SPARE and self.step + 1 < self._steps:
            until, _ = self._too_much.get(self.step + 1, (0.0, 0.0))
            self.step += now >= until
        self._begin()


@dataclass(slots=True)
class Codec:
    """Compresses parts where that pays. compress: one for each step of the effort, for 0 none.
    effort: None for always the last one, without trying samples.
    """

    number: int
    compress: Sequence[Compress]
    effort: Effort | None = None
    _pause: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)
    _worked: float = field(default=0.0, init=False)
    _tried: bool = field(default=False, init=False)

    def encode(self, parts: Parts) -> tuple[int, Parts]:
        """Returns the codec's number for the frame, and the parts as they travel."""
        step = len(self.compress) if self.effort is None else self.effort.step
        self._tried = not step or self._worthwhile(parts[-1])
        if not step or not self._tried:
            return RAW, parts
        began = time.monotonic()
        packed = self.compress[step - 1](parts)
        self._worked += time.monotonic() - began
        if len(packed) >= sum(map(len, parts)):
            return RAW, parts
        return self.number, [memoryview(packed)]

    def sent(self, waited: float) -> None:
        """Notes how many seconds the link took for the frame of `encode`."""
        if self.effort is not None:
            self.effort.note(self._worked, waited, counts=self._tried)
            self._worked = 0.0

    def _worthwhile(self, content: memoryview) -> bool:
        if self.effort is None:
            return True
        if self._skipped < self._pause:
            self._skipped += 1
            return False
        middle = max(0, len(content) - SAMPLE_BYTES) // 2
        sample = content[middle : middle + SAMPLE_BYTES]
        pays = len(self.compress[0]([sample])) <= _PAYS[self.number] * len(sample)
        self._skipped = 0
        self._pause = 0 if pays else min(LONGEST_PAUSE, max(1, 2 * self._pause))
        return pays


def choose_codec(setting: str, offered: Sequence[str]) -> Codec:
    """Returns the codec for a session: setting is run.codec, offered what the remote can
    decompress.

    Raises Unsupported where a codec was asked for by name and the remote does not have it.
    """
    name, _, level = setting.partition("-")
    if name == "auto":
        if "zstd" in offered:
            steps = [_zstd(one) for one in _LEVELS]
            return Codec(ZSTD, steps, Effort(len(steps) + 1, _FIRST_STEP))
        return Codec(ZLIB, [_zlib], Effort(2, 1)) if "zlib" in offered else Codec(RAW, [])
    if name == "none":
        return Codec(RAW, [])
    if name not in offered:
        raise Unsupported(
            f"the remote cannot decompress {name}",
            detail=f"it has {', '.join(offered) or 'nothing'}",
            hint="install python3-zstandard on the remote, or set run.codec to auto",
        )
    return Codec(ZSTD, [_zstd(int(level))]) if level else Codec(ZLIB, [_zlib])


def _zstd(level: int) -> Compress:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=False)

    def compress(parts: Parts) -> bytes:
        run = compressor.compressobj()
        return b"".join([*map(run.compress, parts), run.flush()])

    return compress


def _zlib(parts: Parts) -> bytes:
    run = zlib.compressobj(1)
    return b"".join([*map(run.compress, parts), run.flush()])
