"""`setup`: from nothing to a backup by two commands, and back to nothing where a step fails."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import click
import pytest

from ntt_backup.cli.commands import setup
from ntt_backup.config import Settings
from ntt_backup.daemon.service_files import USER, is_sample
from ntt_backup.errors import BackupError, ConfigError
from ntt_backup.process.embedded import NAME
from tests.helpers import program
from tests.helpers.blobs import put, tree
from tests.helpers.parallel import memory
from tests.helpers.s3_servers import S3Server
from tests.helpers.sshd import Sshd, free_port
from tests.helpers.waiting import PATIENCE, wait_until

SECRET = "hunter2"


@dataclass
class Host:
    """A host with files, and nothing else."""

    root: Path
    before: set[Path] = field(default_factory=set)

    @property
    def server(self) -> Path:
        return self.root / "state" / NAME

    @property
    def config(self) -> Path:
        return self.root / "etc" / "backup.toml"

    def words(self, *args: str, to: str = "", catalog: str = "") -> list[str]:
        """The command line of setup for the files."""
        words = ["--config", str(self.config), "setup", *(args or ("--yes",))]
        words += ["--to", to or f"file://{self.root}/disk/backup"]
        words += ["--catalog", catalog or f"embedded:{self.root}/state"]
        values = {
            "log.jsonl": "log/backup.jsonl",
            "lock.file": "lock",
            "host.key_file": "etc/host.key",
        }
        return words + [f"--set={key}={self.root}/{one}" for key, one in values.items()]

    def call(self, words: list[str], expect: int = 0) -> str:
        done = program.run(words, os.environ, PATIENCE)
        assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def run(self, *args: str) -> str:
        return self.call(["--config", str(self.config), *args])

    def is_as_before(self) -> bool:
        return set(self.root.rglob("*")) == self.before

    def await_end(self) -> None:
        """Wait for the end of the embedded server."""
        socket = self.server / ".s.PGSQL.5432"
        wait_until(lambda: not socket.exists(), "the server to stop")


@pytest.fixture
def host() -> Iterator[Host]:
    root = Path(tempfile.mkdtemp(prefix="ntt-setup-", dir=memory()))
    root.chmod(0o711)  # The user of the embedded server passes.
    for name in ("files", "state", "disk"):
        (root / name).mkdir()
    if os.geteuid() == 0:
        shutil.chown(root / "state", "nobody")
    (root / "files" / "one").write_bytes(b"one")
    (root / "files" / 'Ünï "x"').write_bytes(b"two")
    host = Host(root)
    host.before = set(root.rglob("*"))
    try:
        yield host
        host.await_end()
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.long
def test_two_commands_lead_to_a_backup(host: Host) -> None:
    files = f"--files={host.root}/files"
    shown = host.call([*host.words("--yes", files), "--set=source.grace=0"])
    ran = host.run("run", "--once")
    again = host.call(host.words("--yes", files))
    other = host.call(host.words("--yes", files, to="file:///elsewhere"), expect=2)

    assert "2. make" in shown
    assert "may still be being written" not in shown
    assert "2 of 2 blobs" in ran
    proved = host.run("drill", f"--scratch={host.root}/scratch", "--database=embedded")
    assert "PROVED" in proved
    assert "drop the database" not in proved
    assert "nothing was changed" in again
    assert "has another remote.url" in other
    assert host.config.stat().st_mode & 0o007 == 0


@pytest.mark.long
def test_a_store_is_registered(host: Host) -> None:
    put(host.root / "store", b"a blob")
    said = host.call(host.words("--yes", f"--store={host.root}/store"))
    assert "registered 1 blob" in said
    assert "pending   1 blob" in host.run("status")


@pytest.mark.parametrize("step", ["catalog", "target"])
def test_what_was_made_is_removed_where_a_step_fails(host: Host, step: str) -> None:
    wrong = {"catalog": f"postgresql://u:{SECRET}@127.0.0.1:1/x", "target": ""}[step]
    to = "file:///proc/no/backup" if step == "target" else ""
    code = {"catalog": 4, "target": 2}[step]
    files = f"--files={host.root}/files"
    said = host.call(host.words("--yes", files, catalog=wrong, to=to), expect=code)
    assert "removed again" in said
    assert SECRET not in said
    assert host.is_as_before()


def test_ctrl_c_removes_what_was_made(host: Host) -> None:
    words = host.words("--yes", f"--files={host.root}/files")
    with open(os.devnull, "w") as nothing:
        running = program.Started(words, os.environ, nothing, nothing)
    wait_until(lambda: (host.server / "users").exists(), "the catalog to be begun")
    running.send_signal(signal.SIGINT)
    assert running.wait(PATIENCE) == 130
    assert host.is_as_before()


def test_nobody_is_there_to_answer(host: Host) -> None:
    said = host.call(host.words(f"--files={host.root}/files"), expect=2)
    assert "--yes confirms" in said
    assert host.is_as_before()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["s3", "sftp"])
def test_a_target_that_lets_nobody_in_is_one_line(
    host: Host, s3: S3Server, scratch_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3.bucket()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET * 2)
    to = bucket.url if kind == "s3" else f"sftp://u@127.0.0.1:{free_port()}/x"
    words = host.words("--yes", f"--files={host.root}/files", to=to, catalog=scratch_url)
    if kind == "s3":
        words += [f"--set=remote.endpoint={bucket.endpoint}", "--set=remote.addressing=path"]
    *_, undone, error, hint = host.call(words, expect=5).splitlines()
    assert undone == "--- undone: what setup has made is removed again"
    why = {"s3": "does not accept the credentials", "sftp": "Connection refused"}[kind]
    assert error.startswith("error: ")
    assert why in error
    assert hint.startswith("hint: ")
    assert SECRET not in error
    assert host.is_as_before()


@pytest.mark.long
def test_the_directory_on_another_machine_is_made(host: Host, remote: Sshd) -> None:
    place = remote.directory("setup")
    to = f"ssh://{remote.alias}{place.path}/backup"
    words = host.words("--yes", f"--files={host.root}/files", to=to)
    host.call([*words, f"--set=remote.ssh_config={remote.ssh_config}", "--set=source.grace=0"])
    assert "2 of 2 blobs" in host.run("run", "--once")
    assert len(tree(place.local / "backup" / "by-hash")) == 2


def test_no_secret_is_shown(host: Host) -> None:
    urls = {f"notify.{key}_url": f"https://hc.example/{SECRET}" for key in ("ping", "webhook")}
    more = [f"--set={key}={one}" for key, one in urls.items()]
    url = f"postgresql://u:{SECRET}ü@127.0.0.1:1/x"
    said = host.call(host.words(f"--files={host.root}/files", *more, catalog=url), expect=2)
    assert "notify" in said
    assert SECRET not in said
    assert host.is_as_before()


@pytest.mark.parametrize("value", ["/\x7f", "/\udcff", None, {"a": 1}, float("nan")])
def test_no_file_is_written_that_cannot_be_read(value: object) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        setup._written(Path("/nowhere"), {"log.jsonl": value}, {})


def test_what_others_have_made_is_not_removed(host: Host) -> None:
    host.config.parent.mkdir()
    host.config.symlink_to("nowhere")
    host.before = set(host.root.rglob("*"))
    said = host.call(host.words("--yes", f"--files={host.root}/files"), expect=2)
    assert "cannot write" in said
    assert host.is_as_before()

    # Two at once: the second one finds the settings, and leaves all that the first one makes.
    other = host.root / "other.toml"
    step = setup._written(other, {}, {})
    other.write_text("of another setup")
    with pytest.raises(ConfigError):
        setup._do([step], [other], None)
    assert other.read_text() == "of another setup"


@pytest.mark.parametrize("fails", [False, True])
def test_the_sample_of_the_service_counts_as_no_settings(
    host: Host, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """The package installs it, so `setup` would refuse on each such host."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    sample = Path(setup.__file__).parents[3] / "systemd" / "backup-remote.toml"
    host.config.parent.mkdir()
    shutil.copy(sample, host.config)
    assert is_sample(host.config)
    step = setup._written(host.config, {"source.root": "/srv/other"}, {})
    steps = [step, setup.Step("two", partial(setup._call, ("false",)))] if fails else [step]
    with suppress(BackupError):
        setup._do(steps, [], None)
    assert is_sample(host.config) == fails
    assert fails or "/srv/other" in host.config.read_text()


def test_the_remote_is_asked_as_the_user_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root has other keys, and knows other hosts."""
    remote = Settings(
        source={"root": "/srv"}, remote={"url": "ssh://v@127.0.0.1/srv/b"}, target="remote"
    )
    called: list[tuple[str, ...]] = []

    def record(argv: Sequence[str], *_: object, **__: object) -> tuple[int, str, str]:
        called.append(tuple(argv))
        return 0, "", ""

    monkeypatch.setattr(setup, "run", record)
    monkeypatch.setattr(setup, "uid_of", lambda _: 999)
    [*setup._preparations(remote, USER)]
    assert ("runuser", "-u", USER, "--", "ssh") in {argv[:5] for argv in called}

    monkeypatch.setattr(setup, "uid_of", lambda _: -1)
    with pytest.raises(ConfigError, match="its key") as refused:
        [*setup._preparations(remote, USER)]
    assert "install-service" in refused.value.hint


def test_a_second_call_may_meet_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(argv: Sequence[str]) -> None:
        raise BackupError("check ended with 3", exit_code=3)

    monkeypatch.setattr(setup, "_call", call)
    setup._check(["program"], changes=False)
    with pytest.raises(BackupError):
        setup._check(["program"], changes=True)


def test_only_steps_that_were_done_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database that a failed `createdb` has found is not dropped."""
    told: list[str] = []

    def fail() -> None:
        raise BackupError("it exists")

    steps = [setup.Step(name, partial(told.append, name)) for name in ("one", "two")]
    steps = [one._replace(undo=partial(told.append, f"not {one.says}")) for one in steps]
    steps.append(setup.Step("three", fail, partial(told.append, "not three")))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(BackupError):
        setup._do(steps, [], None)
    assert told == ["one", "two", "not two", "not one"]


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        ("echo 'warning: x\nerror: a: b\nhint: c'>&2; exit 4", None, ("a: b", "c", 4)),
        ("echo 'ok  a b\nFAILED  c  d: e\n   f\nok  g'; exit 5", None, ("d: e", "f", 5)),
        ("echo 'mkdir: no\nmkdir: \033[31mno'>&2; exit 1", 6, (r"mkdir: \x1b[31mno", "", 6)),
        ("kill -9 $$", None, ("SCRIPT ended with 137", "", 137)),
    ],
)
def test_the_error_is_that_of_the_program(
    script: str, code: int | None, expected: tuple[str, str, int]
) -> None:
    with pytest.raises(BackupError) as failed:
        setup._call(["sh", "-c", script], code)
    said = failed.value.message.replace(script, "SCRIPT")
    assert (said, failed.value.hint, failed.value.exit_code) == expected


def test_an_interrupted_program_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed `check` would leave its trial on the target."""
    monkeypatch.setattr(click, "echo", mock.Mock(side_effect=KeyboardInterrupt))
    script = f"trap 'touch {tmp_path}/ended; exit' TERM; echo begun; while :; do :; done"
    with pytest.raises(KeyboardInterrupt):
        setup._call(["sh", "-c", script])
    assert (tmp_path / "ended").exists()


def test_a_step_is_not_interrupted_in_its_middle() -> None:
    """Else nobody would know whether it has made something."""
    told: list[str] = []

    def make() -> None:
        signal.raise_signal(signal.SIGINT)
        told.append("made")

    steps = [setup.Step("one", make, partial(told.append, "not made"))]
    handlers = {
        one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        with pytest.raises(KeyboardInterrupt):
            setup._do(steps, [], None)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert told == ["made", "not made"]


def test_the_settings_are_valid_toml() -> None:
    values = {"catalog.url": "x", "files.a.paths": ['/a "b"\\', "/ü\U0001f600"], "run.workers": 3}
    step = setup._written(Path("/nowhere"), values, values)
    shown = "\n".join(line.strip() for line in step.says.splitlines()[1:])
    found = tomllib.loads(shown)
    assert found == {
        "catalog": {"url": "x"},
        "files": {"a": {"paths": ['/a "b"\\', "/ü\U0001f600"]}},
        "run": {"workers": 3},
    }
