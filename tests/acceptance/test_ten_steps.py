"""A newcomer's ten steps, as the README has them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from psycopg.conninfo import make_conninfo

from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres

README = Path(__file__).parents[2] / "README.md"
# Their exit codes, where they are not 0.
FINDS_SOMETHING = {7: 7}


def steps() -> dict[int, str]:
    """The commands of each step."""
    (block,) = re.findall(r"^```sh\n(# 1\. .*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    parts = re.split(r"^# (\d+)\. [^\n]*\n", block, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_steps_lead_from_a_configuration_to_a_restore(
    env: Environment, postgres: Postgres
) -> None:
    """Steps 1 and 10, which install, are walked by the tests of the packages and of the service."""
    found = steps()
    assert list(found) == list(range(1, 11))
    home = env.root / "home"
    disk = env.root / "backup"
    disk.mkdir()
    home.mkdir()
    env.store.rename(home / "store")
    env.store.symlink_to(home / "store")
    blobids = {env.put_in_store(b"blob %d" % number) for number in range(20)}
    program = home / "ntt-backup-remote"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ntt_backup "$@"\n')
    program.chmod(0o755)
    environment = {
        **env.environment(),
        "HOME": str(home),
        "PATH": f"{home}:{postgres.programs}:{env.environment()['PATH']}",
        "NTT_CONFIG": str(home / "ntt.toml"),
        "NTT_LOCK_FILE": str(env.lock),
        "NTT_WORKERS": "1",
    }
    said = {}
    for number in range(2, 10):
        commands = found[number].replace("postgresql:///copyjob", make_conninfo(env.url))
        done = subprocess.run(
            ["sh", "-c", commands.replace("/mnt/usb/backup", str(disk))],
            env=environment,
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert done.returncode == FINDS_SOMETHING.get(number, 0), (number, done)
        said[number] = done.stdout
        if number == 6:
            lost = blobids - {Path(name).name for name in tree(disk / "by-hash")}

    assert (len(lost), f"{lost.pop()} remote-missing" in said[7]) == (1, True)
    assert tree(home / "back") == tree(home / "store") == tree(disk / "by-hash")
    assert {Path(name).name for name in tree(home / "back")} == blobids
