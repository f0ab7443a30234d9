"""What a bench sends and what it counts: samples, batches, bytes of ssh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.bench.remote import wire_bytes
from ntt_backup.bench.sample import batches, by_class, deal, draw
from ntt_backup.bench.sending import PLAIN, WAYS, choose
from ntt_backup.model import Blob, total_size

SIZES = st.lists(st.integers(0, 200_000_000), min_size=1, max_size=200)


def blobs(sizes: list[int]) -> list[Blob]:
    return [Blob(f"{number:064x}", size) for number, size in enumerate(sizes)]


@given(SIZES, st.integers(1, 10**9))
def test_sample_keeps_to_its_bytes_and_names_the_classes_it_lacks(
    sizes: list[int], budget: int
) -> None:
    population = blobs(sizes)
    drawn = draw(population, budget)
    assert set(drawn.blobs) <= set(population)
    assert len(set(drawn.blobs)) == len(drawn.blobs)
    assert len(drawn.blobs) == 1 or drawn.size <= budget
    # What is dropped to keep to the budget are the largest of those that are left.
    possible = [name for name in by_class(population) if name not in drawn.missing]
    present = list(by_class(drawn.blobs))
    assert present == possible[: len(present)]


def test_sample_has_the_proportions_of_the_population() -> None:
    population = blobs([999] * 600 + [1_000] * 300 + [50_000] * 100)
    drawn = draw(population, total_size(population) // 10)
    assert {name: len(members) for name, members in by_class(drawn.blobs).items()} == {
        "under 1 KB": 60,
        "1-10 KB": 30,
        "10-100 KB": 10,
    }


@given(SIZES, st.integers(1, 16))
def test_every_blob_is_dealt_to_one_worker_once(sizes: list[int], workers: int) -> None:
    wanted = blobs(sizes)
    hands = deal(batches(wanted, 1000, 256 << 20, workers), workers)
    assert 1 <= len(hands) <= workers
    assert all(hands)
    dealt = [blob for hand in hands for batch in hand for blob in batch]
    assert sorted(dealt, key=lambda one: one.blobid) == wanted


def test_every_strategy_is_a_way_and_ways_are_chosen_by_name() -> None:
    assert {way.name for way in choose([])} == {way.name for way in WAYS} > {"stream", "tar"}
    assert choose(["tar-pipe"]) == [PLAIN]
    with pytest.raises(ValueError, match="tar-lz4: none of stream, tar, "):
        choose(["tar-lz4"])


def test_wire_bytes_are_those_of_all_connections_both_ways() -> None:
    journal = (
        'Authenticated to h ([10.0.0.1]:22) using "publickey".\n'
        "Transferred: sent 1000, received 24 bytes, in 0.1 seconds\n"
        "Transferred: sent 3, received 1 bytes, in 0.1 seconds\n"
    )
    assert wire_bytes(journal) == 1028
    assert wire_bytes("") is None
