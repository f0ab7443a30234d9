"""The files an operator installs: systemd accepts them, and the sample tells the real defaults."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from ntt_backup.config import CatalogConfig, Settings, load
from ntt_backup.config.command_settings import ENVIRONMENT
from ntt_backup.config.sections import SnapshotSettings

SYSTEMD = Path(__file__).parents[2] / "systemd"
SAMPLE = SYSTEMD / "backup-remote.toml"
PROGRAM = "/usr/local/bin/ntt-backup-remote"
# Where a daemon and a single run differ. The rest, from the user to the sandbox, may not.
OWN_SETTINGS = (
    "Type",
    "NotifyAccess",
    "Exec",
    "TimeoutStart",
    "TimeoutAbort",
    "Environment=PYTHONFAULTHANDLER",
    "Watchdog",
    "Restart",
    "SuccessExit",
)


def settings_of(unit: str) -> list[str]:
    """The `Name=value` lines of a unit's [Service] section."""
    section = (SYSTEMD / unit).read_text().partition("[Service]\n")[2].partition("\n[")[0]
    return [line for line in section.splitlines() if line and not line.startswith("#")]


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units, with a program that exists in the place of ours."""
    program = tmp_path / "ntt-backup-remote"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copies = []
    for unit in [*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.timer")]:
        copies.append(tmp_path / unit.name)
        copies[-1].write_text(unit.read_text().replace(PROGRAM, str(program)))
    return copies


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    argv = ["systemd-analyze", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_systemd_accepts_the_units_without_a_word(units: list[Path]) -> None:
    verdict = analyze("verify", "--man=no", *units)
    said = [line for line in verdict.stderr.splitlines() if "ntt-backup" in line]
    assert said == []
    assert verdict.returncode == 0


def test_the_services_are_exposed_little(units: list[Path]) -> None:
    services = [unit for unit in units if unit.suffix == ".service"]
    threshold = "--threshold=20"  # of 100
    verdict = analyze("security", "--offline=true", threshold, "--no-pager", *services)
    if "unrecognized option" in verdict.stderr:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_no_service_leaves_its_memory_in_a_file() -> None:
    """A core dump has the passwords and keys of the daemon."""
    units = [unit.name for unit in SYSTEMD.glob("*.service")]
    assert units
    assert [unit for unit in units if "LimitCORE=0" not in settings_of(unit)] == []


def test_the_settings_are_for_root_and_the_group_alone() -> None:
    text = (SYSTEMD / "tmpfiles.d" / "ntt-backup.conf").read_text()
    modes = {path: words for _, path, *words in map(str.split, re.findall(r"(?m)^d .*", text))}
    assert modes["/etc/ntt"] == ["0750", "root", "ntt-backup"]
    assert modes["/var/lib/ntt-backup"] == ["0700", "ntt-backup", "ntt-backup"]


def test_all_services_run_in_the_same_sandbox() -> None:
    def shared(unit: str) -> list[str]:
        return [line for line in settings_of(unit) if not line.startswith(OWN_SETTINGS)]

    daemon = shared("ntt-backup-remote.service")
    assert "ProtectSystem=strict" in daemon
    assert shared("ntt-backup-remote-once.service") == daemon
    assert shared("ntt-backup-remote@.service") == daemon
    page, begin = shared("ntt-backup-remote-page.service"), "CapabilityBoundingSet="
    assert page[page.index(begin) :] == daemon[daemon.index(begin) :]


def test_the_lock_of_the_services_is_the_one_in_the_sample() -> None:
    lock = tomllib.loads(SAMPLE.read_text())["lock"]["file"]
    for name in ("", "-once", "-page"):
        unit = f"ntt-backup-remote{name}.service"
        assert f"Environment=NTT_LOCK_FILE={lock}" in settings_of(unit)


def test_the_sample_gives_each_target_a_lock_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text(
        re.sub(r'^#(?=\[targets|url = "ssh)', "", SAMPLE.read_text(), flags=re.MULTILINE)
    )
    locks = {
        load(Settings, environ={}, file=file, target=t).lock.file for t in ("remote", "offsite")
    }
    assert locks == {Path("/run/ntt-backup/remote.lock"), Path("/run/ntt-backup/offsite.lock")}


@pytest.mark.parametrize("url", ["ssh://me@host/backup", "file:///mnt/usb", "s3://bucket/backup"])
def test_a_person_who_sets_the_url_in_the_sample_need_not_change_anything_else(
    url: str, tmp_path: Path
) -> None:
    """As docs/install.md says: set source.root and remote.url."""
    before, remote, after = re.split(r"^(\[remote\]\n)", SAMPLE.read_text(), flags=re.MULTILINE)
    file = tmp_path / "edited.toml"
    edited = re.sub(r"^#?url =.*$", f'url = "{url}"', after, count=1, flags=re.MULTILINE)
    file.write_text(before + remote + edited)
    assert load(Settings, environ={}, file=file).remote.url == url


def test_the_sample_states_the_defaults(tmp_path: Path) -> None:
    spelled_out = tmp_path / "all.toml"
    spelled_out.write_text(re.sub(r"^#(\w+ = )", r"\1", _before_targets(), flags=re.MULTILINE))
    assert load(Settings, environ={}, file=spelled_out) == load(Settings, environ={}, file=SAMPLE)


def test_the_example_of_a_snapshot_set_states_the_defaults(tmp_path: Path) -> None:
    written = "[snapshots.etc]" + SAMPLE.read_text().partition("#[snapshots.etc]")[2]
    path, lines = tmp_path / "set.toml", re.sub(r"^#(?=\w+ = )", "", written, flags=re.MULTILINE)
    path.write_text(lines)
    stated = load(CatalogConfig, environ={}, file=path).snapshots["etc"]
    assert stated == SnapshotSettings(paths=(Path("/etc"),))
    named = set(re.findall(r"^#?(\w+) =", lines, flags=re.MULTILINE))
    assert named == set(SnapshotSettings.model_fields)


def test_the_sample_names_every_setting_and_variable() -> None:
    text = _before_targets()
    named = set()
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
        elif setting := re.match(r"#?(\w+) =", line):
            named.add(f"{section}.{setting[1]}")
    tables = load(Settings, environ={}, file=SAMPLE).model_dump(exclude={"target"}, by_alias=True)
    known = {f"{section}.{name}" for section, table in tables.items() for name in table}
    assert named == known
    assert [variable for variable in ENVIRONMENT if variable not in text] == []


def _before_targets() -> str:
    return SAMPLE.read_text().partition("# A second remote")[0]
