"""How hard the codec compresses: it follows who waits for whom."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ntt_backup.client.effort import Effort, Load, Sender, cpu_load
from ntt_backup.errors import Unsupported
from ntt_backup.upload.strategies.codec import (
    LONGEST_PAUSE,
    MOST_PACK_BYTES,
    SAMPLE_BYTES,
    choose_codec,
)
from ntt_backup.wire.framing import PACK_BYTES
from ntt_backup.wire.messages import RAW, ZLIB, ZSTD

STEPS = 6
SENDERS = 3


@dataclass
class Machine:
    """A clock and CPUs that are idle for a share of the time."""

    now: float = 1.0
    idle: float = 0.0
    senders: list[Sender] = field(init=False)
    effort: Sender = field(init=False)

    def __post_init__(self) -> None:
        shared = Effort(SENDERS, lambda: self.now, lambda: Load(self.idle, self.now))
        self.senders = [shared.sender(index) for index in range(SENDERS)]
        self.effort = self.senders[0]
        self.effort.set_steps(STEPS)

    def goes_on(
        self,
        seconds: float,
        *,
        works: float,
        waits: float,
        spare: float,
        shrinks: float = 0.4,
        raw: int = 1 << 20,
        frame: float = 0.125,
        senders: int = 1,
    ) -> list[int]:
        """Returns the steps that are taken while so many senders work, and wait for the link, for
        these shares of the time, each with a frame in so many seconds.
        """
        steps = []
        for _ in range(round(seconds / frame)):
            self.now += frame
            self.idle += frame * spare
            step = self.effort.step
            wire = int(raw * (shrinks if step else 1)) or 1 << 20
            for sender in self.senders[:senders]:
                sender.note(works * frame if step else 0.0, waits * frame, raw, wire)
            steps.append(self.effort.step)
        return steps


def test_a_link_that_is_waited_for_gets_a_higher_level_within_a_second() -> None:
    machine = Machine()
    assert 3 in machine.goes_on(1, works=0.2, waits=0.7, spare=0.6)
    assert machine.goes_on(10, works=0.2, waits=0.7, spare=0.6)[-1] == STEPS - 1


def test_a_level_is_found_before_a_short_run_is_over() -> None:
    machine = Machine()
    assert 3 in machine.goes_on(0.5, works=0.2, waits=0.7, spare=0.6, raw=4 << 20, frame=0.05)


def test_a_near_remote_gets_one_frame_compressed_and_the_others_as_they_are() -> None:
    """Over loopback the sender waits for the receiver, and by less than compressing takes. Now
    and then compressing is tried again.
    """
    machine, steps = Machine(), []
    machine.effort.set_near()
    for _ in range(800):
        plain = machine.effort.step == 0
        works, waits, raw = (0.0, 0.6, 55 << 20) if plain else (0.9, 0.05, 27 << 20)
        steps += machine.goes_on(0.125, works=works, waits=waits, spare=0.3, raw=raw)
    assert set(steps[:40]) == {0}
    assert steps.count(0) > 0.95 * len(steps)


@pytest.mark.parametrize("begun", [False, True])
def test_a_near_remote_behind_a_slow_link_is_compressed_for_soon(begun: bool) -> None:
    machine = Machine()
    if begun:
        machine.goes_on(0.02, works=0.2, waits=0.0, spare=0.6, frame=0.02)
    machine.effort.set_near()
    assert machine.effort.step == (0 if begun else 1)
    steps = machine.goes_on(1, works=0.05, waits=0.9, spare=0.8)
    assert (steps[0], steps[-1] > 1) == (0, True)


@pytest.mark.parametrize(("raw", "worked", "seconds"), [(300, 2e-4, 3), (1 << 20, 0.2, 60)])
def test_a_first_frame_that_took_long_for_its_bytes_does_not_end_compression(
    raw: int, worked: float, seconds: float
) -> None:
    """A tiny frame takes long for its bytes, and so does any frame where the CPU is busy."""
    machine = Machine()
    machine.effort.set_near()
    machine.effort.note(worked, 0.0, raw, raw // 2)
    assert machine.goes_on(seconds, works=0.05, waits=0.9, spare=0.8)[-1] > 1


def test_set_near_changes_nothing_once_a_step_was_tried() -> None:
    machine = Machine()
    steps = machine.goes_on(1, works=0.5, waits=0.2, spare=0.5)
    machine.effort.set_near()
    steps += machine.goes_on(1, works=0.5, waits=0.2, spare=0.5)
    assert set(steps) == {1}


def test_a_period_without_length_lasts_for_one_frame() -> None:
    """Two processes that decide at the same instant may leave one."""
    machine, looks = Machine(), 0

    def load() -> Load:
        nonlocal looks
        looks += 1
        return Load(machine.now, machine.now)

    shared = Effort(1, lambda: machine.now, load)
    machine.senders = [machine.effort] = [shared.sender(0)]
    machine.effort.set_steps(STEPS)
    assert machine.goes_on(3, works=0.9, waits=0.0, spare=0.5)[-1] == 0
    shared._state.period = 0.0
    looks = 0
    assert set(machine.goes_on(1, works=0.9, waits=0.0, spare=0.5, frame=0.01)) == {0}
    assert 1 < looks < 10


def test_what_takes_all_of_the_time_is_done_less() -> None:
    assert Machine().goes_on(3, works=0.9, waits=0.0, spare=0.5)[-1] == 0


def test_a_link_that_is_never_waited_for_gains_nothing_by_less_to_carry() -> None:
    """So it is on a link as fast as the machine, where reading takes the other half of the time."""
    assert Machine().goes_on(3, works=0.45, waits=0.04, spare=0.15)[-1] == 0


def test_what_sent_less_is_not_tried_again_while_no_compression_sends_as_much() -> None:
    machine = Machine()
    steps = machine.goes_on(3, works=0.8, waits=0.05, spare=0.2)
    assert steps[-1] == 0
    assert set(machine.goes_on(10, works=0.8, waits=0.6, spare=0.2, raw=2 << 20)) == {0}


def test_what_the_buffers_on_the_way_take_in_says_nothing_about_the_link() -> None:
    machine = Machine()
    steps = machine.goes_on(0.6, works=0.9, waits=0.0, spare=0.5, shrinks=0.4)
    assert set(steps) == {1}
    assert machine.goes_on(3, works=0.1, waits=0.8, spare=0.5)[-1] > 1


def test_a_level_is_not_tried_that_takes_more_than_the_cpus_have_left() -> None:
    """Level 12 takes nearly three times as long as level 9, and a try of it half a second."""
    works, spare = (0.0, 0.05, 0.1, 0.2, 0.38, 1.0), (1.6, 1.5, 1.4, 1.2, 1.0, 0.0)
    machine, steps = Machine(), []
    for _ in range(160):
        share, idle = works[machine.effort.step], spare[machine.effort.step]
        steps += machine.goes_on(0.125, works=share, waits=0.95 - share, spare=idle, senders=2)
    assert (steps[-1], max(steps)) == (4, 4)


def test_one_slow_period_keeps_no_step_that_takes_all_of_the_time() -> None:
    """So it is where one of two senders ends, and the other cannot fill the link by that level."""
    machine = Machine()
    while machine.effort.step < 3:
        machine.goes_on(0.125, works=0.2, waits=0.7, spare=0.6)
    machine.goes_on(2, works=0.6, waits=0.2, spare=0.6)
    assert machine.effort.step == 3
    while machine.effort.step == 3:
        machine.goes_on(0.125, works=0.2, waits=0.7, spare=0.6, raw=1 << 18)
    steps = machine.goes_on(2, works=0.96, waits=0.01, spare=0.4, raw=3 << 18)
    assert 3 in steps


def test_where_the_cpu_is_used_up_nothing_is_compressed_that_saves_little() -> None:
    machine = Machine()
    assert machine.goes_on(4, works=0.5, waits=0.2, spare=0.0)[-1] == 0
    assert set(machine.goes_on(40, works=0.4, waits=0.9, spare=0.0, raw=8 << 20)) == {0}


def test_where_the_cpu_is_used_up_the_lowest_level_stays_that_saves_much() -> None:
    machine = Machine()
    machine.goes_on(2, works=0.2, waits=0.7, spare=0.6)
    assert machine.effort.step > 1
    steps = machine.goes_on(20, works=0.15, waits=0.7, spare=0.0)
    assert (steps[-1], min(steps)) == (1, 1)


def test_a_link_that_becomes_slow_is_noticed_where_the_cpu_is_used_up() -> None:
    machine = Machine()
    assert machine.goes_on(4, works=0.5, waits=0.3, spare=0.0)[-1] == 0
    assert machine.goes_on(40, works=0.1, waits=0.9, spare=0.0, raw=1 << 18)[-1] == 1


def test_what_sends_more_than_no_compression_did_stays_on_a_busy_cpu() -> None:
    """It stays also after an hour without anything to send."""
    machine, steps = Machine(), []
    for _ in range(80):
        works = machine.effort.step > 0
        raw = 1 << 20 if works else 1 << 18
        steps += machine.goes_on(
            0.125, works=0.9, waits=0.05 if works else 0.95, spare=0.0, raw=raw
        )
        machine.now += 3600 if len(steps) == 60 else 0
    assert 0 in steps[:40]
    assert set(steps[40:]) == {1}


def test_all_senders_of_a_run_have_one_step() -> None:
    machine = Machine()
    machine.goes_on(10, works=0.2, waits=0.7, spare=0.6)
    assert {sender.step for sender in machine.senders} == {STEPS - 1}


def test_a_link_that_more_senders_fill_is_compressed_for() -> None:
    machine = Machine()
    assert machine.goes_on(3, works=0.2, waits=0.05, spare=0.7, raw=2 << 20)[-1] == 0
    steps = machine.goes_on(2, works=0.2, waits=0.6, spare=0.7, raw=2 << 20, senders=SENDERS)
    assert steps[-1] > 0


def test_frames_of_the_step_before_say_nothing_about_the_step() -> None:
    machine = Machine()
    while machine.effort.step < 2:
        machine.goes_on(0.125, works=0.2, waits=0.7, spare=0.6, senders=SENDERS)
    for late in machine.senders[1:]:
        late.note(5.0, 0.0, 1 << 20, 1 << 19)
        assert machine.effort.step == 2
    steps = machine.goes_on(2, works=0.2, waits=0.7, spare=0.6, senders=SENDERS)
    assert min(steps) == 2


def test_what_sent_less_is_tried_again_the_more_rarely_the_less_it_sent() -> None:
    def tries(less: int) -> int:
        machine, count = Machine(), 0
        for _ in range(1600):
            before = machine.effort.step
            high = before >= 3
            machine.goes_on(
                0.125,
                works=0.9 if high else 0.2,
                waits=0.0 if high else 0.7,
                spare=0.5,
                raw=(4 << 20) // (less if high else 1),
            )
            count += machine.effort.step > max(before, 2)
        return count

    assert 3 <= tries(4) < tries(2) <= 12


def test_what_was_taken_to_send_less_by_mistake_is_found_out() -> None:
    machine = Machine()
    steps = []
    for _ in range(160):
        plain = machine.effort.step == 0
        misled = machine.now < 3
        raw = (1 << 20) * (4 if not plain else 3 if misled else 12)
        waits = 0.6 if plain else 0.05
        steps += machine.goes_on(0.125, works=0.8, waits=waits, spare=0.3, raw=raw)
    assert steps[16] == 1
    assert set(steps[-40:]) == {0}


def test_what_is_not_tried_counts_as_sent() -> None:
    """Half of the content does not shrink. With the other half compressed, a third more goes."""
    machine, steps = Machine(), []
    for _ in range(80):
        compressed = machine.effort.step > 0
        raw = (4 << 20) if compressed else 3 << 20
        waits = 0.05 if compressed else 0.8
        machine.effort.note(0.0, 0.0, 0 if compressed else raw, raw)
        steps += machine.goes_on(0.125, works=0.5, waits=waits, spare=0.0, raw=raw)
    assert 0 in steps[:40]
    assert set(steps[40:]) == {1}


def test_what_does_not_compress_says_nothing_about_the_level() -> None:
    assert set(Machine().goes_on(10, works=0.0, waits=0.9, spare=0.9, raw=0)) == {1}


def test_the_load_of_this_machine_grows() -> None:
    load = cpu_load()
    assert 0 <= load.idle <= load.all


@pytest.mark.parametrize("setting", ["auto", "zstd-1", "zstd-12"])
def test_what_shrinks_is_compressed_and_what_does_not_travels_as_it_is(setting: str) -> None:
    codec = choose_codec(setting, ("zstd", "zlib"))
    text = [memoryview(b"all work and no play " * 5000)]
    number, parts = codec.encode(text)
    assert number == ZSTD
    assert sum(map(len, parts)) < 5000
    assert codec.encode([memoryview(b"\x00\x01\x02")]) == (RAW, [memoryview(b"\x00\x01\x02")])


@pytest.mark.parametrize(
    ("setting", "offered", "number"),
    [
        ("auto", ["zstd", "zlib"], ZSTD),
        ("auto", ["zlib"], ZLIB),
        ("auto", [], RAW),
        ("none", ["zstd", "zlib"], RAW),
        ("zlib", ["zstd", "zlib"], ZLIB),
        ("zstd-3", ["zstd"], ZSTD),
    ],
)
def test_a_codec_is_one_that_the_remote_has(setting: str, offered: list[str], number: int) -> None:
    assert choose_codec(setting, offered).number == number


@pytest.mark.parametrize(("offered", "has"), [(["zlib"], "zlib"), ([], "nothing")])
def test_a_codec_that_the_remote_lacks_is_asked_for_in_vain(offered: list[str], has: str) -> None:
    with pytest.raises(Unsupported, match="cannot decompress zstd") as refused:
        choose_codec("zstd-3", offered)
    assert refused.value.detail == f"it has {has}"


def test_packs_are_large_where_content_shrinks_and_only_there() -> None:
    codec = choose_codec("auto", ("zstd", "zlib"))
    assert codec.pack_bytes == MOST_PACK_BYTES
    codec.encode([memoryview(random.Random(1).randbytes(100_000))])
    assert codec.pack_bytes == PACK_BYTES
    assert choose_codec("zstd-1", ("zstd",)).pack_bytes == MOST_PACK_BYTES
    assert choose_codec("none", ("zstd",)).pack_bytes == PACK_BYTES


def test_a_pack_of_which_only_the_middle_shrinks_is_compressed() -> None:
    noise = random.Random(1).randbytes(1 << 20)
    codec = choose_codec("auto", ("zstd",))
    number, _ = codec.encode([memoryview(noise + bytes(2 << 20) + noise)])
    assert number == ZSTD


def test_content_that_does_not_shrink_is_tried_ever_more_rarely() -> None:
    codec = choose_codec("auto", ("zstd",))
    noise = [memoryview(random.Random(1).randbytes(SAMPLE_BYTES))]
    for _ in range(100):
        assert codec.encode(noise)[0] == RAW
    text = [memoryview(b"all work and no play " * 5000)]
    found = [codec.encode(text)[0] for _ in range(LONGEST_PAUSE + 1)]
    assert found[-1] == ZSTD
    assert RAW in found
