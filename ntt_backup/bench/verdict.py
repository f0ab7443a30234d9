"""A verdict says in words what the figures mean. Pure."""

from __future__ import annotations

from ntt_backup.bench import link
from ntt_backup.bench.results import MARGIN, MEGA
from ntt_backup.bench.runs import Findings, Runs
from ntt_backup.bench.sending import COMPRESSED, UNCOMPRESSED, Way
from ntt_backup.formatting import many


def of_link(found: link.Findings) -> list[str]:
    """Says the link's ceiling, the streams that it takes, and the cost of a connection."""
    said = [_link_ceiling(found, "up"), _link_ceiling(found, "down")]
    if found.trip.spread and found.opening.spread:
        trip, opening = found.trip.spread.median, found.opening.spread.median
        said.append(
            f"A question and its answer take {trip * 1000:.1f} ms. A new connection takes"
            f" {opening * 1000:.1f} ms: so much does a connection for each batch cost every time."
        )
    return said


def _link_ceiling(found: link.Findings, direction: link.Direction) -> str:
    rates = {
        streams.count: figure.spread
        for streams, figure in found.rates.items()
        if streams.direction == direction and figure.spread
    }
    best = max(rates.values(), key=lambda rate: rate.median)
    needed = next(n for n, rate in rates.items() if rate.median >= best.median * (1 - MARGIN))
    text = f"Ceiling {direction}: {best.mb_per_s}, reached by {many(needed, 'stream')}"
    if needed > 1 and 1 in rates:
        text += f"; one stream alone gets {rates[1].mb_per_s}"
    return text + "."


def of_strategies(found: Findings) -> list[str]:
    """Says the fastest way, its share of the ceiling, the workers it takes, and what is missing."""
    compared = found.compared()
    said = [f"Ceiling: {found.ceiling / MEGA:.1f} MB/s of random bytes, measured between the runs."]
    if compared:
        said.append(_fastest(found, compared))
    said += [_workers(way, by_workers) for way, by_workers in found.scaling().items()]
    if COMPRESSED in compared and UNCOMPRESSED in compared:
        said.append(_compression(compared[COMPRESSED], compared[UNCOMPRESSED]))
    if missing := found.sample.missing:
        text = ", ".join(missing)
        said.append(f"Too large for a sample of this size: blobs {text}; see --sample.")
    if found.unreadable:
        blobs = many(found.unreadable, "blob")
        said.append(f"Not in the sample: {blobs} that the store could not give as catalogued.")
    return said


def of_bucket(out: Findings, back: Findings, left: str) -> list[str]:
    """Returns the sentences of the verdict for a bucket.

    These are the sentences of `of_strategies` for the ways out, then the savings of packs, the
    fastest way back, and the objects that stay in the bucket.

    Args:
        out: The findings of the ways out.
        back: The findings of the ways back.
        left: The objects that stay in the bucket, in words.
    """
    said = of_strategies(out)
    compared = {way.name: runs for way, runs in out.compared().items()}
    if "packs-zst" in compared and "packs-none" in compared:
        said.append(_compression(compared["packs-zst"], compared["packs-none"]))
    packs = compared.get("packs-zst") or compared.get("packs-none")
    if packs is not None and "put-each" in compared:
        each = compared["put-each"]
        times = packs.rate.median / each.rate.median
        requests = [one.spread("writes").median for one in (each, packs)]
        said.append(
            f"One request a blob takes {requests[0]:,.0f} requests where packs take"
            f" {requests[1]:,.0f}, and {times:.1f} times as long."
        )
    if ways := back.compared():
        said.append(f"Ceiling back: {back.ceiling / MEGA:.1f} MB/s.")
        said.append(_fastest(back, ways, "Fastest way back"))
        for way, runs in ways.items():
            if (first := runs.known("first_s")) is not None:
                said.append(f"{way.name} shows all blobs after {first.median:.1f} s.")
        said.append("Each blob that came back was compared with its name.")
    return [*said, left] if left else said


def _fastest(found: Findings, compared: dict[Way, Runs], title: str = "Fastest") -> str:
    best, *others = compared
    rate = compared[best].rate
    equal = [way.name for way in others if not rate.above(compared[way].rate)]
    share = f"{rate.median / found.ceiling:.0%} of the ceiling"
    text = f"{title} with {many(found.workers, 'worker')}: {best.name}, {rate.mb_per_s}, {share}"
    return text + (f"; no certain difference to {', '.join(equal)}." if equal else ".")


def _workers(way: Way, by_workers: dict[int, Runs]) -> str:
    best = max(runs.rate.median for runs in by_workers.values())
    enough = next(n for n, one in by_workers.items() if one.rate.median >= best * (1 - MARGIN))
    steps = ", ".join(f"{n}: {one.rate.mb_per_s}" for n, one in by_workers.items())
    return f"Workers, {way.name}: {many(enough, 'worker')} will do ({steps})."


def _compression(packed: Runs, plain: Runs) -> str:
    if packed.rate.above(plain.rate):
        verdict = "pays on these blobs"
    elif plain.rate.above(packed.rate):
        verdict = "costs on these blobs"
    else:
        verdict = "makes no difference on these blobs"
    text = f"Compression {verdict}: {packed.rate.mb_per_s} with, {plain.rate.mb_per_s} without"
    wire, bare = packed.known("wire_bytes"), plain.known("wire_bytes")
    if wire and bare:
        text += f"; {wire.median / bare.median:.0%} of the bytes go over the wire"
    return text + "."
