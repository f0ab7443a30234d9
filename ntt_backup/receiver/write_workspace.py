"""A session that writes has a staging directory, `.ntt-incoming/<owner>.<run>.<slot>.<token>`.

The token is random, and the directory is made new: two sessions of one name, as of hosts that are
clones of each other, never share a stage. A session holds the lock of its stage as long as it
lives. The leftovers of a dead session are removed by the next one of the same owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable

from ntt_backup.blobdir.descriptors import (
    DIRECTORY,
    NEW,
    Misplaced,
    closing,
    lock_file,
    lock_new,
    make_directory,
    names_in,
    open_below,
    remove_tree,
    rename_new,
    sync_directory,
    write_all,
)
from ntt_backup.blobdir.layout import BY_HASH, marker_text
from ntt_backup.receiver.large_blob import PARTIAL, remove_useless
from ntt_backup.receiver.workspace import Refusal, Workspace, refused
from ntt_backup.wire.framing import IDENTITY

INCOMING = ".ntt-incoming"

_LOCK = "lock"
# So many names are tried for a stage.
_TRIES = 20
# A check or a bench of the tar strategy that was killed leaves these; younger ones may be alive.
_SCRATCH = ".ntt-check-"
_SCRATCH_SECONDS = 3600
# A receiver looks every second whether it is still wanted; its last sync may take longer.
_PREDECESSOR_SECONDS = 10.0
# A stage that no lock tells of is left over when it has not changed for so long: that of the tar
# strategy, one that is being made, and any on a file system without locks. A session that is idle
# for longer loses an empty stage at worst: it ends as superseded, and its client begins again.
_LOCKLESS_SECONDS = 86400


class _Taken(Exception):
    """The name, the stage or its lock is another session's."""


class WriteWorkspace(Workspace):
    """The root, `by-hash`, and the session's staging directory: all on one file system.

    The root itself is never made. Raises Refusal.

    Args:
        root: The path of the root.
        owner: The owner of the session: its stage is named so.
        run: The run of the session.
        slot: The worker of the run.
        alive: Called now and then while the leftovers of others are removed.

    Attributes:
        stage: The descriptor of the staging directory.
        incoming: The descriptor of the directory that has all staging directories.
    """

    def __init__(
        self, root: str, owner: str, run: str, slot: str, alive: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(root)
        self._session = (owner, run, slot)
        self._alive = alive
        self._predecessors: list[str] = []
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(super().leave)
            with refused(BY_HASH):
                self._require_writable()
            with refused(INCOMING):
                self._make()
                with contextlib.suppress(OSError):
                    self._remove_leftovers(*self._session)
                remove_useless(self.incoming, self.by_hash)
            otherwise.pop_all()

    @property
    def superseded(self) -> bool:
        """Whether a newer session of the same worker has asked this one to end."""
        return os.fstat(self._lock).st_nlink == 0

    def await_predecessors(self) -> None:
        """Waits, for some seconds, until the sessions that were asked to end hold no lock."""
        deadline = time.monotonic() + _PREDECESSOR_SECONDS
        while self._predecessors and time.monotonic() < deadline:
            try:
                os.stat(self._predecessors[-1], dir_fd=self.incoming, follow_symlinks=False)
            except OSError:
                self._predecessors.pop()
            else:
                self._alive()
                time.sleep(0.05)
        self._predecessors.clear()

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

    def identify(self, identity: str, hash: str) -> None:
        """Gives the target this identity and hash of names, durably, where it has none. Never
        replaces a marker. Raises Refusal.
        """
        if self.identity:
            return
        if hash != "blake3" and not self.empty:
            raise Refusal("refused", "what is in by-hash was stored as named by BLAKE3")
        with refused(IDENTITY):
            with closing(os.open(IDENTITY, NEW, 0o644, dir_fd=self.stage)) as fd:
                write_all(fd, memoryview(marker_text(identity, hash)))
                os.fsync(fd)
            with contextlib.suppress(FileExistsError):  # Another session has just given it one.
                rename_new(self.stage, IDENTITY.encode(), self.root, IDENTITY.encode())
            with contextlib.suppress(FileNotFoundError):
                os.unlink(IDENTITY, dir_fd=self.stage)
            sync_directory(self.root)

    def leave(self) -> None:
        """Removes the staging directory, and those around it if they are empty, and closes all."""
        # Again: this session may have published a blob whose partial file another one held.
        remove_useless(self.incoming, self.by_hash)
        # First: over NFS and sshfs a file that is open only gets another name, which would stay.
        os.close(self._lock)
        remove_tree(self.incoming, self._name)
        with contextlib.suppress(OSError):
            os.rmdir(PARTIAL, dir_fd=self.incoming)
        with contextlib.suppress(OSError):
            os.rmdir(INCOMING, dir_fd=self.root)
        os.close(self.stage)
        os.close(self.incoming)
        super().leave()

    def _require_writable(self) -> None:
        if self.device != os.fstat(self.root).st_dev:
            raise Misplaced(f"{BY_HASH} is on another file system than the root")
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self.by_hash):
            read_only = os.statvfs(self.by_hash).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if read_only else errno.EACCES, "", BY_HASH)

    def _make(self) -> None:
        # Again, under another name, where a session that ends removes what is empty at that moment,
        # or the name, the stage or its lock is another one's.
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError, FileExistsError, _Taken):
                make_directory(self.root, INCOMING, 0o755)
                self._make_stage()
                return
        raise Misplaced(f"no stage in {INCOMING} whose lock is not held by another session")

    def _make_stage(self) -> None:
        """Makes a stage of a name that nobody has. Raises FileNotFoundError, FileExistsError and
        _Taken where another name may do better, Misplaced, OSError.
        """
        name = ".".join((*self._session, os.urandom(8).hex()))
        with contextlib.ExitStack() as otherwise:
            incoming = open_below(self.root, INCOMING, self.device)
            otherwise.callback(os.close, incoming)
            os.mkdir(name, 0o700, dir_fd=incoming)
            otherwise.callback(_discard, os.rmdir, incoming, name)
            try:
                stage = open_below(incoming, name, self.device)
            except Misplaced as problem:  # What was made is a directory: this is another one's.
                raise _Taken from problem
            otherwise.callback(os.close, stage)
            lock = os.open(_LOCK, NEW, 0o600, dir_fd=stage)
            otherwise.callback(os.close, lock)
            otherwise.callback(_discard, os.unlink, stage, _LOCK)
            named = os.stat(name, dir_fd=incoming, follow_symlinks=False)
            ours = os.path.samestat(named, os.fstat(stage)) and os.fstat(lock).st_nlink == 1
            if not (lock_new(lock) and ours):
                raise _Taken
            otherwise.pop_all()
        self.incoming, self.stage, self._lock, self._name = incoming, stage, lock, name

    def _remove_leftovers(self, owner: str, run: str, slot: str) -> None:
        for name in names_in(self.incoming):
            parts = name.split(".")
            if name == self._name or len(parts) != 4 or parts[0] != owner:
                continue
            with contextlib.suppress(OSError):
                if _is_dead(self.incoming, name):
                    remove_tree(self.incoming, name, self._alive)
                elif parts[1:3] == [run, slot]:
                    # A worker has one session at a time, so the client of that one is gone: its
                    # link died in silence. Without the name of its lock it ends.
                    self._supersede(name)
        for name in names_in(self.root):
            if name.startswith(f"{_SCRATCH}{owner}.") and self._is_old_directory(name):
                remove_tree(self.root, name, self._alive)

    def _supersede(self, name: str) -> None:
        with contextlib.suppress(OSError):
            with closing(os.open(name, DIRECTORY, dir_fd=self.incoming)) as stage:
                os.unlink(_LOCK, dir_fd=stage)
            self._predecessors.append(name)

    def _is_old_directory(self, name: str) -> bool:
        found = os.stat(name, dir_fd=self.root, follow_symlinks=False)
        return stat.S_ISDIR(found.st_mode) and found.st_mtime < time.time() - _SCRATCH_SECONDS


def _is_dead(incoming: int, name: str) -> bool:
    """Returns whether the session of a stage has ended. Raises OSError."""
    with closing(os.open(name, DIRECTORY, dir_fd=incoming)) as stage:
        try:
            lock = lock_file(stage, _LOCK, create=False)
        except OSError:  # It has no lock yet, or there are none.
            return os.fstat(stage).st_mtime < time.time() - _LOCKLESS_SECONDS
    if lock is not None:
        os.close(lock)
    return lock is not None


def _discard(remove: Callable[..., None], directory: int, name: str) -> None:
    with contextlib.suppress(OSError):
        remove(name, dir_fd=directory)
