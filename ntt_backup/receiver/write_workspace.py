"""The workspace of a session that writes: that of a reading one, and a staging directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ntt_backup.blobdir.layout import BY_HASH
from ntt_backup.blobdir.open import Misplaced, open_below
from ntt_backup.blobdir.staging import INCOMING, Staging
from ntt_backup.blobdir.syscalls import words
from ntt_backup.receiver.workspace import Refusal, Workspace, refusal


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
        if self.device != os.fstat(self.root).st_dev:
            raise Refusal("place", f"{BY_HASH} is on another file system than the root")
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self.by_hash):
            read_only = os.statvfs(self.by_hash).f_flag & os.ST_RDONLY
            denied = errno.EROFS if read_only else errno.EACCES
            raise Refusal("storage", words(OSError(denied, "", BY_HASH)))
        try:
            session = (owner, run, slot)
            self.staging = Staging(self.root, self.by_hash, self.device, session, alive)
        except (OSError, Misplaced) as problem:
            raise refusal(problem, INCOMING) from None
        self.stage = self.staging.stage

    @property
    def superseded(self) -> bool:  # type: ignore[override]
        """Whether a newer session of the same worker has asked this one to end."""
        return self.staging.superseded

    def place(self) -> None:
        """Makes `by-hash` where it was missing: never below a session that has had one. Raises
        Refusal.
        """
        if self.placed:
            return
        try:
            made = open_below(self.root, BY_HASH, self.device, make=0o755)
        except (OSError, Misplaced) as problem:
            raise refusal(problem, BY_HASH) from None
        os.dup2(made, self.by_hash, inheritable=False)
        os.close(made)
        self.placed = True

    def leave(self) -> None:
        """Removes the staging directory, and closes all."""
        self.staging.remove()
        super().leave()
