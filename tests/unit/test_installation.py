"""The line for authorized_keys, the steps around it, and the receiver as one file."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from ntt_backup.cli.app import cli
from ntt_backup.cli.commands.install import key_line, steps, write_receiver
from ntt_backup.client.bootstrap import standalone
from ntt_backup.config import RemoteSettings
from ntt_backup.errors import ConfigError
from ntt_backup.name_hash import HashOfNames

PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLE backup@source"


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    identity = tmp_path / "id_backup"
    identity.with_name("id_backup.pub").write_text(PUBLIC + "\n")
    return identity


def remote(path: str = "/srv/backup", identity: Path | None = None) -> RemoteSettings:
    return RemoteSettings(host="backup@host", path=path, identity_file=identity)


def test_the_line_restricts_the_key_to_the_receiver(identity: Path) -> None:
    assert key_line(remote(identity=identity)) == (
        'restrict,command="ntt-backup-receive --root /srv/backup'
        f' --allow put,list,verify,dump,snapshot --require blake3" {PUBLIC}'
    )


@pytest.mark.parametrize(
    ("layout", "names", "said", "step"),
    [
        ("files", "blake3", "dump,snapshot --require blake3", "b3sum"),
        ("files", "sha256", "dump,snapshot --require sha256", "needs no BLAKE3"),
        ("packs", "sha256", "packs,dump,snapshot", "needs no BLAKE3"),
    ],
)
def test_the_line_requires_the_hash_that_names_are(
    layout: Literal["files", "packs"], names: HashOfNames, said: str, step: str
) -> None:
    place = RemoteSettings(host="backup@host", path="/srv/backup", layout=layout)
    assert f'{said}" ' in key_line(place, names)
    text = steps(place, names)
    assert key_line(place, names) in text.splitlines()
    assert step in text
    assert [line[0] for line in text.splitlines() if re.match(r"\d\. ", line)] == list("12345")


@pytest.mark.parametrize("path", ["/srv/with space", '/srv/a"b', "/srv/it's", "/srv/$HOME;`id`"])
def test_an_odd_path_arrives_as_it_is(path: str) -> None:
    line = key_line(remote(path))
    # As sshd reads it: up to the next quote without a backslash before it.
    found = re.match(r'restrict,command="((?:\\"|[^"])*)" ', line)
    assert found is not None
    command = found[1].replace('\\"', '"')
    done = subprocess.run(
        ["sh", "-c", f'set -- {command}; printf %s "$3"'], capture_output=True, check=True
    )
    assert shlex.split(command)[2] == path
    assert done.stdout.decode() == path


@pytest.mark.parametrize("content", [None, "", "\n", "\x1b[2Jssh-ed25519 AAAA\n", "one-word\n"])
def test_a_key_that_is_not_to_be_had_is_asked_for(tmp_path: Path, content: str | None) -> None:
    identity = tmp_path / "id_backup"
    if content is not None:
        identity.with_name("id_backup.pub").write_text(content)
    text = steps(remote(identity=identity))
    assert "the public half of the key for this job" in text
    assert f"ssh-keygen -y -f {identity}" in text
    assert "\x1b" not in text


def test_the_key_is_the_one_that_ssh_takes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519.pub").write_text(PUBLIC + "\n")
    text = steps(remote())
    assert key_line(remote()) in text.splitlines()
    assert PUBLIC in text
    assert "If ssh takes another one" in text


def test_the_steps_hold_the_line_by_itself(identity: Path) -> None:
    text = steps(remote(identity=identity))
    assert key_line(remote(identity=identity)) in text.splitlines()
    assert "ssh-keygen" not in text
    assert [line[0] for line in text.splitlines() if re.match(r"\d\. ", line)] == list("12345")


def test_the_receiver_as_one_file_runs_on_its_own(tmp_path: Path) -> None:
    receiver = tmp_path / "ntt-backup-receive"
    write_receiver(receiver)
    ast.parse(receiver.read_text(), feature_version=(3, 8))
    root = tmp_path / "root"
    root.mkdir()
    done = subprocess.run(
        [sys.executable, "-I", receiver, "--root", root, "--allow", "put,list,verify"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"NTT-RECEIVE 1 " in done.stdout
    assert b" allow=put,list,verify " in done.stdout
    assert receiver.stat().st_mode & 0o777 == 0o755


def test_a_bare_dash_is_standard_output_for_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["install-receiver", "--write", "-"])
    assert (done.exit_code, done.output) == (0, standalone())
    both = CliRunner().invoke(cli, ["install-receiver", "--write", "-", "--print"])
    assert (both.exit_code, "standard output" in both.output) == (2, True)
    assert list(tmp_path.iterdir()) == []
    file = CliRunner().invoke(cli, ["install-receiver", "--write", "./-"])
    assert (file.exit_code, file.output) == (0, "")
    assert (tmp_path / "-").read_text() == standalone()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_receiver(tmp_path / "missing" / "file")
    assert "missing/file" in caught.value.message
