"""The comparison of strategies as one figure: three panels, each a question.

How close does each way come to the ceiling? How many files a second, by size? What do more workers
bring? Bars and points are medians, thin lines run from the least to the greatest.

The same findings make the same file, byte for byte: fixed size, fixed ids, no date. matplotlib is
not among our requirements (the extra `bench` brings it), so it is imported here, when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ntt_backup.bench.results import MEGA, Spread
from ntt_backup.bench.runs import Findings, Run
from ntt_backup.errors import ConfigError
from ntt_backup.format import many

FORMATS: Final = (".svg", ".png")

# Any: its stubs, where they are installed, list every name there is.
_STYLE: Final[Any] = {
    "svg.hashsalt": "ntt-backup",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}
# Told apart by people who see red and green alike, too.
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def require() -> None:
    """Raise ConfigError where matplotlib is missing: before the work, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed",
            hint="pip install '.[bench]', in a checkout of this project, or leave --plot out",
        ) from error


def draw(found: Findings, file: Path, where: str) -> None:
    """Write the figure to file; its name ends in one of FORMATS. where: said in the title."""
    require()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(_STYLE):
        figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), layout="constrained")
        try:
            figure.suptitle(
                f"{many(len(found.sample.blobs), 'blob')}, {found.sample.size / MEGA:,.0f} MB,"
                f" to {where}"
            )
            _ways(axes[0], found)
            _sizes(axes[1], found)
            _workers(axes[2], found)
            metadata = {"Date": None} if file.suffix == ".svg" else {"Software": None}
            figure.savefig(file, dpi=120, metadata=metadata)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written", detail=error.strerror or str(error)
            ) from error
        finally:
            pyplot.close(figure)


def _ways(axis: Any, found: Findings) -> None:
    rows = list(found.compared().items())[::-1]
    rates = [_spread(runs, lambda run: run.rate / MEGA) for _, runs in rows]
    axis.barh(
        [way.name for way, _ in rows],
        [rate.median for rate in rates],
        xerr=_bars(rates),
        color=[_COLOURS[0] if way.strategy else "#9aa5b1" for way, _ in rows],
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    axis.axvline(found.ceiling / MEGA, color=_COLOURS[5], linestyle="--")
    axis.set_xlim(left=0)
    axis.set_xlabel("MB/s of content")
    axis.set_title(
        f"{many(found.workers, 'worker')}; dashed: the ceiling, {found.ceiling / MEGA:.1f} MB/s",
        fontsize=9,
    )


def _sizes(axis: Any, found: Findings) -> None:
    for colour, (way, by_class) in zip(_cycle(), found.classes().items(), strict=False):
        rates = [_spread(runs, lambda run: run.files_rate) for runs in by_class.values()]
        _line(axis, list(by_class), rates, way.name, colour)
    axis.set_yscale("log")
    axis.set_ylabel("files/s")
    axis.tick_params(axis="x", labelrotation=30)
    axis.set_title(f"by size of file, {many(found.workers, 'worker')}", fontsize=9)
    _legend(axis)


def _workers(axis: Any, found: Findings) -> None:
    for colour, (way, by_workers) in zip(_cycle(), found.scaling().items(), strict=False):
        rates = [_spread(runs, lambda run: run.rate / MEGA) for runs in by_workers.values()]
        _line(axis, [str(workers) for workers in by_workers], rates, way.name, colour)
    axis.axhline(found.ceiling / MEGA, color=_COLOURS[5], linestyle="--")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("workers")
    axis.set_ylabel("MB/s of content")
    axis.set_title("by number of workers; dashed: the ceiling", fontsize=9)
    _legend(axis)


def _line(
    axis: Any, names: Sequence[str], rates: Sequence[Spread], label: str, colour: str
) -> None:
    medians = [rate.median for rate in rates]
    axis.errorbar(
        names, medians, yerr=_bars(rates), label=label, color=colour, marker="o", capsize=3
    )


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)
    else:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center")


def _cycle() -> Sequence[str]:
    return _COLOURS * 4


def _bars(rates: Sequence[Spread]) -> list[list[float]]:
    return [
        [rate.median - rate.low for rate in rates],
        [rate.high - rate.median for rate in rates],
    ]


def _spread(runs: Sequence[Run], value: Callable[[Run], float]) -> Spread:
    spread = Spread.of([value(run) for run in runs])
    assert spread is not None
    return spread
