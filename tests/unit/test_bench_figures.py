"""What a bench concludes from its measurements: rates, verdicts, tables, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ntt_backup.bench import link, verdict
from ntt_backup.bench.bucket_back import WAYS_BACK
from ntt_backup.bench.bucket_out import WAYS_OUT
from ntt_backup.bench.helpers import Answer
from ntt_backup.bench.link import rate_of
from ntt_backup.bench.results import Figure
from ntt_backup.bench.runs import Cell, Findings, Run, Runs
from ntt_backup.bench.sample import Sample
from ntt_backup.bench.sending import PLAIN, Way
from ntt_backup.model import Blob

MB = 1e6
UP = link.Streams("up")
TAR = Way("tar", strategy="tar")


def link_found(rates: dict[link.Streams, Iterable[float]]) -> link.Findings:
    return link.Findings(
        rates={
            cell: Figure(cell.name, "bytes/s", values=[value * MB for value in values])
            for cell, values in rates.items()
        },
        opening=Figure("opening", "s", values=[0.2, 0.25, 0.3]),
        trip=Figure("trip", "s", values=[0.027, 0.028, 0.031]),
    )


def runs(*rates: float, wire: int | None = 100) -> Runs:
    size = 100_000_000
    return Runs(Run(size / (rate * MB), 1000, size, wire, cpu=1.0) for rate in rates)


def ways_found(by_cell: dict[Cell, Runs]) -> Findings:
    sample = Sample((Blob("a" * 64, 60), Blob("b" * 64, 40)), ("over 100 MB",))
    ceilings = {1: [11e6, 12e6, 12.5e6], 4: [10e6, 11e6, 12e6]}
    return Findings(sample, unreadable=0, workers=4, runs=by_cell, ceilings=ceilings)


@pytest.mark.parametrize(
    ("answers", "rate"),
    [
        ([Answer(10.0, 12.0, size=24)], 12),
        # Two streams of 6 a second; the second was up to speed a second later.
        ([Answer(0.0, 4.0, size=24), Answer(1.0, 4.0, size=18)], 12),
        # One pipe of 12 a second: 6 each until the first ends, then 12 for the other.
        ([Answer(0.0, 2.0, size=12), Answer(0.0, 3.0, size=24)], 12),
        # The first was over before the second was up to speed.
        ([Answer(0.0, 1.0, size=100), Answer(2.0, 4.0, size=8)], 4),
    ],
)
def test_rate_of_streams_is_what_they_move_side_by_side(answers: list[Answer], rate: float) -> None:
    assert rate_of(answers) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (
            {UP: (11.8, 11.9, 12.0), link.Streams("up", 4): (11.9, 12.0, 12.1)},
            "Ceiling up: 12.0 MB/s, reached by 1 stream.",
        ),
        (
            {
                UP: (5.9, 6.0, 6.1),
                link.Streams("up", 2): (11.7, 11.8, 11.9),
                link.Streams("up", 4): (12,),
            },
            "Ceiling up: 12.0 MB/s, reached by 2 streams; one stream alone gets 6.0 MB/s.",
        ),
    ],
)
def test_verdict_names_the_fewest_streams_that_reach_the_ceiling(
    rates: dict[link.Streams, Iterable[float]], words: str
) -> None:
    said = verdict.of_link(link_found({**rates, link.Streams("down"): (20,)}))
    assert said[0] == words
    assert "take 28.0 ms" in said[2]
    assert "connection takes 250.0 ms" in said[2]


def test_verdict_ranks_ways_and_compares_them_with_the_ceiling() -> None:
    made = ways_found(
        {
            Cell(PLAIN, 4): runs(5, 6, 7),
            Cell(TAR, 4): runs(11, 11.4, 11.5),
            Cell(TAR, 1): runs(11.3, 11.3, 11.3),
        }
    )
    made.unreadable = 3
    assert verdict.of_strategies(made) == [
        "Ceiling: 12.0 MB/s of random bytes, measured between the runs.",
        "Fastest with 4 workers: tar, 11.4 MB/s, 95% of the ceiling.",
        "Workers, tar: 1 worker will do (1: 11.3 MB/s, 4: 11.4 MB/s).",
        "Too large for a sample of this size: blobs over 100 MB; see --sample.",
        "Not in the sample: 3 blobs that the store could not give as catalogued.",
    ]


def test_verdict_of_a_bucket_says_what_packs_save_and_what_comes_back_first() -> None:
    def bucket_runs(*rates: float, writes: int | None = None, first: float | None = None) -> Runs:
        return Runs(replace(run, writes=writes, first_s=first) for run in runs(*rates))

    each, none, zst = (one for one in WAYS_OUT if not one.name.startswith(("d", "pi", "c")))
    ranges, mount = WAYS_BACK[-2:]
    out = ways_found(
        {
            Cell(each, 4): bucket_runs(1.9, 2, 2.1, writes=1000),
            Cell(none, 4): bucket_runs(9, 10, 11, writes=8),
            Cell(zst, 4): bucket_runs(11.2, 11.4, 11.5, writes=6),
        }
    )
    back = ways_found(
        {
            Cell(ranges, 4): bucket_runs(11, 11, 11),
            Cell(mount, 4): bucket_runs(9, 9, 9, first=0.52),
        }
    )
    said = verdict.of_bucket(out, back, "Left in the bucket: all of it")
    assert said[1] == "Fastest with 4 workers: packs-zst, 11.4 MB/s, 95% of the ceiling."
    assert said[3:] == [
        "Compression pays on these blobs: 11.4 MB/s with, 10.0 MB/s without; 100% of the bytes go"
        " over the wire.",
        "One request a blob takes 1,000 requests where packs take 6, and 5.7 times as long.",
        "Ceiling back: 12.0 MB/s.",
        "Fastest way back with 4 workers: restore-ranges, 11.0 MB/s, 92% of the ceiling.",
        "restore-mount shows all blobs after 0.5 s.",
        "Each blob that came back was compared with its name.",
        "Left in the bucket: all of it",
    ]


def test_json_has_a_figure_for_each_cell_with_every_run() -> None:
    made = ways_found({Cell(TAR, 4): runs(11, 12, 13), Cell(TAR, 1): runs(6, 6, 6, wire=None)})
    report = json.loads(json.dumps(made.json()))
    first, second = report["figures"]
    assert (first["way"], first["workers"]) == ("tar", 4)
    assert first["bytes_per_s"] == pytest.approx({"median": 12e6, "low": 11e6, "high": 13e6})
    assert first["share_of_ceiling"] == pytest.approx(1.0)
    assert len(first["runs"]) == 3
    assert second["wire_bytes"] is None
    assert report["sample"]["blobs"] == 2
    assert report["sample"]["classes_left_out"] == ["over 100 MB"]
    assert report["link"]["ceiling_bytes_per_s"] == 12e6
