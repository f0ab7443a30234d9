"""The service's files on a host: written once, replaced while ours, never where changed by hand."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from ntt_backup.cli.commands import install as command
from ntt_backup.cli.commands.install import install_service
from ntt_backup.daemon.service_files import PROGRAM, service_files
from ntt_backup.errors import ConfigError
from ntt_backup.source import read_ahead
from tests.helpers.parallel import memory

UNIT = Path("etc/systemd/system/ntt-backup-remote.service")
SETTINGS = Path("etc/ntt/backup-remote.toml")


def install(root: Path, *options: str) -> dict[Path, str]:
    """What was done with each file."""
    argv = ["--root", str(root), "--program", "/opt/x/bin/ntt-backup-remote", *options]
    done = CliRunner().invoke(install_service, argv, catch_exceptions=False)
    assert done.exit_code == 0
    lines = [line.partition(": ") for line in done.output.splitlines()]
    return {Path(path).relative_to(root): what for path, _, what in lines}


def files(root: Path) -> dict[Path, bytes]:
    found = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root): path.read_bytes() for path in found}


def test_all_is_written_once_and_removed_but_for_the_settings(tmp_path: Path) -> None:
    done = install(tmp_path)
    assert set(done.values()) == {"written"}
    first = files(tmp_path)
    assert set(first) == set(done)
    unit = first[UNIT].decode()
    assert "\nExecStart=/opt/x/bin/ntt-backup-remote run --watch\n" in unit
    assert "\nType=notify\n" in unit
    assert PROGRAM not in unit
    # So many workers have room in its memory; on a slow disk each has all its threads.
    tasks = int(unit.partition("\nTasksMax=")[2].partition("\n")[0])
    assert tasks > 16 * (read_ahead._THREADS + read_ahead._BESIDE)
    assert (tmp_path / SETTINGS).stat().st_mode & 0o777 == 0o640
    (tmp_path / SETTINGS).write_text("[run]\nworkers = 7\n")
    assert set(install(tmp_path).values()) == {"unchanged", "kept"}
    drop_in = tmp_path / f"{UNIT}.d" / "override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\n")
    assert install(tmp_path, "--uninstall")[UNIT] == "removed"
    left = files(tmp_path)
    assert left == {
        SETTINGS: b"[run]\nworkers = 7\n",
        drop_in.relative_to(tmp_path): b"[Service]\n",
    }
    assert set(install(tmp_path, "--uninstall").values()) == {"not there", "kept"}


def test_a_new_version_replaces_what_nobody_has_changed(tmp_path: Path) -> None:
    install(tmp_path)
    now = (tmp_path / UNIT).read_bytes()
    install(tmp_path, "--program", "/opt/old/bin/ntt-backup-remote")
    assert (tmp_path / UNIT).read_bytes() != now
    assert install(tmp_path)[UNIT] == "written"
    assert (tmp_path / UNIT).read_bytes() == now


@pytest.mark.parametrize("change", [b"Nice=19\n", b"", b"# f\xfcr die Nacht\nNice=19\n"])
@pytest.mark.parametrize("end", [b"# ntt-backup-remote", b"no such line"])
def test_what_was_changed_by_hand_is_kept(tmp_path: Path, change: bytes, end: bytes) -> None:
    """With our last line or without; or put there by hand, as an earlier version had it."""
    install(tmp_path)
    unit, ours = tmp_path / UNIT, (tmp_path / UNIT).read_bytes()
    changed = ours.replace(b"Nice=10\n", change)
    theirs = changed.rpartition(end)[0] or changed
    unit.write_bytes(theirs)
    assert install(tmp_path)[UNIT].startswith("kept, since it was changed by hand")
    beside = unit.with_name(f"{unit.name}.dpkg-dist")
    assert (unit.read_bytes(), beside.read_bytes()) == (theirs, ours)
    assert install(tmp_path, "--uninstall")[UNIT] == "kept"
    assert unit.read_bytes() == theirs
    assert not beside.exists()


def test_a_package_has_its_files_below_its_prefix(tmp_path: Path) -> None:
    lib = Path("usr/lib")
    done = install(tmp_path, "--prefix", "/usr")
    assert {path.parent for path in done} == {
        lib / "systemd/system",
        lib / "sysusers.d",
        lib / "tmpfiles.d",
        Path("etc/logrotate.d"),
        Path("etc/ntt"),
    }


@pytest.mark.parametrize("release", [252, 253])
def test_a_systemd_that_knows_how_asks_for_reloads_itself(release: int) -> None:
    text = next(file.text for file in service_files(PROGRAM, None, release) if file.path == UNIT)
    assert ("\nType=notify-reload\n" in text) == (release >= 253)
    assert ("\nExecReload=" in text) == (release < 253)


def test_nothing_gives_the_log_directory_to_the_service(tmp_path: Path) -> None:
    """It may belong to other programs and another account."""
    install(tmp_path)
    for path, content in files(tmp_path).items():
        lines = [line for line in content.decode().splitlines() if not line.startswith("#")]
        assert [line for line in lines if line.startswith("LogsDirectory")] == [], path
        named = [line for line in lines if "/var/log" in line]
        if path.parent.name == "logrotate.d":
            assert named == ["/var/log/ntt/backup-remote*.jsonl {"]
        else:
            assert set(named) <= {"ReadWritePaths=-/var/log/ntt"}, path


def test_the_service_runs_as_another_account_until_it_is_given_back(tmp_path: Path) -> None:
    install(tmp_path, "--user", "app")
    drop_in = Path(f"{UNIT}.d/user.conf")
    assert b"\nUser=app\nGroup=\n" in files(tmp_path)[drop_in]
    kept = files(tmp_path)[Path("etc/tmpfiles.d/ntt-backup.conf")].decode()
    assert re.findall(r"(?m)^d (\S+) +\d+ (\S+)", kept) == [
        ("/run/ntt-backup", "app"),
        ("/var/lib/ntt-backup", "app"),
        ("/etc/ntt", "root"),
    ]
    units = {path.parent.name for path in files(tmp_path) if path.name == "user.conf"}
    assert units == {f"{path.name}.d" for path in files(tmp_path) if path.suffix == ".service"}
    # As after an upgrade.
    assert set(install(tmp_path).values()) == {"unchanged", "kept"}
    install(tmp_path, "--user", "ntt-backup")
    assert [path for path in files(tmp_path) if path.name == "user.conf"] == []
    assert not (tmp_path / drop_in).parent.exists()
    assert set(install(tmp_path).values()) == {"unchanged", "kept"}


def test_the_service_reads_every_file_where_that_is_wanted(tmp_path: Path) -> None:
    install(tmp_path, "--read-all")
    drop_in = Path(f"{UNIT}.d/read-all.conf")
    lines = files(tmp_path)[drop_in].decode().splitlines()
    assert "AmbientCapabilities=CAP_DAC_READ_SEARCH" in lines
    assert "CapabilityBoundingSet=CAP_DAC_READ_SEARCH" in lines
    # The page shows and sends nothing of a file.
    units = {path.parent.name for path in files(tmp_path) if path.name == drop_in.name}
    assert units == {f"ntt-backup-remote{name}.service.d" for name in ("", "-once", "@")}
    install(tmp_path)
    assert drop_in in files(tmp_path)
    assert install(tmp_path, "--no-read-all")[drop_in] == "removed"
    install(tmp_path, "--read-all", "--user", "app")
    left = install(tmp_path, "--uninstall")
    assert set(left.values()) == {"removed", "kept"}
    assert set(files(tmp_path)) == {SETTINGS}


@pytest.mark.parametrize("name", ["root", "a b", "x\nExecStart=/bin/sh", "%i", "-x", "1000"])
def test_the_service_runs_as_no_account_of_such_a_name(tmp_path: Path, name: str) -> None:
    argv = ["--root", str(tmp_path), "--program", "/opt/x", "--user", name]
    with pytest.raises(ConfigError, match=r"account|as root"):
        CliRunner().invoke(install_service, argv, catch_exceptions=False)
    assert files(tmp_path) == {}


def test_what_a_package_has_installed_is_not_written_a_second_time(tmp_path: Path) -> None:
    """A copy in /etc would hide the unit of the next version of the package."""
    install(tmp_path, "--prefix", "/usr")
    package = files(tmp_path)
    install(tmp_path)
    assert files(tmp_path) == package
    install(tmp_path, "--user", "app")
    override = Path("etc/tmpfiles.d/ntt-backup.conf")
    new = set(files(tmp_path)) - set(package)
    assert {path for path in new if path.name != "user.conf"} == {override}
    install(tmp_path, "--user", "ntt-backup")
    assert files(tmp_path) == package


@pytest.mark.parametrize("closed", ["bin", "lib", ""])
def test_a_program_that_the_service_could_not_start_is_refused(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's umask may have closed the package only, in a later upgrade."""
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        root = Path(name)
        root.chmod(0o755)
        for one in ("bin", "lib"):
            (root / one).mkdir()
            (root / one).chmod(0o700 if one == closed else 0o755)
        monkeypatch.setattr(command, "__file__", str(root / "lib" / "install.py"))
        monkeypatch.setattr(sys, "argv", [str(root / "bin" / "ntt-backup-remote")])
        if closed:
            with pytest.raises(ConfigError, match=f"{root / closed} is closed to others"):
                command._this_program("ntt-backup", check=True)
        else:
            assert command._this_program("ntt-backup", check=True) == sys.argv[0]


def test_units_start_the_program_and_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`setup` calls `install-service` by `python -m`, whose path cannot be executed."""
    module = Path(command.__file__).parents[2] / "__main__.py"
    monkeypatch.setattr(sys, "argv", [str(module)])
    program = Path(command._this_program("ntt-backup", check=False))
    assert program == Path(sys.executable).with_name("ntt-backup-remote")
