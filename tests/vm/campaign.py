"""Rounds of power cuts, and the model that says after each what must be there."""

from __future__ import annotations

import math
import random
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from blake3 import blake3

from tests.acceptance.conftest import validator
from tests.faults.model import wrong_dumps
from tests.faults.plain_packs import Damaged, members, read_pack
from tests.helpers.waiting import wait_until
from tests.vm.guest import SECONDS
from tests.vm.image import FILE_SYSTEMS
from tests.vm.pair import OURS, Pair, Told

ROUNDS_AN_ERA: Final = 20
LAYOUTS: Final = ("files", "packs")
DUMPS: Final = ("full", "series")
_VICTIMS: Final = ("remote", "remote", "source", "source and remote")
_BY_HASH, _PACKS, _BLOBS, _PGDUMP = "by-hash/", "packs/", "blobs/", "pgdump/"
# Of the power cuts, the share that comes at any moment after the last start, not at work.
_EARLY: Final = 0.25
_LONGEST_EARLY_S: Final = 8.0
_LONGEST_WORK_S: Final = 2.5


def blobs_of(files: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    """The blobs of a target, in both layouts, and what is wrong with what has a final name.

    Args:
        files: The content of each file of the target by its path.

    Returns:
        The content of each blob that is right by its blobid, and a line for each finding.
    """
    found, wrong = dict[str, bytes](), list[str]()
    for name, content in files.items():
        top, _, rest = name.partition("/")
        blobid = rest.rpartition("/")[2]
        if f"{top}/" in (_BY_HASH, _BLOBS):
            if rest != f"{blobid[:2]}/{blobid[2:4]}/{blobid}":
                if top == "by-hash" or not blobid.startswith("."):
                    wrong.append(f"{name} is in a strange place")
            elif blake3(content).hexdigest() != blobid:
                wrong.append(f"{name} is not what its name says")
            else:
                found[blobid] = content
        elif f"{top}/" == _PACKS and blobid[:1] != "." and not rest.startswith("trial-"):
            try:
                blobs, entries = read_pack(content)
                whole = len(blobs) == entries and members(content).items() <= blobs.items()
            except Damaged:
                blobs, whole = {}, False
            if not whole:
                wrong.append(f"{name} is damaged")
            found |= blobs
    return found, wrong


@dataclass
class Model:
    """What may not be missing any more."""

    named: set[str] = field(default_factory=set)

    def lose(self, said: Set[str]) -> None:
        """The power of the remote was cut: a name may be gone whose blob has no receipt yet."""
        self.named &= said

    def target_violations(
        self, files: Mapping[str, bytes], said: Iterable[str], ledger: Iterable[list[str]]
    ) -> list[str]:
        """Everything that is not as it must be on the remote.

        Args:
            files: The content of each file of the target by its path.
            said: Blobids that were marked, or said to be copied, before the files were read.
            ledger: The rows of ntt_backup.packs: key, blobs, size, checksum.
        """
        blobs, wrong = blobs_of(files)
        if lost := set(said) - blobs.keys():
            wrong.append(f"{len(lost)} blobs were said to be copied and are not there: {min(lost)}")
        if gone := self.named - blobs.keys():
            wrong.append(f"{len(gone)} blobs had a final name and are gone: {min(gone)}")
        self.named |= blobs.keys()
        for key, count, size, checksum in ledger:
            content = files.get(key)
            if content is None:
                wrong.append(f"the ledger has {key}, which is not there")
            elif (size, checksum) != (
                str(len(content)),
                b64encode(sha256(content).digest()).decode(),
            ):
                wrong.append(f"the ledger has another {key} of {count} blobs")
        dumps = {
            name.removeprefix(_PGDUMP): content
            for name, content in files.items()
            if name.startswith(_PGDUMP)
        }
        return [*wrong, *wrong_dumps(dumps)]


@dataclass
class Tally:
    """What a campaign did."""

    cuts: Counter[str] = field(default_factory=Counter)
    unsettled: int = 0
    blobs: int = 0
    dumps: int = 0
    checks: int = 0
    eras: Counter[str] = field(default_factory=Counter)
    boots: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def lines(self) -> list[str]:
        count = self.cuts.total()
        many = ", ".join(f"{number} {name}" for name, number in sorted(self.cuts.items()))
        eras = ", ".join(f"{number} of {name}" for name, number in sorted(self.eras.items()))
        boot = sorted(self.boots)[len(self.boots) // 2] if self.boots else 0.0
        return [
            f"{count} power cuts in {self.duration_s:.0f} s"
            f" ({self.duration_s / max(1, count):.1f} s each): {many}",
            f"  disks with unflushed writes: {self.unsettled};"
            f" from the cut to a new copy {boot:.1f} s (median)",
            f"  rounds: {eras}",
            f"  blobs: {self.blobs}; checks: {self.checks}; dumps at once: {self.dumps}",
            f"  violations: {len(self.violations)}",
        ]


class Campaign:
    """The rounds, on two guests."""

    def __init__(
        self, pair: Pair, seed: int, say: Callable[[str], None], *, lying: bool = False
    ) -> None:
        self.pair = pair
        self.tally = Tally()
        self._seed = seed
        self._say = say
        self._lying = lying
        self._lies_from = math.inf
        self._model = Model()
        self._cuts_of_source = 0

    def play(self, rounds: int, an_era: int = ROUNDS_AN_ERA) -> None:
        """Play the rounds; ends with the first that has violations."""
        began = time.monotonic()
        for number in range(rounds):
            chance = random.Random(f"{self._seed} {number}")
            if number % an_era == 0:
                era = self._seed + number // an_era
                layout, mode = LAYOUTS[era // 3 % 2], chance.choice(DUMPS)
                self.begin_era(FILE_SYSTEMS[era % 3], layout, mode)
            self._round(chance, number)
            last = (number + 1) % an_era == 0 or number + 1 == rounds
            if last and not self.tally.violations:
                self._found(f"after round {number}", self.end_era())
            self.tally.duration_s = time.monotonic() - began
            if self.tally.violations:
                return

    def begin_era(self, fs: str, layout: str, mode: str) -> None:
        """Begin with empty disks; blobs are being copied."""
        self._era = f"{fs}, {layout}"
        self._model, self._cuts_of_source = Model(), 0
        for guest in self.pair.both:
            guest.off()
        self.pair.begin(fs, {"remote": {"layout": layout}, "dump": {"mode": mode}})
        self.pair.await_progress()
        if self._lying:  # From now on: what was set up before is on the disk.
            self._lies_from = time.monotonic_ns()
        self._say(f"{self._era}, dumps {mode}")

    def _round(self, chance: random.Random, number: int) -> None:
        self.tally.eras[self._era] += 1
        victims = chance.choice(_VICTIMS)
        time.sleep(chance.uniform(0, _LONGEST_WORK_S))
        unsettled = self._cut(victims, chance)
        began = time.monotonic()
        while chance.random() < _EARLY:
            time.sleep(chance.uniform(0.5, _LONGEST_EARLY_S))
            unsettled += self._cut(victims, chance)
        if "remote" in victims:
            self._model.lose(self.pair.told.copied)
        self.pair.await_up()
        if "source" in victims:
            self.pair.apply()
        else:
            self.pair.told.begin_watch()
        self.pair.await_progress()
        took = time.monotonic() - began
        self.tally.boots.append(took)
        found = self.violations(source="source" in victims)
        self._say(
            f"{number:4} {victims:18} {unsettled:5} unflushed, copies again after {took:4.1f} s,"
            f" {len(self.pair.told.copied)} copied"
        )
        self._found(f"round {number}, {self._era}, {victims}", found)

    def _cut(self, victims: str, chance: random.Random) -> int:
        cut = [guest for guest in self.pair.both if guest.name in victims]
        for guest in cut:
            guest.cut()
        if "source" in victims:
            self._cuts_of_source += 1
        unsettled = 0
        for guest in cut:
            writes = guest.lose(chance, lies_from=self._lies_from)
            self.tally.unsettled += writes > 0
            unsettled += writes
            guest.start()
        self.tally.cuts[victims] += 1
        return unsettled

    def _found(self, where: str, found: Iterable[str]) -> None:
        for one in found:
            self.tally.violations.append(f"{where}: {one}")
            self._say(f"VIOLATION {where}: {one}")

    def violations(self, *, source: bool = True, restarts: bool = False) -> list[str]:
        """What is not as it must be now, while the program works.

        Args:
            source: Compare also what the source must have.
            restarts: The unit may have been restarted.
        """
        self.tally.checks += 1
        found = self._target()
        # What was read while it was being named may have looked wrong.
        if found:
            found = [one for one in self._target() if one in found]
        told = self.pair.told
        # What was copied before the cut may be told of before the unit is up.
        wait_until(lambda: self.pair.unit()["ActiveState"] != "activating", "the unit", SECONDS)
        unit = self.pair.unit()
        if unit["ActiveState"] != "active" or (unit["NRestarts"] != "0" and not restarts):
            found.append(f"the unit is {unit}")
        if told.failed:
            found.append(f"{told.failed} blobs are marked as failed")
        return [*found, *(self._source(told) if source else ())]

    def _target(self) -> list[str]:
        with self.pair.told.lock:
            said = set(self.pair.told.copied)
        said |= {row[0] for row in self.pair.query("select blobid from blobs where remote_copied")}
        ledger = self.pair.query("select key, blobs, size, checksum from ntt_backup.packs")
        files = self.pair.on_remote()
        self.tally.dumps = max(self.tally.dumps, sum(name.endswith(".dump") for name in files))
        return self._model.target_violations(files, said, ledger)

    def _source(self, told: Told) -> list[str]:
        """What the application was told to be durable must be there: else our disk is to blame."""
        with told.lock:
            stored = set(told.stored)
        rows = {row[0] for row in self.pair.query("select blobid from blobs")}
        files = set(self.pair.source.run("find /srv/store -type f -printf '%f\\n'").split())
        return [
            f"{len(stored - there)} blobs of the application have no {what} any more"
            for there, what in ((rows, "row"), (files, "file"))
            if stored - there
        ]

    def end_era(self, *, restarts: bool = False) -> list[str]:
        """What is not as it must be once all is copied."""
        pair = self.pair
        pair.stop_storing()
        wait_until(lambda: pair.told.all_copied, "all to be copied", SECONDS, pair.explain)
        self.tally.blobs += len(pair.told.stored)
        found = self.violations(restarts=restarts)
        store = {name.rpartition("/")[2]: one for name, one in pair.in_store().items()}
        there, _ = blobs_of(pair.on_remote())
        if wrong := [one for one in pair.told.stored if there.get(one) != store[one]]:
            found.append(f"{len(wrong)} blobs differ from the store: {min(wrong)}")
        done = pair.source.try_to(f"{OURS} verify")
        if done.returncode != 0:
            found.append(f"verify: {done.returncode} {done.stdout[-900:]!r} {done.stderr[-900:]!r}")
        done = pair.remote.try_to(
            "cd /srv/backup/pgdump; for one in $(grep -lE '\"format\": ?1[,}]' *.json || :); do"
            " pg_restore -f /dev/null ${one%.json}; done"
        )
        if done.returncode != 0:
            found.append(f"pg_restore: {done.stderr[-900:]!r}")
        events, broken = pair.events()
        if broken > self._cuts_of_source:
            found.append(f"{broken} lines of the log are broken")
        for line in events:
            if error := next(iter(validator(line["event"]).iter_errors(line)), None):
                found.append(f"a line of the log breaks the schema: {error.message}: {line}")
                break
        return found


def default_work() -> Path:
    """Where images are kept."""
    return Path.home() / ".cache/ntt-vm"
