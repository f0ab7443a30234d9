"""What a fault may touch: one environment, its database, its remote's disk, and the link between.

Everything is reused from round to round. Blobs are few and small, because the remote's disk is: a
file system of 16 MiB, where privileges allow, that can be filled and made read-only. After some
rounds the campaign sees that all is complete and begins a new era with an empty store.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.program import Process
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import wait_until

_IN_CONTAINER = re.compile(r"/proc/(\d+)/root(/.*)")
BALLAST = "ballast"
INCOMING = ".ntt-incoming"
# The largest of them, of a bucket's server.
SMALL_DISK = 512 << 20


@dataclass
class Disk:
    """The remote's file system. small: it can be filled; switchable: and made read-only."""

    local: Path
    small: bool

    @property
    def struck(self) -> bool:
        """Whether it is full, or read-only: to be both could not be undone in any order."""
        read_only = os.statvfs(self.local).f_flag & os.ST_RDONLY
        return bool(read_only) or (self.local / BALLAST).exists()

    def fill(self) -> None:
        """Leave no byte. What is freed meanwhile may be used."""
        with (self.local / BALLAST).open("ab", buffering=0) as ballast, suppress(OSError):
            while ballast.tell() < SMALL_DISK:
                ballast.write(b"\0" * 4096)

    def free(self) -> None:
        (self.local / BALLAST).unlink(missing_ok=True)

    def remount(self, options: str) -> bool:
        """Whether that could be done: not while a file is open for writing, nor without rights."""
        within = _IN_CONTAINER.fullmatch(str(self.local))
        argv = ["mount", "-o", f"remount,{options}", within[2] if within else str(self.local)]
        if within:
            argv = ["nsenter", "--mount", "--target", within[1], *argv]
        return self.small and subprocess.run(argv, capture_output=True).returncode == 0


@dataclass(repr=False)
class FaultEnvironment:
    """chance decides everything that is decided. damaged: what stood in blobs that were altered."""

    env: Environment
    postgres: Postgres
    remote: Sshd
    link: Link
    disk: Disk
    tools: Path
    strategy: str
    chance: random.Random
    blobs: dict[str, bytes] = field(default_factory=dict)
    damaged: dict[str, bytes] = field(default_factory=dict)
    ever_damaged: set[str] = field(default_factory=set)
    run: Process | None = None
    sizes: tuple[int, ...] = (0, 1, 600, 5_000, 30_000, 30_000, 60_000, 90_000)
    target: str = "ssh"
    _log_before: int = 0

    @property
    def sent(self) -> int:
        """The bytes that have come to the target since the campaign began, or stand there."""
        return self.link.sent

    @property
    def beside(self) -> tuple[str, ...]:
        """What the names of files and directories beside by-hash may begin with."""
        return ("pgdump", "snapshots", BALLAST, ".ntt-check-")

    def on_target(self, script: str) -> bytes:
        """What a script of sh prints there."""
        return self.remote.run(script).stdout

    # --- the store and the catalog

    def add(self, count: int, *, register: bool = True) -> list[str]:
        """New blobs of many sizes, in the store, and in the catalog unless told otherwise."""
        made = []
        for _ in range(count):
            content = self.chance.randbytes(self.chance.choice(self.sizes))
            blobid = self.env.put_in_store(content)
            self.blobs[blobid] = content
            made.append(blobid)
        if register:
            self.env.register(sorted(set(made)))
        return made

    def alter(self, blobid: str) -> None:
        """Flip a bit of a blob in the store, cut it, or take it away."""
        path, content = self.env.path(blobid), self.blobs[blobid]
        self.damaged[blobid] = content
        self.ever_damaged.add(blobid)
        way = self.chance.choice(("flip", "flip", "cut", "remove"))
        if way == "remove" or not content:
            path.unlink()
        elif way == "cut":
            os.truncate(path, self.chance.randrange(len(content)))
        else:
            altered = bytearray(content)
            altered[self.chance.randrange(len(altered))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(altered)

    def put_right(self) -> None:
        for blobid, content in self.damaged.items():
            self.env.path(blobid).write_bytes(content)
        self.damaged.clear()

    def await_catalog(self) -> None:
        """Until the database answers: one that was killed puts itself right first."""
        self.postgres.start()

        def answers() -> bool:
            with suppress(psycopg.Error):
                self.env.query("select 1")
                return True
            return False

        wait_until(answers, "the database")

    # --- processes

    def begin_round(self) -> None:
        """From here on `flowing` is asked."""
        self._log_before = self.env.log.stat().st_size

    def flowing(self) -> bool:
        """Whether content has come through in this round: there was a receipt."""
        with self.env.log.open("rb") as log:
            log.seek(self._log_before)
            return b'"batch_complete"' in log.read()

    def workers(self) -> list[int]:
        """The run's workers that live."""
        if self.run is None:
            return []
        found = self.env.children(self.run.pid).items()
        return sorted(pid for pid, name in found if name.startswith("ntt-worker"))

    def kill(self, pids: list[int], how: int = signal.SIGKILL) -> bool:
        """A signal for one of them; False where there is none."""
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.chance.choice(pids), how)
            return True
        return False

    def events(self) -> list[dict[str, Any]]:
        """The log's lines; the last one may be torn, after a kill."""
        if not self.env.log.exists():
            return []
        lines = self.env.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    # --- eras

    def begin_era(self) -> None:
        """An empty store, an empty catalog, an empty remote. by-hash itself stays, as its disk."""
        self.disk.free()
        _empty(self.env.remote.local / "by-hash")
        for left in ("pgdump", "snapshots", ".ntt-check-*", INCOMING):
            for entry in self.env.remote.local.glob(left):
                shutil.rmtree(entry, ignore_errors=True)
        self.begin_source()

    def begin_source(self) -> None:
        """An empty store, an empty catalog, and no notes of what a target should have."""
        _empty(self.env.store)
        for note in self.env.log.parent.glob("newest-*.json"):
            note.unlink()
        self.env.query("truncate blobs, ntt_backup.failures, ntt_backup.dumps")
        for known in (self.blobs, self.damaged, self.ever_damaged):
            known.clear()

    def peace(self) -> None:
        """Whatever is on the way passes again."""
        self.link.resume()
        self.link.restore()
        self.link.throttle(None)

    def await_end(self) -> None:
        wait_until(lambda: self.env.processes() == {}, "the end of all processes")

    def await_quiet(self) -> None:
        """Until nothing of the run is left here; what it left there has lost its connection."""
        self.await_end()
        self.remote.kill_sessions()

    # --- what the remote has

    def on_remote(self) -> dict[str, bytes]:
        return self.env.on_remote()

    def dumps(self) -> dict[str, bytes]:
        """Name to content of the dumps and their records."""
        return {path.name: path.read_bytes() for path in self.env.remote.local.glob("pgdump/2*")}

    def ledger_violations(self) -> list[str]:
        """What else the ledger records of the remote is true."""
        return []

    def alter_remote(self, count: int) -> set[str]:
        """Flip a bit in files below by-hash, to be found by `verify`; the marked blobs among
        them.
        """
        top = self.env.remote.local / "by-hash"
        there = sorted(path for path in top.rglob("*") if path.is_file() and path.stat().st_size)
        victims = self.chance.sample(there, min(count, len(there)))
        for path in victims:
            content = bytearray(path.read_bytes())
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)
        return {path.name for path in victims} & self.env.copied()

    def litter(self) -> list[str]:
        """What stands on the remote and should not; asked again for a while, until there is none.

        What a killed preflight leaves is removed by others once it is an hour old, not before; the
        stage of a tar session that could not remove it (its disk was read-only) once it is a day
        old, as nothing tells that the session is dead.
        """

        def found() -> list[str]:
            names = [name for name in self.env.litter() if not name.startswith(self.beside)]
            if self.strategy != "tar" or INCOMING not in names:
                return names
            last = self.env.events("run_start")[-1]["run_id"]
            stages = [path.name for path in (self.env.remote.local / INCOMING).iterdir()]
            return [*{*names} - {INCOMING}, *(name for name in stages if f".{last}." in name)]

        with suppress(pytest.fail.Exception):
            wait_until(lambda: found() == [], "the last receivers to clear up", 10.0)
        return found()


def _empty(top: Path) -> None:
    for entry in top.iterdir() if top.exists() else ():
        shutil.rmtree(entry)
