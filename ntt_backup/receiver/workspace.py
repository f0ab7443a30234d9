"""Where a session works: the root, `by-hash`, and a stage of its own, by descriptor.

Everything below the root is opened once, without following a symlink, and reached from then on only
through these descriptors: no path is resolved again, so nothing that is swapped meanwhile leads
elsewhere. A stage lives as long as its lock is held. Whatever a dead session left is removed by the
next one of the same owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable

BY_HASH = "by-hash"
INCOMING = ".ntt-incoming"
PARTIAL = "partial"
MARK = ".mark"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK = "lock"
_HEX = frozenset("0123456789abcdef")
_PARTIAL_DAYS = 7
# What a check or a bench of the tar strategy that was killed has left; younger ones may be alive.
_SCRATCH = ".ntt-check-"
_SCRATCH_SECONDS = 3600
_ALIVE_EVERY = 256
# What the name of a directory that is being removed begins with.
_TAKEN = "-"


class Refusal(Exception):
    """The session cannot begin, or go on. code and text are what the client is told."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def gone(name: str = BY_HASH) -> Refusal:
    """What was there, or should be, and is not."""
    return Refusal("gone", f"{name} is gone: is its disk mounted?")


def words(problem: OSError) -> str:
    """An error of the system as the protocol tells it: `ENOSPC: No space left on device: name`."""
    number = problem.errno or 0
    name = problem.filename
    about = f": {os.fsdecode(name)}" if isinstance(name, (str, bytes)) else ""
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}{about}"


class Ground:
    """The descriptors of one session, and its stage.

    placed: `by-hash` is there; a client may look around without it. The root itself is never made.
    alive is called now and then while what others left is removed. reading: the session writes
    nothing, so it has no stage, and a disk that is read-only, or mounted at `by-hash` itself, will
    do. Raises Refusal.
    """

    def __init__(
        self,
        root: str,
        owner: str,
        run: str,
        slot: str,
        alive: Callable[[], None] = lambda: None,
        reading: bool = False,
    ) -> None:
        self._alive = alive
        self._reading = reading
        try:
            self._path = root.encode("utf-8", "surrogateescape")
            self.root = os.open(self._path, _DIRECTORY)
        except (OSError, ValueError) as problem:
            said = words(problem) if isinstance(problem, OSError) else str(problem)
            raise Refusal("root", said) from None
        self.device = os.fstat(self.root).st_dev
        self.placed = True
        try:
            self.by_hash = self._below_root(BY_HASH, create=False)
        except Refusal as refusal:
            if refusal.code != "gone":
                raise
            self.placed = False
            self.by_hash = os.dup(self.root)
        if reading:
            self.device = os.fstat(self.by_hash).st_dev
            return
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self.by_hash):
            denied = errno.EROFS if self._is_read_only() else errno.EACCES
            raise Refusal("storage", words(OSError(denied, "", BY_HASH)))
        self._name = f"{owner}.{run}.{slot}.{os.getpid()}"
        self._predecessors: list[str] = []
        try:
            self._make_stage()
        except OSError as problem:
            self._remove_stage()
            raise Refusal("storage", words(problem)) from None
        with contextlib.suppress(OSError):
            self._remove_left_overs(owner, run, slot)
        self._remove_useless_partials()

    def free(self) -> tuple[int, int]:
        """(free, total) bytes, as this account may use them."""
        room = os.statvfs(self.root)
        return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize

    def place(self) -> None:
        """Make `by-hash` where it was missing: never below a session that has had one. Raises
        Refusal.
        """
        if self.placed:
            return
        made = self._below_root(BY_HASH, create=True)
        os.dup2(made, self.by_hash, inheritable=False)
        os.close(made)
        self.placed = True

    @property
    def in_place(self) -> bool:
        """Whether what this session writes to is still what its names show: a disk may have been
        taken away, or another one put over it.
        """
        try:
            root = os.stat(self._path)  # noqa: PTH116 - a name of any bytes
            by_hash = os.stat(BY_HASH, dir_fd=self.root, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(root, os.fstat(self.root)) and os.path.samestat(
            by_hash, os.fstat(self.by_hash)
        )

    @property
    def superseded(self) -> bool:
        """Whether a newer session of the same worker has asked this one to go."""
        return not self._reading and os.fstat(self._lock).st_nlink == 0

    @property
    def awaits_predecessor(self) -> bool:
        """Whether a session that was asked to go is still there, and with it what it has locked."""
        for name in self._predecessors:
            with contextlib.suppress(OSError):
                os.stat(name, dir_fd=self.incoming, follow_symlinks=False)
                return True
        return False

    def forget_predecessors(self) -> None:
        self._predecessors.clear()

    def partial(self) -> int:
        """The directory of partial files; opened anew, for the caller to close. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(PARTIAL, 0o755, dir_fd=self.incoming)
        return os.open(PARTIAL, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.incoming)

    def leave(self) -> None:
        """Remove the stage with all that is in it, and the directories around it if empty; close
        all of them.
        """
        if self._reading:
            os.close(self.by_hash)
            os.close(self.root)
            return
        # Again: a blob whose partial file another session held may have been placed by this one.
        self._remove_useless_partials()
        self._remove_stage()
        for fd in (self._lock, self.stage, self.incoming, self.by_hash, self.root):
            os.close(fd)

    def _remove_stage(self) -> None:
        remove_tree(self.incoming, self._name)
        with contextlib.suppress(OSError):
            os.rmdir(PARTIAL, dir_fd=self.incoming)
        with contextlib.suppress(OSError):
            os.rmdir(INCOMING, dir_fd=self.root)

    def _is_read_only(self) -> bool:
        return bool(os.statvfs(self.by_hash).f_flag & os.ST_RDONLY)

    def _below_root(self, name: str, create: bool) -> int:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=self.root)
            fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.root)
        except FileNotFoundError:
            raise gone(name) from None
        except OSError as problem:
            if problem.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Refusal("place", f"{name} is a symlink, or no directory") from None
            raise Refusal("storage", words(problem)) from None
        if not self._reading and os.fstat(fd).st_dev != self.device:
            raise Refusal("place", f"{name} is on another file system than the root")
        return fd

    def _make_stage(self) -> None:
        # Again where another session that ends removes what is empty at that moment, or one that
        # begins takes a stage without a lock for a dead one's.
        for _ in range(20):
            self.incoming = self._below_root(INCOMING, create=True)
            with contextlib.suppress(FileNotFoundError):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._name, 0o700, dir_fd=self.incoming)
                self.stage = os.open(self._name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.incoming)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._lock = os.open(_LOCK, flags, 0o600, dir_fd=self.stage)
                with contextlib.suppress(OSError):  # Some network file systems have no locks.
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                here = os.stat(self._name, dir_fd=self.incoming, follow_symlinks=False)
                if os.path.samestat(here, os.fstat(self.stage)) and os.fstat(self._lock).st_nlink:
                    return
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), INCOMING)

    def _remove_left_overs(self, owner: str, run: str, slot: str) -> None:
        for name in os.listdir(self.incoming):
            parts = name.split(".")
            if name == self._name or len(parts) != 4 or parts[0] != owner:
                continue
            if parts[1] == run and parts[2] != slot:
                continue  # Alive, maybe, with no lock to tell: the tar strategy holds none.
            if _is_dead(self.incoming, name):
                remove_tree(self.incoming, name, self._alive)
            elif parts[1:3] == [run, slot]:
                # A worker has one session at a time, so that one's client is gone, and nobody has
                # told it: the link died in silence. Without the name of its lock it ends.
                self._supersede(name)
        for name in os.listdir(self.root):
            if name.startswith(f"{_SCRATCH}{owner}.") and self._is_old_directory(name):
                remove_tree(self.root, name, self._alive)

    def _supersede(self, name: str) -> None:
        with contextlib.suppress(OSError):
            stage = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.incoming)
            try:
                os.unlink(_LOCK, dir_fd=stage)
            finally:
                os.close(stage)
            self._predecessors.append(name)

    def _remove_useless_partials(self) -> None:
        """Partial files that spare nobody anything. Those in use are locked."""
        with contextlib.suppress(OSError):
            partial = os.open(PARTIAL, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.incoming)
            try:
                names = set(os.listdir(partial))
                for name in names:
                    self._remove_useless(partial, name, names)
            finally:
                os.close(partial)

    def _is_old_directory(self, name: str) -> bool:
        found = os.stat(name, dir_fd=self.root, follow_symlinks=False)
        return stat.S_ISDIR(found.st_mode) and found.st_mtime < time.time() - _SCRATCH_SECONDS

    def _remove_useless(self, partial: int, name: str, names: set[str]) -> None:
        with contextlib.suppress(OSError):
            if name.endswith(MARK):
                # Without a lock: a mark that is lost costs time, no more.
                if name[: -len(MARK)] not in names:
                    os.unlink(name, dir_fd=partial)
                return
            changed = os.stat(name, dir_fd=partial, follow_symlinks=False).st_mtime
            is_blob = len(name) == 64 and set(name) <= _HEX
            if not (
                changed < time.time() - _PARTIAL_DAYS * 86400
                or (is_blob and (name + MARK not in names or self._is_placed(name)))
            ):
                return
            lock = lock_file(partial, name, create=False)
            if lock is not None:
                os.unlink(name, dir_fd=partial)
                os.close(lock)
                os.unlink(name + MARK, dir_fd=partial)

    def _is_placed(self, name: str) -> bool:
        try:
            path = f"{name[:2]}/{name[2:4]}/{name}"
            return stat.S_ISREG(os.stat(path, dir_fd=self.by_hash, follow_symlinks=False).st_mode)
        except OSError:
            return False


def lock_file(directory: int, name: str | bytes, create: bool) -> int | None:
    """A regular file, open and locked, that still has this name; None where another holds it or
    something else stands there. Raises OSError.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(20):
        fd = os.open(name, flags | (os.O_CREAT if create else 0), 0o644, dir_fd=directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                break
            # Whoever held the lock may have moved the file into place, or removed it.
            with contextlib.suppress(FileNotFoundError):
                here = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if os.path.samestat(here, found):
                    return fd
        except BlockingIOError:
            break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        fd = -1
    if fd >= 0:
        os.close(fd)
    return None


def _is_dead(incoming: int, name: str) -> bool:
    try:
        stage = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=incoming)
    except OSError:
        return False
    try:
        lock = lock_file(stage, _LOCK, create=False)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(stage)
    if lock is None:
        return False
    os.close(lock)
    return True


def remove_tree(parent: int, name: str, alive: Callable[[], None] = lambda: None) -> None:
    """A tree, by descriptors, best effort: what cannot be removed now is tried again by the next
    session. alive is called after every some files: a stage may hold hundreds of thousands.

    A session that is taken for dead may be alive, and move a directory of its stage below by-hash
    while it is emptied here. So each gets another name first, under which nobody looks for it.
    """
    with contextlib.suppress(OSError):
        fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
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
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)
