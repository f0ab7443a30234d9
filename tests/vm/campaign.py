"""Rounds of faults, and the model that says after each what must be there."""

from __future__ import annotations

import math
import random
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from blake3 import blake3

from tests.acceptance.conftest import validator
from tests.faults.model import wrong_dumps
from tests.faults.plain_packs import Damaged, members, read_pack
from tests.helpers.waiting import wait_until
from tests.vm.faults import LASTING
from tests.vm.guest import SECONDS, Guest
from tests.vm.image import FILE_SYSTEMS
from tests.vm.pair import OURS, UNIT, Pair, Told

ROUNDS_AN_ERA: Final = 20
LAYOUTS: Final = ("files", "packs")
DUMPS: Final = ("full", "series")
FAULTS: Final = ("power", "reboot", *LASTING)
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

    faults: dict[str, Counter[str]] = field(default_factory=dict)
    restarts: int = 0
    unsettled: int = 0
    blobs: int = 0
    dumps: int = 0
    checks: int = 0
    eras: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def lines(self) -> list[str]:
        count = sum(victims.total() for victims in self.faults.values())
        eras = ", ".join(f"{number} of {name}" for name, number in sorted(self.eras.items()))
        return [
            f"{count} faults in {self.duration_s:.0f} s"
            f" ({self.duration_s / max(1, count):.1f} s each)",
            *(self._line(fault) for fault in self.faults),
            f"  disks with unflushed writes: {self.unsettled}; restarts: {self.restarts}",
            f"  rounds: {eras}",
            f"  blobs: {self.blobs}; checks: {self.checks}; dumps at once: {self.dumps}",
            f"  violations: {len(self.violations)}",
        ]

    def _line(self, fault: str) -> str:
        victims, waits = self.faults[fault], sorted(self.waits.get(fault, [0.0]))
        many = ", ".join(f"{number} {name}" for name, number in sorted(victims.items()))
        wait = waits[len(waits) // 2]
        return f"  {fault}: {victims.total()} ({many}), then to a new copy {wait:.1f} s (median)"


class Campaign:
    """The rounds, on two guests."""

    def __init__(
        self,
        pair: Pair,
        seed: int,
        say: Callable[[str], None],
        *,
        faults: Sequence[str] = ("power",),
        lying: bool = False,
    ) -> None:
        self.pair = pair
        self.tally = Tally()
        self._seed = seed
        self._say = say
        self._faults = faults
        self._before = ""
        self._lying = lying
        self._lies_from = math.inf
        self._model = Model()
        # The log may lose the end of its last line then.
        self._torn_lines = 0.0

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
        self._model, self._torn_lines = Model(), 0.0
        for guest in self.pair.both:
            guest.off()
        self.pair.begin(fs, {"remote": {"layout": layout}, "dump": {"mode": mode}})
        self.pair.await_progress()
        if self._lying:  # From now on: what was set up before is on the disk.
            self._lies_from = time.monotonic_ns()
        self._say(f"{self._era}, dumps {mode}")

    def _round(self, chance: random.Random, number: int) -> None:
        self.tally.eras[self._era] += 1
        fault = self._faults[number % len(self._faults)]
        victims, pair, told = chance.choice(_VICTIMS), self.pair, self.pair.told
        time.sleep(chance.uniform(0, _LONGEST_WORK_S))
        unsettled = 0
        if fault in LASTING:
            self._let_last(fault, victims, chance)
        else:
            unsettled = self._cut(fault, victims, chance)
        self.tally.faults.setdefault(fault, Counter())[victims] += 1
        began = time.monotonic()
        while fault == "power" and chance.random() < _EARLY:
            time.sleep(chance.uniform(0.5, _LONGEST_EARLY_S))
            unsettled += self._cut(fault, victims, chance)
            self.tally.faults[fault][victims] += 1
        if fault == "power" and "remote" in victims:
            self._model.lose(told.copied)
        pair.await_up()
        ended = fault in ("power", "reboot", "full") and "source" in victims
        if ended:
            pair.apply()
        else:
            told.begin_watch()
        pair.await_progress()
        took = time.monotonic() - began
        self.tally.waits.setdefault(fault, []).append(took)
        # A full remote ends the daemon once nothing is in flight; then systemd starts it again.
        restarts = "full" in (fault, self._before)
        self._before = fault
        found = self.violations(source="source" in victims, restarts=restarts)
        if restarts:
            self.tally.restarts += int(pair.unit()["NRestarts"])
            pair.source.run(f"systemctl reset-failed {UNIT}")
        self._say(
            f"{number:4} {fault:6} {victims:18} {unsettled:5} unflushed, copies again after"
            f" {took:4.1f} s, {len(told.copied)} copied"
        )
        self._found(f"round {number}, {self._era}, {fault} {victims}", found)

    def _hit(self, victims: str) -> list[Guest]:
        return [guest for guest in self.pair.both if guest.name in victims]

    def _cut(self, fault: str, victims: str, chance: random.Random) -> int:
        """Boot the guests anew, after the end of their power."""
        hit = self._hit(victims)
        for guest in hit:
            if fault == "power":
                guest.cut()
            else:
                guest.shut_down()
        if fault == "power" and "source" in victims:
            self._torn_lines += 1
        unsettled = 0
        for guest in hit:
            writes = guest.lose(chance, lies_from=self._lies_from)
            self.tally.unsettled += writes > 0
            unsettled += writes
            guest.start()
        return unsettled

    def _let_last(self, fault: str, victims: str, chance: random.Random) -> None:
        """Let guests have a fault for a while."""
        kind = LASTING[fault]
        with ExitStack() as stack:
            for guest in self._hit(victims):
                stack.enter_context(kind.strike(guest, chance))
            self.pair.told.begin_watch()
            time.sleep(chance.uniform(*kind.seconds))
            if kind.copies:
                self.pair.await_progress()
        if fault == "full" and "source" in victims:
            self._torn_lines = math.inf

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
        # It is inactive before systemd has come to it.
        waiting = ("activating", "inactive")
        wait_until(lambda: self.pair.unit()["ActiveState"] not in waiting, "the unit", SECONDS)
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
            # The unit goes on, and may remove a dump meanwhile.
            " pg_restore -f /dev/null ${one%.json} || { sleep 2; [ ! -e $one ]; } || exit 1; done"
        )
        if done.returncode != 0:
            found.append(f"pg_restore: {done.stderr[-900:]!r}")
        events, broken = pair.events()
        if broken > self._torn_lines:
            found.append(f"{broken} lines of the log are broken")
        for line in events:
            if error := next(iter(validator(line["event"]).iter_errors(line)), None):
                found.append(f"a line of the log breaks the schema: {error.message}: {line}")
                break
        return found


def default_work() -> Path:
    """Where images are kept."""
    return Path.home() / ".cache/ntt-vm"
