"""The workspace of a session that writes adds a staging directory to that of a reading one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from ntt_backup.blobdir.layout import BY_HASH
from ntt_backup.blobdir.open import Misplaced, make_directory, open_below
from ntt_backup.blobdir.staging import INCOMING, Staging
from ntt_backup.receiver.workspace import Workspace, refused


class WriteWorkspace(Workspace):
    """The root, `by-hash`, and `stage`, the session's staging directory: all on one file system.

    The root itself is never made. alive is called now and then while the leftovers of others are
    removed. Raises Refusal.
    """

    def __init__(
        self,
        root: str,
        owner: str,
        run: str,
        slot: str,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(root)
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(super().leave)
            self._make_stage((owner, run, slot), alive)
            otherwise.pop_all()

    def _make_stage(self, session: tuple[str, str, str], alive: Callable[[], None]) -> None:
        with refused(BY_HASH):
            if self.device != os.fstat(self.root).st_dev:
                raise Misplaced(f"{BY_HASH} is on another file system than the root")
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=self.by_hash):
                read_only = os.statvfs(self.by_hash).f_flag & os.ST_RDONLY
                raise OSError(errno.EROFS if read_only else errno.EACCES, "", BY_HASH)
        with refused(INCOMING):
            self.staging = Staging(self.root, self.by_hash, self.device, session, alive)
        self.stage = self.staging.stage

    @property
    def superseded(self) -> bool:
        """Whether a newer session of the same worker has asked this one to end."""
        return self.staging.superseded

    def place(self) -> None:
        """Makes `by-hash` where it was missing: never below a session that has had one. Raises
        Refusal.
        """
        if self.placed:
            return
        with refused(BY_HASH):
            make_directory(self.root, BY_HASH, 0o755)
            made = open_below(self.root, BY_HASH, self.device)
        os.dup2(made, self.by_hash, inheritable=False)
        os.close(made)
        self.placed = True

    def leave(self) -> None:
        """Removes the staging directory, and closes all."""
        self.staging.remove()
        super().leave()
