"""What happens in each simulated hour, decided by the seed alone.

A copier works on weekdays from 8 to 20 o'clock, an operator looks at 9, a disk is swapped every
week, and between them something breaks: one fault at a time, each undone before the next one comes.
The nights and the weekends have idle hours.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DAY = 24
_OPERATOR_AT = 9
_WORK = range(8, 20)
_FAULTS_A_DAY = 1.5
_QUIET_HOURS = 3  # After a fault, before the next one.


@dataclass(frozen=True)
class Act:
    """name: of a method of `World`, which is called with the values."""

    name: str
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(str, (self.name, *self.values)))


# Faults with the names of targets for which they are; none: for no target in particular.
_FAULTS: Sequence[tuple[str, Sequence[str]]] = (
    ("rot_in_store", ()),
    ("rot_of_a_new_blob", ()),
    ("lose_in_store", ()),
    ("delete_rows", ()),
    ("rot_on_target", ("usb", "remote", "vault", "disk", "sealed")),
    ("remove_from_target", ("usb", "remote", "vault", "disk", "sealed")),
    ("outage", ("usb", "remote", "vault", "sftp", "bucket")),
    ("stall", ("remote", "vault", "sftp", "bucket")),
    ("outage_of_catalog", ()),
    ("crash_of_catalog", ()),
    ("kill_daemon", ()),
    ("kill_worker", ()),
    ("reload", ()),
    ("move_clock", ()),
)
# With how many hours at least and at most.
_LASTING = {
    "outage": (1, 9),
    "stall": (1, 3),
    "outage_of_catalog": (1, 6),
    "crash_of_catalog": (0, 0),
    "kill_daemon": (0, 3),
    "move_clock": (2, 30),
}


def plan(seed: int, hours: int, targets: Sequence[str], *, calm: bool) -> dict[int, list[Act]]:
    """Returns what happens in each hour, the operator's work last."""
    chance = random.Random(seed)
    acts: defaultdict[int, list[Act]] = defaultdict(list)
    days = max(1, hours // DAY)
    swap_days = max(1, min(7, days // 3))
    for hour in range(hours):
        day, clock = divmod(hour, DAY)
        swaps = clock == _OPERATOR_AT and day % swap_days == 0 and day
        if "usb" in targets and (swaps or (days == 1 and hour == _OPERATOR_AT + 7)):
            acts[hour].append(Act("swap_disks"))
        if day % 7 < 5 and clock in _WORK and chance.random() < 0.8:
            acts[hour].append(Act("insert", (chance.randrange(3, 40),)))
            if clock == 14 and day % 3 == 0:
                acts[hour].append(Act("insert", (300,)))
            if clock == 10 and day % 2 == 0:
                acts[hour].append(Act("forget_rows", (chance.randrange(1, 8),)))
        if calm and clock == 3:
            acts[hour].append(Act("reload"))
    if not calm:
        _break(chance, acts, hours, targets)
        acts[hours // 2 // DAY * DAY + 2].append(Act("upgrade"))
    for hour in range(_OPERATOR_AT, hours, DAY):
        acts[hour].append(Act("operate"))
    return dict(acts)


def _break(
    chance: random.Random, acts: dict[int, list[Act]], hours: int, targets: Sequence[str]
) -> None:
    deck: list[Act] = []
    # The first hours are for the first copies; the last day and a half is for what was broken.
    first, last = 4, hours - DAY * 3 // 2
    step = max(1.0, min(DAY / _FAULTS_A_DAY, (last - first) / len(_cards(targets))))
    hour, free = float(first), 0
    while hour < last:
        if not deck:
            deck = _cards(targets)
            chance.shuffle(deck)
        act = deck.pop()
        at = max(free, int(hour + chance.random() * step / 2))
        least, most = _LASTING.get(act.name, (0, 0))
        lasts = chance.randint(least, max(least, min(most, int(step * 2))))
        if act.name in _LASTING:
            act = Act(act.name, (*act.values, lasts))
        acts.setdefault(at, []).append(act)
        if act.name in _LASTING:
            # What lasts ends before anything else happens.
            ends = acts.setdefault(at + lasts, [])
            ends.insert(0 if lasts else len(ends), Act("undo", (act.name,)))
        free = at + lasts + min(_QUIET_HOURS, int(step))
        hour = max(hour + step, free)


def _cards(targets: Sequence[str]) -> list[Act]:
    found = []
    for name, only in _FAULTS:
        if only:
            found += [Act(name, (target,)) for target in only if target in targets]
        else:
            found.append(Act(name))
    return found
