"""The compression of `stream`, which follows the data and the link.

Most blobs do not compress (pictures, archives, media); some do, by a factor of three. So with
`run.codec = auto` a sample of each pack is tried, and where samples do not shrink they are taken
ever more rarely: incompressible data costs almost nothing, and a change is noticed within a few
MiB.

The level follows the bottleneck. While the sender waits for the link and this machine has idle CPU,
a higher level sends more; where compressing takes the time, or no CPU is idle, as on a link that is
as fast as the machine, a lower one does. Each pack is compressed by itself, so what compresses goes
in larger packs: 4 MiB are 3 to 4 % smaller than four times 1 MiB, at the same speed.
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
from ntt_backup.wire.framing import PACK_BYTES
from ntt_backup.wire.write_messages import RAW, ZLIB, ZSTD

SAMPLE_BYTES: Final = 32 * 1024
_SAMPLES: Final = 4
LONGEST_PAUSE: Final = 16
# What a sample must shrink to: less gain is not worth the time, also on a fast link.
_PAYS: Final = {ZSTD: 0.85, ZLIB: 0.6}

# Of zstd. Above level 12 a core sends less than 10 MB/s.
_LEVELS: Final = (1, 3, 6, 9, 12)
# A receiver of any version takes a PACK of 8 MiB with its table.
MOST_PACK_BYTES: Final = 4 << 20

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

    It begins with the lowest, and goes one step at a time, after `FRAMES` frames at least and a
    period that doubles from `FIRST_PERIOD` to `PERIOD` seconds. A step that was too high is not
    tried again for a while, which doubles each time.
    """

    FIRST_PERIOD: Final = 0.15
    PERIOD: Final = 0.5
    FRAMES: Final = 2
    # Shares of the time that were spent waiting for the link, or compressing.
    _MUCH: Final = 0.3
    _LITTLE: Final = 0.1
    # Shares of the CPU that are idle.
    _SPARE: Final = 0.25
    _USED_UP: Final = 0.05
    # Seconds of waiting that a second of the lowest compression must save where no CPU is idle:
    # what is waited for then may be the CPU, so the saving looks larger than it is.
    _MUST_SAVE: Final = 2.0
    # Bytes that the pipe and ssh's window take in before a slow link is felt.
    _BUFFERS: Final = 3 << 20
    # Of periods.
    _FIRST_PAUSE: Final = 32

    def __init__(
        self,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], Load] = cpu_load,
    ) -> None:
        self.step = 1
        self._period = self.FIRST_PERIOD
        # Bytes on the wire in all.
        self._sent = 0
        # What the lowest compression makes of a byte, and its seconds for one.
        self._shrinks, self._price = 1.0, 0.0
        # The seconds for a byte without compression, where that was seen.
        self._plain = 0.0
        self._steps = steps
        self._clock = clock
        self._load = load
        self._too_much: dict[int, tuple[float, float]] = {}
        self._begin()

    def _begin(self) -> None:
        self._since = self._clock()
        self._before = self._load()
        self._waited = self._worked = 0.0
        # Of this period: frames that compressing was tried for, their bytes of content and on the
        # wire, and the bytes of all frames on the wire.
        self._frames = self._raw = self._wire = self._all = 0

    def note(self, worked: float, waited: float, raw: int, wire: int) -> None:
        """Notes the cost of a frame: seconds of compressing, seconds until the link had it, and its
        bytes of content and on the wire. raw: 0 where compressing it was not tried.
        """
        self._worked += worked
        self._waited += waited
        self._sent += wire
        self._all += wire
        if raw:
            self._raw += raw
            self._wire += wire
            self._frames += 1
        now = self._clock()
        lasted = now - self._since
        if lasted < self._period or self._frames < self.FRAMES:
            return
        idle, everything = (b - a for a, b in zip(self._before, self._load(), strict=True))
        spare = idle / everything if everything else 0.0
        waits, works = self._waited / lasted, self._worked / lasted
        step, pays = self.step, self._pays(lasted)
        cpu_limits = spare < self._USED_UP or (works > 1 - self._MUCH and waits < self._LITTLE)
        if step and cpu_limits and works > self._LITTLE:
            link_is_felt = self._sent - self._all >= self._BUFFERS
            if step > 1 or (link_is_felt and not pays):
                first = self._FIRST_PAUSE / 2 * self._period
                _, pause = self._too_much.get(step, (0.0, first))
                self._too_much[step] = (now + 2 * pause, 2 * pause)
                self.step -= 1
        elif waits > self._MUCH and (spare > self._SPARE or (pays and step == 0)):
            until, _ = self._too_much.get(step + 1, (0.0, 0.0))
            # No pause holds where the first look without compression shows that it pays.
            first_look = step == 0 and not self._plain
            if step + 1 < self._steps and (now >= until or (pays and first_look)):
                self.step += 1
        if step == 0:
            self._plain = lasted / self._raw
        elif step == 1:
            self._shrinks, self._price = self._wire / self._raw, self._worked / self._raw
        if self._sent >= self._BUFFERS:
            self._period = min(self.PERIOD, 2 * self._period)
        self._begin()

    def _pays(self, lasted: float) -> bool:
        """Returns whether the lowest compression would pay, or this one does, on a busy CPU."""
        per_byte = self._waited / self._all
        if self.step == 0:
            return per_byte * (1 - self._shrinks) > self._price
        saved = per_byte * (self._raw - self._wire)
        return saved > self._MUST_SAVE * self._worked or lasted / self._raw < self._plain


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
    _raw: int = field(default=0, init=False)
    _wire: int = field(default=0, init=False)

    @property
    def pack_bytes(self) -> int:
        """The bytes of content at which a pack is full."""
        compresses = self.effort.step > 0 if self.effort else len(self.compress) > 0
        return MOST_PACK_BYTES if compresses and not self._pause else PACK_BYTES

    def encode(self, parts: Parts) -> tuple[int, Parts]:
        """Returns the codec's number for the frame, and the parts as they travel."""
        step = len(self.compress) if self.effort is None else self.effort.step
        length = self._raw = self._wire = sum(map(len, parts))
        if not step:
            return RAW, parts
        if not self._worthwhile(parts[-1]):
            self._raw = 0
            return RAW, parts
        began = time.monotonic()
        packed = self.compress[step - 1](parts)
        self._worked += time.monotonic() - began
        if len(packed) >= length:
            return RAW, parts
        self._wire = len(packed)
        return self.number, [memoryview(packed)]

    def sent(self, waited: float) -> None:
        """Notes how many seconds the link took for the frame of `encode`."""
        if self.effort is not None:
            self.effort.note(self._worked, waited, self._raw, self._wire)
            self._worked = 0.0

    def _worthwhile(self, content: memoryview) -> bool:
        if self.effort is None:
            return True
        if self._skipped < self._pause:
            self._skipped += 1
            return False
        length = SAMPLE_BYTES // _SAMPLES
        starts = range(0, len(content), max(length, len(content) // _SAMPLES))
        sample = [content[start : start + length] for start in starts]
        pays = len(self.compress[0](sample)) <= _PAYS[self.number] * sum(map(len, sample))
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
            return Codec(ZSTD, steps, Effort(len(steps) + 1))
        return Codec(ZLIB, [_zlib], Effort(2)) if "zlib" in offered else Codec(RAW, [])
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
