"""A bench fills a directory on the remote, and leaves it empty.

It lies below remote.path, on the backup's own file system, and is named like the preflight's. It is
removed when the connection that made it ends, for whatever reason; where the remote went down, the
next check, run or bench removes it once it is an hour old. Each run of a way stores into a
directory of its own in it, which is removed before the next run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ntt_backup.client.remote_errors import explain_root
from ntt_backup.client.remote_shell import ask
from ntt_backup.client.transport import Transport, transport_to
from ntt_backup.config import Settings
from ntt_backup.errors import BackupError
from ntt_backup.upload.strategies.probe import Facts
from ntt_backup.upload.strategies.tar_probe import ScratchDirectory

_SECONDS: Final = 60.0
_RENEW: Final = """
LC_ALL=C; export LC_ALL
cd "$scratch" || exit 1
rm -rf "$old"
message=$(mkdir "$new" "$new/by-hash" 2>&1) || echo "problem=$message"
sync -f . 2>/dev/null || sync
"""


@dataclass(slots=True)
class RemoteDir:
    """The directory. root: where the next run may store. facts: what the remote says of itself."""

    _transport: Transport
    _path: str
    facts: Facts
    _number: int = 0

    @property
    def root(self) -> str:
        return f"{self._path}/{self._number}"

    def renew(self) -> None:
        """Removes what the last run stored, and makes room for the next."""
        old, self._number = self._number, self._number + 1
        values = {"scratch": self._path, "old": str(old), "new": str(self._number)}
        said = ask(self._transport, _RENEW, values, doing="room for the next run", timeout=_SECONDS)
        _, problem, why = said.decode("utf-8", "replace").partition("problem=")
        if problem:
            raise explain_root(why.strip())


@contextmanager
def remote_dir(settings: Settings, warn: Callable[[str], None]) -> Iterator[RemoteDir]:
    """Makes the directory, and removes it at the end; warn is told where that fails."""
    transport = transport_to(settings.remote)
    stem = f".ntt-check-{settings.owner}"
    path = f"{settings.remote.path}/{stem}.bench-{os.getpid()}"
    scratch = ScratchDirectory(transport, settings.remote.path, stem, path)
    try:
        made = RemoteDir(transport, path, scratch.facts)
        made.renew()
        yield made
    finally:
        try:
            scratch.close()
        except BackupError as error:
            warn(
                f"{path} may still stand on the remote ({error.message}); a check or run in an"
                " hour removes it"
            )
