"""What the figures of a link mean, in words. Pure."""

from __future__ import annotations

from ntt_backup.bench.link import Direction, Findings
from ntt_backup.bench.results import MARGIN, Spread
from ntt_backup.format import many


def of_link(found: Findings) -> list[str]:
    """Says the link's ceiling, the streams it takes, the cost of a connection, and the cipher."""
    said = [_ceiling(found, "up"), _ceiling(found, "down")]
    if found.trip.spread and found.opening.spread:
        trip, opening = found.trip.spread.median, found.opening.spread.median
        said.append(
            f"A question and its answer take {trip * 1000:.1f} ms. A new ssh connection takes"
            f" {opening * 1000:.1f} ms: so much does a connection for each batch cost every time."
        )
    return [line for line in [*said, _cipher(found)] if line]


def _ceiling(found: Findings, direction: Direction) -> str:
    rates = {
        cell.streams: figure.spread
        for cell, figure in sorted(found.rates.items(), key=lambda one: one[0].streams)
        if cell.direction == direction and not cell.cipher and figure.spread
    }
    if not rates:
        return ""
    best = max(rates.values(), key=lambda rate: rate.median)
    needed = next(n for n, rate in rates.items() if rate.median >= best.median * (1 - MARGIN))
    text = f"Ceiling {direction}: {best.mb_per_s}, reached by {many(needed, 'stream')}"
    if needed > 1 and 1 in rates:
        text += f"; one stream alone gets {rates[1].mb_per_s}"
    return text + "."


def _cipher(found: Findings) -> str:
    rates: dict[str, Spread] = {
        cell.cipher: figure.spread
        for cell, figure in found.rates.items()
        if cell.direction == "up" and cell.streams == 1 and figure.spread
    }
    own = rates.pop("", None)
    if not rates or own is None:
        return ""
    best = max(rates, key=lambda cipher: rates[cipher].median)
    if not rates[best].above(own):
        slow = sorted(name for name, rate in rates.items() if own.above(rate))
        others = f"slower: {', '.join(slow)}" if slow else "no other makes a difference"
        return f"Cipher: the job's own choice is as fast as any here; {others}."
    return (
        f"Cipher: {best} moves {rates[best].mb_per_s}, the job's own choice {own.mb_per_s}."
        " The job takes it where the remote's sshd offers no other (Ciphers in its sshd_config)."
    )
