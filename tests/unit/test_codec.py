"""How hard the codec compresses: it follows who waits for whom."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from ntt_backup.upload.strategies.codec import Effort, Load, choose_codec, cpu_load
from ntt_backup.wire.write_messages import RAW, ZSTD

STEPS = 6


@dataclass
class Machine:
    """A clock and CPUs that are idle for a share of the time."""

    now: float = 0.0
    idle: float = 0.0
    effort: Effort = field(init=False)

    def __post_init__(self) -> None:
        self.effort = Effort(STEPS, 2, lambda: self.now, lambda: Load(self.idle, self.now))

    def goes_on(
        self, seconds: float, *, works: float, waits: float, spare: float, counts: bool = True
    ) -> list[int]:
        """Returns the steps that are taken while it works, and waits for the link, for these shares
        of the time.
        """
        steps = []
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.idle += 0.25 * spare
            self.effort.note(works * 0.25, waits * 0.25, counts=counts)
            steps.append(self.effort.step)
        return steps


def test_a_link_that_is_waited_for_gets_the_highest_level() -> None:
    assert Machine().goes_on(10, works=0.2, waits=0.7, spare=0.6)[-1] == STEPS - 1


def test_what_takes_all_of_the_time_is_done_less() -> None:
    assert Machine().goes_on(10, works=0.9, waits=0.0, spare=0.5)[-1] == 0


def test_where_the_cpu_is_used_up_nothing_is_compressed_however_long_the_wait() -> None:
    assert Machine().goes_on(10, works=0.3, waits=0.6, spare=0.0)[-1] == 0


def test_what_was_too_much_is_tried_again_ever_more_rarely() -> None:
    machine = Machine()
    tries = []
    for second in range(200):
        high = machine.effort.step >= 3
        before = machine.effort.step
        machine.goes_on(1, works=0.9 if high else 0.2, waits=0.0 if high else 0.7, spare=0.5)
        if machine.effort.step > before:
            tries.append(second)
    assert 3 <= len(tries) <= 5
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)


def test_what_does_not_compress_says_nothing_about_the_level() -> None:
    assert set(Machine().goes_on(10, works=0.0, waits=0.9, spare=0.9, counts=False)) == {2}


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
