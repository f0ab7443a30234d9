"""What is played: this machine loses power while it restores, packs, installs, and keeps its state.

The target lies elsewhere, and was made before.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3

from ntt_backup.snapshot.restore.tree import MARKER
from tests.power.crashes import Moment
from tests.power.disks import REMOTE, call
from tests.power.kinds import MIB, Kind, now
from tests.power.machine import Done, blobs_of, ended
from tests.power.stored import differences, sha256, tree_of

_BUSY = """\
import os, sys, time
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
while True:
    os.pwrite(fd, os.urandom(100), 0)
    os.ftruncate(fd, 100 + os.urandom(1)[0])
    os.fsync(fd)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def busy(path: Path, pause: float = 0.04) -> Iterator[None]:
    """Another program of the same disk syncs a file of its own, as a database or a log does."""
    process = subprocess.Popen([sys.executable, "-c", _BUSY, str(path), str(pause)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Local(Kind):
    """A store, and a copy of it as the target."""

    count: ClassVar[int] = 400
    large: ClassVar[tuple[int, ...]] = (70 * MIB,)

    def prepare(self) -> None:
        elsewhere = self.home / "elsewhere"
        self.ours = self.program(elsewhere)
        sizes = (0, 10, 3000, 9000, 30_000, 300_000)
        some = [self.chance.choice(sizes) for _ in range(self.count)]
        contents = (self.chance.randbytes(size) for size in (*self.large, *some))
        self.blobs = dict(self.ours.put(content) for content in contents)
        shutil.copytree(self.ours.store, elsewhere / "by-hash")
        self.out = self.remote / "out"
        call("sync", "-f", self.disk.mnt)

    def promises(self) -> list[int]:
        return [self.end]


class Restore(Local):
    """`restore` of blobs into a directory."""

    name = "restore"
    size = 512 * MIB

    def work(self) -> None:
        self.prepare()
        self.begin = now()
        self.command()
        self.end = now()
        self.facts = {"blobs": len(self.blobs)}

    def command(self, *, ok: bool = True) -> Done:
        return self.ours("restore", "--to", self.out, ok=ok)

    def check(self, top: Path, moment: Moment) -> list[str]:
        out = top / REMOTE / "out"
        found = {
            path.name: blake3(path.read_bytes()).hexdigest()
            for path in out.rglob("*")
            if path.is_file() and ".ntt-restore" not in path.parts
        }
        wrong = [f"VISIBLE: {name} is wrong" for name, digest in found.items() if name != digest]
        if moment.time >= self.end and set(found) != set(self.blobs):
            wrong.append(f"LOST: it said done, and {len(set(self.blobs) - set(found))} are missing")
        return wrong

    def again(self, moment: Moment) -> list[str]:
        done = self.command(ok=False)
        wrong = [f"AGAIN: {ended(done)}"] if done.returncode else []
        found, strange = blobs_of(self.out)
        wrong += [f"AGAIN: strange: {one}" for one in strange[:3]]
        wrong += [f"AGAIN: {name} is wrong" for name, digest in found.items() if name != digest]
        if set(found) != set(self.blobs):
            wrong.append(f"AGAIN: {len(set(self.blobs) - set(found))} blobs are missing")
        return wrong


class Unpack(Restore):
    """`unpack` of a pack file into a directory."""

    name = "unpack"

    def prepare(self) -> None:
        super().prepare()
        self.pack = self.home / "all.pack"
        self.ours("pack", self.pack, "--from", self.ours.store)

    def command(self, *, ok: bool = True) -> Done:
        return self.ours("unpack", self.pack, "--to", self.out, "--jobs", 2, ok=ok)


class Pack(Local):
    """`pack` writes a file, and replaces it by another."""

    name = "pack"
    large = ()

    def work(self) -> None:
        self.prepare()
        self.file = self.remote / "all.pack"
        self.begin = now()
        self.ours("pack", self.file, "--from", self.ours.store)
        self.middle = now()
        self.first = sha256(self.file)
        self.ours.put(self.chance.randbytes(5000))
        self.ours("pack", self.file, "--from", self.ours.store, "--force")
        self.end = now()
        self.second = sha256(self.file)

    def promises(self) -> list[int]:
        return [self.middle] * 6 + [self.end] * 6

    def check(self, top: Path, moment: Moment) -> list[str]:
        path = top / REMOTE / "all.pack"
        found = sha256(path) if path.exists() else None
        right = {self.first, self.second}
        if moment.time >= self.end:
            right = {self.second}
        if found in right or (found is None and moment.time < self.middle):
            return []
        return [f"LOST: the pack is gone, or is something else: {found}"]

    def again(self, moment: Moment) -> list[str]:
        done = self.ours("pack", self.file, "--from", self.ours.store, "--force", ok=False)
        right = done.returncode == 0 and sha256(self.file) == self.second
        return [] if right else [f"AGAIN: {ended(done)}"]


class SnapshotRestore(Kind):
    """`snapshot restore`; after a power cut the same command has to make it right."""

    name = "snapshot-restore"
    size = 448 * MIB
    more: ClassVar[tuple[object, ...]] = ()
    others: ClassVar[bool] = True

    def work(self) -> None:
        self.ours = self.program(self.home / "elsewhere")
        self.tree = self.home / "tree"
        sizes = (0, 10, 3000, 20_000, 60_000, 200_000)
        for number in range(500):
            self.write(f"d{number % 12}/f{number}", self.chance.choice(sizes), number)
        for number, size in enumerate((3, 5, 9, 14, 20)):
            self.write(f"big{number}", size * MIB, number)
        self.ours("snapshot", "take", "s", self.tree)
        self.wanted = tree_of(self.tree)
        self.out = self.remote / "out"
        self.before()
        call("sync", "-f", self.disk.mnt)
        self.begin = now()
        pause = 0.15 if self.write_us else 0.04
        with busy(self.disk.mnt / "other", pause) if self.others else nullcontext():
            self.play()
        self.end = now()
        # All is promised from its last sync on; a little later it says so.
        self.synced = self.ours.last_sync()
        assert (found := self.differ(self.out)) == [], found[:3]
        self.facts = {"files": len(self.wanted)}

    def write(self, name: str, size: int, number: int) -> None:
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.chance.randbytes(size))
        os.utime(path, (10**9 + number, 10**9 + number))

    def before(self) -> None:
        """Prepare the destination."""

    def play(self) -> None:
        self.restore()

    def restore(self, *, ok: bool = True) -> Done:
        return self.ours("snapshot", "restore", "s", "--to", self.out, *self.more, ok=ok)

    def differ(self, out: Path) -> list[str]:
        return differences(self.wanted, tree_of(out / str(self.tree)[1:]))

    def promises(self) -> list[int]:
        return [self.synced] * 12 + [self.end] * 6

    def traps(self, top: Path) -> list[str]:
        """Files that look right: mode, size and time are, and the content is not."""
        out, found = top / REMOTE / "out" / str(self.tree)[1:], []
        for name, one in tree_of(out).items() if out.exists() else ():
            wanted = self.wanted.get(name, "").split()
            if wanted[3:] and one.split()[:3] == wanted[:3] and one.split() != wanted:
                zeros = not (out / name).read_bytes().strip(b"\0")
                found.append(f"{name} looks right and is {'zeros' if zeros else 'wrong'}: {one}")
        return found

    def check(self, top: Path, moment: Moment) -> list[str]:
        if moment.time >= self.synced:
            return [f"LOST: it was synced; {one}" for one in self.differ(top / REMOTE / "out")[:3]]
        if os.path.lexists(top / REMOTE / "out" / MARKER):
            return []  # The next restore believes nothing.
        return [f"TRAP: {one}" for one in self.traps(top)]

    def worth_going_on(self, top: Path, moment: Moment) -> bool:
        return moment.time < self.synced and bool(self.traps(top))

    def again(self, moment: Moment) -> list[str]:
        done = self.restore(ok=False)
        wrong = [f"AGAIN: {ended(done)}"] if done.returncode else []
        differ = self.differ(self.out)
        wrong += [f"AGAIN: {len(differ)} differ: {one}" for one in differ[:3]]
        if [one.name for one in self.out.iterdir()] != [self.tree.parts[1]]:
            wrong.append(f"AGAIN: litter: {os.listdir(self.out)}")
        return wrong


class SnapshotRestoreSlow(SnapshotRestore):
    """It is stopped most of the time, as by a slow link, and nobody else syncs anything: the kernel
    writes back, and the journal commits, by themselves.
    """

    name = "snapshot-restore-slow"
    others = False

    def play(self) -> None:
        process = self.ours.start("snapshot", "restore", "s", "--to", self.out)
        time.sleep(0.5)
        while process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
        assert process.returncode == 0, process.communicate()


class SnapshotRestoreJobs(SnapshotRestore):
    """By several processes."""

    name = "snapshot-restore-jobs"
    more = ("--jobs", 2)


class SnapshotRestoreDelta(SnapshotRestore):
    """Files are there, and differ in some blocks; copies of them take their place."""

    name = "snapshot-restore-delta"
    write_us = 4000
    more: ClassVar[tuple[object, ...]] = ("--delta",)

    def before(self) -> None:
        there = self.out / str(self.tree)[1:]
        shutil.copytree(self.tree, there, symlinks=True)
        for path in sorted(there.rglob("*")):
            if path.is_file() and path.stat().st_size > 3000:
                with path.open("r+b") as file:
                    for _ in range(3):
                        file.seek(self.chance.randrange(path.stat().st_size - 2000))
                        file.write(self.chance.randbytes(2000))


class SnapshotRestoreInPlace(SnapshotRestoreDelta):
    """What differs is written into the files themselves."""

    name = "snapshot-restore-in-place"
    write_us = 12_000
    more = ("--delta", "--in-place")


class Install(Kind):
    """`install-receiver --write` and `install-service --root`."""

    name = "install"

    def work(self) -> None:
        self.ours = self.program(self.home / "elsewhere")
        self.begin = now()
        self.receiver()
        self.middle = now()
        time.sleep(0.3)
        (self.remote / "root").mkdir()
        self.service()
        self.done = now()
        with busy(self.disk.mnt / "other", 0.1):
            time.sleep(1.5)
        self.end = now()
        self.wanted = _files(self.remote)

    def receiver(self, *, ok: bool = True) -> Done:
        return self.ours("install-receiver", "--write", self.remote / "ntt-backup-receive", ok=ok)

    def service(self, *, ok: bool = True) -> Done:
        program = ("--program", "/usr/bin/ntt-backup-remote")
        return self.ours("install-service", "--root", self.remote / "root", *program, ok=ok)

    def promises(self) -> list[int]:
        return [self.middle] * 6 + [self.done] * 6

    def check(self, top: Path, moment: Moment) -> list[str]:
        found, wrong = _files(top / REMOTE), []
        for name, one in self.wanted.items():
            due = self.middle if name == "ntt-backup-receive" else self.done
            if moment.time >= due and found.get(name) != one:
                wrong.append(f"LOST: {name}: {found.get(name)}, written was {one}")
            elif name in found and found[name].split()[-1] != one.split()[-1]:
                wrong.append(f"VISIBLE: {name}: {found[name]}")
        return wrong

    def again(self, moment: Moment) -> list[str]:
        (self.remote / "root").mkdir(exist_ok=True)
        ended_so = [self.receiver(ok=False), self.service(ok=False)]
        wrong = [f"AGAIN: {ended(one)}" for one in ended_so if one.returncode]
        found = _files(self.remote)
        for name, one in self.wanted.items():
            if found.get(name, "").split()[-1:] != one.split()[-1:]:
                wrong.append(f"AGAIN: {name}: {found.get(name)}")
        return wrong


class State(Kind):
    """What this machine keeps beside the catalog: the log, the lock, caches of dumps and takes."""

    name = "state"

    def work(self) -> None:
        self.ours = self.program(self.home / "elsewhere", catalog=True)
        self.log = self.remote / "log/backup-remote.jsonl"
        self.tree = self.home / "tree"
        self.tree.mkdir()
        self.ours.environ["XDG_CACHE_HOME"] = str(self.remote / "cache")
        settings: dict[str, dict[str, Any]] = {
            "log": {"jsonl": str(self.log)},
            "lock": {"file": str(self.remote / "lock")},
            "run": {"skip_pgdump": False, "batch_size": 20},
            "dump": {"mode": "series", "full_every": 6, "max_age": 0},
            "snapshots.s": {"paths": [str(self.tree)], "every": 1},
        }
        self.ours.configure(settings)
        self.blobs: dict[str, int] = {}
        self.begin = now()
        for number in range(4):
            self.more(number)
            time.sleep(1.1)
            self.ours("run", "--once")
        self.end = now()
        self.facts = {"blobs": len(self.blobs), "lines": len(self.log.read_text().splitlines())}

    def more(self, number: int) -> None:
        sizes = (10, 2000, 9000)
        contents = (self.chance.randbytes(self.chance.choice(sizes)) for _ in range(150))
        new = dict(self.ours.put(content) for content in contents)
        self._catalogs[0].register(new)
        self.blobs |= new
        for one in range(60):
            size = self.chance.choice((10, 3000, 20_000))
            (self.tree / f"f{number}-{one}").write_bytes(self.chance.randbytes(size))
        (self.tree / "big").write_bytes(self.chance.randbytes(3 * MIB))

    def promises(self) -> list[int]:
        return [self.end]

    def check(self, top: Path, moment: Moment) -> list[str]:
        return []

    def again(self, moment: Moment) -> list[str]:
        wrong = []
        before = self.log.read_bytes() if self.log.exists() else b""
        self.more(self.chance.randrange(1000, 10**6))
        commands = ("run --once", "run --once", "dumps", "status", "snapshot verify --download")
        for words in commands:
            if words == "run --once":
                time.sleep(1.1)
            done = self.ours(*words.split(), ok=False)
            if done.returncode:
                wrong.append(f"AGAIN: {words}: {ended(done)}")
        back = self.catalog("_back")
        with self.ours.catalog_at(back.url):
            done = self.ours("restore", "--catalog", ok=False)
        if done.returncode:
            wrong.append(f"AGAIN: restore --catalog: {ended(done)}")
        elif back.query("select count(*) from blobs")[0][0] != len(self.blobs):
            wrong.append("AGAIN: restore --catalog: other rows")
        to = self.home / "back"
        shutil.rmtree(to, ignore_errors=True)
        done = self.ours("snapshot", "restore", "s", "--to", to, ok=False)
        if done.returncode or differences(tree_of(self.tree), tree_of(to / str(self.tree)[1:])):
            wrong.append(f"AGAIN: snapshot restore: {ended(done)}")
        for line in self.log.read_bytes()[len(before) :].splitlines():
            if not (line.startswith(b"{") and line.endswith(b"}")):
                wrong.append(f"AGAIN: a line of the log is not whole: {line[:120]!r}")
        return wrong


def _files(top: Path) -> dict[str, str]:
    return {name: one for name, one in tree_of(top).items() if not one.startswith("dir")}
