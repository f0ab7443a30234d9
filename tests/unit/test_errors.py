"""Errors: the exit codes that scripts rely on, and hints whose command lines can be pasted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ntt_backup import errors
from ntt_backup.errors import BackupError, ConfigError

LINE = "ntt-backup-remote --config '/etc/a b.toml' --target offsite"

# The contract that users script against, and whether waiting may help.
CONTRACT = {
    "BackupError": (1, False),
    "ConfigError": (2, False),
    "SourceError": (2, False),
    "StoreSuspect": (2, False),
    "LockHeld": (3, False),
    "CatalogError": (4, False),
    "CatalogUnavailable": (4, True),
    "FileListUnavailable": (4, True),
    "SessionExpired": (4, True),
    "CatalogRefused": (4, False),
    "RemoteError": (5, False),
    "RemoteUnreachable": (5, True),
    "AnotherTarget": (5, True),
    "ProtocolViolation": (5, True),
    "RemoteDenied": (5, False),
    "Unsupported": (5, False),
    "RemoteCannotStore": (6, False),
    "NameTaken": (6, False),
    "DestinationError": (6, False),
    "NotRunning": (8, False),
    "WaitsToStart": (8, False),
    "BatchRejected": (7, True),
    "DumpFailed": (7, False),
    "DumpImpossible": (2, False),
    "MountImpossible": (2, False),
    "WorkerFailed": (1, False),
}


def classes() -> dict[str, type[BackupError]]:
    return {
        name: found
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, BackupError)
    }


def test_every_error_has_the_exit_code_of_the_contract() -> None:
    found = {name: (one.exit_code, one.retryable) for name, one in classes().items()}
    assert {name: found[name] for name in CONTRACT} == CONTRACT
    assert set(found) - set(CONTRACT) == {"Stopped"}


# --- command lines in hints -----------------------------------------------------------------------


@pytest.fixture
def global_options() -> Iterator[None]:
    errors.remember_global_options(["--config", "/etc/a b.toml", "--target", "offsite"])
    yield
    errors.remember_global_options([])


@pytest.mark.usefixtures("global_options")
@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("run `ntt-backup-remote init-db`", f"run `{LINE} init-db`"),
        ("ntt-backup-remote restore --to DIR; then scan", f"{LINE} restore --to DIR; then scan"),
        ("`ntt-backup-remote scan`, `ntt-backup-remote run`", f"`{LINE} scan`, `{LINE} run`"),
        ("install ntt-backup-remote, as root", "install ntt-backup-remote, as root"),
    ],
)
def test_a_hint_repeats_the_options_before_the_command(hint: str, shown: str) -> None:
    assert ConfigError("it is wrong", hint=hint).hint == shown
    # Another process may pass it on as another error.
    assert BackupError("it is wrong", hint=shown).hint == shown
