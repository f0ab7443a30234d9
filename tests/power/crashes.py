"""What a disk may have after a power cut: crash images, made from the log of its writes.

What was logged before the last flush that had ended by then is on the disk. Of what came after it
any part may be, in any order: `MODES` says which part is taken. The time of a flush is noted before
the disk answers it, and a promise after it was given. Both are of one clock, so whoever relied on a
flush finds it in the log with an earlier time: no finding comes of a race.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tests.power.disks import LoggedDisk, copy

_RECORD: Final = struct.Struct("<QQQII")
_WRITE, _FLUSH = 1, 2
_PAGE: Final = 4096

MODES: Final = (
    *("none", "all", "half", "few", "most", "prefix", "tail", "small", "large", "but-one"),
    *("half", "few"),
)
_SHARES: Final = {"half": 0.5, "few": 0.1, "most": 0.9}
# Half of a superblock is on the disk with neither: btrfs has one of 4 KiB, and xfs does not replay
# its log over a block whose header is the newer one.
UNITS: Final = {"ext4": (512, _PAGE, 0), "xfs": (_PAGE, _PAGE, 0), "btrfs": (_PAGE, _PAGE, 0)}


class Record(NamedTuple):
    """A write or a flush. time: ns; offset: on the disk; place: of the content in the log."""

    time: int
    offset: int
    place: int
    kind: int
    length: int


class Part(NamedTuple):
    """Bytes that reached the disk."""

    offset: int
    place: int
    length: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A power cut. unit: writes are torn in pieces of so many bytes; 0 for not at all."""

    time: int
    mode: str
    unit: int
    seed: int
    why: str


class Log:
    """The writes and flushes of a disk, in order. lies_from: It ignored flushes from then on."""

    def __init__(self, disk: LoggedDisk, *, lies_from: float = math.inf) -> None:
        self.base = disk.base
        data = Path(f"{disk.log}.idx").read_bytes()
        records = [Record._make(one) for one in _RECORD.iter_unpack(data)]
        self.records = [one for one in records if one.time < lies_from or one.kind == _WRITE]
        self.times = [one.time for one in self.records]
        self.content: mmap.mmap | bytes = b""
        if any(one.kind == _WRITE for one in records):
            with open(f"{disk.log}.dat", "rb") as file:
                self.content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def has_flushed(self, content: bytes) -> bool:
        """Whether a page was written, and the disk flushed after that."""
        place = self.content.find(content)
        written = [one.time for one in self.records if one.kind == _WRITE and one.place <= place]
        flushed = [one.time for one in self.records if one.kind == _FLUSH]
        return place >= 0 and flushed[-1:] > written[-1:]

    def until(self, time: int) -> int:
        """The number of records that were there at a time."""
        return bisect_right(self.times, time)

    def times_of(self, begin: int, end: int, *, flushes: bool) -> list[int]:
        kind = _FLUSH if flushes else _WRITE
        between = self.records[self.until(begin) : self.until(end)]
        return [one.time for one in between if one.kind == kind]


def moments(
    log: Log,
    between: tuple[int, int],
    count: int,
    chance: random.Random,
    fs: str,
    promises: Sequence[int],
) -> list[Moment]:
    """Power cuts in the order of time: right at promises, mostly with nothing but what was flushed;
    right before a flush ends; at any write; at the end.
    """
    begin, end = between
    found: list[Moment] = []

    def add(time: int, why: str, mode: str = "") -> None:
        unit, seed = chance.choice(UNITS[fs]), chance.randrange(1 << 30)
        found.append(Moment(time, mode or chance.choice(MODES), unit, seed, why))

    given = [one for one in promises if begin <= one <= end]
    for one in chance.sample(given, min(len(given), count // 3)):
        add(one, "promise", "none" if chance.random() < 0.6 else "")
    add(end, "end", "none")
    flushes = [one - 1 for one in log.times_of(begin, end, flushes=True)]
    writes = log.times_of(begin, end, flushes=False)
    while len(found) < count and (flushes or writes):
        if flushes and (not writes or chance.random() < 0.4):
            add(chance.choice(flushes), "flush")
        else:
            add(chance.choice(writes), "write")
    return sorted(found, key=lambda one: one.time)


def chosen(pending: Sequence[Record], moment: Moment) -> list[Part]:
    """What reached the disk of the writes since the last flush, in order."""
    chance, mode = random.Random(moment.seed), moment.mode
    if mode == "none" or not pending:
        return []
    if mode == "prefix":
        pending = pending[: chance.randrange(len(pending) + 1)]
    elif mode == "tail":
        pending = pending[chance.randrange(len(pending)) :]
    elif mode == "small":
        pending = [one for one in pending if one.length <= 2 * _PAGE]
    elif mode == "large":
        pending = [one for one in pending if one.length > 2 * _PAGE]
    elif mode == "but-one":
        gone = chance.randrange(len(pending))
        pending = [one for number, one in enumerate(pending) if number != gone]
    found = []
    for number, one in enumerate(pending):
        torn = mode == "prefix" and number == len(pending) - 1
        if mode in _SHARES or torn:
            found += _torn(one, moment.unit, _SHARES.get(mode, 0.5), chance)
        else:
            found.append(Part(one.offset, one.place, one.length))
    return found


def _torn(write: Record, unit: int, share: float, chance: random.Random) -> list[Part]:
    found, at = [], 0
    while at < write.length:
        step = unit or write.length
        if write.offset + at < _PAGE:  # ext4 reads its superblock before its journal.
            step = _PAGE - write.offset - at
        if chance.random() < share:
            found.append(Part(write.offset + at, write.place + at, min(step, write.length - at)))
        at += step
    return found


class Images:
    """Makes crash images of a log, in the order of time. crash: the file that has the last one."""

    def __init__(self, log: Log, directory: Path) -> None:
        self.crash = directory / "crash.img"
        self._log = log
        self._durable = directory / "durable.img"
        copy(log.base, self._durable)
        self._fd = os.open(self._durable, os.O_RDWR)
        self._applied = 0

    def close(self) -> None:
        os.close(self._fd)
        for path in (self._durable, self.crash):
            path.unlink(missing_ok=True)

    def make(self, moment: Moment) -> int:
        """Makes the image of a moment; returns how many writes no flush had covered by then."""
        records, content = self._log.records, self._log.content
        end = last = self._log.until(moment.time)
        while last > 0 and records[last - 1].kind != _FLUSH:
            last -= 1
        for one in records[self._applied : last]:
            if one.kind == _WRITE:
                os.pwrite(self._fd, content[one.place : one.place + one.length], one.offset)
        self._applied = last
        self.crash.unlink(missing_ok=True)
        copy(self._durable, self.crash)
        fd = os.open(self.crash, os.O_RDWR)
        for part in chosen(records[last:end], moment):
            os.pwrite(fd, content[part.place : part.place + part.length], part.offset)
        os.close(fd)
        return end - last
