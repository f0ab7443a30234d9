"""The contenders of `snapshots`: ours by blocks, by files, and what a user would pick instead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from tests.bench.archivers import ARCHIVERS, Archiver, Place
from tests.bench.contender import PROJECT, Failed
from tests.bench.lab import ALIAS

_LIMIT: Final = 900.0
_SAID: Final = 2000


@dataclass(frozen=True, slots=True)
class Spent:
    """What a command took, and said. version: what it took; fetched: bytes, where that is known."""

    seconds: float
    cpu: float
    said: str
    version: str = ""
    fetched: int = 0


def spend(
    argv: Sequence[str], work: Path, environ: dict[str, str] | None = None, **how: Any
) -> Spent:
    """Runs a command; raises Failed where it fails. CPU time is that of all it has waited for."""
    # What is installed is compiled.
    foreign = ("NTT_", "PG", "RESTIC_", "BORG_", "KOPIA_", "TAR_OPTIONS", "PYTHONDONTWRITE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    with (work / "said").open("w+") as said, (work / "errors").open("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            ["timeout", f"{_LIMIT:.0f}", *argv],
            env={**kept, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=errors,
            **how,
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        complaint = (work / "errors").read_text(errors="replace") + (work / "said").read_text()
        raise Failed(f"{argv[0]} ended with {process.returncode}: {complaint[-_SAID:]}")
    return Spent(seconds, used.ru_utime + used.ru_stime, (work / "said").read_text())


class Contender(ABC):
    """One way to take versions of a directory, and to bring one back."""

    name: ClassVar[str]
    tools: ClassVar[tuple[str, ...]] = ()
    # Names of files that need not come back.
    leaves_out: ClassVar[tuple[str, ...]] = ()

    def __init__(self, place: Place) -> None:
        self.place = place
        self.environ: dict[str, str] = {}
        self._count = 0

    @classmethod
    def missing(cls, *, link: bool, bucket: bool) -> str:
        """Returns why it cannot be measured here; empty where it can. link: the repository is
        behind one; bucket: in one.
        """
        absent = [tool for tool in cls.tools if not shutil.which(tool)]
        return f"{', '.join(absent)} not installed" if absent else ""

    def inside(self, to: Path) -> Path:
        """Returns where the data comes to lie below a directory."""
        return to

    @abstractmethod
    def prepare(self) -> None:
        """Does what a user has done long before."""

    @abstractmethod
    def take(self) -> Spent:
        """Takes a version of the data."""

    @abstractmethod
    def restore(self, version: str, to: Path, *, delta: bool) -> Spent:
        """Restores a version. delta: another state of it lies there."""

    def _run(self, argv: Sequence[str], **how: Any) -> Spent:
        return spend(argv, self.place.work, self.environ, **how)


class Ours(Contender):
    """`snapshot take` and `snapshot restore`, in the second place with `--delta`."""

    name = "ntt-backup"
    full: ClassVar[tuple[str, ...]] = ()
    delta: ClassVar[tuple[str, ...]] = ("--delta",)

    def inside(self, to: Path) -> Path:
        return to / str(self.place.data).lstrip("/")

    def prepare(self) -> None:
        place = self.place
        self.environ = {"PYTHONPATH": str(PROJECT), "XDG_CACHE_HOME": str(place.work / "cache")}
        remote: dict[str, object] = {"url": f"file://{place.repository}"}
        if place.bucket:
            endpoint, bucket = place.bucket
            url = f"s3://{bucket}/backup"
            remote = {"url": url, "endpoint": endpoint, "addressing": "path"}
        elif place.link:
            remote = {
                "host": ALIAS,
                "path": place.repository,
                "ssh_config": place.link.ssh_config,
                "known_hosts": place.link.known_hosts,
            }
        tables: dict[str, dict[str, object]] = {
            "remote": remote,
            "lock": {"file": place.work / "lock"},
        }
        text = "".join(
            f"[{table}]\n"
            + "".join(f"{key} = {json.dumps(str(value))}\n" for key, value in values.items())
            for table, values in tables.items()
        )
        text += f"[snapshots.bench]\npaths = [{json.dumps(str(place.data))}]\n"
        (place.work / "settings.toml").write_text(text)

    def take(self, *options: str) -> Spent:
        done = self._run(self.taking(*self.full, *options))
        return Spent(done.seconds, done.cpu, done.said, json.loads(done.said)["version"])

    def restore(self, version: str, to: Path, *, delta: bool) -> Spent:
        done = self._run(self.restoring(version, to, *(self.delta if delta else ())))
        return Spent(done.seconds, done.cpu, done.said, "", json.loads(done.said)["fetched"])

    def taking(self, *options: str) -> list[str]:
        """Returns the command that takes a version."""
        return self._argv("take", "bench", *options)

    def restoring(self, version: str, to: Path, *options: str) -> list[str]:
        """Returns the command that restores a version."""
        return self._argv("restore", f"bench@{version}", "--to", str(to), *options)

    def manifest(self, version: str) -> Path:
        """Returns the manifest of a version, which lies on this machine in any case."""
        return self.place.repository / "snapshots" / "bench" / version / "manifest"

    def _argv(self, *command: str) -> list[str]:
        settings = str(self.place.work / "settings.toml")
        program = [sys.executable, "-m", "ntt_backup", "--config", settings, "snapshot"]
        return [*program, *command, "--json", "--quiet"]


class OursInPlace(Ours):
    """The same, but files are changed where they are, and not in a copy."""

    name = "ntt-backup, in place"
    delta = ("--delta", "--in-place")


class OursWhole(Ours):
    """The same by files: each version full, and files that differ fetched whole."""

    name = "ntt-backup, whole files"
    full = ("--full",)
    delta = ()


class Archived(Contender):
    """A program that keeps a repository; see `archivers`."""

    program: ClassVar[Archiver]

    @classmethod
    def missing(cls, *, link: bool, bucket: bool) -> str:
        if bucket and not cls.program.buckets:
            return "it knows no buckets"
        return super().missing(link=link, bucket=bucket)

    def prepare(self) -> None:
        place = self.place
        self._repository = self.program.at(place)
        self.environ = self._repository.environ
        for argv in self._repository.create:
            self._run(argv)

    def take(self) -> Spent:
        self._count += 1
        done = self._run(self._repository.take(self._count), cwd=self.place.data)
        version = self._repository.version(done.said, self._count)
        return Spent(done.seconds, done.cpu, "", version)

    def restore(self, version: str, to: Path, *, delta: bool) -> Spent:
        return self._run(self._repository.restore(version, to), cwd=to)


def _archived(program: Archiver) -> type[Archived]:
    return type(
        program.name,
        (Archived,),
        {"name": program.name, "tools": (program.tool,), "program": program},
    )


ARCHIVED: Final = tuple(map(_archived, ARCHIVERS))


class PgBackRest(Contender):
    """pgBackRest of a cluster that does not run: `--type=full`, `--type=incr`, and `--delta`. Its
    repository is a directory: over ssh it must be asked from the remote.
    """

    name = "pgbackrest"
    tools = ("pgbackrest",)
    more: ClassVar[dict[str, str]] = {}
    # PostgreSQL makes them anew.
    leaves_out = ("pg_internal.init", "postmaster.opts", "pg_subtrans", "pgsql_tmp")

    @classmethod
    def missing(cls, *, link: bool, bucket: bool) -> str:
        if link or bucket:
            return "its backups are begun by the remote, and its buckets are behind TLS"
        return super().missing(link=link, bucket=bucket)

    def prepare(self) -> None:
        work = self.place.work
        self.environ = {"PGBACKREST_ALLOW_ROOT": "y"}
        lines = {
            "repo1-path": self.place.repository,
            "log-path": work,
            "lock-path": work,
            "spool-path": work,
            "compress-type": "zst",
            "start-fast": "y",
            **self.more,
        }
        text = "[global]\n" + "".join(f"{key}={value}\n" for key, value in lines.items())
        text += f"[bench]\npg1-path={self.place.data}\n"
        (work / "pgbackrest.conf").write_text(text)
        self._run(self._argv("stanza-create", "--no-online"))

    def take(self) -> Spent:
        self._count += 1
        kind = "--type=full" if self._count == 1 else "--type=incr"
        done = self._run(self._argv("backup", "--no-online", kind))
        info = json.loads(self._run(self._argv("info", "--output=json")).said)
        return Spent(done.seconds, done.cpu, "", info[0]["backup"][-1]["label"])

    def restore(self, version: str, to: Path, *, delta: bool) -> Spent:
        where = [f"--set={version}", f"--pg1-path={to}", "--type=none"]
        return self._run(self._argv("restore", *where, *(["--delta"] if delta else [])))

    def _argv(self, command: str, *options: str) -> list[str]:
        config = str(self.place.work / "pgbackrest.conf")
        program = ["pgbackrest", f"--config={config}", "--stanza=bench", "--log-level-console=warn"]
        return [*program, *options, command]


class PgBackRestBlocks(PgBackRest):
    """The same by blocks, and with small files in bundles: from version 2.46 on."""

    name = "pgbackrest, blocks"
    more: ClassVar[dict[str, str]] = {"repo1-bundle": "y", "repo1-block": "y"}


class PgBackRestGz(PgBackRestBlocks):
    """The same by its default codec."""

    name = "pgbackrest, blocks, gz"
    more: ClassVar[dict[str, str]] = {**PgBackRestBlocks.more, "compress-type": "gz"}


class PgBackRestLz4(PgBackRestBlocks):
    """The same by lz4."""

    name = "pgbackrest, blocks, lz4"
    more: ClassVar[dict[str, str]] = {**PgBackRestBlocks.more, "compress-type": "lz4"}
