"""The demo: from nothing to identical stores, and back to nothing, however it ends."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ntt_backup import demo
from ntt_backup.demo import store, story
from ntt_backup.demo.processes import Interrupts
from ntt_backup.demo.seaweedfs import ADMINISTER, Account, SeaweedFS
from ntt_backup.errors import ConfigError, SourceError
from ntt_backup.formatting import many
from tests.helpers.parallel import ports
from tests.helpers.waiting import PATIENCE, wait_until

DEMO = (sys.executable, "-m", "ntt_backup", "demo")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A small tree with what real trees have: sizes, a duplicate, links, a pipe."""
    root = tmp_path / "files"
    (root / "below").mkdir(parents=True)
    for index in range(40):
        (root / f"file {index}").write_bytes(os.urandom(index * 500))
    (root / "below" / "large").write_bytes(os.urandom(2_000_000))
    (root / "below" / "duplicate").write_bytes((root / "below" / "large").read_bytes())
    (root / "link").symlink_to("/etc/passwd")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    return root


BLOBS = 41


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where temporary files go: a path with a space, too long for a socket's."""
    path = tmp_path / f"a long {'x' * 90}"
    path.mkdir()
    return path


def environment(place: Path) -> dict[str, str]:
    checkout = str(Path(demo.__file__).parents[2])
    places = dict.fromkeys(("TMPDIR", "XDG_CONFIG_HOME"), str(place))
    return {**os.environ, **places, "PYTHONPATH": checkout}


class Demo(subprocess.Popen[bytes]):
    """A demo under way. It prints to a file, so that its end is its own and not that of a pipe."""

    def __init__(self, place: Path, *options: str | Path) -> None:
        self._printed = place.parent / "printed"
        with self._printed.open("wb") as printed:
            super().__init__(
                [*DEMO, *map(str, options)],
                env=environment(place),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._printed.read_text()

    def result(self) -> tuple[int, str]:
        """The exit code and all it has printed."""
        try:
            code = self.wait(PATIENCE)
        finally:
            self.terminate()
        return code, self.output


def run(place: Path, *options: str | Path) -> tuple[int, str]:
    return Demo(place, *options).result()


def processes_at(place: Path) -> list[str]:
    """The command lines of all processes that were told of this place.

    By their environment or by the command line itself: sshd overwrites its environment.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            told = f"TMPDIR={place}".encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if told or f"{place}/" in command:
            found.append(command)
    return found


def assert_nothing_left(place: Path, output: str) -> None:
    assert list(place.iterdir()) == []
    # The kernel ends a worker with its coordinator, and that takes a moment.
    wait_until(lambda: processes_at(place) == [], "the end of all that was started", PATIENCE)
    for word in output.replace("'", " ").split():
        if word.startswith("/tmp/ntt-demo-postgres-"):
            assert not Path(word).exists()


def assert_told_in_full(output: str, workers: int) -> None:
    for command in ("init-db", "scan", "check", f"run --once --workers {workers}", "status"):
        assert any(
            line.startswith("$ ntt-backup-remote --config") and line.endswith(command)
            for line in output.splitlines()
        ), command
    assert f"{BLOBS} files, byte for byte the same" in output
    assert f"{BLOBS} rows, {BLOBS} copied, 0 failed" in output
    assert "1 duplicate, 0 unreadable" in output
    assert "0 blobs sent" in output
    assert "Identical" in output
    assert "Warning" not in output


def assert_all_came_back(output: str) -> None:
    lost, back = output.index("lost: the database"), output.index("Everything came back")
    typed = [line for line in output[lost:back].splitlines() if line.startswith("$ ")]
    wanted = ("restore --catalog", "restore --to '", "verify --local", "reconcile")
    assert len(typed) == len(wanted)
    assert all(command in line for line, command in zip(typed, wanted, strict=True)), typed
    said = " ".join(output[lost:].split())
    assert f"store {BLOBS} files, byte for byte the same" in said
    assert f"remote {BLOBS} files, byte for byte the same" in said
    assert f"public.blobs {BLOBS + 7} rows, all equal" in said
    assert "public.albums" in said
    assert "NOT" not in output


def test_demo_shows_a_whole_backup_and_a_drill_and_leaves_nothing(place: Path, files: Path) -> None:
    code, output = run(place, "--from", files, "--workers", "2", "--drill")
    assert code == 0, output
    assert_told_in_full(output, workers=2)
    assert_all_came_back(output)
    assert_nothing_left(place, output)


@pytest.mark.long
@pytest.mark.parametrize("drill", [(), ("--drill",)])
def test_demo_with_a_bucket_loses_half_of_the_store_and_leaves_nothing(
    place: Path, files: Path, drill: tuple[str, ...]
) -> None:
    code, output = run(place, "--from", files, "--workers", "2", "--s3", *drill)
    assert code == 0, output
    assert_told_in_full(output, workers=2)
    said = " ".join(output.split())
    assert re.search("packs [12] object", said)  # Each worker may write one.
    assert f"checked {BLOBS} of {BLOBS} blobs on the remote" in said
    (lost,) = re.findall(rf"lost: (\d+) of {BLOBS} files", said)
    assert 0 < int(lost) < BLOBS
    assert f"restored {many(int(lost), 'blob')}," in said
    if drill:
        assert f"restored {BLOBS} blobs," in said
        assert "reconcile --apply` marks it as copied" in said
        assert "reconcile --apply` marks them as copied" in said
        assert "Everything came back, byte for byte and row by row." in said
    assert_nothing_left(place, output)


@pytest.mark.long
def test_server_finds_its_objects_again_after_it_was_killed(tmp_path: Path) -> None:
    owner = Account("owner")
    server = SeaweedFS(tmp_path, Interrupts(), {owner: ADMINISTER}, ports())
    try:
        server.start()
        server.client().create_bucket(Bucket="vault")
        server.client().put_object(Bucket="vault", Key="key", Body=b"content")
        # It counts a request once it has answered it.
        wait_until(lambda: server.requests("vault") == {"PUT": 2}, "two requests to be counted")
        assert server.pid is not None
        assert not server.ended
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.ended, "the server to be seen to have ended")
        said, *lines = server.ended.splitlines()
        assert said.startswith("SeaweedFS ended by signal 9")
        assert lines == (tmp_path / "log").read_text().strip().splitlines()[-5:]
        server.stop()
        assert server.pid is None
        assert not server.ended
        server.start()
        answer = server.client().get_object(Bucket="vault", Key="key")
        assert answer["Body"].read() == b"content"
    finally:
        server.stop()


@pytest.mark.long
def test_demo_without_sshd_in_a_directory_of_the_users_own(place: Path, files: Path) -> None:
    own = place / "own"
    own.mkdir(mode=0o700)
    code, output = run(place, "--from", files, "--directory", own, "--ssh-server", "embedded")
    assert code == 0, output
    assert "ssh server: embedded" in output
    assert_told_in_full(output, workers=4)
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()  # it stays, and is empty
    assert_nothing_left(place, output)


@pytest.mark.parametrize(
    ("moment", "signum", "options"),
    [
        ("A catalog and a remote", signal.SIGTERM, ()),
        pytest.param("run --once", signal.SIGINT, (), marks=pytest.mark.long),
        pytest.param("A catalog and a bucket", signal.SIGINT, ("--s3",), marks=pytest.mark.long),
        pytest.param("run --once", signal.SIGTERM, ("--s3",), marks=pytest.mark.long),
    ],
)
def test_stopped_demo_leaves_nothing(
    place: Path, files: Path, moment: str, signum: signal.Signals, options: tuple[str, ...]
) -> None:
    running = Demo(place, "--from", files, "--workers", "2", *options)
    wait_until(lambda: moment in running.output, f"{moment!r} is printed", PATIENCE)
    # As a terminal does it: to the whole group.
    os.killpg(running.pid, signum)
    code, output = running.result()
    assert code == 128 + signum, output
    assert f"stopped by signal {signum}" in output
    assert "Traceback" not in output
    assert "Identical" not in output
    assert_nothing_left(place, output)


@pytest.mark.parametrize(
    "options",
    [("--ssh-server", "embedded"), ("--s3",)],
)
@pytest.mark.long
def test_killed_demo_leaves_files_but_no_process(
    place: Path, files: Path, options: tuple[str, ...]
) -> None:
    running = Demo(place, "--from", files, *options)
    wait_until(lambda: "run --once" in running.output, "a run", PATIENCE)
    assert processes_at(place) != []
    running.kill()
    code, output = running.result()
    try:
        assert code == -signal.SIGKILL, output
        wait_until(lambda: processes_at(place) == [], "the end of all that was started", PATIENCE)
    finally:
        for postgres in place.glob("*/postgres"):  # it may lie in /tmp
            # Its server, as it ends, removes files there too.
            shutil.rmtree(postgres.resolve(), ignore_errors=True)


@pytest.mark.long
def test_kept_demo_can_be_played_on(place: Path, files: Path) -> None:
    code, output = run(place, "--from", files, "--workers", "2", "--keep")
    assert code == 0, output
    (kept,) = place.iterdir()
    assert "play   starts the servers again" in output
    assert processes_at(place) == []

    shell = {**environment(place), "SHELL": "/bin/sh", "NTT_DB_URL": "not for this"}
    new = kept / "store" / "by-hash" / "00" / "11" / ("0011" + "00" * 30)
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_bytes(b"it does not hash to its name")
    commands = (
        "ntt-backup-remote scan && ntt-backup-remote status;"
        " psql -qAtc 'select count(*) from blobs';"
        " createdb drill; psql -qAt drill -c 'select 2000 + 1';"
        " ntt-backup-remote run --once; echo run gave $?; exit 3"
    )
    played = subprocess.run(
        ["sh", kept / "play"],
        input=commands,
        env=shell,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert played.returncode == 3, played
    assert "registered 1 blob," in played.stdout
    assert "run gave 7" in played.stdout
    assert f"\n{BLOBS + 1}\n2001\n" in played.stdout

    (advice,) = [line for line in output.splitlines() if line.startswith("rm -r ")]
    subprocess.run(["sh", "-c", advice.removesuffix("removes everything")], check=True)
    assert_nothing_left(place, output)


@pytest.mark.long
def test_demo_fails_when_a_file_is_missing_on_the_remote(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def damaged(source: Path, destination: Path) -> store.Comparison:
        victim = next(path for path in sorted(destination.rglob("*")) if path.is_file())
        victim.unlink()
        return store.compare(source, destination)

    monkeypatch.setattr(story, "compare", damaged)
    assert demo.run(source=files, directory=tmp_path / "demo") == 1
    output = capfd.readouterr().out
    assert f"{BLOBS - 1} the same, 0 different, 1 missing, 0 too many" in output
    assert "NOT as it should be" in output
    assert not (tmp_path / "demo").exists()


def test_botocore_is_needed_for_a_bucket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_botocore(name: str) -> ModuleSpec | None:
        return None if name == "botocore" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_botocore)
    monkeypatch.setattr(story.Story, "tell", lambda _: 0)
    assert demo.run() == 0
    with pytest.raises(ConfigError, match="the demo needs botocore") as caught:
        demo.run(s3=True)
    assert "demo-s3" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "directory", "path", "said", "hint"),
    [
        ("files", "demo", "ssh", "tar is not installed", "install "),
        ("files", "demo", "tar", "ssh is not installed", "install "),
        ("files", "files", "", "is not empty", "a new one"),
        ("nothing", "demo", "", "is not a directory", "--from"),
        ("files/file 3", "demo", "", "is not a directory", "--from"),
        ("empty", "demo", "", "no readable files", "--from"),
    ],
)
def test_what_a_demo_lacks_is_told_before_a_server_is_started(
    tmp_path: Path,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    source: str,
    directory: str,
    path: str,
    said: str,
    hint: str,
) -> None:
    (tmp_path / "empty").mkdir()
    if path:
        (tmp_path / path).symlink_to("/bin/true")
        monkeypatch.setenv("PATH", str(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ConfigError, SourceError), match=said) as caught:
        demo.run(source=tmp_path / source, directory=tmp_path / directory)
    assert hint in caught.value.hint
    assert "PostgreSQL" not in capfd.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_store_is_made_of_copies_and_never_of_itself(tmp_path: Path, files: Path) -> None:
    place = files / "demo" / "store"
    place.mkdir(parents=True)
    (files / "demo" / "key").write_text("a secret of the demo")
    made = store.make_store(place, [files], 1_000, avoid=files / "demo")
    blobs = [path for path in place.rglob("*") if path.is_file()]
    assert len(blobs) == made.blobs == BLOBS
    assert all(path.read_bytes() != b"a secret of the demo" for path in blobs)
    assert sum(path.stat().st_size for path in blobs) == made.bytes
    assert all(path.stat().st_nlink == 1 for path in blobs)
    assert made.duplicates == 1


def test_comparison_sees_every_kind_of_difference(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for root in (ours, theirs):
        root.mkdir()
        for name in ("same", "changed", "longer", "replaced"):
            (root / name).write_bytes(b"x" * 3_000_000)
    (ours / "missing").touch()
    (theirs / "extra").touch()
    (theirs / "changed").write_bytes(b"x" * 2_999_999 + b"y")
    (theirs / "longer").write_bytes(b"x" * 3_000_001)
    (theirs / "replaced").unlink()
    (theirs / "replaced").symlink_to(ours / "replaced")
    comparison = store.compare(ours, theirs)
    assert not comparison.identical
    assert comparison == store.Comparison(
        same=1, missing=["missing"], extra=["extra"], different=["changed", "longer", "replaced"]
    )
    assert store.compare(ours, ours).identical
