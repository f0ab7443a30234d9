"""The place on the remote that a bench fills and leaves empty.

It lies below remote.path, on the same file system as the backup, beside the preflight's and under
the same kind of name. It goes when the connection that made it ends, however that comes; what stays
where the remote went down, the next check, run or bench removes once it is an hour old. Each run of
a way gets a directory of its own in it, and that goes before the next begins: no more than one
sample is ever there, and a bench of many hours stays young.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ntt_backup import identity
from ntt_backup.bench.remote import remote_cpu_s
from ntt_backup.client.error_text import explain_root
from ntt_backup.client.shell import ask
from ntt_backup.client.ssh import Ssh
from ntt_backup.config import Settings
from ntt_backup.errors import BackupError
from ntt_backup.process.interrupts import Interrupts
from ntt_backup.upload.strategies.probe import Facts
from ntt_backup.upload.strategies.tar_probe import ScratchDirectory

_SECONDS: Final = 60.0
_TURN: Final = """
LC_ALL=C; export LC_ALL
cd "$scratch" || exit 1
cat "account.$old" 2>/dev/null
rm -rf "$old" "account.$old"
message=$(mkdir "$new" "$new/by-hash" 2>&1) || echo "problem=$message"
sync -f . 2>/dev/null || sync
"""
_ABSENT: Final = 'for tool in $tools; do command -v "$tool" >/dev/null 2>&1 || echo "$tool"; done'


class Scratch:
    """A directory on the remote. root is where the next run may store, account where its sessions
    may leave their CPU times; facts is what the remote says about itself.
    """

    def __init__(self, settings: Settings, path: str, facts: Facts) -> None:
        self._ssh = Ssh(settings.remote)
        self._path = path
        self._number = 0
        self.facts = facts

    @property
    def root(self) -> str:
        return f"{self._path}/{self._number}"

    @property
    def account(self) -> str:
        return f"{self._path}/account.{self._number}"

    def turn(self) -> float | None:
        """Remove what the last run stored and make room for the next; the CPU seconds that the last
        one used there, None where that is not known.
        """
        old, self._number = self._number, self._number + 1
        values = {"scratch": self._path, "old": str(old), "new": str(self._number)}
        said = ask(self._ssh, _TURN, values, doing="room for the next run", timeout=_SECONDS)
        text = said.decode("utf-8", "replace")
        _, problem, why = text.partition("problem=")
        if problem:
            raise explain_root(why.strip())
        return remote_cpu_s(text)

    def absent(self, tools: Sequence[str]) -> list[str]:
        """Those of the tools that the remote lacks."""
        values = {"tools": " ".join(tools)}
        said = ask(self._ssh, _ABSENT, values, doing="its tools", timeout=_SECONDS)
        return said.decode("utf-8", "replace").split()


@contextmanager
def scratch(
    settings: Settings, interrupts: Interrupts, warn: Callable[[str], None]
) -> Iterator[Scratch]:
    """Make the directory, and remove it whatever happens; warn is told where that fails."""
    stem = f".ntt-check-{identity.owner(settings)}"
    path = f"{settings.remote.path}/{stem}.bench-{os.getpid()}"
    lodging = ScratchDirectory(Ssh(settings.remote), settings.remote.path, stem, path)
    try:
        made = Scratch(settings, path, lodging.facts)
        made.turn()
        yield made
    finally:
        with interrupts.held():
            _remove(lodging, path, warn)


def _remove(lodging: ScratchDirectory, path: str, warn: Callable[[str], None]) -> None:
    try:
        lodging.close()
    except BackupError as error:
        warn(
            f"{path} may still stand on the remote ({error.message}); a check or run in an hour"
            " removes it"
        )
