"""kopia, set up for a comparison: zstd, its own state, and no look for updates.

It encrypts, as it always does, and splits files into chunks of 4 MiB on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench.lab import ALIAS, Lab


def environment(work: Path) -> dict[str, str]:
    """Returns the variables that keep all of kopia's state below a directory."""
    return {
        "KOPIA_PASSWORD": "bench",
        "KOPIA_CONFIG_PATH": str(work / "kopia.config"),
        "KOPIA_CACHE_DIRECTORY": str(work / "cache"),
        "KOPIA_LOG_DIR": str(work / "logs"),
        "KOPIA_CHECK_FOR_UPDATES": "false",
        "KOPIA_USE_KEYRING": "false",
    }


def creation(*storage: str) -> Iterator[list[str]]:
    """Yields the commands that create a repository. storage: its kind, and where it is."""
    yield ["kopia", "repository", "create", *storage]
    yield ["kopia", "policy", "set", "--global", "--compression=zstd"]


def storage(link: Lab | None, repository: Path) -> list[str]:
    """Returns the kind of a repository and its place; link: None for this machine."""
    if link is None:
        return ["filesystem", f"--path={repository}"]
    ssh, *options = link.ssh
    argv = ["sftp", "--external", f"--ssh-command={ssh}", f"--host={ALIAS}"]
    argv += [f"--ssh-args={' '.join(options)}", f"--username={link.user}"]
    return [*argv, f"--path={repository}"]
