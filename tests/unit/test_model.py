"""The nouns: a blobid is checked before it becomes a path, and sums count what is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.model import Batch, Blob, Receipt, Shard, total_size

GOOD = "0123456789abcdef" * 4
blobids = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(blobids)
def test_a_blobid_lies_below_its_first_two_pairs(blobid: str) -> None:
    assert is_blobid(blobid)
    first, second, name = relative_path(blobid).split("/")
    assert (first, second, name) == (blobid[0:2], blobid[2:4], blobid)


@given(blobids | st.text(), st.integers(1, 1000))
def test_each_text_is_in_one_shard_and_a_shard_has_what_its_numbers_say(
    text: str, count: int
) -> None:
    shards = [Shard(number, count) for number in range(1, count + 1)]
    (having,) = (one for one in shards if one.has(text))
    assert (shards[0].first, shards[-1].end) == (0, 1 << 256)
    assert [one.end for one in shards[:-1]] == [one.first for one in shards[1:]]
    if is_blobid(text):
        assert having.first <= int(text, 16) < having.end


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD + "0",
        GOOD + "\n",
        GOOD.upper(),
        GOOD[:-1] + "g",
        "../" + GOOD[3:],
        GOOD[:-1] + "/",
        GOOD[:-1] + "\0",
        GOOD[:-1] + "\N{FULLWIDTH DIGIT ONE}",
    ],
)
def test_any_other_text_is_no_blobid_and_has_no_path(text: str) -> None:
    assert not is_blobid(text)
    with pytest.raises(ValueError, match="not a blobid"):
        relative_path(text)


@given(st.lists(st.none() | st.integers(0, 2**50)))
def test_sums_count_the_sizes_that_are_known(sizes: list[int | None]) -> None:
    blobs = tuple(Blob(f"{index:064x}", size) for index, size in enumerate(sizes))
    known = sum(size for size in sizes if size is not None)
    assert total_size(blobs) == known
    assert Batch("b", blobs).size == known
    assert Receipt(Batch("b", blobs), blobs, (), 0, 0.0).stored_bytes == known
