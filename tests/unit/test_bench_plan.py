"""What a bench sends and by which ways: samples, batches, ssh's options, accounts of CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.bench.remote import accounted, remote_cpu_s, wire_bytes
from ntt_backup.bench.sample import CLASSES, batches, by_class, class_of, deal, draw, draw_class
from ntt_backup.bench.streams import stock
from ntt_backup.bench.ways import PLAIN, VARIATIONS, choose, registered
from ntt_backup.client.ssh import endpoint, query_argv, varied
from ntt_backup.model import Blob, total_size
from ntt_backup.upload.strategies import STRATEGIES

SIZES = st.lists(st.integers(0, 200_000_000), min_size=1, max_size=200)


def blobs(sizes: list[int]) -> list[Blob]:
    return [Blob(f"{number:064x}", size) for number, size in enumerate(sizes)]


# --- the sample


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (0, "under 1 KB"),
        (999, "under 1 KB"),
        (1000, "1-10 KB"),
        (99_999_999, "10-100 MB"),
        (100_000_000, "over 100 MB"),
    ],
)
def test_classes_are_cut_at_powers_of_ten(size: int, name: str) -> None:
    assert class_of(size) == name


@given(SIZES, st.integers(1, 10**9))
def test_a_sample_is_of_the_population_and_keeps_to_its_bytes(
    sizes: list[int], budget: int
) -> None:
    population = blobs(sizes)
    drawn = draw(population, budget)
    assert set(drawn.blobs) <= set(population)
    assert len(set(drawn.blobs)) == len(drawn.blobs)
    assert len(drawn.blobs) == 1 or drawn.size <= budget


@given(SIZES, st.integers(1, 10**9))
def test_every_class_is_in_the_sample_or_said_to_be_missing_unless_it_grew_too_large(
    sizes: list[int], budget: int
) -> None:
    population = blobs(sizes)
    drawn = draw(population, budget)
    there = list(by_class(drawn.blobs))
    assert not set(there) & set(drawn.missing)
    # What is dropped to keep to the budget are the largest of those that are left.
    possible = [name for name in by_class(population) if name not in drawn.missing]
    assert there == possible[: len(there)]


def test_a_sample_has_the_populations_proportions() -> None:
    population = blobs([500] * 600 + [5_000] * 300 + [50_000] * 100)
    drawn = draw(population, total_size(population) // 10)
    assert {name: len(members) for name, members in by_class(drawn.blobs).items()} == {
        "under 1 KB": 60,
        "1-10 KB": 30,
        "10-100 KB": 10,
    }


def test_a_store_that_fits_is_its_own_sample() -> None:
    population = blobs([1, 5_000, 70_000])
    assert set(draw(population, 10**6).blobs) == set(population)


def test_films_do_not_crowd_out_the_rest() -> None:
    drawn = draw(blobs([500] * 1000 + [600_000_000] * 3), 10_000_000)
    assert drawn.missing == ("over 100 MB",)
    assert len(drawn.blobs) == 1000


@given(SIZES, st.integers(1, 10**9), st.integers(1, 50))
def test_one_class_alone_keeps_to_its_limits(sizes: list[int], budget: int, most: int) -> None:
    for members in by_class(blobs(sizes)).values():
        few = draw_class(members, budget, most)
        assert 1 <= len(few) <= most
        assert len(few) == 1 or total_size(few) <= budget


# --- batches


@given(SIZES, st.integers(1, 16))
def test_every_blob_is_dealt_to_one_worker_once(sizes: list[int], workers: int) -> None:
    wanted = blobs(sizes)
    hands = deal(batches(wanted, 1000, 256 << 20, workers), workers)
    assert 1 <= len(hands) <= workers
    assert all(hands)
    dealt = [blob for hand in hands for batch in hand for blob in batch]
    assert sorted(dealt, key=lambda one: one.blobid) == wanted


def test_every_worker_has_something_where_there_is_enough() -> None:
    wanted = blobs([1000] * 64)
    assert len(deal(batches(wanted, 1000, 256 << 20, 8), 8)) == 8


def test_batches_are_no_larger_than_those_of_a_run() -> None:
    for batch in batches(blobs([10] * 1000), 7, 10**6, 2):
        assert len(batch) <= 7
    for batch in batches(blobs([10] * 1000), 10**6, 100, 2):
        assert total_size(batch) <= 100


# --- ways


def test_every_strategy_of_the_registry_is_a_way() -> None:
    assert {way.strategy for way in registered()} == set(STRATEGIES)
    assert len({way.name for way in (*registered(), *VARIATIONS)}) == len(STRATEGIES) + len(
        VARIATIONS
    )


def test_ways_whose_tools_are_missing_are_left_out_and_said() -> None:
    chosen, skipped = choose((), ["zstd"])
    assert {way.name for way in VARIATIONS} - {way.name for way in chosen} == set(skipped)
    assert set(skipped) == {"tar-zst-1", "tar-zst-3"}
    assert "zstd" in skipped["tar-zst-1"]


def test_ways_are_chosen_by_name() -> None:
    assert choose(["tar-pipe"], ["gzip"]) == ([PLAIN], {})
    with pytest.raises(ValueError, match="tar-lz4: none of stream, tar, "):
        choose(["tar-lz4"], [])


# --- ssh


def test_varied_options_stand_before_the_jobs_own() -> None:
    argv = varied(["ssh", "-T", "-o", "Compression=no", "--", "h", "true"], {"Compression": "yes"})
    assert argv[:4] == ["ssh", "-o", "Compression=yes", "-T"]
    assert argv[4:] == ["-o", "Compression=no", "--", "h", "true"]
    assert varied(["ssh", "h"], {}) == ["ssh", "h"]


def test_ssh_itself_takes_the_first_value_of_an_option() -> None:
    argv = ["ssh", "-F", "none", "-T", "-o", "Compression=no", "--", "h", "true"]
    asked = query_argv(varied(argv, {"Compression": "yes"}))
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert "\ncompression yes\n" in said


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ("host h\nhostname 10.0.0.1\nport 2222\n", ("10.0.0.1", 2222)),
        ("hostname ::1\nport 22\nproxycommand none\n", ("::1", 22)),
        ("hostname h\nport 22\nproxyjump bastion\n", None),
        ("hostname h\nport 22\nproxycommand nc h 22\n", None),
        ("", None),
    ],
)
def test_where_ssh_goes_is_known_unless_it_goes_by_a_proxy(
    said: str, where: tuple[str, int] | None
) -> None:
    assert endpoint(said) == where


def test_wire_bytes_are_those_of_all_connections_both_ways() -> None:
    journal = (
        'Authenticated to h ([10.0.0.1]:22) using "publickey".\n'
        "Transferred: sent 1000, received 24 bytes, in 0.1 seconds\n"
        "Transferred: sent 3, received 1 bytes, in 0.1 seconds\n"
    )
    assert wire_bytes(journal) == 1028
    assert wire_bytes("") is None


# --- CPU time


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_an_accounted_command_does_the_same_and_leaves_its_times(
    tmp_path: Path, shell: str
) -> None:
    account = tmp_path / "a b's account"
    command = accounted("exec sh -c 'cat; echo \"$0 done\"; exit 7'", str(account))
    done = subprocess.run(
        [shell, "-c", command], input="hello ", capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode, done.stderr) == ("hello sh done\n", 7, "")
    assert remote_cpu_s(account.read_text()) is not None


def test_cpu_times_are_those_of_the_commands_and_of_their_sshd() -> None:
    stat = "4711 (sshd-session) S 1 2 3 4 5 6 7 8 9 10 150 50 11 12\n"
    assert remote_cpu_s(f"0m0.10s 0m0.20s\n1m0.30s 0m0.40s\n{stat}") == pytest.approx(63.0)
    other = "4711 (python3) S 1 2 3 4 5 6 7 8 9 10 150 50 11 12\n"
    assert remote_cpu_s(f"0m0.10s 0m0.20s\n0m0.30s 0m0.40s\n{other}") == pytest.approx(1.0)
    assert remote_cpu_s("") is None


def test_an_account_that_cannot_be_written_disturbs_nothing(tmp_path: Path) -> None:
    command = accounted("echo fine", str(tmp_path / "missing" / "account"))
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"fine\n", 0)


# --- content


def test_random_content_does_not_compress_and_halves_do_by_half() -> None:
    import zlib

    for content, low, high in (("random", 0.99, 1.01), ("halves", 0.45, 0.6), ("zeros", 0, 0.01)):
        data = bytes(stock(content)[: 1 << 20])
        assert low <= len(zlib.compress(data, 6)) / len(data) <= high


def test_classes_leave_no_gap() -> None:
    ends = [end for _, end in CLASSES]
    assert ends[-1] is None
    assert ends[:-1] == sorted(end for end in ends if end is not None)
