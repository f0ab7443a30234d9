"""Keys and known hosts in places with odd names: ssh must find what the settings name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ntt_backup.client.remote_shell import ask
from ntt_backup.client.transport import Ssh
from ntt_backup.config.sections import RemoteSettings
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import PATIENCE


@pytest.mark.parametrize("name", ["plain", 'a b it\'s "c" 100%h %d back\\slash $HOME'])
def test_a_login_works_with_files_in_odd_places(remote: Sshd, tmp_path: Path, name: str) -> None:
    odd = tmp_path / name
    odd.mkdir()
    key, hosts, config = odd / "id", odd / "hosts", odd / "config"
    shutil.copy(remote.identity_file, key)
    shutil.copy(remote.known_hosts, hosts)
    config.write_text(
        f"Host *\n  User {remote.user}\n  IdentityFile /nowhere\n  GlobalKnownHostsFile /dev/null\n"
    )
    settings = RemoteSettings(
        host=remote.host,
        port=remote.port,
        path="/srv",
        identity_file=key,
        known_hosts=hosts,
        ssh_config=config,
    )
    said = ask(Ssh(settings), "id -un", {}, doing="its name", timeout=PATIENCE)
    assert said.decode().strip() == remote.user
