"""What must hold after every round, and once the trouble is over: checked from outside.

Nothing of the program is asked, but to replay a series of dumps. Rows are read with SQL, files
where they lie, lines of the log as anybody would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from ntt_backup.dump.record import SERIES
from ntt_backup.dump.series import replay
from tests.acceptance.conftest import validator
from tests.faults.environment import FaultEnvironment

# What a run may end with when it was not killed. 1 is for what nobody foresaw, and for a worker
# that died six times; no round has that many strikes at workers.
_EXPECTED = {0, 4, 5, 6, 7, 130, 143}
# Nothing is pending after these.
_FINISHED = {0, 7}


@dataclass
class Model:
    """Remembers across rounds what may not go away again."""

    named: set[str] = field(default_factory=set)
    lines: int = 0

    def begin_era(self) -> None:
        self.named.clear()

    def violations(
        self, environment: FaultEnvironment, status: int, output: str, known: set[str]
    ) -> list[str]:
        """Everything that is not as it must be, after a round. status: the run's; known: the blobs
        that existed before it, and whose marks it must have kept.
        """
        return [
            *self._remote(environment),
            *self._ledger(environment),
            *wrong_dumps(environment.dumps()),
            *self._log(environment),
            *_ending(status, output),
            *(self._pending(environment, known) if status in _FINISHED else ()),
        ]

    def complete(self, environment: FaultEnvironment) -> list[str]:
        """Everything that is not as it must be, after a clean run without trouble."""
        env = environment.env
        found = []
        ours = environment.blobs
        there = {Path(name).name: content for name, content in environment.on_remote().items()}
        if missing := ours.keys() - there.keys():
            found.append(f"{len(missing)} blobs are lost, such as {min(missing)}")
        if more := there.keys() - ours.keys():
            found.append(f"{len(more)} files are of no blob, such as {min(more)}")
        if wrong := [name for name in ours.keys() & there.keys() if ours[name] != there[name]]:
            found.append(f"{len(wrong)} files differ, such as {min(wrong)}")
        store = {Path(name).name: content for name, content in env.in_store().items()}
        if store != ours:
            found.append("the source has changed")
        if unmarked := ours.keys() - env.copied():
            found.append(f"{len(unmarked)} blobs are not marked, such as {min(unmarked)}")
        if failed := env.failures():
            found.append(f"{len(failed)} blobs are failed: {sorted(set(failed.values()))}")
        if litter := environment.litter():
            found.append(f"there is litter: {litter}")
        return [*found, *wrong_dumps(environment.dumps())]

    def _remote(self, environment: FaultEnvironment) -> list[str]:
        """Whatever has a name is whole and right, and what had one still has it."""
        found = []
        names = set()
        for path, content in environment.on_remote().items():
            name = Path(path).name
            names.add(name)
            if blake3(content).hexdigest() != name:
                found.append(f"{path} on the remote is not what its name says")
            if path != f"{name[:2]}/{name[2:4]}/{name}":
                found.append(f"{path} on the remote is in the wrong place")
        if gone := self.named - names:
            found.append(f"{len(gone)} files are gone, such as {min(gone)}")
        self.named |= names
        return found

    def _ledger(self, environment: FaultEnvironment) -> list[str]:
        """What is recorded as copied is there; what failed was bad."""
        found = []
        if unfounded := environment.env.copied() - self.named:
            found.append(f"{len(unfounded)} blobs are marked and not there: {min(unfounded)}")
        failed = environment.env.failures()
        if both := environment.env.copied() & failed.keys():
            found.append(f"{len(both)} blobs are copied and failed, such as {min(both)}")
        if wronged := failed.keys() - environment.ever_damaged:
            reasons = sorted({failed[blobid] for blobid in wronged})
            found.append(f"{len(wronged)} good blobs are failed: {reasons}, such as {min(wronged)}")
        return [*found, *environment.ledger_violations()]

    def _pending(self, environment: FaultEnvironment, known: set[str]) -> list[str]:
        """A run that says that it is finished has left nothing."""
        rows = environment.env.query(
            "select blobid from blobs"
            " where remote_copied is not true and remote_copy_failed is not true"
        )
        left = known & {blobid for (blobid,) in rows}
        return [f"{len(left)} blobs are pending, such as {min(left)}"] if left else []

    def _log(self, environment: FaultEnvironment) -> list[str]:
        """Every new line is as the schema says."""
        found = []
        events = environment.events()
        for line in events[self.lines :]:
            if error := next(iter(validator(line["event"]).iter_errors(line)), None):
                found.append(f"a line of the log breaks the schema: {error.message}: {line}")
        self.lines = len(events)
        return found


def wrong_dumps(there: Mapping[str, bytes]) -> list[str]:
    """A dump that has its name has its record, and is what the record says; with its
    whole dump, where it is an increment, it is what pg_dump wrote.
    """
    found = []
    for name in sorted(one for one in there if one.endswith(".dump")):
        if f"{name}.json" not in there:
            found.append(f"the dump {name} has no record")
            continue
        record = json.loads(there[f"{name}.json"])
        if record["sha256"] != hashlib.sha256(there[name]).hexdigest():
            found.append(f"the dump {name} is not what its record says")
        elif record["format"] == SERIES and not _comes_back(there, name, record):
            found.append(f"the dump {name} does not come back")
    return found


def _comes_back(there: Mapping[str, bytes], name: str, record: dict[str, Any]) -> bool:
    """Whether a dump of a series, with the one that it refers to, makes what pg_dump wrote."""
    base = record["base"]
    if base and base not in there:
        return False
    text = replay([there[name]], replay([there[base]]) if base else ())
    return hashlib.sha256(b"".join(text)).hexdigest() == str(record["text_sha256"])


def _ending(status: int, output: str) -> list[str]:
    found = []
    if status >= 0 and status not in _EXPECTED:
        found.append(f"the run ended with {status}: {output[-500:]}")
    if "Traceback" in output or "unforeseen" in output:
        found.append(f"the run did not foresee: {output[-1500:]}")
    return found
