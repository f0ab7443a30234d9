"""The blocks of docs/install.md, run as they stand there on a Debian with systemd."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.machine import CHECKOUT, SECONDS, Machine, debian, fill
from tests.helpers.waiting import wait_until

PAGE = CHECKOUT / "docs" / "install.md"
# What a build of the package needs of a checkout; the rest of ours (.venv, tests) is no part of it.
SHIPPED = (
    "ntt_backup",
    "systemd",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
)
BLOBS = 300

# Where the page says `editor`, a person types: the key into authorized_keys. The settings of the
# sample are those of the page, and stay.
EDITOR = """\
#!/bin/sh
case $1 in */authorized_keys) cat /var/lib/ntt-backup/.ssh/id_ed25519.pub >>"$1" ;; esac
"""
LEFT = re.compile(r"/etc/(passwd|group|g?shadow|sub[ug]id)-|/home/vault(/.*)?|/srv/backup(/.*)?")


def blocks(chapter: str) -> list[str]:
    """The shell commands of one chapter of the page, block by block."""
    text = PAGE.read_text().partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, chapter
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would fetch to build and install us: the container has no network."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the wheels for Debian's Python 3.11 are fetched by a Python 3.11")
    directory = tmp_path_factory.mktemp("wheels")
    argv = [sys.executable, "-m", "pip", "wheel", "-q", "-w", str(directory), str(CHECKOUT)]
    subprocess.run([*argv, "hatchling"], check=True, timeout=600)
    for ours in directory.glob("ntt_backup-*"):
        ours.unlink()
    return directory


@pytest.fixture
def machine(wheels: Path) -> Iterator[Machine]:
    with debian(wheels) as machine:
        yield machine


@pytest.mark.docker
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_leads_from_nothing_to_a_backup_and_back(machine: Machine, tmp_path: Path) -> None:
    paths = fill(tmp_path / "store", BLOBS)
    machine.put("/srv/store", tmp_path / "store")
    for name in SHIPPED:
        machine.put(f"/root/checkout/{name}", CHECKOUT / name)
    machine.put("/usr/bin/editor", EDITOR.encode())
    machine.run(
        "echo 127.0.0.1 backup.example.org >>/etc/hosts; ssh-keygen -A; systemctl start ssh"
    )
    before = machine.files()

    def status() -> dict[str, object]:
        as_service = "runuser -u ntt-backup -- ntt-backup-remote status --json"
        found: dict[str, object] = json.loads(machine.run(as_service))
        return found

    def is_backed_up() -> bool:
        return status()["copied"] == len(paths)

    for block in blocks("From nothing to the first backup"):
        machine.run(block)
    wait_until(is_backed_up, "the first backup", SECONDS)
    assert status()["pending"] == status()["failed"] == 0
    listing = "cd /srv/backup/by-hash && find . -type f -printf '%P\\n'"
    assert set(machine.run(listing).splitlines()) == paths
    machine.run("diff -r /srv/store /srv/backup/by-hash && test -s /srv/backup/pgdump/*.dump")
    assert machine.run("systemctl is-active ntt-backup-remote.service") == "active\n"
    assert machine.run("cat /run/ntt-backup/remote.lock").strip().isdigit()

    later = fill(tmp_path / "later", 3)
    machine.put("/srv/store", tmp_path / "later")
    for block in blocks("Upgrade"):
        machine.run(block)
    machine.run("runuser -u ntt-backup -- ntt-backup-remote scan")
    paths |= later
    wait_until(is_backed_up, "a backup after the upgrade", SECONDS)

    for block in blocks("Uninstall"):
        machine.run(block)
    left = machine.files() - before
    assert sorted(path for path in left if not LEFT.fullmatch(path)) == []
    assert set(machine.run(listing).splitlines()) == paths
    assert machine.try_to("getent passwd ntt-backup || getent group ntt-backup").returncode == 2
    assert "ntt-backup" not in machine.run("systemctl list-units --all --plain --no-legend")
    assert machine.query("select count(*) from blobs") == str(len(paths))
    assert machine.query("select rolname from pg_roles where rolname ~ 'ntt'") == ""
    ours = "table_schema = 'public' and column_name ~ 'remote' or table_schema ~ 'ntt'"
    assert machine.query(f"select * from information_schema.columns where {ours}") == ""
