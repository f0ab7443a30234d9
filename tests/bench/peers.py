"""The contenders: we, and what a user would pick instead, each for the same job on the same files.

What precedes the job, such as making a repository or telling our catalog of the blobs, is done
before the clock starts; starting the program is not. Each peer is run as its own documentation
says, with the options that favour it where a user would find them; what was chosen stands in its
class, or in `archivers`.

A new contender is a class here and an entry in CONTENDERS; a program that keeps a repository is an
entry in `archivers.ARCHIVERS`, for the buckets and the snapshots, too.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psycopg
from blake3 import blake3
from psycopg import sql
from pyrage import x25519

from tests.bench.archivers import ARCHIVERS, Archived
from tests.bench.contender import PROJECT, Contender, Failed, Job, compare
from tests.bench.lab import ALIAS, HOST, Link

_BATCH = 1000
_SIDE_BY_SIDE = 4
_BARE = (sys.executable, "-I", str(Path(__file__).with_name("bare_stream.py")))
_CHUNK = 1 << 20
_CHEAP_CIPHER = ("-c", "aes128-gcm@openssh.com")


class Ours(Contender):
    """`run --once` with the default settings, of a fresh process and all: the catalog work, the
    preflight, the hashing of every blob, the remote's syncs, the JSONL. No dump of the catalog:
    no peer has anything like it."""

    name = "ntt-backup"
    local = True
    layout: ClassVar[str] = "files"
    tools = ("ssh", "tar")
    version_argv: tuple[str, ...] = (sys.executable, "-m", "ntt_backup", "--version")

    def prepare(self, job: Job) -> None:
        job.environ["PYTHONPATH"] = str(PROJECT)
        if job.workers is not None:
            job.environ["NTT_WORKERS"] = str(job.workers)
        self.finish(job)
        job.postgres.query("create database bench")
        settings: dict[str, dict[str, object]] = {
            "catalog": {"url": self._url(job)},
            # The store was made a moment ago, and stands for an older one, whose sizes are known.
            "source": {"root": job.store.root, "grace": 0},
            "remote": {"layout": self.layout, **self._remote(job)},
            "log": {"jsonl": self._log(job)},
            "lock": {"file": job.scratch / "lock"},
        }
        text = "".join(
            f"[{table}]\n"
            + "".join(f"{key} = {json.dumps(str(value))}\n" for key, value in values.items())
            for table, values in settings.items()
        )
        (job.scratch / "settings.toml").write_text(text)
        job.call(self._argv(job, "init-db"))
        job.call(self._argv(job, "scan"))
        if self._rows(job, sql.SQL("true")) != job.store.blobs:
            raise Failed("the scan did not register the whole store")

    def run(self, job: Job) -> float:
        return job.call(self._argv(job, "run", "--once", "--skip-pgdump"))

    def check(self, job: Job) -> None:
        compare(job.store, job.destination / "by-hash")
        self._require_recorded(job)

    def _require_recorded(self, job: Job) -> None:
        self._require_marked(job)
        last = json.loads(self._log(job).read_text().splitlines()[-1])
        if (last["event"], last["copied"]) != ("run_stop", job.store.blobs):
            raise Failed(f"the log does not end with a complete run: {last}")

    def _require_marked(self, job: Job) -> None:
        if self._rows(job, sql.SQL("remote_copied")) != job.store.blobs:
            raise Failed("the catalog does not have all as copied")

    def finish(self, job: Job) -> None:
        # By the superuser, who may also end a vacuum that is at work in it.
        drop = "drop database if exists bench with (force)"
        job.postgres.query(drop, job.postgres.url_of("postgres"))

    def _remote(self, job: Job) -> dict[str, object]:
        if job.local:
            return {"url": f"file://{job.destination}"}
        return {
            "host": ALIAS,
            "path": job.destination,
            "ssh_config": job.lab.ssh_config,
            "known_hosts": job.lab.known_hosts,
        }

    @staticmethod
    def _argv(job: Job, *command: str) -> list[str]:
        settings = str(job.scratch / "settings.toml")
        return [sys.executable, "-m", "ntt_backup", "--config", settings, *command]

    @staticmethod
    def _log(job: Job) -> Path:
        return job.scratch / "backup-remote.jsonl"

    @staticmethod
    def _url(job: Job) -> str:
        return psycopg.conninfo.make_conninfo(job.postgres.url, dbname="bench")

    def _rows(self, job: Job, condition: sql.SQL) -> int:
        query = sql.SQL("select count(*) from blobs where {}").format(condition)
        with psycopg.connect(self._url(job)) as conn:
            row = conn.execute(query).fetchone()
        return int(row[0]) if row else 0


class OursFixed(Ours):
    """The same with a `run.codec` that does not follow the link."""

    def __init__(self, codec: str) -> None:
        self.name = f"{Ours.name} {codec}"
        self._codec = codec

    def prepare(self, job: Job) -> None:
        job.environ["NTT_CODEC"] = self._codec
        super().prepare(job)


class OursPacks(Ours):
    """The same with `remote.layout = "packs"`."""

    name = "packs"
    layout = "packs"

    def check(self, job: Job) -> None:
        self._require_recorded(job)
        if job.thorough:
            restored = job.scratch / "restored"
            job.call(self._argv(job, "restore", "--quiet", "--to", str(restored)))
            compare(job.store, restored)


class OursSealed(OursPacks):
    """The same, each pack encrypted for a key of age."""

    name = "sealed"

    def prepare(self, job: Job) -> None:
        seal(job)
        super().prepare(job)


class OursAdopting(Ours):
    """`reconcile --adopt` of what lies there already: both ends read it, and sums are compared."""

    name = "ntt-backup adopts"
    local = False

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        shutil.copytree(job.store.root, job.destination / "by-hash")

    def run(self, job: Job) -> float:
        return job.call(self._argv(job, "reconcile", "--adopt"))

    def check(self, job: Job) -> None:
        compare(job.store, job.destination / "by-hash")
        self._require_marked(job)


class Rsync(Contender):
    """`rsync -a`, into an empty directory; by another cipher or with more options where told."""

    tools = ("rsync", "ssh")
    version_argv = ("rsync", "--version")

    def __init__(
        self, name: str = "rsync -a", more: Sequence[str] = (), cipher: Sequence[str] = ()
    ) -> None:
        self.name, self._more, self._cipher = name, more, cipher

    def run(self, job: Job) -> float:
        rsh = shlex.join([*job.lab.ssh, *self._cipher])
        ends = [f"{job.store.root}/", f"{ALIAS}:{job.destination}/"]
        return job.call(["rsync", "-a", *self._more, "--rsh", rsh, *ends])


class TarStream(Contender):
    """`tar | ssh tar`: all in one stream over one connection, what an old hand would type."""

    tools = ("tar", "ssh", "bash")
    version_argv = ("tar", "--version")

    def __init__(self, name: str = "tar | ssh tar", cipher: Sequence[str] = ()) -> None:
        self.name, self._cipher = name, cipher

    def run(self, job: Job) -> float:
        extract = shlex.join(["tar", "xf", "-", "-C", str(job.destination)])
        remote = _shell(job, extract, *self._cipher)
        script = f"tar cf - -C {shlex.quote(str(job.store.root))} . | {remote}"
        return job.call(["bash", "-o", "pipefail", "-c", script])


class TarBatches(Contender):
    """The same in batches of 1000 files, a new ssh for each, four side by side."""

    name = "tar, ssh a batch"
    tools = ("tar", "ssh", "bash", "find", "xargs")

    def run(self, job: Job) -> float:
        extract = shlex.join(["tar", "xf", "-", "-C", str(job.destination)])
        batch = f'tar cf - "$@" | {_shell(job, extract)}'
        script = (
            "find . -type f -print0 |"
            f" xargs -0 -n {_BATCH} -P {_SIDE_BY_SIDE} bash -o pipefail -c {shlex.quote(batch)} -"
        )
        return job.call(["bash", "-o", "pipefail", "-c", script], cwd=job.store.root)


class Rclone(Contender):
    """rclone over sftp. 64 transfers at once and no checksums asked of the remote: with its
    defaults, four and a command there for every file, it is several times slower."""

    name = "rclone sftp"
    local = True
    tools = ("rclone",)
    version_argv = ("rclone", "version")

    def prepare(self, job: Job) -> None:
        remote = {
            "type": "sftp",
            "host": HOST,
            "port": job.lab.port,
            "user": job.lab.user,
            "key_file": job.lab.identity,
            "known_hosts_file": job.lab.known_hosts,
            "shell_type": "unix",
            "disable_hashcheck": "true",
        }
        lines = [f"[{ALIAS}]", *(f"{key} = {value}" for key, value in remote.items())]
        (job.scratch / "rclone.conf").write_text("\n".join(lines) + "\n")

    def run(self, job: Job) -> float:
        argv = ["rclone", "--config", str(job.scratch / "rclone.conf"), "copy"]
        argv += ["--transfers", "64", "--checkers", "64"]
        place = str(job.destination)
        return job.call([*argv, str(job.store.root), place if job.local else f"{ALIAS}:{place}"])


class BareStreams(Contender):
    """Two Python loops and an ssh between them, twice side by side: what they hash is all that they
    prove, and what they write is neither synced nor recorded. See bare_stream."""

    name = "bare streams"
    tools = ("ssh", "bash")

    def run(self, job: Job) -> float:
        receive = shlex.join([*_BARE, "receive", str(job.destination)])
        send = [*_BARE, "send", str(job.store.root)]
        return _twice(job, send, f" | {_shell(job, receive)}")


class BareRun(Ours):
    """The same, and what else a run promises: our settings, locks, the catalog's names, a sync
    before the names, an answer, the plainest UPDATE, and a cipher and pipes as ours. The floor of
    what is written in Python. level: of zstd; 0 for no compression."""

    name = "bare run"
    local = False
    tools = ("ssh", "bash")
    version_argv = ()
    senders, level = 2, 0
    receiver = "store"

    def run(self, job: Job) -> float:
        receive = [*_BARE, "unpack" if self.level else self.receiver, str(job.destination)]
        remote = _shell(job, shlex.join(receive), *_CHEAP_CIPHER)
        settings = str(job.scratch / "settings.toml")
        argv = [*_BARE, "run", str(job.store.root), self._url(job), settings, remote]
        parts = sorted(os.listdir(job.store.root))
        directories = max(1, round(len(parts) * _BATCH / job.store.blobs))
        how = map(str, (self.senders, directories, self.level))
        return job.call([*argv, *how, *parts])

    def check(self, job: Job) -> None:
        compare(job.store, job.destination)
        self._require_marked(job)


class BarePacks(BareRun):
    """The same, whose receiver writes a file for each batch: the floor of packs."""

    name = "bare packs"
    receiver = "pack"

    def check(self, job: Job) -> None:
        packed = sum(file.stat().st_size for file in job.destination.glob("*.pack"))
        if packed < job.store.bytes:
            raise Failed(f"{packed} bytes are in packs")
        self._require_marked(job)


class BareZstd(BareRun):
    """The same, compressed: the floor of content that shrinks, over a slow link."""

    links: ClassVar[tuple[Link, ...]] = ("slow",)

    def __init__(self, senders: int, level: int) -> None:
        self.name = f"bare zstd {senders}x{level}"
        self.senders, self.level = senders, level


class Copy(Contender):
    """`cp -r`, which needs no link: the floor."""

    name = "cp -r"
    local = True
    tools = ("cp",)
    links: ClassVar[tuple[Link, ...]] = ("loopback",)

    def run(self, job: Job) -> float:
        return job.call(["cp", "-r", f"{job.store.root}/.", str(job.destination)])


class Ceiling(Contender):
    """As many random bytes as the store has, from one file, by `ssh cat`, over AES-GCM: no files,
    no names, nothing stored. What the link and ssh carry at best."""

    name = "ssh cat"
    tools = ("ssh",)
    version_argv = ("ssh", "-V")

    def prepare(self, job: Job) -> None:
        stream, size, position = blake3(b"ceiling"), job.store.bytes, 0
        if self._file(job).exists() and self._file(job).stat().st_size == size:
            return
        with self._file(job).open("wb") as file:
            while position < size:
                file.write(stream.digest(length=min(size - position, _CHUNK), seek=position))
                position = min(size, position + _CHUNK)

    def run(self, job: Job) -> float:
        ssh = shlex.join(job.lab.argv("cat >/dev/null", *_CHEAP_CIPHER))
        return job.call(["sh", "-c", f"exec {ssh} <{shlex.quote(str(self._file(job)))}"])

    def check(self, job: Job) -> None:
        """Nothing is kept; ssh and cat have ended without a complaint."""

    @staticmethod
    def _file(job: Job) -> Path:
        return job.store.root.with_name("random")


CONTENDERS: tuple[Contender, ...] = (
    Ours(),
    OursPacks(),
    OursSealed(),
    OursAdopting(),
    Rsync(),
    # Over the cipher that ours asks ssh for, and not over the default of OpenSSH.
    Rsync("rsync, AES-GCM", cipher=_CHEAP_CIPHER),
    # With zstd at its default level.
    Rsync("rsync -az zstd", ("-z", "--compress-choice=zstd")),
    TarStream(),
    TarStream("tar, AES-GCM", _CHEAP_CIPHER),
    TarBatches(),
    *map(Archived, ARCHIVERS),
    Rclone(),
    BareStreams(),
    BareRun(),
    BarePacks(),
    BareZstd(1, 7),
    BareZstd(2, 9),
    Copy(),
    Ceiling(),
)
OURS, CEILING = CONTENDERS[0].name, CONTENDERS[-1].name


def seal(job: Job) -> None:
    """Has our packs be sealed for a new key of age."""
    key, secret = x25519.Identity.generate(), job.scratch / "identity"
    secret.write_text(f"{key}\n")
    secret.chmod(0o600)
    job.environ |= {
        "NTT_PACK_RECIPIENTS": str(key.to_public()),
        "NTT_PACK_IDENTITY_FILE": str(secret),
        "NTT_HOST_KEY": str(job.scratch / "host.key"),
    }


def _shell(job: Job, command: str, *options: str) -> str:
    """An ssh that runs the command on the remote, as a shell has it."""
    return shlex.join(job.lab.argv(command, *options))


def _twice(job: Job, send: list[str], onwards: str) -> float:
    """Runs a sender twice side by side, each with half of the directories."""
    parts = sorted(os.listdir(job.store.root))
    middle = len(parts) // 2
    one, other = (shlex.join([*send, *half]) + onwards for half in (parts[:middle], parts[middle:]))
    return job.call(["bash", "-o", "pipefail", "-c", f"{one} & {other} && wait $!"])
