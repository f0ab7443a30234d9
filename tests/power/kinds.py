"""What is played on a disk that loses power: blobs, by us and, as controls, by others.

Each kind works, says what must be there from when on, and looks at what a power cut has left.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from tests.helpers.postgres_server import Postgres
from tests.power.crashes import Moment
from tests.power.disks import REMOTE, Disk, call
from tests.power.machine import Catalog, Program, blobs_of, ended

now = time.monotonic_ns
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a kind is played. fs: the file system that loses power. broken: see `promising`."""

    fs: str
    seed: int
    home: Path
    work: Path
    server: Postgres
    broken: str = ""


class Kind:
    """One kind. Moments are taken from begin to end."""

    name: ClassVar[str] = ""
    size: ClassVar[int] = 320 * MIB
    flush_us: ClassVar[int] = 3000
    write_us: ClassVar[int] = 0

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.home = scene.home
        self.chance = random.Random(scene.seed)
        self.begin = self.end = 0
        self.facts: dict[str, Any] = {}
        self.disk = Disk(scene.fs, self.size, scene.home, scene.work, self.flush_us, self.write_us)
        self._catalogs: list[Catalog] = []
        self.ours: Program

    @property
    def remote(self) -> Path:
        """The directory on the disk that loses power."""
        return self.disk.mnt / REMOTE

    def catalog(self, more: str = "") -> Catalog:
        made = Catalog(self.scene.server, f"{self.home.name}{more}")
        self._catalogs.append(made)
        return made

    def program(self, remote: Path | None = None, *, catalog: bool = False) -> Program:
        """The program; its target is on the disk that loses power unless another is given."""
        server = self.scene.server
        if remote is not None:
            remote.mkdir()
        made = Program(
            self.home,
            self.catalog() if catalog else None,
            remote or self.remote,
            server.programs if catalog else None,
        )
        if self.scene.broken:
            made.environ["NTT_POWER_BROKEN"] = self.scene.broken
        if catalog:
            made("init-db")
        return made

    def work(self) -> None:
        """Play it on the disk, which has just been mounted."""
        raise NotImplementedError

    def promises(self) -> list[int]:
        """The times of promises."""
        return []

    def check(self, top: Path, moment: Moment) -> list[str]:
        """What is wrong on a crashed disk that is mounted at top."""
        raise NotImplementedError

    def again(self, moment: Moment) -> list[str]:
        """Let the program go on with the crashed disk, which is mounted where the disk was; what is
        wrong then.
        """
        return []

    def worth_going_on(self, top: Path, moment: Moment) -> bool:
        """Whether this crashed disk is one that the program ought to go on with."""
        return False

    def close(self) -> None:
        for one in self._catalogs:
            one.drop()


class Blobs(Kind):
    """Runs that send blobs."""

    count: ClassVar[int] = 700
    run: ClassVar[dict[str, Any]] = {"workers": 2, "batch_size": 20}
    environ: ClassVar[dict[str, str]] = {}
    # Beside by-hash: what a killed preflight leaves is removed once it is an hour old.
    may_stay: ClassVar[tuple[str, ...]] = ("by-hash", ".ntt-target.json", ".ntt-check-")

    def content(self, number: int) -> bytes:
        return self.chance.randbytes(self.chance.choice((0, 1, 300, 2000, 4096, 9000, 20_000)))

    def prepare(self) -> None:
        self.ours = self.program(catalog=True)
        self.ours.environ.update(self.environ)
        self.ours.configure({"run": self.run})
        self.blobs: dict[str, int] = {}
        self.fill(self.count)

    def fill(self, count: int) -> None:
        new = dict(self.ours.put(self.content(number)) for number in range(count))
        new = {name: size for name, size in new.items() if name not in self.blobs}
        self._catalogs[0].register(new)
        self.blobs |= new

    def work(self) -> None:
        self.prepare()
        self.begin = now()
        self.ours("run", "--once")
        self.end = now()
        self.collect()

    def collect(self) -> None:
        self.receipts = self.ours.noted("blobids")
        # What this machine shows right after the run, without any power cut.
        live, strange = blobs_of(self.remote / "by-hash")
        assert not strange, strange[:3]
        assert live == {name: name for name in self.blobs}
        assert self._catalogs[0].copied() == set(self.blobs)
        assert set(self.blobs) <= {one for _, many in self.receipts for one in many}
        self.facts = {"blobs": len(self.blobs), "receipts": len(self.receipts)}

    def promises(self) -> list[int]:
        return [at for at, _ in self.receipts]

    def promised(self, moment: Moment) -> set[str]:
        return {one for at, many in self.receipts if at <= moment.time for one in many}

    def may_be(self, name: str) -> set[str]:
        """The BLAKE3 of what may be visible under a name without a receipt."""
        return {name}

    def check(self, top: Path, moment: Moment) -> list[str]:
        by_hash = top / REMOTE / "by-hash"
        found, strange = blobs_of(by_hash)
        wrong = [f"STRANGE: {one} below by-hash" for one in strange]

        def about(name: str) -> str:
            size = (by_hash / relative_path(name)).stat().st_size
            return f"{name} ({self.blobs.get(name)} bytes) is wrong: {size} bytes"

        promised = self.promised(moment)
        for name in promised:
            if name not in found:
                wrong.append(f"LOST: {name} ({self.blobs[name]} bytes) is gone after its receipt")
            elif found[name] != name:
                wrong.append(f"LOST: after its receipt {about(name)}")
        for name, digest in found.items():
            if name not in promised and digest not in self.may_be(name):
                wrong.append(f"VISIBLE: {about(name)}")
        return wrong

    def again(self, moment: Moment) -> list[str]:
        self._catalogs[0].set_copied(self.promised(moment))
        done = self.ours("run", "--once", ok=False)
        wrong = [f"AGAIN: {ended(done)}"] if done.returncode else []
        found, strange = blobs_of(self.remote / "by-hash")
        wrong += [f"AGAIN: strange: {one}" for one in strange]
        if set(found) != set(self.blobs):
            missing, more = set(self.blobs) - set(found), set(found) - set(self.blobs)
            wrong.append(f"AGAIN: {len(missing)} missing, {len(more)} more")
        wrong += [f"AGAIN: {name} is wrong" for name, digest in found.items() if name != digest]
        names = [one.name for one in self.remote.iterdir()]
        litter = [name for name in names if not name.startswith(self.may_stay)]
        if litter:
            wrong.append(f"AGAIN: litter: {litter}")
        if self._catalogs[0].copied() != set(self.blobs):
            wrong.append("AGAIN: not all are recorded as copied")
        return wrong


class Small(Blobs):
    """A first backup: directories `aa` and `aa/bb` are moved whole."""

    name = "small"


class FourWorkers(Blobs):
    """A first backup by four workers, who publish into each other's directories."""

    name = "workers"
    run: ClassVar = {"workers": 4, "batch_size": 30}


class ByFile(Blobs):
    """The receiver syncs each file, as where the kernel or a filter has no syncfs."""

    name = "by-file"
    flush_us = 500
    count = 300
    environ: ClassVar = {"NTT_POWER_SYNC": "fsync"}
    # btrfs may keep a file of a stage and not the lock beside it: then the stage stays for a day.
    may_stay = (*Blobs.may_stay, ".ntt-incoming")


class Dense(Blobs):
    """A second run, into 16 directories that exist: blobs are published file by file."""

    name = "dense"
    count = 300

    def content(self, number: int) -> bytes:
        size = self.chance.choice((40, 300, 2000, 5000, 20_000))
        while True:
            content = self.chance.randbytes(40) + bytes(size - 40)
            found = blake3(content).digest()
            if found[0] & 0xCF == 0x40 and found[1] & 0xCF == 0x80:
                return content

    def work(self) -> None:
        self.prepare()
        self.ours("run", "--once")
        self.fill(400)
        self.begin = now()
        self.ours("run", "--once")
        self.end = now()
        self.collect()


class Tar(Blobs):
    """The strategy `tar`. Nothing tells that an earlier run's session is dead, so its stage stays
    for a day.
    """

    name = "tar"
    may_stay = (*Blobs.may_stay, ".ntt-incoming")
    run: ClassVar = {"workers": 3, "batch_size": 40, "strategy": "tar"}


class Mix(Blobs):
    """Large blobs in pieces; one of 70 MiB, which can be resumed."""

    name = "mix"
    count = 60
    size = 448 * MIB
    run: ClassVar = {"workers": 2, "batch_size": 20, "batch_bytes": 8 * MIB, "bwlimit": "60MB"}

    def content(self, number: int) -> bytes:
        if number == 0:
            return self.chance.randbytes(70 * MIB)
        if number < 4:
            return self.chance.randbytes(self.chance.randrange(4 * MIB, 12 * MIB))
        sizes = (0, 1000, 30_000, 200_000, 900_000, MIB + 1, 2_500_000)
        return self.chance.randbytes(self.chance.choice(sizes))


class Rot(Blobs):
    """Blobs have rotted, `verify` has found that, and the next run replaces them."""

    name = "rot"
    count = 400

    def work(self) -> None:
        self.prepare()
        self.ours("run", "--once")
        names = sorted(name for name, size in self.blobs.items() if size)
        self.rotten: dict[str, str] = {}
        for name in self.chance.sample(names, 120):
            path = self.remote / "by-hash" / relative_path(name)
            content = bytearray(path.read_bytes())
            content[self.chance.randrange(len(content))] ^= 1
            path.write_bytes(content)
            self.rotten[name] = blake3(content).hexdigest()
        call("sync", "-f", self.remote)
        assert self.ours("verify", ok=False).returncode == 7
        assert set(self.blobs) - self._catalogs[0].copied() == set(self.rotten)
        self.begin = now()
        self.ours("run", "--once")
        self.end = now()
        self.collect()

    def promised(self, moment: Moment) -> set[str]:
        again = [many for at, many in self.receipts if self.begin < at <= moment.time]
        return set(self.blobs) - set(self.rotten) | {one for many in again for one in many}

    def may_be(self, name: str) -> set[str]:
        return {name, self.rotten.get(name, name)}


class Control(Blobs):
    """Another program copies the store, part by part; its end stands for a receipt."""

    def work(self) -> None:
        self.ours = self.program()
        self.blobs = dict(self.ours.put(self.content(number)) for number in range(self.count))
        by_hash = self.remote / "by-hash"
        by_hash.mkdir()
        call("sync", "-f", self.remote)
        self.begin = now()
        self.receipts = []
        names = sorted(one.name for one in self.ours.store.iterdir())
        for part in range(4):
            some = names[part::4]
            self.copy(some, by_hash)
            self.receipts.append((now(), [one for one in self.blobs if one[:2] in some]))
            time.sleep(0.15)
        self.end = now()
        self.facts = {"blobs": len(self.blobs), "receipts": len(self.receipts)}

    def copy(self, names: list[str], by_hash: Path) -> None:
        raise NotImplementedError

    def again(self, moment: Moment) -> list[str]:
        return []


class Cp(Control):
    """cp -a: loses blobs."""

    name = "control-cp"

    def copy(self, names: list[str], by_hash: Path) -> None:
        call("cp", "-a", *(self.ours.store / one for one in names), by_hash)


class Rsync(Control):
    """rsync -a: loses blobs."""

    name = "control-rsync"

    def copy(self, names: list[str], by_hash: Path) -> None:
        call("rsync", "-a", *(self.ours.store / one for one in names), by_hash)


class TarX(Control):
    """tar | tar: loses blobs."""

    name = "control-tar"

    def copy(self, names: list[str], by_hash: Path) -> None:
        pack = f"tar -C {self.ours.store} -cf - {' '.join(names)}"
        call("sh", "-c", f"{pack} | tar -C {by_hash} -xf -")


class CpSync(Cp):
    """cp -a and sync -f: shows names before their content, and loses nothing."""

    name = "control-cp-sync"

    def copy(self, names: list[str], by_hash: Path) -> None:
        super().copy(names, by_hash)
        call("sync", "-f", by_hash)


def kinds_of(*modules: Any) -> dict[str, Callable[[Scene], Kind]]:
    """The kinds that are played, by name."""
    found = [one for module in modules for one in vars(module).values()]
    return {
        one.name: one
        for one in found
        if isinstance(one, type) and issubclass(one, Kind) and one.name
    }
