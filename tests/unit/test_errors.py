"""The hierarchy of errors: what scripts and the daemon rely on."""

from __future__ import annotations

import signal

import pytest

from ntt_backup import errors
from ntt_backup.errors import BackupError, Stopped

# The contract that users script against, and whether waiting may help.
CONTRACT = {
    "BackupError": (1, False),
    "ConfigError": (2, False),
    "SourceError": (2, False),
    "StoreSuspect": (2, False),
    "LockHeld": (3, False),
    "CatalogError": (4, False),
    "CatalogUnavailable": (4, True),
    "CatalogRefused": (4, False),
    "RemoteError": (5, False),
    "RemoteUnreachable": (5, True),
    "RemoteNonsense": (5, True),
    "RemoteDenied": (5, False),
    "Unsupported": (5, False),
    "RemoteCannotStore": (6, False),
    "DestinationError": (6, False),
    "BatchRejected": (7, True),
    "DumpFailed": (7, False),
    "DumpImpossible": (2, False),
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


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_with_the_code_that_shells_give_to_its_signal(
    signum: signal.Signals, code: int
) -> None:
    error = Stopped(signum)
    assert error.exit_code == code
    assert not error.retryable
    assert str(error) == f"stopped by signal {int(signum)}"
