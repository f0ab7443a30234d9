"""What the comparison of ways means, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ntt_backup.bench.results import MARGIN, MEGA
from ntt_backup.bench.runs import Findings, Runs
from ntt_backup.bench.ways import COMPRESSED, UNCOMPRESSED, Way
from ntt_backup.format import many


def of_strategies(found: Findings) -> list[str]:
    """Says the fastest way, its share of the ceiling, the workers it takes, and what failed."""
    compared = found.compared()
    said = [f"Ceiling: {found.ceiling / MEGA:.1f} MB/s of random bytes, measured between the runs."]
    if compared:
        said.append(_fastest(found, compared))
    said += [_workers(way, by_workers) for way, by_workers in found.scaling().items()]
    if COMPRESSED in compared and UNCOMPRESSED in compared:
        said.append(_compression(compared[COMPRESSED], compared[UNCOMPRESSED]))
    smallest = [
        f"{way.name} {runs.spread('files_rate').median:,.0f} files/s ({name})"
        for way, classes in found.classes().items()
        for name, runs in list(classes.items())[:1]
    ]
    if smallest:
        said.append(f"Small files: {', '.join(smallest)}.")
    if missing := found.sample.missing:
        text = ", ".join(missing)
        said.append(f"Too large for a sample of this size: blobs {text}; see --sample.")
    if found.unreadable:
        blobs = many(found.unreadable, "blob")
        said.append(f"Not in the sample: {blobs} that the store could not give as catalogued.")
    return said


def _fastest(found: Findings, compared: dict[Way, Runs]) -> str:
    best, *others = compared
    rate = compared[best].rate
    equal = [way.name for way in others if not rate.above(compared[way].rate)]
    text = f"Fastest with {many(found.workers, 'worker')}: {best.name}, {rate.mb_per_s}"
    if found.ceiling:
        text += f", {rate.median / found.ceiling:.0%} of the ceiling"
    return text + (f"; no certain difference to {', '.join(equal)}." if equal else ".")


def _workers(way: Way, by_workers: dict[int, Runs]) -> str:
    best = max(runs.rate.median for runs in by_workers.values())
    enough = next(n for n, one in by_workers.items() if one.rate.median >= best * (1 - MARGIN))
    steps: Sequence[str] = [f"{n}: {one.rate.mb_per_s}" for n, one in by_workers.items()]
    return f"Workers, {way.name}: {many(enough, 'worker')} will do ({', '.join(steps)})."


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
