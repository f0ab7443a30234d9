"""A whole environment for acceptance tests: store, catalog, remote, configuration, installed CLI.

Tests say what an operator would do and look at what he would look at: exit codes, rows, files on
the remote, lines of the log.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO, Any
from unittest import mock

import psycopg
import pytest
from jsonschema import Draft202012Validator

from ntt_backup.blobdir.layout import BY_HASH, relative_path
from ntt_backup.cli import app
from ntt_backup.config.signing_key import make_signing_key
from ntt_backup.errors import remember_global_options
from ntt_backup.wire.framing import IDENTITY
from tests.helpers import documents, program
from tests.helpers.blobs import put, tree
from tests.helpers.processes import children
from tests.helpers.sshd import RemoteDir, Sshd
from tests.helpers.waiting import PATIENCE, wait_until

# In the environment of all that an environment's CLI starts, so that none of it can hide.
_MARK = "ACCEPTANCE_ENVIRONMENT"
# A `wrapper`: some starters leave that behind, and it is inherited.
IGNORING_CHILDREN = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
    " os.execv(sys.argv[1], sys.argv[1:])",
]


def _as(
    expected: int | None, done: subprocess.CompletedProcess[str]
) -> subprocess.CompletedProcess[str]:
    """The same, once its exit code was compared."""
    assert expected in (None, done.returncode), f"{done.stdout}\n{done.stderr}"
    return done


@cache
def _status_schema() -> Draft202012Validator:
    return Draft202012Validator(json.loads(documents.STATUS.read_text()))


@dataclass
class Environment:
    """One source host with its catalog, and the remote directory its blobs go to.

    environ is added to the program's environment; wrapper is a command that starts the program,
    which is a copy of one that has started already as long as neither is about the start.
    shared_store is the store of another environment, where this is not the only host.
    """

    root: Path
    url: str
    sshd: Sshd
    remote: RemoteDir
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)
    shared_store: Path | None = None

    @property
    def store(self) -> Path:
        return self.shared_store or self.root / "by-hash"

    @property
    def log(self) -> Path:
        return self.root / "log" / "backup-remote.jsonl"

    @property
    def config(self) -> Path:
        return self.root / "backup-remote.toml"

    @property
    def host_key(self) -> Path:
        """As init-db makes it."""
        return self.root / "host.key"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    def write_config(self, **changes: dict[str, Any]) -> None:
        """Write the configuration; changes are laid over the defaults, table by table."""
        for table, values in changes.items():
            self.settings.setdefault(table, {}).update(values)
        text = "".join(
            f"[{table}]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            for table, values in self.settings.items()
        )
        self.config.write_text(text)

    def begin(self) -> None:
        """Make the empty store, and write a configuration with one worker and no dumps."""
        self.store.mkdir()
        make_signing_key(self.host_key)
        self.write_config(
            catalog={"url": self.url},
            host={"key_file": str(self.host_key)},
            # Blobs of tests are young, and what is bad is to be failed at once.
            source={"root": str(self.store), "grace": 0},
            remote={"connect_timeout": int(min(600, PATIENCE))},
            # Each worker has a session, and dumps have tests of their own: both take time.
            run={"workers": 1, "backoff_base": 0.05, "backoff_cap": 0.5, "skip_pgdump": True},
            log={"jsonl": str(self.log)},
            lock={"file": str(self.lock)},
        )

    def through(self, sshd: Sshd) -> None:
        """Reach the remote by another way: another account, or a link that can fail."""
        self.sshd = sshd
        self.write_config(remote={"host": sshd.alias, "ssh_config": str(sshd.ssh_config)})

    def beside(self, name: str) -> Environment:
        """The same store, catalog and remote as another host would have them: own lock, own log."""
        root = self.root / name
        root.mkdir()
        other = replace(
            self, root=root, settings=copy.deepcopy(self.settings), shared_store=self.store
        )
        other.write_config(log={"jsonl": str(other.log)}, lock={"file": str(other.lock)})
        return other

    # --- the store and the catalog

    def put(self, content: bytes) -> str:
        """A blob in the store and in the catalog; its blobid."""
        blobid = self.put_in_store(content)
        self.register([blobid])
        return blobid

    def put_in_store(self, content: bytes) -> str:
        return put(self.store, content).blobid

    def fill(
        self, count: int, *, seed: int = 1, size: Callable[[random.Random], int] | None = None
    ) -> list[str]:
        """count small random blobs, in the store and in the catalog."""
        chance = random.Random(seed)
        sizes = size or (lambda r: r.choice((0, 1, 511, 512, 513, r.randrange(1, 20_000))))
        blobids = {self.put_in_store(chance.randbytes(sizes(chance))) for _ in range(count)}
        self.register(sorted(blobids))
        return sorted(blobids)

    def fill_both(
        self, count: int, *, seed: int = 1, size: Callable[[random.Random], int] | None = None
    ) -> list[str]:
        """Make blobs that lie in the store and on the remote, and that the catalog has as copied;
        this is much quicker than a run.
        """
        blobids = self.fill(count, seed=seed, size=size)
        self.send_all()
        return blobids

    def send_all(self) -> None:
        """Have the remote and the catalog as a run would leave them."""
        owner, top = self.remote.local.stat(), self.remote.local / "by-hash"
        shutil.copytree(self.store, top, dirs_exist_ok=True)
        for path in (top, *top.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
        sizes = [(len(content), Path(name).name) for name, content in self.in_store().items()]
        marks = "remote_copied = true, remote_last_checked = now(), size = %s"
        with psycopg.connect(self.url, autocommit=True) as conn, conn.cursor() as cursor:
            cursor.executemany(f"update blobs set {marks} where blobid = %s".encode(), sizes)

    def fill_slowly(self, count: int = 120, *, rate: str = "1MB/s") -> list[str]:
        """Work of two workers for some seconds: count blobs of about 20 kB, in batches of 5, over a
        slow link.
        """
        self.write_config(run={"workers": 2, "batch_size": 5, "bwlimit": rate})
        return self.fill(count, size=lambda chance: chance.randrange(10_000, 30_000))

    def register(self, blobids: list[str], sizes: list[int] | None = None) -> None:
        with psycopg.connect(self.url, autocommit=True) as conn, conn.cursor() as cursor:
            rows = zip(blobids, sizes or itertools.repeat(None, len(blobids)), strict=True)
            cursor.executemany(
                "insert into blobs (blobid, size) values (%s, %s) on conflict do nothing",
                list(rows),
            )

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of any SQL."""
        with psycopg.connect(self.url, autocommit=True) as conn:
            cursor = conn.execute(text.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def copied(self) -> set[str]:
        return {row[0] for row in self.query("select blobid from blobs where remote_copied")}

    def await_copied(self, blobids: set[str]) -> None:
        wait_until(lambda: blobids <= self.copied(), "the blobs to be copied")

    @contextmanager
    def locked_catalog(self) -> Iterator[Callable[[], None]]:
        """Nobody can record anything until this ends, or its value is called; reading goes on.

        Lock before the run begins: else it may be over by then.
        """
        with self._locked("lock table blobs in exclusive mode") as release:
            yield release

    @contextmanager
    def held(self, blobid: str) -> Iterator[Callable[[], None]]:
        """Nobody can record this blob until this ends, or its value is called: no run that sends it
        is over before.
        """
        with self._locked("select from blobs where blobid = %s for update", blobid) as release:
            yield release

    @contextmanager
    def _locked(self, text: str, *values: object) -> Iterator[Callable[[], None]]:
        with psycopg.connect(self.url) as conn:
            conn.execute(text.encode(), values)

            def release() -> None:
                with suppress(psycopg.OperationalError):  # The database may be away by now.
                    conn.rollback()

            yield release
            release()

    def failures(self) -> dict[str, str]:
        """Blobid to reason, for every blob marked as failed."""
        rows = self.query(
            "select blobid, reason from blobs left join ntt_backup.failures using (blobid)"
            " where remote_copy_failed"
        )
        return dict(rows)

    def path(self, blobid: str) -> Path:
        return self.store / relative_path(blobid)

    # --- the remote

    def on_remote(self) -> dict[str, bytes]:
        """Path below by-hash to content, for every file on the remote."""
        return tree(self.remote.local / "by-hash")

    def remote_path(self, blobid: str) -> Path:
        return self.remote.local / "by-hash" / self.path(blobid).relative_to(self.store)

    def in_store(self) -> dict[str, bytes]:
        return tree(self.store)

    def litter(self) -> list[str]:
        """The names in the remote directory beside by-hash and the marker."""
        kept = {BY_HASH, IDENTITY}
        return sorted(path.name for path in self.remote.local.iterdir() if path.name not in kept)

    def assert_complete(self) -> None:
        """Every blob of the store is copied, and the remote has the same files and no others."""
        assert self.on_remote() == self.in_store()
        assert self.copied() == {Path(name).name for name in self.in_store()}
        assert self.litter() == []

    def finish(self) -> None:
        """A run without a limit sends what is left, and then all is complete."""
        self.write_config(run={"batch_size": 100, "bwlimit": "1GB/s"})
        done = self.run("run")
        assert done.returncode == 0, done.stdout
        assert self.failures() == {}
        self.assert_complete()

    def assert_nothing_half(self) -> None:
        """Every copied row has its file, and every file on the remote is as in the store."""
        copied = self.copied()
        remote, local = self.on_remote(), self.in_store()
        assert copied <= {Path(name).name for name in remote}
        assert [name for name, content in remote.items() if content != local.get(name)] == []

    # --- the program

    def argv(self, *args: str) -> list[str]:
        return [*self.wrapper, sys.executable, "-m", "ntt_backup", *self._args(*args)]

    @property
    def _starts_python(self) -> bool:
        """Whether a command must be started as usual: something is said to Python's start."""
        said = any(key.startswith(("LD_", "PYTHON")) for key in self.environ)
        return said or bool(self.wrapper)

    def _args(self, *args: str) -> list[str]:
        return ["--config", str(self.config), *args]

    def environment(self) -> dict[str, str]:
        # Neither our settings nor Python's: unbuffered output hides what goes wrong at the end.
        dropped = ("NTT_", "PYTHONUNBUFFERED")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        own = {
            "COLUMNS": "200",
            "XDG_CONFIG_HOME": str(self.root / "config"),
            _MARK: str(self.root),
        }
        return {**kept, **own, **self.environ}

    def run(
        self,
        *args: str,
        expect: int | None = None,
        timeout: float = PATIENCE,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.CompletedProcess[str]:
        """A command of the CLI, to its end. expect: the exit code that it must have, if any."""
        if not self._starts_python:
            env = self.environment()
            return _as(expect, program.run(self._args(*args), env, timeout, stdout, stderr))
        done = subprocess.run(
            self.argv(*args),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            timeout=timeout,
            check=False,
        )
        return _as(expect, done)

    def call(self, *args: str, expect: int | None = None) -> subprocess.CompletedProcess[str]:
        """A command of the CLI in this process: quicker by the start of a Python, for what is no
        matter of processes.
        """
        argv = ["ntt-backup-remote", "--config", str(self.config), *args]
        with (
            redirect_stdout(io.StringIO()) as stdout,
            redirect_stderr(io.StringIO()) as stderr,
            mock.patch.dict(os.environ, self.environment(), clear=True),
            mock.patch.multiple(sys, argv=argv, excepthook=sys.excepthook),
        ):
            try:
                code = app._run()
            finally:
                remember_global_options([])
        done = subprocess.CompletedProcess(argv, code, stdout.getvalue(), stderr.getvalue())
        return _as(expect, done)

    @contextmanager
    def running(self, *args: str) -> Iterator[program.Process]:
        """A command of the CLI in the background; killed at the end, with all that it started."""
        with (self.root / "output.txt").open("w") as output:
            process: program.Process
            if self._starts_python:
                process = subprocess.Popen(
                    self.argv(*args),
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            else:
                process = program.Started(self._args(*args), self.environment(), output, output)
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
                self.kill_all(random.Random(0))

    def processes(self) -> dict[int, str]:
        """What runs of the CLI and of all that it started: PID to the program's name."""
        marks = {f"{_MARK}={self.root}".encode(), program.mark().encode()}
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if not marks.isdisjoint((entry / "environ").read_bytes().split(b"\0")):
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
        return {pid: name for pid, name in found.items() if name != program.MAKER}

    def children(self, pid: int) -> dict[int, str]:
        """Those of `processes` that pid has started itself."""
        below = children(pid)
        return {child: name for child, name in self.processes().items() if child in below}

    def kill_all(self, chance: random.Random) -> None:
        """kill -9 for all of it, in any order."""
        while running := sorted(self.processes()):
            chance.shuffle(running)
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        result = self.call("status", "--json")
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        _status_schema().validate(answer)
        return answer

    def output(self) -> str:
        return (self.root / "output.txt").read_text()

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The log's lines, or those of one event."""
        if not self.log.exists():
            return []
        whole = self.log.read_text().rpartition("\n")[0]  # One may be being written.
        lines = [json.loads(line) for line in whole.splitlines() if line]
        return [line for line in lines if name is None or line["event"] == name]

    def await_event(self, name: str, count: int = 1) -> dict[str, Any]:
        """The event that makes it count of that name in the log, once it is there."""
        wait_until(lambda: len(self.events(name)) >= count, f"{count} times {name}")
        return self.events(name)[count - 1]


@pytest.fixture
def env(tmp_path: Path, catalog_url: str, remote: Sshd) -> Environment:
    """An environment with an empty store, a fresh catalog and an empty remote directory."""
    directory = remote.directory()
    made = Environment(tmp_path, catalog_url, remote, directory)
    made.begin()
    made.write_config(remote={"path": directory.path}, run={"batch_size": 100})
    made.through(remote)
    return made


@pytest.fixture
def startup(remote: Sshd) -> Iterator[Path]:
    """A shell script that the remote's ordinary account runs at every login; absent at first."""
    if remote.kind != "docker":
        pytest.skip("nobody's own startup files are touched: this needs the sshd in a container")
    directory = remote.directory("startup")
    script = f"{directory.path}/rc"
    assert remote.run(f"echo '[ ! -r {script} ] || . {script}' >~/.bashrc").returncode == 0
    path = directory.local / "rc"
    yield path
    path.unlink(missing_ok=True)
