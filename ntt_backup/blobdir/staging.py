"""Each session has a staging directory, `.ntt-incoming/<owner>.<run>.<slot>.<pid>`.

It lives as long as its lock is held. The leftovers of a dead session are removed by the next one of
the same owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable

from ntt_backup.blobdir.open import closing, make_directory, open_below
from ntt_backup.blobdir.partial import PARTIAL, lock_file, remove_useless
from ntt_backup.blobdir.syscalls import DIRECTORY

INCOMING = ".ntt-incoming"

_LOCK = "lock"
# A check or a bench of the tar strategy that was killed leaves these; younger ones may be alive.
_SCRATCH = ".ntt-check-"
_SCRATCH_SECONDS = 3600
# A receiver looks every second whether it is still wanted; its last sync may take longer.
_PREDECESSOR_SECONDS = 10.0
_ALIVE_EVERY = 256
# The name of a directory that is being removed begins with this.
_TAKEN = "-"


class Staging:
    """The staging directory `stage` within `incoming`, both by descriptor.

    root and by_hash are descriptors of the caller's, on that device. alive is called now and then
    in what takes long. Raises Misplaced, OSError.
    """

    def __init__(
        self,
        root: int,
        by_hash: int,
        device: int,
        session: tuple[str, str, str],
        alive: Callable[[], None],
    ) -> None:
        self._root = root
        self._by_hash = by_hash
        self._alive = alive
        self._name = ".".join((*session, str(os.getpid())))
        self._predecessors: list[str] = []
        self._make(device)
        with contextlib.suppress(OSError):
            self._remove_leftovers(*session)
        remove_useless(self.incoming, by_hash)

    @property
    def superseded(self) -> bool:
        """Returns whether a newer session of the same worker has asked this one to end."""
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

    def remove(self) -> None:
        """Removes the staging directory with all that is in it, and those around it if empty."""
        # Again: this session may have published a blob whose partial file another one held.
        remove_useless(self.incoming, self._by_hash)
        self._remove()
        for fd in (self._lock, self.stage, self.incoming):
            os.close(fd)

    def _remove(self) -> None:
        remove_tree(self.incoming, self._name)
        with contextlib.suppress(OSError):
            os.rmdir(PARTIAL, dir_fd=self.incoming)
        with contextlib.suppress(OSError):
            os.rmdir(INCOMING, dir_fd=self._root)

    def _make(self, device: int) -> None:
        # Again where another session that ends removes what is empty at that moment, or one that
        # begins takes a directory without a lock for a dead one's.
        for _ in range(20):
            with contextlib.suppress(FileNotFoundError):
                make_directory(self._root, INCOMING, 0o755)
                self.incoming = open_below(self._root, INCOMING, device)
                if self._make_stage():
                    return
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), INCOMING)

    def _make_stage(self) -> bool:
        """Returns whether it was made, and both it and its lock still have their names."""
        try:
            make_directory(self.incoming, self._name, 0o700)
            self.stage = open_below(self.incoming, self._name)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(_LOCK, flags, 0o600, dir_fd=self.stage)
        except FileNotFoundError:
            return False
        except OSError:
            self._remove()
            raise
        with contextlib.suppress(OSError):  # Some network file systems have no locks.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = os.stat(self._name, dir_fd=self.incoming, follow_symlinks=False)
        return os.path.samestat(named, os.fstat(self.stage)) and not self.superseded

    def _remove_leftovers(self, owner: str, run: str, slot: str) -> None:
        for name in os.listdir(self.incoming):
            parts = name.split(".")
            if name == self._name or len(parts) != 4 or parts[0] != owner:
                continue
            if parts[1] == run and parts[2] != slot:
                continue  # Alive, maybe, with no lock to tell: the tar strategy holds none.
            if _is_dead(self.incoming, name):
                remove_tree(self.incoming, name, self._alive)
            elif parts[1:3] == [run, slot]:
                # A worker has one session at a time, so the client of that one is gone: its link
                # died in silence. Without the name of its lock it ends.
                self._supersede(name)
        for name in os.listdir(self._root):
            if name.startswith(f"{_SCRATCH}{owner}.") and self._is_old_directory(name):
                remove_tree(self._root, name, self._alive)

    def _supersede(self, name: str) -> None:
        with contextlib.suppress(OSError):
            with closing(os.open(name, DIRECTORY, dir_fd=self.incoming)) as stage:
                os.unlink(_LOCK, dir_fd=stage)
            self._predecessors.append(name)

    def _is_old_directory(self, name: str) -> bool:
        found = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        return stat.S_ISDIR(found.st_mode) and found.st_mtime < time.time() - _SCRATCH_SECONDS


def _is_dead(incoming: int, name: str) -> bool:
    try:
        with closing(os.open(name, DIRECTORY, dir_fd=incoming)) as stage:
            lock = lock_file(stage, _LOCK, create=False)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is not None


def remove_tree(parent: int, name: str, alive: Callable[[], None] = lambda: None) -> None:
    """Removes a tree as far as it can; the next session tries the rest again. alive is called after
    every some files: a staging directory may hold hundreds of thousands.

    A session that is taken for dead may be alive, and publish a directory of its stage while it is
    emptied here. So each gets another name first, by which nobody looks for it.
    """
    with contextlib.suppress(OSError):
        with closing(os.open(name, DIRECTORY, dir_fd=parent)) as fd:
            with os.scandir(fd) as found:
                entries = [(each.name, each.is_dir(follow_symlinks=False)) for each in found]
            for number, (below, is_directory) in enumerate(entries):
                with contextlib.suppress(OSError):
                    if is_directory:
                        os.rename(below, _TAKEN + below, src_dir_fd=fd, dst_dir_fd=fd)
                        remove_tree(fd, _TAKEN + below, alive)
                    else:
                        os.unlink(below, dir_fd=fd)
                if number % _ALIVE_EVERY == 0:
                    alive()
        os.rmdir(name, dir_fd=parent)


def write_all(fd: int, data: memoryview) -> None:
    """Writes all of data. Raises OSError."""
    while data:
        data = data[os.write(fd, data) :]
