"""What a bench concludes from what it measured: rates, medians, verdicts, and the JSON of it."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from ntt_backup.bench import link_verdict, strategies_verdict
from ntt_backup.bench.link import ZEROS, Cell, Findings, Options, cells, rate_of
from ntt_backup.bench.results import Figure, Setting, Spread, report_json
from ntt_backup.bench.runs import MIX, Run
from ntt_backup.bench.runs import Cell as WayCell
from ntt_backup.bench.runs import Findings as WayFindings
from ntt_backup.bench.sample import Sample
from ntt_backup.bench.tasks import Answer
from ntt_backup.bench.ways import PLAIN, Way
from ntt_backup.model import Blob

MB = 1e6


def figure(name: str, *values: float, unit: str = "bytes/s") -> Figure:
    return Figure(name, unit, values=list(values))


def found(rates: dict[Cell, Iterable[float]], zeros: float = 480 * MB) -> Findings:
    return Findings(
        rates={
            cell: figure(cell.name, *(v * MB for v in values)) for cell, values in rates.items()
        },
        zeros=figure("zeros", zeros, zeros, zeros),
        connect=figure("connect", 0.028, unit="s"),
        opening=figure("opening", 0.2, 0.25, 0.3, unit="s"),
        trip=figure("trip", 0.027, 0.028, 0.031, unit="s"),
    )


UP = Cell("up")
PACKED = Cell("up", compressed=True)
HALVES = Cell("up", compressed=True, content="halves")


# --- rates


def test_the_rate_of_one_stream_is_its_bytes_by_its_time() -> None:
    assert rate_of([Answer(began=10.0, ended=12.0, size=24)]) == pytest.approx(12.0)


def test_streams_side_by_side_add_up_and_are_counted_from_when_the_last_was_under_way() -> None:
    # Two equal streams of 6 a second each; the second was up to speed a second later.
    answers = [Answer(began=0.0, ended=4.0, size=24), Answer(began=1.0, ended=4.0, size=18)]
    assert rate_of(answers) == pytest.approx(12.0)


def test_a_stream_that_ends_early_does_not_make_the_link_faster() -> None:
    # One pipe of 12 a second: 6 each until the first ends, then 12 for the other.
    answers = [Answer(began=0.0, ended=2.0, size=12), Answer(began=0.0, ended=3.0, size=24)]
    assert rate_of(answers) == pytest.approx(12.0)


def test_a_stream_that_was_over_before_another_began_counts_for_nothing() -> None:
    answers = [Answer(began=0.0, ended=1.0, size=100), Answer(began=2.0, ended=4.0, size=8)]
    assert rate_of(answers) == pytest.approx(4.0)


def test_a_spread_is_of_all_runs() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([]) is None
    assert Spread(2.0, 1.0, 3.0).times(1000) == Spread(2000.0, 1000.0, 3000.0)


# --- what is measured


def test_every_cipher_and_number_of_streams_goes_up_and_down_once() -> None:
    wanted = cells(Options(streams=(1, 4)), ["a", "b"])
    assert len(wanted) == len(set(wanted))
    for direction in ("up", "down"):
        mine = [cell for cell in wanted if cell.direction == direction]
        assert {cell.streams for cell in mine} == {1, 4}
        assert {cell.cipher for cell in mine} == {"", "a", "b"}
        assert {cell.compressed for cell in mine} == {True, False}


def test_zeros_are_in_no_figure() -> None:
    assert ZEROS not in cells(Options(), ["a"])
    shown = found({UP: (12, 12, 12)}).figures()
    assert "zeros" not in [one.name for one in shown]


# --- the verdict on a link


def test_one_stream_that_reaches_the_ceiling_is_enough() -> None:
    rates = {UP: (11.8, 11.9, 12.0), Cell("up", 4): (11.9, 12.0, 12.1)}
    assert link_verdict.streams_needed(found(rates), "up") == 1
    assert link_verdict.of_link(found(rates))[0] == "Ceiling up: 12.0 MB/s, reached by one stream."


def test_more_streams_are_named_where_one_falls_short() -> None:
    rates = {UP: (5.9, 6.0, 6.1), Cell("up", 2): (11.7, 11.8, 11.9), Cell("up", 4): (12, 12, 12)}
    said = link_verdict.of_link(found(rates))[0]
    assert said == "Ceiling up: 12.0 MB/s, reached by 2 streams; one stream alone gets 6.0 MB/s."


def test_the_times_are_said() -> None:
    said = " ".join(link_verdict.of_link(found({UP: (12, 12, 12)})))
    assert "take 28.0 ms" in said
    assert "connection 250.0 ms" in said


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        ((100, 101, 102), (300, 310, 320), "Cipher: fast moves 310.0 MB/s"),
        ((100, 101, 102), (99, 101, 103), "no other makes a difference"),
        ((100, 101, 102), (50, 51, 52), "slower: fast"),
        # A better median in runs that overlap is no better cipher.
        ((100, 101, 140), (90, 120, 130), "as fast as any"),
    ],
)
def test_a_cipher_is_better_only_where_its_runs_do_not_overlap(
    own: tuple[float, ...], other: tuple[float, ...], words: str
) -> None:
    rates = {UP: own, Cell("up", cipher="fast"): other}
    assert words in " ".join(link_verdict.of_link(found(rates)))


@pytest.mark.parametrize(
    ("packed", "halves", "words"),
    [
        ((12, 12, 12), (23, 24, 25), "costs nothing here on content that does not compress"),
        ((5.9, 6, 6.1), (23, 24, 25), "costs 50%"),
        ((12, 12, 12), (23, 24, 25), "and pays for content that halves (24.0 MB/s of it)"),
        ((5.9, 6, 6.1), (7, 8, 9), "does not even pay"),
    ],
)
def test_whether_compression_pays(
    packed: tuple[float, ...], halves: tuple[float, ...], words: str
) -> None:
    said = link_verdict.of_link(found({UP: (12, 12, 12), PACKED: packed, HALVES: halves}))
    assert words in " ".join(said)


def test_what_zeros_would_have_claimed_is_said_and_why_it_is_not_shown() -> None:
    said = link_verdict.of_link(found({UP: (12, 12, 12)}))[-1]
    assert "would have claimed 480.0 MB/s, 40.0 times the ceiling" in said
    assert "in none of the figures" in said


# --- the verdict on ways

TAR = Way("tar", strategy="tar")
GZ = Way("tar-gz", codec="gz")
SAMPLE = Sample((Blob("a" * 64, 60), Blob("b" * 64, 40)), ("over 100 MB",))


def runs(*rates: float, wire: int | None = 100) -> list[Run]:
    size = 100_000_000
    return [Run(size / (rate * MB), 1000, size, wire, 1.0, None) for rate in rates]


def ways_found(by_cell: dict[WayCell, list[Run]]) -> WayFindings:
    made = WayFindings(SAMPLE, 0, 4)
    made.runs = by_cell
    made.ceilings = {1: [11e6, 12e6, 12.5e6], 4: [10e6, 11e6, 12e6]}
    return made


def test_ways_are_ranked_and_held_against_the_ceiling() -> None:
    made = ways_found(
        {
            WayCell(TAR, 4): runs(11, 11.4, 11.5),
            WayCell(PLAIN, 4): runs(5, 6, 7),
            WayCell(TAR, 1): runs(11.3, 11.3, 11.3),
        }
    )
    assert [way.name for way in made.compared()] == ["tar", "tar-pipe"]
    said = strategies_verdict.of_strategies(made)
    assert said[0].startswith("Ceiling: 12.0 MB/s")
    assert said[1] == "Fastest with 4 workers: tar, 11.4 MB/s, 95% of the ceiling."
    assert said[2] == "Workers, tar: one worker will do (1: 11.3 MB/s, 4: 11.4 MB/s)."


def test_ways_whose_runs_overlap_are_no_different() -> None:
    made = ways_found({WayCell(TAR, 4): runs(10, 11, 12), WayCell(PLAIN, 4): runs(9, 10.5, 11)})
    assert "no certain difference to tar-pipe" in strategies_verdict.of_strategies(made)[1]


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        ((23, 24, 25), "pays on these blobs: tar-gz moves 24.0 MB/s, plain 12.0 MB/s"),
        ((5, 6, 7), "costs on these blobs"),
        ((11, 12, 13), "makes no difference"),
    ],
)
def test_whether_a_codec_pays_is_told_by_plain_tars(packed: tuple[float, ...], words: str) -> None:
    made = ways_found(
        {WayCell(PLAIN, 4): runs(11.9, 12, 12.1), WayCell(GZ, 4): runs(*packed, wire=50)}
    )
    said = next(
        line for line in strategies_verdict.of_strategies(made) if line.startswith("Compression")
    )
    assert words in said
    assert "50% of the bytes go over the wire" in said


def test_classes_come_in_the_order_of_their_sizes() -> None:
    made = ways_found(
        {
            WayCell(TAR, 4, "1-10 MB"): runs(12),
            WayCell(TAR, 4, "under 1 KB"): runs(1),
        }
    )
    assert list(made.classes()[TAR]) == ["under 1 KB", "1-10 MB"]
    assert "(under 1 KB)" in " ".join(strategies_verdict.of_strategies(made))


def test_what_was_too_large_for_the_sample_is_said() -> None:
    said = strategies_verdict.of_strategies(ways_found({WayCell(TAR, 4): runs(12, 12, 12)}))
    assert said[-1] == "Too large for a sample of this size: blobs over 100 MB; see --sample."


def test_blobs_that_could_not_be_read_are_said() -> None:
    made = ways_found({WayCell(TAR, 4): runs(12, 12, 12)})
    made.gone = 3
    assert strategies_verdict.of_strategies(made)[-1].startswith("Not in the sample: 3 blobs")


# --- JSON


def test_a_report_says_where_it_was_measured_and_holds_every_run() -> None:
    setting = Setting("2026-01-01T00:00:00+00:00", {"cores": 2}, {"host": "h"}, {"rounds": 3})
    report = report_json(
        "link",
        setting,
        took_s=1.23456,
        figures=[figure("trip", 0.1, 0.3, 0.2, unit="s").json()],
        verdict=["slow"],
        skipped={"aes128-ctr": "not there"},
    )
    assert json.loads(json.dumps(report)) == {
        "schema": 1,
        "bench": "link",
        "started": "2026-01-01T00:00:00+00:00",
        "machine": {"cores": 2},
        "remote": {"host": "h"},
        "options": {"rounds": 3},
        "took_s": 1.235,
        "figures": [
            {
                "name": "trip",
                "unit": "s",
                "median": 0.2,
                "low": 0.1,
                "high": 0.3,
                "runs": [0.1, 0.3, 0.2],
            }
        ],
        "skipped": {"aes128-ctr": "not there"},
        "verdict": ["slow"],
    }


def test_ways_as_json_have_a_figure_a_cell_and_one_for_the_way_back() -> None:
    made = ways_found({WayCell(TAR, 4): runs(11, 12, 13), WayCell(TAR, 1): runs(6, 6, 6)})
    made.returning = WayCell(TAR, 4)
    made.back = runs(10, 10, 10, wire=None)
    report = json.loads(json.dumps(made.json()))
    labels = [(one["way"], one["workers"], one["direction"]) for one in report["figures"]]
    assert labels == [("tar", 4, "up"), ("tar", 1, "up"), ("tar-back", 4, "down")]
    first, _, back = report["figures"]
    rate = pytest.approx({"median": 12e6, "low": 11e6, "high": 13e6})
    assert first["bytes_per_s"] == rate
    assert first["share_of_ceiling"] == pytest.approx(1.0)
    assert first["load"] == MIX
    assert len(first["runs"]) == 3
    assert back["wire_bytes"] is None
    assert report["sample"]["blobs"] == 2
    assert report["sample"]["classes_left_out"] == ["over 100 MB"]
    assert report["link"]["ceiling_bytes_per_s"] == 12e6
