"""The source and the remote: their set-up, what runs on them, and what is on them."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Final

from tests.helpers.waiting import wait_until
from tests.vm.guest import SECONDS, Guest, Wire
from tests.vm.image import PYTHON, Image

UNIT: Final = "ntt-backup-remote.service"
OURS: Final = "cd / && runuser -u ntt-backup -- ntt-backup-remote"
_PSQL: Final = "cd / && psql -XqAt -v ON_ERROR_STOP=1 -d copyjob"
_REMOTE: Final = "/srv/backup"
_LOG: Final = "/var/log/ntt/backup-remote.jsonl"
_KEY: Final = "/var/lib/ntt-backup/.ssh/id_ed25519"
_ALLOW: Final = "put,list,verify,get,dump,snapshot,packs"
# Where a value is shorter than the default, a round would otherwise last for minutes.
_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "source": {"root": "/srv/store"},
    "remote": {
        "url": f"ssh://vault@remote{_REMOTE}",
        "alive_interval": 5,
        "alive_count": 4,
        "connect_timeout": 60,
    },
    "run": {
        "workers": 2,
        "batch_size": 40,
        "poll_interval": 0.5,
        "stall_timeout": 30.0,
        "receipt_timeout": 60.0,
        "backoff_base": 0.2,
        "backoff_cap": 2.0,
    },
    "dump": {"interval": 4, "keep_last": 2, "keep_daily": 1, "keep_weekly": 0, "full_every": 4},
    "lock": {"file": "/run/ntt-backup/{target}.lock"},
}


@dataclass
class Told:
    """What the application has told since the disks were new."""

    stored: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    failed: int = 0
    watched: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, line: Mapping[str, Any]) -> None:
        with self.lock:
            self.stored.update(line.get("stored", ()))
            self.copied.update(line["copied"])
            self.failed = line["failed"]

    def begin_watch(self) -> None:
        with self.lock:
            self.watched = len(self.copied)

    @property
    def advanced(self) -> bool:
        """Whether a blob has been copied since the watch began that was not copied before."""
        with self.lock:
            return len(self.copied) > self.watched

    @property
    def all_copied(self) -> bool:
        with self.lock:
            return self.stored <= self.copied


class Pair:
    """Two guests, off at first."""

    def __init__(self, image: Image, directory: Path, work: Path) -> None:
        self._wire = wire = Wire()
        masked = ("postgresql.service", UNIT)
        self.source = Guest("source", 1, image, directory / "1", wire, work, 1024)
        self.remote = Guest("remote", 2, image, directory / "2", wire, work, 640, masked)
        self.told = Told()
        self._application: Popen[bytes] | None = None
        self._listener = threading.Thread()

    @property
    def both(self) -> tuple[Guest, Guest]:
        return self.source, self.remote

    def begin(self, fs: str, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """New disks with file systems of that type, and everything set up; the unit runs."""
        self.stop_application()
        self.told = Told()
        for guest in self.both:
            guest.new_disk(fs)
            guest.start(mkfs=True)
        self.await_up()
        for guest in self.both:
            guest.check_flush()
        settings = {
            name: {**_SETTINGS.get(name, {}), **tables.get(name, {})}
            for name in {*_SETTINGS, *tables}
        }
        text = "".join(
            f"[{name}]\n" + "".join(f"{key} = {json.dumps(one)}\n" for key, one in values.items())
            for name, values in settings.items()
        )
        self.source.run("cat >/etc/ntt/backup-remote.toml", text.encode())
        key = self.source.run(
            f"""
            systemctl stop {UNIT}
            install -d -o ntt-backup -g ntt-backup -m 700 {Path(_KEY).parent}
            cd /
            runuser -u ntt-backup -- ssh-keygen -q -t ed25519 -N '' -f {_KEY}
            echo 'remote {self.source.image.host_key}' >{Path(_KEY).parent}/known_hosts
            runuser -u postgres -- createuser --superuser root
            runuser -u postgres -- createuser ntt-backup
            runuser -u postgres -- createdb --owner ntt-backup copyjob
            cat {_KEY}.pub
            """
        )
        line = (
            f'command="ntt-backup-receive --root {_REMOTE} --allow {_ALLOW} --require blake3"'
            f",restrict {key}"
        )
        self.remote.run(
            """
            install -d -o vault -g vault -m 700 /home/vault/.ssh
            cat >/home/vault/.ssh/authorized_keys
            sync
            """,
            line.encode(),
        )
        self.source.run(f"{OURS} init-db; sync; systemctl start --no-block {UNIT}")
        self.apply()

    def await_up(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda guest: guest.await_up(), self.both))

    def apply(self) -> None:
        """Start the application."""
        self.stop_application()
        code = Path(__file__).with_name("application.py").read_text()
        self.source.run("cat >/run/application.py", code.encode())
        self.told.begin_watch()
        argv = self.source.ssh(f"exec {PYTHON} /run/application.py")
        self._application = Popen(argv, stdin=PIPE, stdout=PIPE)
        self._listener = threading.Thread(target=self._listen, args=[self._application])
        self._listener.start()

    def _listen(self, application: Popen[bytes]) -> None:
        assert application.stdout is not None
        with application.stdout:
            for line in application.stdout:
                if line.endswith(b"\n"):  # Else its end was cut off.
                    self.told.hear(json.loads(line))

    def stop_storing(self) -> None:
        assert self._application is not None
        assert self._application.stdin is not None
        self._application.stdin.write(b"\n")
        self._application.stdin.flush()

    def stop_application(self) -> None:
        if self._application is not None:
            self._application.kill()
            self._application.wait()
            self._listener.join()
            self._application = None

    def await_progress(self, seconds: float = SECONDS) -> None:
        """Wait until one more blob is copied."""
        wait_until(lambda: self.told.advanced, "a new copied blob", seconds, self.explain)

    def explain(self) -> str:
        """What the source says of itself, for a failure."""
        try:
            return self.source.try_to(
                f"systemctl status --no-pager -n 40 {UNIT}; tail -n 15 {_LOG}", seconds=60
            ).stdout.decode(errors="replace")
        except (OSError, RuntimeError, TimeoutError) as error:
            return f"{error!r}\n{self.source.console}"

    def unit(self) -> dict[str, str]:
        """The state of the unit."""
        names = "ActiveState,NRestarts,ExecMainStatus,Result"
        said = self.source.run(f"systemctl show -p {names} {UNIT}")
        return dict(line.split("=", 1) for line in said.splitlines())

    def query(self, sql: str) -> list[list[str]]:
        said = self.source.run(_PSQL, sql.encode())
        return [line.split("|") for line in said.splitlines()]

    def events(self) -> tuple[list[dict[str, Any]], int]:
        """The lines of the log that are whole, and how many are not."""
        found, broken = list[dict[str, Any]](), 0
        for line in self.source.run_bytes(f"cat {_LOG}").split(b"\n"):
            try:
                found += [json.loads(line)] if line else []
            except ValueError:
                broken += 1
        return found, broken

    def on_remote(self) -> dict[str, bytes]:
        """All files of the target; some may come and go meanwhile."""
        return _files(self.remote, _REMOTE)

    def in_store(self) -> dict[str, bytes]:
        return _files(self.source, "/srv/store")

    def close(self) -> None:
        self.stop_application()
        for guest in self.both:
            guest.close()
        self._wire.close()


def _files(guest: Guest, top: str) -> dict[str, bytes]:
    packed = guest.run_bytes(
        f"tar -C {top} -cf - --warning=no-file-changed --warning=no-file-removed . || [ $? = 1 ]"
    )
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        return {
            one.name.removeprefix("./"): packed[one.offset_data : one.offset_data + one.size]
            for one in archive
            if one.isreg()
        }
