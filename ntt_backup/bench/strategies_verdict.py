"""What follows from the ways that were compared, in words. Pure."""

from __future__ import annotations

from ntt_backup.bench.link_verdict import MARGIN, above
from ntt_backup.bench.results import MEGA, Spread
from ntt_backup.bench.runs import Findings, Run, known, median
from ntt_backup.bench.ways import PLAIN, Way
from ntt_backup.format import many


def of_strategies(found: Findings) -> list[str]:
    """The fastest way, how it stands to the ceiling, workers, compression, and what failed."""
    compared = found.compared()
    said = [_ceiling(found), _fastest(found, compared)]
    said += [_workers(way, by) for way, by in found.scaling().items()]
    said += [_codecs(compared), _small(found), _back(found), _left_out(found), _gone(found)]
    return [line for line in said if line]


def _ceiling(found: Findings) -> str:
    return f"Ceiling: {found.ceiling / MEGA:.1f} MB/s of random bytes, measured between the runs."


def _fastest(found: Findings, compared: dict[Way, list[Run]]) -> str:
    if not compared:
        return ""
    best, *others = compared
    equal = [way.name for way in others if not above(_rate(compared[best]), _rate(compared[way]))]
    rate = _rate(compared[best])
    text = f"Fastest with {_workers_of(found.workers)}: {best.name}, {_mb(rate)}"
    if found.ceiling:
        text += f", {rate.median / found.ceiling:.0%} of the ceiling"
    return text + (f"; no certain difference to {', '.join(equal)}." if equal else ".")


def _workers(way: Way, by_workers: dict[int, list[Run]]) -> str:
    rates = {workers: _rate(runs) for workers, runs in by_workers.items()}
    best = max(rate.median for rate in rates.values())
    enough = next(n for n, rate in rates.items() if rate.median >= best * (1 - MARGIN))
    steps = ", ".join(f"{n}: {_mb(rate)}" for n, rate in rates.items())
    return f"Workers, {way.name}: {_workers_of(enough)} will do ({steps})."


def _codecs(compared: dict[Way, list[Run]]) -> str:
    plain = compared.get(PLAIN)
    packed = {way: runs for way, runs in compared.items() if way.codec or way.compressed}
    if plain is None or not packed:
        return ""
    best = max(packed, key=lambda way: _rate(packed[way]).median)
    rate, own = _rate(packed[best]), _rate(plain)
    if above(rate, own):
        verdict = f"pays on these blobs: {best.name} moves {_mb(rate)}, plain {_mb(own)}"
    elif above(own, rate):
        verdict = f"costs on these blobs: the best, {best.name}, {_mb(rate)} for {_mb(own)} plain"
    else:
        verdict = f"makes no difference on these blobs ({best.name} {_mb(rate)}, plain {_mb(own)})"
    wire, bare = (known(runs, lambda run: run.wire_bytes) for runs in (packed[best], plain))
    if wire and bare:
        verdict += f"; {wire.median / bare.median:.0%} of the bytes go over the wire"
    return f"Compression {verdict}."


def _small(found: Findings) -> str:
    """How the smallest class of sizes fares: there the overhead a file shows."""
    said = []
    for way, by_class in found.classes().items():
        name, runs = next(iter(by_class.items()))
        rate = median(runs, lambda run: run.files_rate)
        said.append(f"{way.name} {rate:,.0f} files/s ({name})")
    return f"Small files: {', '.join(said)}." if said else ""


def _back(found: Findings) -> str:
    return f"The way back, by a plain tar: {_mb(_rate(found.back))}." if found.back else ""


def _left_out(found: Findings) -> str:
    missing = found.sample.missing
    if not missing:
        return ""
    return f"Too large for a sample of this size: blobs {', '.join(missing)}; see --sample."


def _gone(found: Findings) -> str:
    if not found.gone:
        return ""
    gone = many(found.gone, "blob")
    return f"Not in the sample: {gone} that the store could not give as catalogued."


def _rate(runs: list[Run]) -> Spread:
    spread = Spread.of([run.rate for run in runs])
    assert spread is not None
    return spread


def _mb(rate: Spread) -> str:
    return f"{rate.median / MEGA:.1f} MB/s"


def _workers_of(count: int) -> str:
    return "one worker" if count == 1 else many(count, "worker")
