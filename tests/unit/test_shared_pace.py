"""A limit on what is fetched: by the threads of a process, over a channel, from a bucket."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ntt_backup.client.channel import Channel
from ntt_backup.client.throttle import Limit, SharedPace
from ntt_backup.client.transport import Local
from ntt_backup.config.bandwidth_timetable import parse_timetable
from ntt_backup.objects.s3_bucket import content_of

RATE = 4_000_000
BURST = RATE // 4


def paced() -> SharedPace:
    pace = SharedPace.of(parse_timetable(RATE))
    assert pace is not None
    assert pace.pause() == 0  # Now its time begins.
    return pace


def test_what_was_taken_and_did_not_go_is_given_back() -> None:
    now = 100.0
    pace = SharedPace(Limit(parse_timetable("100kB"), 1, clock=lambda: now).sender(0))
    first = pace.take_now(1 << 20)
    pace.give_back(first - 10)
    shares = 0
    while pace.take_now(1 << 20):
        shares += 1
    assert first * (shares - 1) <= 25_000 <= first * (shares + 1)
    now += pace.pause()
    assert pace.take_now(5) == 5


def test_several_channels_together_keep_to_the_limit() -> None:
    pace, each, channels = paced(), 1_000_000, 3
    began = time.monotonic()

    def fetch(_: int) -> int:
        channel = Channel(Local(), f"head -c {each} /dev/zero", fetch=pace)
        came = 0
        while (data := channel.read(10.0)) != b"":
            came += len(data or b"")
        channel.abort()
        return came

    with ThreadPoolExecutor(channels) as threads:
        assert list(threads.map(fetch, range(channels))) == [each] * channels
    # The last reads need not be waited for.
    assert time.monotonic() - began >= (each * channels - BURST) / RATE - 0.3


def test_a_channel_that_waits_for_its_pace_is_not_taken_for_silent() -> None:
    limit = Limit(None, 1)
    limit.held = True
    channel = Channel(Local(), "echo it is there", fetch=SharedPace(limit.sender(0)))
    for _ in range(3):
        heard = channel.heard
        assert channel.read(0.001) is None
        assert channel.heard > heard
    limit.held = False
    while (data := channel.read(1.0)) is None:
        continue
    assert data == b"it is there\n"
    channel.abort()


@pytest.mark.parametrize("size", [0, 1, 700_000])
def test_what_a_bucket_answers_comes_whole_at_the_pace(size: int) -> None:
    began = time.monotonic()
    pace, content = paced(), bytes(size)
    taken = sum(iter(lambda: pace.take_now(RATE), 0))
    assert content_of({"Body": io.BytesIO(content)}, size, pace) == content
    # The burst, and a share that is owed.
    assert time.monotonic() - began >= (taken + size - BURST * 1.25) / RATE
