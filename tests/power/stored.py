"""What is played: packs, dumps, increments of a series, and versions of snapshots on the remote."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3

from tests.faults.plain_packs import Damaged, read_pack
from tests.power.crashes import Moment
from tests.power.disks import REMOTE, call
from tests.power.kinds import MIB, Kind, Scene, now
from tests.power.machine import ended

_NEVER = 1 << 62
_FORGET = ("forget", "s", "--keep-last", "1", "--keep-daily", "0", "--keep-weekly", "0", "--yes")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree_of(top: Path) -> dict[str, str]:
    """What is below a directory: by path its mode, size, time and hash, or what it is."""
    found = {}
    for path in sorted(top.rglob("*")):
        name, status = str(path.relative_to(top)), path.lstat()
        mode = f"{status.st_mode & 0o7777:o}"
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            found[name] = f"dir {mode}"
        else:
            found[name] = f"{mode} {status.st_size} {status.st_mtime_ns} {sha256(path)}"
    return found


def differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    return [
        f"{name}: wanted {wanted.get(name)}, found {found.get(name)}"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]


class Files(Kind):
    """Files that have a name stay whole until their removal begins."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        # Of each file, once it had its name.
        self.sums: dict[str, str] = {}

    def collect(self) -> None:
        self.named = {one: at for at, many in self.ours.noted("named") for one in many}
        self.removed = {one: at for at, many in self.ours.noted("removed") for one in many}

    def promises(self) -> list[int]:
        return [*sorted(self.named.values()), self.end]

    def check(self, top: Path, moment: Moment) -> list[str]:
        wrong = []
        for name, at in self.named.items():
            path = top / REMOTE / name
            if at <= moment.time < self.removed.get(name, _NEVER):
                if not path.exists():
                    wrong.append(f"LOST: {name} was named, and is gone")
                elif name in self.sums and sha256(path) != self.sums[name]:
                    wrong.append(f"LOST: {name} was named, and is wrong: {path.stat().st_size} B")
        return wrong + self.visible(top / REMOTE)

    def visible(self, root: Path) -> list[str]:
        """What has a final name and is not whole, whether or not it was promised."""
        return []

    def forget_cache(self, moment: Moment) -> None:
        """Every second time the machine has lost what it keeps to save work. What it notes of the
        newest is of the end of the play, and not of the moment.
        """
        for note in (self.home / "log").glob("newest-*.json"):
            note.unlink()
        if moment.seed % 2:
            shutil.rmtree(self.home / "cache", ignore_errors=True)


class Packs(Files):
    """The layout `packs`: runs that send packs, and large blobs as files of their own."""

    name = "packs"
    count: ClassVar[int] = 600
    # Of these blobs a fifth.
    large: ClassVar[int] = 15_000
    may_stay: ClassVar[tuple[str, ...]] = ("packs", "blobs", "format.json", ".ntt-check-")

    def work(self) -> None:
        self.ours = self.program(catalog=True)
        self.ours.environ["NTT_POWER_LARGE_BLOB"] = str(self.large)
        self.ours.configure({"remote": {"layout": "packs"}, "run": {"batch_size": 25}})
        sizes = (0, 1, 300, 2000, 4096, 9000, 14_000, 16_000, 20_000)
        new = (self.chance.randbytes(self.chance.choice(sizes)) for _ in range(self.count))
        self.blobs = dict(map(self.ours.put, new))
        self._catalogs[0].register(self.blobs)
        call("sync", "-f", self.remote)
        self.begin = now()
        self.ours("run", "--once")
        self.end = now()
        self.collect()
        self.receipts = self.ours.noted("blobids")
        self.packs = self.ours.noted("packs")
        files = [one for one in self.remote.rglob("*") if one.is_file()]
        self.sums = {str(one.relative_to(self.remote)): sha256(one) for one in files}
        # What this machine shows right after the run, without any power cut.
        assert self.stored(self.remote) == (set(self.blobs), [])
        assert self._catalogs[0].copied() == set(self.blobs)
        assert {one for _, many in self.receipts for one in many} == set(self.blobs)
        self.facts = {"blobs": len(self.blobs), "files": len(self.sums)}

    def promises(self) -> list[int]:
        return [*super().promises(), *(at for at, _ in self.receipts)]

    def promised(self, moment: Moment) -> set[str]:
        return {one for at, many in self.receipts if at <= moment.time for one in many}

    def stored(self, root: Path) -> tuple[set[str], list[str]]:
        """The blobs that are right, and files that have a final name and are not whole."""
        found: set[str] = set()
        wrong: list[str] = []
        for path in (one for one in root.rglob("*") if one.is_file() and one.name[0] != "."):
            name = str(path.relative_to(root))
            if name.startswith("blobs/"):
                if blake3(path.read_bytes()).hexdigest() == path.name:
                    found.add(path.name)
                else:
                    wrong.append(name)
            elif path.suffix == ".tar":
                try:
                    blobs, entries = read_pack(path.read_bytes())
                except Damaged:
                    blobs, entries = {}, 1
                found |= blobs.keys()
                wrong += [name] if len(blobs) < entries else []
            elif name == "format.json" and not path.read_bytes().endswith(b"}\n"):
                wrong.append(name)
        return found, wrong

    def check(self, top: Path, moment: Moment) -> list[str]:
        root = top / REMOTE
        found, _ = self.stored(root)
        gone = self.promised(moment) - found
        lost = [f"LOST: {one} ({self.blobs[one]} bytes) is gone after its receipt" for one in gone]
        if self.promised(moment) and not (root / "format.json").exists():
            lost.append("LOST: the marker is gone after a receipt")
        return lost + super().check(top, moment)

    def visible(self, root: Path) -> list[str]:
        return [f"VISIBLE: {name} is not whole" for name in self.stored(root)[1]]

    def again(self, moment: Moment) -> list[str]:
        catalog = self._catalogs[0]
        catalog.set_copied(self.promised(moment))
        kept = [one for at, many in self.packs if at <= moment.time for one in many]
        catalog.query("delete from ntt_backup.packs where key <> all(%s)", kept)
        self.forget_cache(moment)
        wrong = []
        for words in (("run", "--once"), ("verify",)):
            done = self.ours(*words, ok=False)
            wrong += [f"AGAIN: {words}: {ended(done)}"] if done.returncode else []
        found, bad = self.stored(self.remote)
        wrong += [f"AGAIN: {one} is not whole" for one in bad]
        if found != set(self.blobs) or catalog.copied() != found:
            wrong.append(f"AGAIN: {len(set(self.blobs) - found)} missing, or not recorded")
        names = [one.name for one in self.remote.iterdir()]
        litter = [name for name in names if not name.startswith(self.may_stay)]
        return [*wrong, f"AGAIN: litter: {litter}"] if litter else wrong


class Dumps(Files):
    """Whole dumps by the receiver; old ones are removed."""

    name = "dumps"
    rounds: ClassVar[int] = 5
    dump: ClassVar[dict[str, Any]] = {"mode": "full", "keep_last": 2}
    strategy: ClassVar[str] = "stream"

    def work(self) -> None:
        self.ours = self.program(catalog=True)
        kept = {"keep_daily": 0, "keep_weekly": 0, "full_every": 3, **self.dump}
        run = {"strategy": self.strategy, "skip_pgdump": False}
        self.ours.configure({"dump": kept, "run": run})
        self.rows = 0
        self.done: list[tuple[int, int]] = []
        call("sync", "-f", self.remote)
        self.begin = now()
        for _ in range(self.rounds):
            self.grow()
            self.ours("dump", "--force")
            self.done.append((now(), self.rows))
            for path in (self.remote / "pgdump").iterdir():
                self.sums[f"pgdump/{path.name}"] = sha256(path)
        self.end = now()
        self.collect()
        self.facts = {"dumps": self.rounds, "named": len(self.named), "removed": len(self.removed)}

    def grow(self) -> None:
        rows = "select md5(i::text) || md5((i * 7)::text), i from generate_series(%s::int, %s::int)"
        self._catalogs[0].query(
            f"insert into blobs (blobid, size) {rows} i", self.rows, self.rows + 2999
        )
        self._catalogs[0].query("update blobs set size = size + 1 where size % 97 = 3")
        self.rows += 3000

    def visible(self, root: Path) -> list[str]:
        place, wrong = root / "pgdump", []
        names = {one.name for one in place.iterdir()} if place.exists() else set()
        for name in sorted(one for one in names if one.endswith(".dump")):
            if name.startswith("."):
                continue
            if f"{name}.json" not in names:
                wrong.append(f"VISIBLE: {name} has no record")
                continue
            try:
                record = json.loads((place / f"{name}.json").read_text())
            except ValueError:
                wrong.append(f"VISIBLE: the record of {name} is not whole")
                continue
            if sha256(place / name) != record["sha256"]:
                size = (place / name).stat().st_size
                wrong.append(f"VISIBLE: {name} is wrong: {size} of {record['bytes']} bytes")
            if record.get("base") and record["base"] not in names:
                wrong.append(f"VISIBLE: {name} needs {record['base']}, which is gone")
        return wrong

    def again(self, moment: Moment) -> list[str]:
        self.forget_cache(moment)
        rows = [rows for at, rows in self.done if at <= moment.time]
        wrong = self.restored(rows[-1], "after the power cut") if rows else []
        for words in (("dumps", "--json"), ("dump", "--force"), ("dump", "--force")):
            done = self.ours(*words, ok=False)
            if done.returncode not in ((0, 7) if words[0] == "dumps" else (0,)):
                wrong.append(f"AGAIN: {words}: {ended(done)}")
        wrong += self.restored(self.rows, "after the next dump")
        return wrong + [f"AGAIN: {one}" for one in self.visible(self.remote)]

    def restored(self, rows: int, when: str) -> list[str]:
        back = self.catalog("_back")
        with self.ours.catalog_at(back.url):
            done = self.ours("restore", "--catalog", ok=False)
        if done.returncode:
            return [f"AGAIN: restore --catalog {when}: {ended(done)}"]
        found = back.query("select count(*) from blobs")[0][0]
        # The newest dump may be one that was not promised yet.
        return [] if found >= rows else [f"AGAIN: {when} {found} rows came back of {rows}"]


class DumpsByShell(Dumps):
    """Dumps by the remote's sh: the end of the command is the promise."""

    name = "dumps-tar"
    strategy = "tar"

    def collect(self) -> None:
        # As they came: the names of two dumps of one second are in any order.
        names = [name for name in self.sums if name.endswith(".dump")]
        self.named, self.removed = {}, {}
        for number, name in enumerate(names):
            for one in (name, f"{name}.json"):
                self.named[one] = self.done[number][0]
                # The newest two are kept: it is removed within the second dump after it.
                if number + 2 < len(self.done):
                    self.removed[one] = self.done[number + 1][0]


class Series(Dumps):
    """A series: whole dumps and increments."""

    name = "series"
    rounds = 7
    dump: ClassVar = {"mode": "series", "keep_last": 3}


class Snapshots(Files):
    """Versions of a tree are taken, and forgotten."""

    name = "snapshots"
    takes: ClassVar[int] = 6

    def work(self) -> None:
        self.ours = self.program()
        self.tree = self.home / "tree"
        self.tree.mkdir()
        kept = {"keep_last": 2, "keep_daily": 0, "keep_weekly": 0, "full_every": 1}
        self.ours.configure({"snapshots.s": {"paths": [str(self.tree)], **kept}})
        self.big = bytearray(self.chance.randbytes(6 * MIB))
        self.trees: dict[str, dict[str, str]] = {}
        self.taken: list[tuple[int, str]] = []
        call("sync", "-f", self.remote)
        self.begin = now()
        for number in range(self.takes):
            self.change(number)
            self.ours("snapshot", "take", "s", *(["--full"] if number == 3 else []))
            newest = self.versions()[-1]
            self.taken.append((now(), newest))
            self.trees[newest] = tree_of(self.tree)
            for path in (self.remote / "snapshots").rglob("*"):
                if path.is_file():
                    self.sums[str(path.relative_to(self.remote))] = sha256(path)
        self.ours("snapshot", *_FORGET)
        self.end = now()
        self.collect()
        self.facts = {"takes": self.takes, "named": len(self.named), "removed": len(self.removed)}

    def change(self, number: int) -> None:
        chance = self.chance
        for _ in range(40):
            path = self.tree / f"d{chance.randrange(6)}/f{chance.randrange(40)}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(chance.randbytes(chance.choice((0, 10, 3000, 20_000, 100_000))))
        at = chance.randrange(len(self.big) - 70_000)
        self.big[at : at + 70_000] = chance.randbytes(70_000)
        (self.tree / "big").write_bytes(self.big)
        if number == 0:
            (self.tree / "link").symlink_to("d0/f0")
            os.link(self.tree / "big", self.tree / "other name")

    def versions(self) -> list[str]:
        """The versions that exist: those with a manifest."""
        place = self.remote / "snapshots/s"
        return sorted(one.parent.name for one in place.glob("*/manifest"))

    def again(self, moment: Moment) -> list[str]:
        self.forget_cache(moment)
        there, wrong = self.versions(), []
        promised = [name for at, name in self.taken if at <= moment.time]
        # The last command forgets all but the newest.
        if promised and promised[-1] not in there:
            wrong.append(f"LOST: version {promised[-1]} was taken, and is not there")
        if there:
            wrong += self.verified("after the power cut")
        for version in random.Random(moment.seed).sample(there, min(2, len(there))):
            wrong += self.restored(version, self.trees.get(version))
        for words in (("take", "s"), _FORGET):
            done = self.ours("snapshot", *words, ok=False)
            if done.returncode:
                wrong.append(f"AGAIN: {words}: {ended(done)}")
            elif words[0] == "take":
                wrong += self.restored(self.versions()[-1], tree_of(self.tree))
        return wrong + self.verified("at the end")

    def verified(self, when: str) -> list[str]:
        done = self.ours("snapshot", "verify", "--download", ok=False)
        return [f"AGAIN: verify {when}: {ended(done)}"] if done.returncode else []

    def restored(self, version: str, wanted: dict[str, str] | None) -> list[str]:
        to = self.home / "back"
        shutil.rmtree(to, ignore_errors=True)
        done = self.ours("snapshot", "restore", f"s@{version}", "--to", to, ok=False)
        if done.returncode:
            return [f"AGAIN: restore of {version}: {ended(done)}"]
        if wanted is None:
            return [f"AGAIN: nobody knows {version}"]
        found = differences(wanted, tree_of(to / str(self.tree)[1:]))
        return [f"AGAIN: {version} comes back differently: {one}" for one in found[:3]]
