"""The level of compression that the workers choose: nearly as fast as the best fixed one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import pytest

from ntt_backup.client.compression_level import Effort, Sender

MB = 1_000_000
STEPS = 6
# What a byte of content becomes, and the seconds that a megabyte takes, with each step.
TEXT = (1.0, 0.37, 0.34, 0.31, 0.30, 0.295), (0.0, 0.003, 0.0055, 0.014, 0.022, 0.060)
LITTLE = (1.0, 0.75, 0.72, 0.70, 0.69, 0.685), (0.0, 0.003, 0.005, 0.013, 0.025, 0.080)
# Reading and encrypting a megabyte, in seconds of a core; receiving it on this machine.
READS, RECEIVES = 0.002, 0.003
BUFFERS = 2.1
TICK = 0.004


class Control(Protocol):
    @property
    def step(self) -> int: ...
    def note(self, worked: float, waited: float, raw: int, wire: int) -> None: ...


@dataclass
class Fixed:
    step: int

    def note(self, worked: float, waited: float, raw: int, wire: int) -> None: ...


@dataclass
class Worker:
    """A process that compresses a frame, then pushes it into its buffer. All in MB and seconds."""

    control: Control
    raw: float = 0.0
    wire: float = 0.0
    left: float = 0.0
    push: float = 0.0
    buffer: float = 0.0
    worked: float = 0.0
    waited: float = 0.0


@dataclass
class World:
    """Workers that share cores and a link. near: the receiver takes time of the cores, too."""

    content: tuple[tuple[float, ...], tuple[float, ...]]
    link: float
    cores: int
    near: bool = False
    now: float = 1.0
    received: float = 0.0
    steps: list[int] = field(default_factory=list)

    def send(self, megabytes: float, controls: list[Control]) -> float:
        """Returns the seconds until all of it is on the other side."""
        workers, left, began = [Worker(one) for one in controls], megabytes, self.now
        while left > 0 or any(one.raw or one.buffer for one in workers) or self.received > 0:
            for one in workers:
                if not one.raw and left > 0:
                    step = one.control.step
                    one.raw = min(left, 4.0 if step else 1.0)
                    left -= one.raw
                    one.wire = one.push = one.raw * self.content[0][step]
                    one.left = one.raw * (READS + self.content[1][step])
                    one.worked = one.waited = 0.0
            self._tick(workers)
        return self.now - began

    def _tick(self, workers: list[Worker]) -> None:
        self.now += TICK
        busy = [one for one in workers if one.left > 0]
        share = min(1.0, self.cores / max(1, len(busy) + (self.received > 0)))
        self.received = max(0.0, self.received - share * TICK / RECEIVES)
        for one in busy:
            one.left -= share * TICK
            one.worked += TICK if one.left < one.raw * self.content[1][one.control.step] else 0.0
        full = [one for one in workers if one.buffer > 0]
        for one in full:
            sent = min(one.buffer, self.link * TICK / len(full))
            one.buffer -= sent
            self.received += sent * one.raw / one.wire if self.near and one.wire else 0.0
        for one in workers:
            if not one.raw or one.left > 0:
                continue
            room = 0.0 if self.received > 8 else BUFFERS - one.buffer
            moved = min(room, one.push)
            one.buffer += moved
            one.push -= moved
            if one.push > 0:
                one.waited += TICK
                continue
            one.control.note(one.worked, one.waited, int(one.raw * MB), max(1, int(one.wire * MB)))
            self.steps.append(one.control.step)
            one.raw = 0.0


def adaptive(world: World, senders: int) -> list[Sender]:
    effort = Effort(senders, lambda: world.now)
    made = [effort.sender(index) for index in range(senders)]
    made[0].set_steps(STEPS)
    if world.near:
        made[0].set_near()
    return made


@pytest.mark.parametrize(
    ("content", "link", "cores", "senders", "megabytes", "best"),
    [
        (TEXT, 12, 2, 1, 100, 4),
        (TEXT, 12, 2, 4, 400, 4),
        (TEXT, 110, 2, 4, 500, 1),
        (TEXT, 110, 4, 4, 500, 2),
        (TEXT, 1000, 2, 4, 500, 0),
        (LITTLE, 12, 2, 4, 100, 4),
        (LITTLE, 110, 2, 1, 500, 1),
        (LITTLE, 1000, 4, 1, 500, 0),
    ],
)
def test_the_levels_are_nearly_as_fast_as_the_best_one(
    content: tuple[tuple[float, ...], tuple[float, ...]],
    link: float,
    cores: int,
    senders: int,
    megabytes: float,
    best: int,
) -> None:
    """Over a link of 12 MB/s, a fast one, and one within this machine."""
    world = World(content, link, cores, near=link == 1000)
    fixed = World(content, link, cores, near=link == 1000)
    took = world.send(megabytes, [*adaptive(world, senders)])
    assert took < 1.08 * fixed.send(megabytes, [Fixed(best)] * senders), world.steps


def test_a_link_that_becomes_slow_or_fast_is_noticed() -> None:
    world = World(TEXT, 1000, 2, near=True)
    senders = adaptive(world, 2)
    world.send(500, [*senders])
    assert world.steps[-1] == 0
    world.link, world.near = 12, False
    world.send(200, [*senders])
    assert world.steps[-1] > 2
    world.link = 110
    world.send(2000, [*senders])
    assert world.steps[-1] <= 2


def test_all_senders_of_a_run_have_one_step_and_another_process_changes_none() -> None:
    world = World(TEXT, 12, 2)
    senders = adaptive(world, 3)
    world.send(100, [*senders[:2]])
    assert len({one.step for one in senders}) == 1
    assert senders[2].step > 1
    senders[2].set_near()
    assert senders[2].step > 1


def test_a_time_without_anything_to_send_counts_as_none() -> None:
    world = World(TEXT, 12, 2)
    senders = adaptive(world, 2)
    for _ in range(20):
        world.send(20, [*senders])
        world.now += 3600
    assert world.steps[-1] > 1


def test_content_that_is_not_tried_says_nothing_about_the_level() -> None:
    """A tiny frame does not either: the call takes longer than its bytes."""
    now = [1.0]
    effort = Effort(1, lambda: now[0])
    sender = effort.sender(0)
    sender.set_steps(STEPS)
    for raw, wire in ((0, MB), (300, 200)) * 100:
        now[0] += 0.1
        sender.note(0.0 if not raw else 2e-4, 0.09, raw, wire)
    assert sender.step == 1
