"""The store, the catalog, the targets and the daemon of a simulated time, and what befalls them.

What is simulated: the pace. All intervals of the settings, and the constants that an operator knows
as hours and days, are divided by the factor of `simulate / for` (`scaled`), so that a day passes in
minutes. The clock itself is real; libfaketime moves that of the daemon alone, by days and back, as
a wrong clock of a machine does. So what goes by dates is not simulated: retention of the newest of
each day and month, and object locks.
"""

from __future__ import annotations

import html
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tarfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from blake3 import blake3

from tests.acceptance.test_identity import Disks
from tests.faults.kinds import PROJECT, _clock_library
from tests.helpers.blobs import Person, path_of, tree
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.processes import descendants, kill, name, parents
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import PATIENCE, wait_until
from tests.soak.judge import ALL, KINDS, Expectations, Use
from tests.soak.scaled import LONG_OUTAGE

HOUR, DAY = 3600.0, 86400.0
COPIES = 2
_SIZES = (0, 1, 300, 900, 3_000, 5_000, 5_000, 9_000, 20_000, 60_000)
_SERVER = (
    "autovacuum=on",
    "autovacuum_naptime=2s",
    "autovacuum_vacuum_cost_delay=0",
    "max_connections=160",
)
_SET = "docs"
# Seconds in which all is copied at the end, on a machine that is busy.
_LONGEST = 3600.0
# An outage in which a target was needed for longer than so many seconds must be told.
_MUST_TELL = 1.4 * LONG_OUTAGE


@dataclass
class Broken:
    """A blob of the store that is not as it was. good: its content; told: whether it must be."""

    good: bytes
    copied: bool


@dataclass
class World:
    """Everything that the daemon meets.

    Attributes:
        factor: Simulated seconds in a real one.
        ever: All blobids that ever were in the store, with the size of each.
        broken: The blobs of the store that are damaged or gone now.
        given_up: The blobs that the operator has declared to be lost.
        ever_broken: All blobs that ever were damaged or gone.
        most_files: The most descriptors that a process had, and of which kinds, by its ID.
        hour: The present simulated hour, with its part.
    """

    env: Environment
    postgres: Postgres
    remote: Sshd
    links: dict[str, Link]
    targets: Sequence[str]
    factor: float
    chance: random.Random
    upgrade_from: str
    # How many times as often as usual checks, dumps and snapshots are due.
    often: float = 1.0
    hour: float = 0.0
    ever: dict[str, int] = field(default_factory=dict)
    broken: dict[str, Broken] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    ever_broken: set[str] = field(default_factory=set)
    most_files: dict[int, tuple[int, dict[str, int]]] = field(default_factory=dict)
    expectations: Expectations = field(default_factory=Expectations)
    did: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    daemon: subprocess.Popen[str] | None = None
    page: subprocess.Popen[str] | None = None
    address: str = ""
    versions: int = 0
    _disks: Disks | None = None
    _mounted: str = "a"
    _undo: dict[str, Callable[[], None]] = field(default_factory=dict)
    # The target of an outage, and since when it was needed, in monotonic seconds.
    _cut_off: str = ""
    _needed: float | None = None

    def __post_init__(self) -> None:
        self.expectations.excuses = self._is_known

    # --- the beginning

    @property
    def root(self) -> Path:
        return self.env.root

    @property
    def names(self) -> list[str]:
        """The targets as the program has them: each medium is one."""
        return [
            name
            for target in self.targets
            for name in (["usb_a", "usb_b"] if target == "usb" else [target])
        ]

    def seconds(self, simulated: float, least: float = 1.0) -> float:
        """The real seconds of a simulated time, for a setting."""
        return min(simulated, max(least, simulated / self.factor))

    def make(self, bucket: dict[str, Any]) -> None:
        """Writes the settings, and makes disks, columns and the places of the program."""
        env, seconds = self.env, self.seconds
        for below in ("tmp", "scratch", "cache", "tools", "docs", "program"):
            (self.root / below).mkdir()
        (self.root / "clock").write_text("+0d\n")
        (self.root / "tools" / "sitecustomize.py").write_text(
            "import os, runpy, sys\n"
            "if 'ntt_backup' in sys.orig_argv:\n"
            f"    scaled = runpy.run_path({str(PROJECT / 'tests/soak/scaled.py')!r})\n"
            f"    scaled['quicken']({self.factor})\n"
        )
        env.environ |= {
            "TMPDIR": str(self.root / "tmp"),
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "PYTHONPATH": f"{self.root / 'tools'}:{self._program()}",
        }
        del env.settings["remote"]
        env.write_config(
            source={"grace": seconds(900)},
            run={
                "workers": 1,
                "skip_pgdump": False,
                "poll_interval": seconds(30),
                "backoff_base": 0.2,
                "backoff_cap": seconds(60, 2),
                "stall_timeout": seconds(60, 6),
                "receipt_timeout": 60,
            },
            dump={
                "bin": str(self.postgres.programs),
                "interval": seconds(DAY / self.often),
                "max_age": seconds(7 * DAY),
                "mode": "series",
                "full_every": 7,
                "keep_daily": 0,
                "keep_weekly": 0,
            },
            checks={},
            policy={"copies": COPIES, "proved": seconds(10 * DAY), "every": seconds(6 * HOUR)},
            log={"progress_interval": seconds(60, 5)},
            lock={"file": str(self.root / "lock-{target}")},
        )
        env.settings["checks"] = {}
        everys = {"scan": DAY, "reconcile": DAY, "verify": DAY, "drill": 7 * DAY}
        for check, every in everys.items():
            env.settings[f"checks.{check}"] = {"every": seconds(every / self.often)}
        env.settings["checks.drill"] |= {
            "scratch": str(self.root / "scratch"),
            "database": self.postgres.url("postgres"),
        }
        env.settings[f"snapshots.{_SET}"] = {
            "paths": [str(self.root / "docs")],
            "every": seconds(DAY / self.often),
            "full_every": seconds(7 * DAY),
            "keep_last": 5,
            "keep_daily": 0,
            "keep_weekly": 0,
        }
        for target in self.targets:
            env.settings["remote" if target == "remote" else f"targets.{target}"] = (
                bucket if target == "bucket" else self._place(target)
            )
            if target == "sealed":
                owner = Person.new()
                identity = str(owner.file(self.root / "identity"))
                pack = {"recipients": [owner.public], "identity_file": identity}
                env.settings["targets.sealed.pack"] = pack
        env.write_config()
        self.postgres.stop()
        self._start_catalog()
        self.init()
        self.insert(100)
        if self._disks is not None:  # Each new disk gets its identity by a run of its own.
            for disk in ("b", "a"):
                self._disks.mount(disk)
                env.run("--target", "usb", "run", expect=0)

    def _place(self, target: str) -> dict[str, Any]:
        if target == "usb":
            self._disks = Disks(self.root / "disks")
            return {"url": f"file://{self._disks.at}", "media": ["a", "b"]}
        local = self.local(target)
        local.mkdir(parents=True)
        if target in ("disk", "sealed"):
            return {"url": f"file://{local}", "layout": "packs"}
        sshd = self.remote.through(self.links[target].port)
        place = {"ssh_config": str(sshd.ssh_config), "connect_timeout": 10}
        if target == "sftp":
            sshd = sshd.by_sftp()
            place["ssh_config"] = str(sshd.ssh_config)
            return {**place, "url": f"sftp://{sshd.alias}{local}", "layout": "packs"}
        layout = {"vault": {"layout": "packs"}}.get(target, {})
        return {**place, **layout, "host": sshd.alias, "path": str(local)}

    def local(self, target: str) -> Path:
        """The directory of a target on this machine; of disks, that which is there."""
        if target.startswith("usb"):
            return self.root / "disks" / (target[4:] or self._mounted)
        return self.root / "targets" / target

    def init(self) -> None:
        """Makes the columns of each target; an upgrade asks for that, too."""
        call = self.env.run if self.upgrade_from else self.env.call
        for target in self.names:
            call("--target", target, "init-db", expect=0)

    def _program(self) -> Path:
        """The directory of the next version of the program: of a revision, or copied."""
        place = self.root / "program" / str(self.versions)
        place.mkdir(parents=True)
        if self.upgrade_from and self.versions == 0:
            argv = ["git", "-C", str(PROJECT), "archive", self.upgrade_from, "ntt_backup"]
            packed = subprocess.run(argv, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(place, filter="data")
        else:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROJECT / "ntt_backup", place / "ntt_backup", ignore=ignored)
        self.versions += 1
        return place

    def _start_catalog(self) -> None:
        self.postgres.server.start(*_SERVER)

        def answers() -> bool:
            with suppress(psycopg.Error):
                self.env.query("select 1")
                return True
            return False

        wait_until(answers, "the catalog")

    # --- the daemon, the page

    def start_daemon(self) -> None:
        """Starts it, and waits as systemd does until it can be asked to reload."""
        faked, before = {}, self._starts()
        if library := _clock_library():
            faked = {
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(self.root / "clock"),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DISABLE_SHM": "1",
                "NO_FAKE_STAT": "1",
            }
        with (self.root / "daemon.txt").open("a") as output:
            self.daemon = subprocess.Popen(
                self.env.argv("--target", "all", "run", "--watch"),
                env={**self.env.environment(), **faked},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        wait_until(lambda: self._starts() >= before + len(self.names), "the daemon to begin")

    @property
    def ended(self) -> int | None:
        """The exit code of a daemon that has ended although nobody has killed it."""
        killed = self.daemon is None or "kill_daemon" in self._undo
        return None if killed or self.daemon is None else self.daemon.poll()

    def _starts(self) -> int:
        log = self.env.log
        return log.read_text().count('"event": "run_start"') if log.exists() else 0

    def stop_daemon(self) -> None:
        """Ends it as an operator does."""
        assert self.daemon is not None
        self.daemon.terminate()
        code = self.daemon.wait(PATIENCE)
        if code != 128 + signal.SIGTERM:
            self.wrong.append(f"hour {self.hour:.0f}: the daemon ended with {code} at a SIGTERM")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Daemon and page run; at the end nothing of them is left."""
        self.start_daemon()
        self._serve()
        try:
            yield
        finally:
            for process in (self.page, self.daemon):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
            for link in self.links.values():
                link.restore()
                link.resume()
            self.env.kill_all(random.Random(0))

    def _serve(self) -> None:
        argv = self.env.argv("--target", "all", "serve", "--listen", "127.0.0.1:0")
        self.page = subprocess.Popen(
            argv,
            env=self.env.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.page.stdout is not None
        self.address = self.page.stdout.readline().split()[-1]

    def look(self) -> dict[str, list[str]]:
        """What the page asks for, by target."""
        with urllib.request.urlopen(self.address, timeout=60) as answer:
            text = answer.read().decode()
        asked: dict[str, list[str]] = {}
        for article in text.split('<article id="target-')[1:]:
            points = re.findall(r'<li class="level2"><p>(.*?)</p>', article, re.DOTALL)
            asked[article.partition('"')[0]] = [html.unescape(one).rstrip(".") for one in points]
        if asked.keys() != set(self.names):
            self.wrong.append(f"hour {self.hour:.0f}: the page shows {sorted(asked)}")
        return asked

    # --- what is there

    def uses(self) -> list[Use]:
        """What each process of daemon and page has."""
        found = []
        for top, first in ((self.daemon, "parent"), (self.page, "page")):
            if top is None or top.poll() is not None:
                continue
            above = parents(top.pid)
            targets = {
                pid: name(pid).removeprefix("ntt-") for pid in above if above[pid] == top.pid
            }
            for pid in (top.pid, *above):
                with suppress(OSError, KeyError, ValueError):
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    status = dict(line.split(":", 1) for line in lines if ":" in line)
                    memory = int(status["RssAnon"].split()[0]) * 1024
                    kinds = _descriptors(pid)
                    comm, files = status["Name"].strip(), sum(kinds.values())
                    role = first if pid == top.pid else _role(comm)
                    if files > self.most_files.get(pid, (0, {}))[0]:
                        self.most_files[pid] = files, kinds
                    of = next((targets[one] for one in _chain(above, pid) if one in targets), "")
                    called = f"{role} {of}".strip()
                    threads = int(status["Threads"])
                    found.append(Use(self.hour, pid, role, called, memory, files, threads))
        return found

    def tables(self) -> dict[str, tuple[int, int, int]]:
        """Name to bytes, rows, and dead rows, of the tables that we write."""
        rows = self.env.query(
            "select relname, pg_total_relation_size(relid), n_live_tup, n_dead_tup"
            " from pg_stat_user_tables"
        )
        return {str(one): (size, live, dead) for one, size, live, dead in rows}

    def locks(self) -> int:
        query = "select count(*) from pg_locks where locktype = 'advisory'"
        return int(self.env.query(query)[0][0])

    def files(self) -> dict[str, int]:
        """Files and directories in the places that are not for keeping."""
        state = [one for one in self.env.log.parent.iterdir() if one != self.env.log]
        incoming = [
            one
            for target in self.targets
            if target != "bucket"
            for one in _listed(self.local(target) / ".ntt-incoming")
        ]
        found = {"state": len(state), "incoming": len(incoming)}
        for place in ("tmp", "scratch", "cache"):
            # What disappears meanwhile is passed over.
            found[place] = sum(len(d) + len(f) for _, d, f in os.walk(self.root / place))
        return found

    # --- the copier

    def _new(self, size: int | None = None) -> tuple[str, bytes]:
        content = self.chance.randbytes(self.chance.choice(_SIZES) if size is None else size)
        blobid = blake3(content).hexdigest()
        self.ever[blobid] = len(content)
        return blobid, content

    def _lay(self, blobid: str, content: bytes) -> None:
        place = path_of(self.env.store, blobid)
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = self.root / "tmp-of-copier"
        beside.write_bytes(content)
        beside.replace(place)

    def insert(self, count: int) -> None:
        """Blobs and their rows."""
        made = [self._new() for _ in range(count)]
        for blobid, content in made:
            self._lay(blobid, content)
        self.env.register(sorted(blobid for blobid, _ in made))
        self.change_docs()

    def forget_rows(self, count: int) -> None:
        """Blobs whose rows the copier forgets."""
        for _ in range(count):
            self._lay(*self._new())

    def change_docs(self) -> None:
        for _ in range(3):
            document = self.root / "docs" / f"{self.chance.randrange(60)}.txt"
            document.write_bytes(self.chance.randbytes(self.chance.randrange(20_000)))

    def delete_rows(self) -> None:
        rows = [one for (one,) in self.env.query("select blobid from blobs order by 1")]
        lost = self.chance.sample(rows, max(1, len(rows) // 50)) if rows else []
        self.env.query("delete from blobs where blobid = any(%s)", lost)

    # --- rot

    def _copied(self) -> list[str]:
        """Blobs that are on all targets, and right in the store."""
        marks = " and ".join(f"{target}_copied" for target in self.names)
        rows = self.env.query(f"select blobid from blobs where {marks} order by 1")
        return [one for (one,) in rows if one not in self.broken and self.ever[one] > 0]

    def rot_in_store(self) -> None:
        """Flips a bit in blobs that are copied. `verify` is to find them, and `heal` to mend."""
        self._break(self._flip, "verify failed", must="verify")

    def lose_in_store(self) -> None:
        """Removes blobs that are copied."""
        self._break(Path.unlink, "verify failed")

    def _break(self, do: Callable[[Path], None], kinds: str, must: str = "") -> None:
        for blobid in self.chance.sample(copied := self._copied(), min(2, len(copied))):
            place = path_of(self.env.store, blobid)
            self._note_broken(blobid, Broken(place.read_bytes(), copied=True))
            do(place)
            self._expect(kinds, ALL, _damage(blobid), must)

    def _note_broken(self, blobid: str, broken: Broken) -> None:
        self.broken[blobid] = broken
        self.ever_broken.add(blobid)

    def rot_of_a_new_blob(self) -> None:
        """A blob that was never right: it must be named, and nobody can bring it back but who has
        it elsewhere.
        """
        blobid, content = self._new(5_000)
        self._lay(blobid, content)
        self._flip(path_of(self.env.store, blobid))
        self._note_broken(blobid, Broken(content, copied=False))
        self.env.register([blobid])
        self._expect("failed", ALL, _damage(blobid), must="failed")

    def _flip(self, place: Path) -> None:
        """Flips a bit in place, as a disk does it: times stay."""
        status = place.stat()
        with place.open("r+b") as file:
            at = self.chance.randrange(status.st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << self.chance.randrange(8)]))
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _stored(self, target: str) -> list[Path]:
        """Files of blobs on a target; of packs, all but the newest."""
        top = self.local(target)
        if (top / "packs").is_dir():
            packs = sorted(top.glob("packs/??/*"), key=lambda one: one.stat().st_mtime)
            return packs[:-3]
        copied = set(self._copied())
        return [one for one in sorted(top.glob("by-hash/??/??/*")) if one.name in copied]

    def rot_on_target(self, target: str) -> None:
        stored = self._stored(target)
        for place in self.chance.sample(stored, min(2, len(stored))):
            self._flip(place)
            what = f"rot of {place.name[:8]} on {target}"
            self._expect("found", self._named(target), what, must="found")
            self.expectations.end(what)

    def remove_from_target(self, target: str) -> None:
        packs = (self.local(target) / "packs").is_dir()
        for place in self.chance.sample(
            stored := self._stored(target), min(3 - 2 * packs, len(stored))
        ):
            place.unlink()
            what = f"the loss of {place.name[:8]} on {target}"
            self._expect("found", self._named(target), what, must="found")
            self.expectations.end(what)

    def _named(self, target: str) -> str:
        return f"usb_{self._medium(self._mounted)}" if target == "usb" else target

    def _medium(self, disk: str) -> str:
        """The medium that a disk belongs to, by its identity."""
        marker = self.root / "disks" / disk / ".ntt-target.json"
        known = dict(self.env.query("select id, target from ntt_backup.targets"))
        with suppress(OSError, KeyError):
            return str(known[json.loads(marker.read_text())["store"]])[4:]
        return disk

    def _expect(self, kinds: str, target: str, what: str, must: str = "") -> None:
        self.did.append(f"hour {self.hour:.1f}: {what}")
        self.expectations.expect(kinds, target, self.hour, what, must=must)

    def _is_known(self, target: str, said: str) -> bool:
        """Whether the blobs that could not be copied to a target are those that were damaged."""
        if not re.search(KINDS["failed"], said):
            return False
        with suppress(psycopg.Error):
            rows = self.env.query(f"select blobid from blobs where {target}_copy_failed")
            return {one for (one,) in rows} <= self.ever_broken
        return True  # It cannot be asked now.

    # --- outages

    @contextmanager
    def without_catalog(self) -> Iterator[None]:
        """While there is no catalog, nobody else can use it either: rows are forgotten."""
        try:
            yield
        except psycopg.Error as error:
            if not any("catalog" in one for one in self._undo):
                self.wrong.append(f"hour {self.hour:.0f}: {error}")

    def outage(self, target: str, hours: int) -> None:
        what = f"an outage of {target}"
        self._cut_off = self._named(target)
        self._expect("unreachable dump snapshot found missed", self._cut_off, what)
        if target == "usb":
            assert self._disks is not None
            self._disks.mount("none")
            self._undo["outage"] = lambda: self._disks.mount(self._mounted)  # type: ignore[union-attr]
        else:
            self.links[target].cut()
            self._undo["outage"] = self.links[target].restore

    def watch_outages(self) -> None:
        """Notes since when a target is needed that is cut off."""
        if self._cut_off and self._needed is None and self._pending_on(self._cut_off):
            self._needed = time.monotonic()

    def stall(self, target: str, hours: int) -> None:
        what = f"a stall of {target}"
        self._expect("unreachable dump snapshot found missed", target, what)
        self.links[target].stall()
        self._undo["stall"] = self.links[target].resume

    def outage_of_catalog(self, hours: int) -> None:
        self._without_catalog("outage_of_catalog", at_once=False)

    def crash_of_catalog(self, hours: int) -> None:
        self._without_catalog("crash_of_catalog", at_once=True)

    def _without_catalog(self, what: str, *, at_once: bool) -> None:
        self._expect("catalog unreachable dump snapshot found missed", ALL, what)
        if at_once:
            self.postgres.stop()
        else:
            self.postgres.server.stop()
        self._undo[what] = self._start_catalog

    def kill_daemon(self, hours: int) -> None:
        """kill -9 for all of the daemon, in any order."""
        assert self.daemon is not None
        must = "ended" if hours > 1 else ""
        self._expect("ended found dump snapshot missed", ALL, "kill_daemon", must)
        pids = [self.daemon.pid, *descendants(self.daemon.pid)]
        self.chance.shuffle(pids)
        for pid in pids:
            kill(pid, signal.SIGKILL)
        self.daemon.wait()
        self._undo["kill_daemon"] = self.start_daemon

    def kill_worker(self) -> None:
        assert self.daemon is not None
        found = [pid for pid in descendants(self.daemon.pid) if name(pid).startswith("ntt-worker")]
        for pid in self.chance.sample(sorted(found), min(1, len(found))):
            kill(pid, signal.SIGKILL)

    def move_clock(self, hours: int) -> None:
        """The clock of the daemon's machine is wrong for a while."""
        days = self.chance.choice((-2, -1, 1, 3))
        self._expect("snapshot dump missed", ALL, "move_clock")
        (self.root / "clock").write_text(f"{days:+d}d\n")
        self._undo["move_clock"] = lambda: void((self.root / "clock").write_text("+0d\n"))

    def undo(self, what: str) -> None:
        if not (undo := self._undo.pop(what, None)):
            return
        undo()
        for trouble in {one.what for one in self.expectations.troubles}:
            if trouble == what or trouble.partition(" of ")[0] in (f"an {what}", f"a {what}"):
                if self._needed and time.monotonic() - self._needed > _MUST_TELL:
                    self.expectations.require(trouble, "unreachable")
                self.expectations.end(trouble)
        if what == "outage":
            self._cut_off, self._needed = "", None

    # --- the operator

    def swap_disks(self) -> None:
        assert self._disks is not None
        self._mounted = "b" if self._mounted == "a" else "a"
        self._disks.mount(self._mounted)

    def reload(self) -> None:
        """Changes a setting, and sends a SIGHUP."""
        limit = self.chance.choice(("20MB", "30MB", "40MB"))
        self.env.write_config(run={"bwlimit": limit})
        if self.daemon is not None:
            self.daemon.send_signal(signal.SIGHUP)

    def upgrade(self) -> None:
        """Another version of the program is installed, and the daemon is started again."""
        self._expect("ended found dump snapshot", ALL, "an upgrade")
        self.stop_daemon()
        place = f"{self.root / 'tools'}:{self._program()}"
        self.env.environ["PYTHONPATH"] = place
        self.init()
        assert self.page is not None
        self.page.terminate()
        self.page.wait()
        self._serve()
        self.start_daemon()
        self.expectations.end("an upgrade")

    def operate(self) -> None:
        """What an operator does once a day, if the page asks for something."""
        asked = [one for points in self.look().values() for one in points]
        if self.broken and any(re.search("could not be copied|verify", one) for one in asked):
            self.mend()

    def mend(self) -> None:
        """Heals the store; what no target has comes from elsewhere, or is given up."""
        if not self.broken:
            return
        done = self.env.run("heal", "--all", "--json")
        found = json.loads(done.stdout)["outcomes"] if done.returncode in (0, 7) else []
        healed = {one["blobid"] for one in found if one["outcome"] == "healed"}
        for blobid, broken in sorted(self.broken.items()):
            place = path_of(self.env.store, blobid)
            if place.is_file() and place.read_bytes() == broken.good:
                if blobid not in healed:
                    self.wrong.append(f"heal has not told of {blobid}")
                self._note_mended(blobid)
            elif broken.copied and done.returncode in (0, 7):
                self.wrong.append(f"hour {self.hour:.0f}: heal does not mend {blobid}: {found}")
            elif not broken.copied and blobid not in self.given_up:
                if self.chance.random() < 0.5:
                    self._lay(blobid, broken.good)
                    self._note_mended(blobid)
                else:
                    self.given_up.add(blobid)
        for target in self.names:
            if self.env.query(f"select from blobs where {target}_copy_failed limit 1"):
                self.env.call("--target", target, "requeue")
        if self.given_up:
            # They fail once more, and are known from then on.
            self._await_failed()
            for target in self._served():
                self.env.call("--target", target, "failed", "--known", expect=0)
            for blobid in self.given_up:
                self.expectations.end(_damage(blobid))

    def _note_mended(self, blobid: str) -> None:
        del self.broken[blobid]
        self.expectations.end(_damage(blobid))

    def _served(self) -> list[str]:
        away = {f"usb_{self._medium('b' if self._mounted == 'a' else 'a')}"}
        return [one for one in self.names if one not in away]

    def _await_failed(self) -> None:
        marks = " and ".join(f"{one}_copy_failed is true" for one in self._served())
        query = f"select count(*) from blobs where blobid = any(%s) and {marks}"
        with suppress(psycopg.Error, pytest.fail.Exception):
            wait_until(
                lambda: self.env.query(query, [*self.given_up]) == [(len(self.given_up),)],
                "the lost blobs to fail",
                20,
            )

    # --- the end

    def pending(self) -> int:
        return sum(self._pending_on(one) for one in self._served())

    def _pending_on(self, target: str) -> int:
        where = f"{target}_copied is not true and {target}_copy_failed is not true"
        return int(self.env.query(f"select count(*) from blobs where {where}")[0][0])

    def finish(self) -> None:
        """Puts everything right, and waits until all is copied, on both disks."""
        for what in list(self._undo):
            self.undo(what)
        self.mend()
        query = "select count(*) from blobs where blobid = any(%s)"
        ever = sorted(self.ever)
        wait_until(lambda: self.env.query(query, ever) == [(len(ever),)], "all rows", _LONGEST)
        for _ in range(2 if "usb" in self.targets else 1):
            wait_until(lambda: self.pending() == 0, "all to be copied", _LONGEST)
            if "usb" in self.targets:
                self.swap_disks()
        if "usb" in self.targets:
            wait_until(lambda: self.pending() == 0, "all to be copied", _LONGEST)

    def incomplete(self) -> list[str]:
        """Every blob that ever was, and is neither right on a target nor named. Nothing runs."""
        found = []
        good = self.ever.keys() - self.broken.keys()
        there = {Path(one).name: data for one, data in self.env.in_store().items()}
        if lost := [one for one in good if blake3(there.get(one, b"?")).hexdigest() != one]:
            found.append(f"{len(lost)} blobs of the store are not as they were, such as {lost[0]}")
        for target in self.names:
            rows = self.env.query(
                f"select blobid, {target}_copied, {target}_copy_failed from blobs"
            )
            copied = {one for one, done, _ in rows if done}
            named = {one for one, _, failed in rows if failed}
            if more := named - self.broken.keys():
                found.append(f"{target}: {len(more)} good blobs are failed, such as {min(more)}")
            if silent := self.ever.keys() - copied - named:
                found.append(f"{target}: {len(silent)} blobs neither copied nor named")
            here = self._content(target)
            if lacks := [one for one in copied if blake3(here.get(one, b"?")).hexdigest() != one]:
                found.append(f"{target}: {len(lacks)} marked blobs are not right, {min(lacks)}")
        return found

    def _content(self, target: str) -> dict[str, bytes]:
        """Blobid to content of all that a target has."""
        if target.startswith("usb"):
            disk = next(one for one in "ab" if self._medium(one) == target[4:])
            return _by_name(self.root / "disks" / disk / "by-hash")
        if target == "remote":
            return _by_name(self.local(target) / "by-hash")
        back = self.root / "back" / target
        back.parent.mkdir(exist_ok=True)
        done = self.env.run("--target", target, "restore", str(back))
        if done.returncode not in (0, 7):
            self.wrong.append(f"restore of {target} ended with {done.returncode}: {done.stderr}")
        content = _by_name(back)
        shutil.rmtree(back, ignore_errors=True)
        return content


def _listed(directory: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(directory)
    return []


def _descriptors(pid: int) -> dict[str, int]:
    """The open descriptors of a process by kind: socket, pipe, anon_inode:[eventpoll], a path."""
    found: Counter[str] = Counter()
    for one in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found[re.sub(r":\[?[0-9]+\]?$", "", os.readlink(f"/proc/{pid}/fd/{one}"))] += 1
    return dict(found)


def _chain(above: Mapping[int, int], pid: int) -> Iterator[int]:
    """A process, the process that has started it, and so on."""
    while pid in above:
        yield pid
        pid = above[pid]


def _damage(blobid: str) -> str:
    return f"damage of {blobid[:8]} in the store"


def _role(comm: str) -> str:
    if comm.startswith("ntt-worker"):
        return "worker"
    if comm in ("ntt-dump", "ntt-check", "ntt-snapshot", "ntt-files"):
        return "side job"
    return "coordinator" if comm.startswith("ntt-") else "other"


def _by_name(top: Path) -> dict[str, bytes]:
    return {Path(path).name: content for path, content in tree(top).items()}


def void(_: object) -> None:
    """Drops a value."""
