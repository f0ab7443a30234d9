"""A command asks a running daemon over its control socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ntt_backup.config import CatalogConfig
from ntt_backup.daemon.control.control_socket import peer_uid, short_address
from ntt_backup.daemon.control.run_report import DaemonReport
from ntt_backup.errors import BackupError, ConfigError, NotRunning, WaitsToStart
from ntt_backup.format import printable

# It is served between steps that may take a while, above all before the workers start.
_PATIENCE_SECONDS: Final = 20.0
# What only shows how things are does not wait for long.
_SHORT_SECONDS: Final = 3.0
_MOST_BYTES: Final = 1 << 22


def report(settings: CatalogConfig) -> DaemonReport:
    """Returns what the daemon of this target does. Raises as `ask` does."""
    said = _answer(settings, {"do": "state"}, _SHORT_SECONDS)
    try:
        return DaemonReport.of(said)
    except (TypeError, KeyError, ValueError) as error:
        raise _of_another_version(settings, repr(error)) from error


def ask(settings: CatalogConfig, do: str, **values: str) -> dict[str, Any]:
    """Returns the answer of the daemon of this target; what it has done is its `done`. Raises
    NotRunning where none answers, BackupError for what it refuses.
    """
    said = _answer(settings, {"do": do, **values}, _PATIENCE_SECONDS)
    if not isinstance(said.get("done"), str):
        raise _of_another_version(settings, "it does not say what it has done")
    return said


def _answer(settings: CatalogConfig, request: Mapping[str, str], patience: float) -> dict[str, Any]:
    path = settings.control.socket
    assert path is not None  # The settings have a default that depends on others.
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(patience)
            with short_address(path) as address:
                connection.connect(address)
            if (uid := peer_uid(connection)) not in believed(path):
                raise ConfigError(
                    f"what listens at {path} is a program of the user {uid}, and may not be the"
                    " daemon",
                    hint="call it as the daemon's user, or set lock.file to a directory of the"
                    " daemon's own, such as /run/ntt-backup",
                )
            connection.sendall(json.dumps(request).encode() + b"\n")
            said = _object(_all_of(connection, patience))
        except PermissionError as error:
            raise ConfigError(
                f"this user may not ask the daemon of target {settings.target}",
                detail=f"{path}: {error.strerror}",
                hint="call it as the daemon's user, or as root",
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunning(
                f"no daemon runs for target {settings.target} on this host",
                detail=f"nobody listens at {path}",
                hint="`ntt-backup-remote run --watch` starts one",
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise NotRunning(
                f"the daemon of target {settings.target} does not answer",
                detail=f"{path}: {error}",
                hint="its log says what it does; call it again",
            ) from error
    if said.pop("ok", False):
        return said
    # Whoever listens there may not be ours: only what an error has is taken, as text.
    message, detail, hint = (
        printable(str(said.get(name, ""))) for name in ("message", "detail", "hint")
    )
    if not message:
        raise _of_another_version(settings, "it refuses, and does not say why")
    code = said.get("exit_code")
    exit_code = code if isinstance(code, int) and 0 < code < 256 else None
    if exit_code == WaitsToStart.exit_code:
        raise WaitsToStart(message, detail=detail, hint=hint)
    raise BackupError(message, detail=detail, hint=hint, exit_code=exit_code)


def _of_another_version(settings: CatalogConfig, detail: str) -> NotRunning:
    text = f"the daemon of target {settings.target} is of another version"
    return NotRunning(text, detail=detail, hint="start it again")


def believed(path: Path) -> set[int]:
    """Returns the ids of the users whose program at the socket's path is taken for the daemon:
    root, our own user, and the owner of its directory where nobody else can have put that there.
    Raises OSError.
    """
    users, directory = {0, os.geteuid()}, path.absolute().parent
    owner = directory.stat().st_uid
    above = [place.stat() for place in {*directory.parents, *directory.resolve().parents}]
    if all(one.st_uid in (0, owner) and not one.st_mode & 0o022 for one in above):
        users.add(owner)
    return users


def _object(said: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError for anything else."""
    found = json.loads(said)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _all_of(connection: socket.socket, patience: float) -> bytes:
    deadline = time.monotonic() + patience
    said = bytearray()
    while len(said) < _MOST_BYTES and time.monotonic() < deadline:
        data = connection.recv(1 << 16)
        if not data:
            break
        said += data
    return bytes(said)
