"""The packages: a Debian one under a real systemd, and a container image made of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.machine import CHECKOUT, SECONDS, Machine, debian, fill
from tests.helpers.waiting import wait_until

UNIT = "ntt-backup-remote.service"
BLOBS = 100
VAULT = "ssh://vault@127.0.0.1/srv/backup"
CONFIG = """\
[catalog]
url = "postgresql:///nothing-here"
[source]
root = "/srv/store"
[remote]
url = "file:///srv/backup"
[run]
workers = 2
stall_timeout = 2
poll_interval = 1
[log]
progress_interval = 1
[lock]
file = "/run/ntt-backup/{target}.lock"
"""
# The same for three targets, two of them by ssh.
TARGETS = """\
[source]
root = "/srv/store"
[targets.near]
url = "ssh://near@127.0.0.1/srv/near"
[targets.far]
url = "ssh://far@127.0.0.1:2222/srv/far"
[targets.disk]
url = "file:///srv/disk"
[run]
workers = 1
poll_interval = 1
backoff_cap = 1
[log]
progress_interval = 1
[notify]
on = ["outage", "recovery"]
outage_after = 1
[lock]
file = "/run/ntt-backup/{target}.lock"
"""
SECRET = "hunter2"
# Secrets are in credentials alone: there is no other key, and no other URL.
CREDENTIALS = {
    "catalog.url": f"postgresql:///copyjob?password={SECRET}",
    "notify.webhook_url": f"http://127.0.0.1:8099/{SECRET}",
    "remote.identity_file": None,
    "targets.far.identity_file": None,
}
ALL_TARGETS = """\
[Service]
ReadWritePaths=/srv/disk
ExecStartPre=
ExecStart=
ExecStart=/usr/bin/ntt-backup-remote --target all run --watch
"""
# What is posted to it is in a file.
HOOK = """\
import http.server
class Hook(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        open("/root/posted", "ab").write(self.path.encode() + b" " + body + b"\\n")
        self.send_response(204)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", 8099), Hook).serve_forever()
"""
# The times of the real unit are minutes. The catalog's URL is a secret.
DROP_IN = """\
[Service]
ReadWritePaths=/srv/backup
LoadCredential=catalog.url:/root/catalog.url
WatchdogSec=12
RestartSec=1
TimeoutStopSec=60
TimeoutAbortSec=10
"""
# What stays after a purge: the directory of the remote and of the store are data.
LEFT = re.compile(
    r"/etc/(passwd|group|g?shadow|sub[ug]id)-|/srv/backup(/.*)?|/root/.*"
    r"|/etc/systemd/system/ntt-backup-remote.service.d(/.*)?|/var/l(ib|og)/(dpkg|apt|systemd)/?.*"
)


def _build(directory: Path, revision: int) -> Path:
    argv = [str(CHECKOUT / "bin" / "build-deb"), "--revision", str(revision), str(directory)]
    done = subprocess.run(argv, check=True, timeout=SECONDS, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of the package, for the Debian in the container."""
    theirs = ["/usr/bin/python3", "-c", "import sys, ensurepip; print(sys.version_info[:2])"]
    try:
        found = subprocess.run(theirs, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = "none with venv"
    if found != "(3, 11)":
        pytest.skip(f"a package for Debian 12 is made by its Python 3.11, and here is {found}")
    directory = tmp_path_factory.mktemp("deb")
    return [_build(directory, revision) for revision in (1, 2)]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_lintian_finds_no_error(packages: list[Path]) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is not installed")
    argv = ["lintian", "--no-cfg", "--fail-on", "none", str(packages[0])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=SECONDS)
    assert [line for line in done.stdout.splitlines() if line.startswith("E:")] == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_build_that_is_killed_leaves_nothing_under_the_name_of_a_package(tmp_path: Path) -> None:
    programs, out = tmp_path / "programs", tmp_path / "out"
    programs.mkdir()
    fake = programs / "dpkg-deb"
    # The package is the last argument.
    fake.write_text('#!/bin/sh\nfor last; do :; done\necho cut >"$last"\nkill -KILL $PPID\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [str(CHECKOUT / "bin" / "build-deb"), str(out)],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == -signal.SIGKILL
    assert [path.read_text() for path in out.iterdir()] == ["cut\n"]
    assert [*out.glob("*.deb")] == []


class Service:
    """The daemon on a machine, as its systemd sees it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def systemctl(self, *words: str) -> str:
        return self.machine.run(f"systemctl {' '.join(words)} {UNIT}").strip()

    def show(self, name: str) -> str:
        return self.systemctl("show", "--value", "-p", name)

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    def workers(self) -> list[int]:
        told = self.machine.try_to(f"pgrep -P {self.pid} ntt-worker").stdout.split()
        return [int(pid) for pid in told]

    def await_at_work(self, other_than: int = 0) -> int:
        """The PID of a daemon that is ready, and whose workers are idle."""

        def ready() -> bool:
            state = self.show("ActiveState"), self.show("StatusText")
            return state[0] == "active" and "copied" in state[1] and self.pid != other_than

        wait_until(ready, "the daemon at work", SECONDS)
        wait_until(lambda: len(self.workers()) == 2, "two workers", SECONDS)
        return self.pid

    def events(self, name: str) -> list[dict[str, object]]:
        text = self.machine.run("cat /var/log/ntt/backup-remote.jsonl")
        return [line for line in map(json.loads, text.splitlines()) if line["event"] == name]

    def copied(self) -> int:
        return int(self.machine.query("select count(*) from blobs where remote_copied is not null"))


@pytest.fixture
def service(packages: list[Path], tmp_path: Path) -> Iterator[Service]:
    """The packages lie on a machine that has a store; nothing is installed."""
    fill(tmp_path / "store", BLOBS)
    with debian() as machine:
        machine.put("/srv/store", tmp_path / "store")
        for package in packages:
            machine.put(f"/root/{package.name}", package)
        machine.put("/root/catalog.url", b"postgresql:///copyjob?application_name=x")
        yield Service(machine)


@pytest.mark.docker
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_package_installs_works_survives_hangs_is_upgraded_and_purged(
    service: Service, packages: list[Path], tmp_path: Path
) -> None:
    machine = service.machine
    before = machine.files()
    machine.run(f"dpkg -i /root/{packages[0].name}")
    assert machine.run("ntt-backup-remote --version").startswith("ntt-backup-remote, version ")
    assert machine.run("ntt-backup-receive --help")
    enabled = machine.try_to(f"systemctl is-enabled {UNIT} ntt-backup-remote-once.timer")
    assert enabled.stdout.split() == [b"disabled", b"disabled"]
    assert service.show("ActiveState") == "inactive"

    machine.run("cat >/etc/ntt/backup-remote.toml", CONFIG.encode())
    machine.run(f"mkdir /etc/systemd/system/{UNIT}.d; cat >$_/test.conf", DROP_IN.encode())
    machine.run("systemctl daemon-reload; install -d -o ntt-backup /srv/backup")
    machine.run("su - postgres -c 'createuser ntt-backup; createdb -O ntt-backup copyjob'")
    as_user = "NTT_DB_URL=postgresql:///copyjob runuser -u ntt-backup -- ntt-backup-remote"
    for command in ("init-db", "scan", "check", "run --dry-run"):
        machine.run(f"{as_user} {command}")
    exposure = machine.run(f"systemd-analyze security --no-pager {UNIT} | tail -1")
    assert float(exposure.split(": ")[1].split()[0]) <= 2.0, exposure

    # It starts, is ready, and says how it is.
    machine.run(f"systemctl enable --now {UNIT}")
    first = service.await_at_work()
    wait_until(lambda: service.copied() == BLOBS, "the first backup", SECONDS)
    machine.run("diff -r /srv/store /srv/backup/by-hash")
    wait_until(lambda: f"{BLOBS} copied" in service.show("StatusText"), "its status", SECONDS)
    assert f'Status: "{BLOBS} copied' in service.systemctl("status", "--no-pager")

    # A reload takes over what is safe; a wrong file changes nothing.
    machine.run("sed -i s/workers.*/workers=3/ /etc/ntt/backup-remote.toml")
    machine.run("sed -i s/progress_interval.*/progress_interval=2/ /etc/ntt/backup-remote.toml")
    service.systemctl("reload")
    wait_until(lambda: service.events("settings_read"), "the reload", SECONDS)
    assert service.events("settings_read")[0]["changed"] == ["log.progress_interval"]
    assert any("run.workers" in str(line["reason"]) for line in service.events("warning"))
    machine.run("echo nonsense >>/etc/ntt/backup-remote.toml")
    service.systemctl("reload")
    wait_until(lambda: service.events("settings_refused"), "the refusal", SECONDS)
    machine.run("sed -i -e /nonsense/d -e s/workers.*/workers=2/ /etc/ntt/backup-remote.toml")
    assert (service.show("ActiveState"), service.pid) == ("active", first)

    # Idle waiting is no hang, for longer than the watchdog's patience.
    idle = service.show("WatchdogTimestampMonotonic")
    wait_until(lambda: service.show("WatchdogTimestampMonotonic") > idle, "a sign", SECONDS)
    assert service.show("NRestarts") == "0"

    # The coordinator hangs.
    machine.run(f"kill -STOP {first}")
    second = service.await_at_work(other_than=first)
    assert service.show("NRestarts") == "1"
    # All workers hang, and the event loop turns.
    machine.run(f"kill -STOP {' '.join(map(str, service.workers()))}")
    third = service.await_at_work(other_than=second)
    assert service.show("NRestarts") == "2"
    assert service.events("worker_stall")
    journal = machine.run(f"journalctl --no-pager -u {UNIT}")
    assert len(re.findall("Watchdog timeout", journal)) == 2
    assert "Fatal Python error: Aborted" in journal
    # A worker that hangs while another one works is no reason.
    machine.run(f"kill -STOP {service.workers()[0]}")
    told = len(service.events("worker_stall"))
    wait_until(lambda: len(service.events("worker_stall")) > told, "the stall", SECONDS)
    idle = service.show("WatchdogTimestampMonotonic")
    wait_until(lambda: service.show("WatchdogTimestampMonotonic") > idle, "a sign", SECONDS)
    assert service.pid == third
    machine.run(f"kill -CONT {' '.join(map(str, service.workers()))}")

    # A stop finishes what is in flight.
    machine.run("runuser -u ntt-backup -- psql -d copyjob -c 'update blobs set remote_copied=null'")
    service.systemctl("stop")
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    assert service.events("run_stop")[-1]["outcome"] == "stopped"
    # A mistake in the settings does not mend itself, and is not tried again.
    machine.run("cp -a /etc/ntt/backup-remote.toml /root/; echo [run >>/etc/ntt/backup-remote.toml")
    machine.try_to(f"systemctl start {UNIT}")
    wait_until(lambda: service.show("ActiveState") == "failed", "the failure", SECONDS)
    assert service.show("ExecMainStatus") == "2"
    machine.run("cp -a /root/backup-remote.toml /etc/ntt/")

    # An upgrade keeps settings and drop-ins, and what ran runs again.
    service.systemctl("start")
    fourth = service.await_at_work()
    settings = machine.run("cat /etc/ntt/backup-remote.toml")
    machine.run(f"dpkg -i /root/{packages[1].name}")
    service.await_at_work(other_than=fourth)
    assert machine.run("cat /etc/ntt/backup-remote.toml") == settings
    assert machine.run("dpkg-query -W -f '${Version}' ntt-backup").endswith("-2")
    wait_until(lambda: service.copied() == BLOBS, "the second backup", SECONDS)

    # A purge keeps keys, with their directory and their user.
    machine.run("rm /var/lib/ntt-backup/host.key")
    machine.run("dpkg --purge ntt-backup")
    left = machine.files() - before
    assert sorted(path for path in left if not LEFT.fullmatch(path)) == []
    machine.run("diff -r /srv/store /srv/backup/by-hash")
    assert machine.try_to("getent passwd ntt-backup").returncode == 2
    assert machine.query("select count(*) from blobs") == str(BLOBS)


# The log directory of another account, which writes into one of its logs all the time.
THEIR_LOGS = """\
useradd app
install -d -o app -g app -m 755 /var/log/ntt
for name in enum backup backup-chll orchestrator verify; do
    echo '{"text": "'$name'"}' >/var/log/ntt/$name.jsonl
done
cd /var/log/ntt
cp verify.jsonl backup-remote-old.jsonl
chown app:app *; chmod 600 enum.jsonl; chmod 664 verify.jsonl; chown root verify.jsonl
systemd-run -q --unit app --uid app \\
    sh -c 'while echo x; do sleep 0.05; done >>/var/log/ntt/copy.log'
"""
STATE_OF_THEIRS = """\
cd /var/log/ntt
theirs="enum.jsonl backup.jsonl backup-chll.jsonl orchestrator.jsonl verify.jsonl"
stat -c '%n %a %u %g %i' . $theirs backup-remote-old.jsonl
sha256sum $theirs backup-remote-old.jsonl
"""


def assert_app_writes(machine: Machine) -> None:
    size = machine.run("systemctl is-active app >&2; stat -c %s /var/log/ntt/copy.log")
    wait_until(
        lambda: machine.run("stat -c %s /var/log/ntt/copy.log") != size, "lines of theirs", SECONDS
    )


@pytest.mark.docker
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_package_is_a_guest_in_the_log_directory_of_others(
    service: Service, packages: list[Path]
) -> None:
    machine = service.machine
    machine.run(THEIR_LOGS)
    before = machine.run(STATE_OF_THEIRS)

    def await_lines() -> None:
        machine.query("update blobs set remote_copied = null")
        wait_until(lambda: service.events("batch_complete"), "lines of ours", SECONDS)
        assert machine.run(STATE_OF_THEIRS) == before
        assert_app_writes(machine)

    def rotate() -> None:
        # It says that it leaves one file alone, and rotates the others.
        done = machine.try_to("logrotate -f /etc/logrotate.d/ntt-backup-remote")
        assert (done.returncode, b"backup-remote-old.jsonl" in done.stderr) == (1, True)

    machine.run(f"dpkg -i /root/{packages[0].name}")
    log = machine.run("stat -c '%U %G %a' /var/log/ntt/backup-remote.jsonl")
    assert log == "ntt-backup app 640\n"
    machine.run("cat >/etc/ntt/backup-remote.toml", CONFIG.encode())
    machine.run(f"mkdir /etc/systemd/system/{UNIT}.d; cat >$_/test.conf", DROP_IN.encode())
    machine.run("systemctl daemon-reload; install -d -o ntt-backup /srv/backup")
    machine.run("su - postgres -c 'createuser ntt-backup; createdb -O ntt-backup copyjob'")
    as_user = "NTT_DB_URL=postgresql:///copyjob runuser -u ntt-backup -- ntt-backup-remote"
    machine.run(f"{as_user} init-db; {as_user} scan")
    machine.run(f"systemctl enable --now {UNIT}")
    service.await_at_work()
    await_lines()
    for _ in range(2):
        rotate()
        await_lines()
    machine.run("ls /var/log/ntt/backup-remote.jsonl.1 /var/log/ntt/backup-remote.jsonl.2.gz")
    # A log that somebody has removed is made again.
    service.systemctl("stop")
    machine.run("rm /var/log/ntt/backup-remote.jsonl")
    service.systemctl("start")
    await_lines()

    # The service moves to their account, which must read the store and own what the service keeps.
    machine.run("chown -R app /srv/store; chmod -R go= /srv/store; chown -R app /srv/backup")
    service.systemctl("stop")
    machine.run("ntt-backup-remote install-service --user app")
    owners = "stat -c %U /var/log/ntt/backup-remote.jsonl /run/ntt-backup /var/lib/ntt-backup"
    assert machine.run(owners).split() == ["app"] * 3
    assert machine.run("ls /etc/systemd/system/*.service 2>&1 || :").count("ntt-backup") == 0
    machine.query('create role app login; grant "ntt-backup" to app')
    machine.run("runuser -u app -- ntt-backup-remote config check")
    service.systemctl("start")
    service.await_at_work()
    assert machine.run(f"ps -o user= -p {service.pid}").strip() == "app"
    await_lines()
    rotate()
    await_lines()
    # An upgrade leaves the account as it is.
    machine.run(f"dpkg -i /root/{packages[1].name}")
    service.await_at_work()
    assert machine.run(f"ps -o user= -p {service.pid}").strip() == "app"
    service.systemctl("stop")
    machine.run("ntt-backup-remote install-service --user ntt-backup --read-all")

    # It reads what only root may, and so do its workers; a program that it starts does not.
    machine.run("chown -R root /srv/store; chown -R ntt-backup /srv/backup")
    machine.run("runuser -u postgres -- psql -d copyjob -c 'update blobs set remote_copied = null'")
    machine.run("rm -r /srv/backup/by-hash/*")
    service.systemctl("start")
    service.await_at_work()
    wait_until(lambda: service.copied() == BLOBS, "blobs that only root may read", SECONDS)
    machine.run("diff -r /srv/store /srv/backup/by-hash")
    capabilities = machine.run(f"grep -h CapEff /proc/{service.pid}/status").split()[1]
    assert int(capabilities, 16) == 1 << 2  # CAP_DAC_READ_SEARCH
    receivers = machine.run("cat /proc/$(pgrep -f ntt_backup.receiver | head -1)/status || :")
    assert "CapEff:\t0000000000000004" not in receivers
    exposure = machine.run(f"systemd-analyze security --no-pager {UNIT} | tail -1")
    assert float(exposure.split(": ")[1].split()[0]) <= 2.0, exposure
    machine.run("ntt-backup-remote install-service --no-read-all")
    machine.run("! ls /etc/systemd/system/ntt-backup-remote.service.d/read-all.conf")

    machine.run("dpkg --purge ntt-backup")
    assert machine.run(STATE_OF_THEIRS) == before
    assert_app_writes(machine)
    left = machine.run("ls /var/log/ntt").split()
    assert [name for name in left if "backup-remote" in name] == ["backup-remote-old.jsonl"]
    assert machine.run("ls /etc/systemd/system/ntt-backup-remote.service.d").split() == [
        "test.conf"
    ]


@pytest.mark.docker
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_one_service_serves_three_targets_with_secrets_from_systemd(
    service: Service, packages: list[Path]
) -> None:
    machine = service.machine
    machine.run(f"dpkg -i /root/{packages[0].name}; mkdir /root/held")
    machine.put("/root/hook.py", HOOK.encode())
    machine.run(
        "touch /root/posted; systemd-run -q --unit hook python3 /root/hook.py; ssh-keygen -A"
    )
    for user, key in (("near", "remote"), ("far", "targets.far")):
        private = f"/root/held/{key}.identity_file"
        machine.run(
            f"ssh-keygen -q -t ed25519 -N '' -f {private}; useradd -m -s /bin/sh {user};"
            f"install -d -o {user} /srv/{user}; install -d -o {user} -m 700 ~{user}/.ssh;"
            f"install -o {user} {private}.pub ~{user}/.ssh/authorized_keys"
        )
    known = "/var/lib/ntt-backup/.ssh/known_hosts"
    machine.run("systemctl start ssh; install -d -o ntt-backup /srv/disk ~ntt-backup/.ssh")
    scan = "ssh-keyscan -t ed25519 127.0.0.1"
    machine.run(f"{scan} >{known}; {scan} | sed 's/^127.0.0.1/[&]:2222/' >>{known}")
    drop_in = ALL_TARGETS
    for name, value in CREDENTIALS.items():
        if value is not None:
            machine.put(f"/root/held/{name}", value.encode())
        drop_in += f"LoadCredential={name}:/root/held/{name}\n"
    machine.run("chmod 600 /root/held/*; cat >/etc/ntt/backup-remote.toml", TARGETS.encode())
    machine.run(f"mkdir /etc/systemd/system/{UNIT}.d; cat >$_/all.conf", drop_in.encode())
    machine.run("systemctl daemon-reload")
    machine.run("su - postgres -c 'createuser ntt-backup; createdb -O ntt-backup copyjob'")
    as_user = "NTT_DB_URL=postgresql:///copyjob runuser -u ntt-backup -- ntt-backup-remote --target"
    for command in ("near init-db", "far init-db", "disk init-db", "near scan"):
        machine.run(f"{as_user} {command}")

    def copied(target: str) -> int:
        return int(machine.query(f"select count(*) from blobs where {target}_copied"))

    # One that is away holds up neither the start nor the others.
    machine.run(f"systemctl enable --now {UNIT}")
    assert service.show("ActiveState") == "active"
    first = service.pid
    wait_until(lambda: copied("near") == copied("disk") == BLOBS, "two backups", SECONDS)
    wait_until(lambda: "far: waiting" in service.show("StatusText"), "its status", SECONDS)
    wait_until(lambda: "outage" in machine.run("cat /root/posted"), "the notice", SECONDS)
    said = json.loads(machine.run(f"{as_user} all status --json"))["targets"]
    assert {name: one["pending"] for name, one in said.items()} == {
        "near": 0,
        "far": 100,
        "disk": 0,
    }

    machine.run("systemd-run -q --unit far /usr/sbin/sshd -D -p 2222")
    wait_until(lambda: copied("far") == BLOBS, "the third backup", SECONDS)
    wait_until(lambda: "recovery" in machine.run("cat /root/posted"), "the notice", SECONDS)
    for target in ("near", "far", "disk"):
        machine.run(f"diff -r /srv/store /srv/{target}/by-hash")

    machine.run("sed -i s/progress_interval.*/progress_interval=2/ /etc/ntt/backup-remote.toml")
    service.systemctl("reload")
    wait_until(lambda: len(service.events("settings_read")) == 3, "three reloads", SECONDS)
    status = service.systemctl("status", "--no-pager", "-l")
    assert {name for name in said if f"{name}: " in status} == set(said)
    assert (service.show("NRestarts"), service.pid) == ("0", first)

    # Nobody saw a secret: the hook's own path is where it belongs.
    assert machine.run("cut -d ' ' -f 1 /root/posted | sort -u") == f"/{SECRET}\n"
    shown = "cat /proc/[0-9]*/cmdline || :; cat /var/log/ntt/*; cut -d ' ' -f 2- /root/posted"
    assert SECRET not in machine.run(f"{shown}; journalctl --no-pager") + status

    service.systemctl("stop")
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    ends = [(line["target"], line["outcome"]) for line in service.events("run_stop")]
    assert sorted(ends)[-3:] == [(name, "stopped") for name in ("disk", "far", "near")]


@pytest.mark.docker
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_image_backs_up_to_a_receiver_that_is_the_image_too(
    packages: list[Path], tmp_path: Path
) -> None:
    def docker(*words: str | Path) -> str:
        argv = ["docker", *map(str, words)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=SECONDS)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    image = "ntt-backup-test-image"
    build = [str(CHECKOUT / "bin" / "build-image"), image]
    environ = {**os.environ, "NTT_DEB": str(packages[0]), "DOCKER_BUILDKIT": "0"}
    subprocess.run(build, env=environ, check=True, timeout=SECONDS)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    allowed = f"{key}.pub:/etc/ntt/authorized_keys:ro"
    vault = docker("run", "-d", "--network", "none", "-v", allowed, image, "receiver")
    try:
        wait_until(lambda: "host key: " in docker("logs", vault), "the receiver", SECONDS)
        home = tmp_path / "home"
        (home / ".ssh").mkdir(parents=True)
        key.rename(home / ".ssh" / "id_ed25519")
        host_key = docker("logs", vault).partition("host key: ")[2].splitlines()[0]
        (home / ".ssh" / "known_hosts").write_text(f"127.0.0.1 {host_key}\n")
        mounted = ("-v", f"{home}:/var/lib/ntt-backup", "-e", "NTT_REMOTE_URL=" + VAULT)
        client = ("run", "--rm", "--network", f"container:{vault}", *mounted, image)
        chown = ("--entrypoint", "chown", image, "-R", "ntt-backup:", "/var/lib/ntt-backup")
        docker("run", "--rm", "-v", f"{home}:/var/lib/ntt-backup", *chown)
        assert "took etc@" in docker(*client, "snapshot", "take", "etc", "/etc/ssh")
        assert "etc" in docker("exec", vault, "ls", "/srv/backup/snapshots")
        # The key can do nothing else: it may not read, and gets no shell.
        with pytest.raises(AssertionError, match="may not get"):
            docker(*client, "snapshot", "list", "etc")
        login = ["--entrypoint", "ssh", image, "-i", "/var/lib/ntt-backup/.ssh/id_ed25519"]
        words = [*login, "-o", "UserKnownHostsFile=/var/lib/ntt-backup/.ssh/known_hosts"]
        shell = docker(*client[:-1], *words, "vault@127.0.0.1", "cat /etc/passwd")
        assert "root:" not in shell
    finally:
        docker("rm", "-f", "-v", vault)
