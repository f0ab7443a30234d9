"""What a fault may touch where the target has packs: a disk of this machine, or one behind ssh.

The campaign reads the target with means of its own. What it damages itself is remembered: all else
that is visible must be right.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from abc import abstractmethod
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pyrage
from blake3 import blake3

from tests.faults.environment import BALLAST, FaultEnvironment
from tests.faults.plain_packs import Damaged, members, opened, read_pack
from tests.helpers.blobs import Person

PACKS, BLOBS, DUMPS, TRIALS = "packs/", "blobs/", "pgdump/", "packs/trial-"
_MARKER = "format.json"
_SEALED = ".age"
_SEALED_SHARE = 0.8
# Far ahead: rounds without recipients leave what is not sealed for the others to read.
_LAST_DAY = "9000-01-01"


@dataclass(repr=False, kw_only=True)
class PackFaults(FaultEnvironment):
    """spoiled: names of files that the campaign has damaged. packs: of each pack the blobs in it
    that are right, as `on_remote` has seen them last. owner: who can open what is sealed.
    """

    owner: Person
    spoiled: set[str] = field(default_factory=set)
    packs: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @abstractmethod
    def listed(self, below: str) -> list[str]:
        """The names of files below a directory of the target."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file."""

    @abstractmethod
    def put(self, name: str, content: bytes | None) -> None:
        """Writes over a file; takes it away where there is no content."""

    @abstractmethod
    def kept(self, name: str, checksum: str) -> tuple[int, str]:
        """The size and the checksum of a file. checksum: the ledger's."""

    def begin_round(self) -> None:
        super().begin_round()
        if self.strategy.startswith("sealed"):
            # What some runs have sealed and others have not is for all to go on with.
            sealing = self.chance.random() < _SEALED_SHARE
            pack = {"recipients": [self.owner.public] * sealing, "unsealed_until": _LAST_DAY}
            self.env.write_config(pack=pack)

    def begin_packs(self) -> None:
        """An empty source, and a target that gets its marker by a run."""
        self.begin_source()
        self.env.query("truncate ntt_backup.packs")
        self.spoiled.clear()
        self.add(2)
        self.env.run("run", expect=0)

    def on_remote(self) -> dict[str, bytes]:
        """All blobs; under a name what is wrong and was not damaged by the campaign."""
        found: dict[str, bytes] = {}
        self.packs = {}
        for name in self.listed(PACKS):
            if name.startswith(TRIALS):
                continue
            content, bad = self.read(name), name in self.spoiled
            try:
                content = opened(content, self.owner.secret)
                blobs, entries = read_pack(content)
                whole = bad or (len(blobs) == entries and members(content).items() <= blobs.items())
            except Damaged:
                blobs, whole = {}, bad
            if not whole:
                found[name] = b"damaged"
            self.packs[name] = blobs
            found |= {_path(blobid): content for blobid, content in blobs.items()}
        for name in self.listed(BLOBS):
            content = self.read(name)
            if name not in self.spoiled or blake3(content).hexdigest() == name.rpartition("/")[2]:
                found[name.removeprefix(BLOBS)] = content
        return found

    def ledger_violations(self) -> list[str]:
        """The ledger's packs are those of the target, and hold all that is copied."""
        found = list[str]()
        held = {name.rpartition("/")[2] for name in self.listed(BLOBS)}
        for name, low, high, count, size, checksum in self.env.query(
            "select key, low, high, blobs, size, checksum from ntt_backup.packs"
        ):
            if not (blobs := self.packs.get(name)):
                found.append(f"the ledger has {name}, which is not right on the target")
                continue
            held |= blobs.keys()
            there = (min(blobs), max(blobs), len(blobs), *self.kept(name, checksum))
            if there != (low, high, count, size, checksum):
                found.append(f"the ledger has another {name}: {(low, high, count, size, checksum)}")
        if nowhere := self.env.copied() - held:
            found.append(
                f"{len(nowhere)} marked blobs are in no pack of the ledger: {min(nowhere)}"
            )
        return found

    def dumps(self) -> dict[str, bytes]:
        identity, found = pyrage.x25519.Identity.from_str(self.owner.secret), {}
        for name in self.listed(DUMPS):
            content, dump = self.read(name), name.removeprefix(DUMPS)
            if dump.endswith(_SEALED):
                content = pyrage.decrypt(content, [identity])
            found[dump.removesuffix(_SEALED)] = content
        return found

    def alter_remote(self, count: int) -> set[str]:
        """Alters packs, or takes them away; returns the marked blobs that are right nowhere."""
        names = sorted(row[0] for row in self.env.query("select key from ntt_backup.packs"))
        for name in self.chance.sample(names, min(count, len(names))):
            content = bytearray(self.read(name))
            way = self.chance.choice(("flip", "flip", "table", "cut", "remove"))
            self.spoiled.add(name)
            if way == "remove":
                self.put(name, None)
                continue
            if way == "cut":
                del content[self.chance.randrange(len(content)) :]
            else:
                at = len(content) - 1100 if way == "table" else self.chance.randrange(len(content))
                content[max(0, at)] ^= 1 << self.chance.randrange(8)
            self.put(name, bytes(content))
        return self.env.copied() - {Path(name).name for name in self.on_remote()}


@dataclass(repr=False, kw_only=True)
class DirectoryPackFaults(PackFaults):
    """Packs in a directory of the remote, or of a disk of this machine. target: ssh or disk."""

    target: str

    @property
    def sent(self) -> int:
        if self.target == "ssh":
            return super().sent
        files = [one for one in self._top.rglob("*") if not one.is_dir() and one.name != BALLAST]
        return sum(one.stat().st_size for one in files if one.exists())

    def on_target(self, script: str) -> bytes:
        if self.target == "ssh":
            return super().on_target(script)
        return subprocess.run(["sh", "-c", script], capture_output=True, check=False).stdout

    def await_quiet(self) -> None:
        if self.target == "ssh":
            super().await_quiet()
        self.await_end()

    def begin_era(self) -> None:
        self.disk.free()
        for entry in self._top.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self.begin_packs()

    @property
    def beside(self) -> tuple[str, ...]:
        return (*super().beside, _MARKER, PACKS[:-1], BLOBS[:-1])

    @property
    def _top(self) -> Path:
        return self.env.remote.local

    def listed(self, below: str) -> list[str]:
        """But files that are being written, or whose receiver was killed."""
        there = [one for one in (self._top / below).rglob("*") if one.is_file()]
        return sorted(str(one.relative_to(self._top)) for one in there if one.name[0] != ".")

    def read(self, name: str) -> bytes:
        return (self._top / name).read_bytes()

    def put(self, name: str, content: bytes | None) -> None:
        if content is None:
            (self._top / name).unlink()
        else:
            (self._top / name).write_bytes(content)

    def kept(self, name: str, checksum: str) -> tuple[int, str]:
        content = self.read(name)
        return len(content), base64.b64encode(sha256(content).digest()).decode()


def _path(blobid: str) -> str:
    return f"{blobid[:2]}/{blobid[2:4]}/{blobid}"
