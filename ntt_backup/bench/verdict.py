"""What follows from the figures, in words: which is what most people wanted to know.

Differences below what a round differs from the next are none, so words like "pays" and "faster"
need a margin, and runs that do not overlap. Pure.
"""

from __future__ import annotations

from typing import Final

from ntt_backup.bench.link import Cell, Findings
from ntt_backup.bench.results import MEGA, Figure, Spread
from ntt_backup.errors import complete

MARGIN: Final = 0.03


def above(one: Spread, other: Spread) -> bool:
    """Whether one is more than other for certain: by a margin, and in its worst run still."""
    return one.median > other.median * (1 + MARGIN) and one.low > other.high


def of_link(found: Findings) -> list[str]:
    """The link's ceiling, the streams and the cipher it takes, and whether compression pays."""
    said = [_ceiling(found, "up"), _ceiling(found, "down")]
    if found.trip.spread is not None:
        trip = found.trip.spread.median
        said.append(
            f"A question and its answer take {_ms(trip)}, a new ssh connection"
            f" {_ms(_median(found.opening))}: that is what a connection a batch costs each time."
        )
    said += [_cipher(found), _compression(found), _zeros(found)]
    return [line for line in said if line]


def ceiling(found: Findings, direction: str) -> Spread | None:
    """The best that the job's own ssh moved in this direction, in bytes a second."""
    spreads = [figure.spread for figure in _by_streams(found, direction).values()]
    return max(filter(None, spreads), key=lambda spread: spread.median, default=None)


def streams_needed(found: Findings, direction: str) -> int | None:
    """The fewest streams that reach the ceiling, but for the margin."""
    best = ceiling(found, direction)
    return next(
        (
            streams
            for streams, figure in sorted(_by_streams(found, direction).items())
            if best and figure.spread and figure.spread.median >= best.median * (1 - MARGIN)
        ),
        None,
    )


def _by_streams(found: Findings, direction: str) -> dict[int, Figure]:
    return {
        cell.streams: figure
        for cell, figure in found.rates.items()
        if cell == Cell(cell.direction, cell.streams) and cell.direction == direction
    }


def _ceiling(found: Findings, direction: str) -> str:
    best, needed = ceiling(found, direction), streams_needed(found, direction)
    if best is None or needed is None:
        return ""
    one = _by_streams(found, direction).get(1)
    text = f"Ceiling {direction}: {_mb(best.median)}, reached by {_streams(needed)}"
    if needed > 1 and one is not None and one.spread is not None:
        text += f"; one stream alone gets {_mb(one.spread.median)}"
    return text + "."


def _cipher(found: Findings) -> str:
    rates = {
        cell.cipher: figure.spread
        for cell, figure in found.rates.items()
        if cell.cipher and cell.direction == "up" and figure.spread
    }
    own = _rate(found, Cell("up"))
    if not rates or own is None:
        return ""
    best = max(rates, key=lambda cipher: rates[cipher].median)
    if not above(rates[best], own):
        slow = sorted(name for name, rate in rates.items() if above(own, rate))
        others = f"slower: {', '.join(slow)}" if slow else "no other makes a difference"
        return f"Cipher: the job's own choice is as fast as any here; {others}."
    return (
        f"Cipher: {best} moves {_mb(rates[best].median)}, the job's own choice {_mb(own.median)}."
        " The job takes it where the remote's sshd offers no other (Ciphers in its sshd_config)."
    )


def _compression(found: Findings) -> str:
    own, packed = _rate(found, Cell("up")), _rate(found, Cell("up", compressed=True))
    halves = _rate(found, Cell("up", compressed=True, content="halves"))
    if own is None or packed is None or halves is None:
        return ""
    costs = "costs nothing here"
    if above(own, packed):
        costs = f"costs {1 - packed.median / own.median:.0%}"
    pays = "pays" if above(halves, own) else "does not even pay"
    return (
        f"Compression by ssh {costs} on content that does not compress ({_mb(packed.median)} for"
        f" {_mb(own.median)}), and {pays} for content that halves ({_mb(halves.median)} of it)."
        f" What your blobs do is measured by `{complete('ntt-backup-remote bench strategies')}`."
    )


def _zeros(found: Findings) -> str:
    best, zeros = ceiling(found, "up"), found.zeros.spread
    if best is None or zeros is None:
        return ""
    return (
        f"Zeros through `ssh -C`, a common test, would have claimed {_mb(zeros.median)},"
        f" {zeros.median / best.median:.1f} times the ceiling. Zeros compress a thousandfold: that"
        " is the speed of a compressor and not of this link, so it is in none of the figures."
    )


def _rate(found: Findings, cell: Cell) -> Spread | None:
    figure = found.rates.get(cell)
    return figure.spread if figure is not None else None


def _median(figure: Figure) -> float:
    return figure.spread.median if figure.spread is not None else 0.0


def _mb(rate: float) -> str:
    return f"{rate / MEGA:.1f} MB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _streams(count: int) -> str:
    return "one stream" if count == 1 else f"{count} streams"
