"""Seals and opens by the operator's keys of age, and says what is wrong with these keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ntt_backup.errors import ConfigError
from ntt_backup.pack.age_encryption import (
    AgeContent,
    AgeWriter,
    Buffer,
    SealedForOthers,
    SealUnusable,
    read_identity,
    require_recipients,
)

if TYPE_CHECKING:
    from ntt_backup.config.command_settings import CatalogConfig

_BEGINS: Final = "AGE-SECRET-KEY-1"
_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """Says what may be read of a target although it is not sealed.

    Without a key anybody who may write to a bucket can plant what is not sealed. So where there are
    recipients it is not read, unless it arrived before a day on which nothing was sealed yet.

    Attributes:
        required: Whether what is read has to be sealed.
        until: What arrived before that time need not be; None: all has to be.
    """

    required: bool = False
    until: datetime | None = None

    @staticmethod
    def of(settings: CatalogConfig) -> SealPolicy:
        """Returns the policy of the settings' target."""
        day = settings.pack.unsealed_until
        until = None if day is None else datetime.combine(day, time.min, UTC)
        return SealPolicy(bool(settings.recipients), until)

    def refuses(self, arrived: datetime | None) -> bool:
        """Returns whether an object that is not sealed must not be read.

        arrived: when the object was stored, as the target itself knows it; None if it does not say.
        """
        return self.required and not (self.until and arrived and arrived < self.until)


# What is said of an object that is refused, after its name.
NOT_SEALED: Final = (
    "is not sealed, and pack.recipients wants all that is read to be sealed, except for what"
    " arrived before pack.unsealed_until"
)


class OtherIdentities(ConfigError):
    """No identity of the operator's opens what is sealed."""


class Keyring:
    """Opens what is sealed, by the identities in a file. The file is read when it is first needed.

    For several threads. find: returns the file, None where none is given; it is called once.
    """

    def __init__(self, find: Callable[[], Path | None] = lambda: None) -> None:
        self._find = find
        self._file: Path | None = None
        self._lock = threading.Lock()
        self._opened = False
        self._refused = False

    def unseal(self, head: bytes, size: int) -> AgeContent:
        """Returns the content of a sealed file, as `AgeContent`. head: its first bytes.

        Raises:
            PackError: This file cannot be opened.
            ConfigError: The identities cannot be used, for any file.
        """
        try:
            found = AgeContent(head, size, self._each())
        except SealedForOthers:
            self._refused = True
            raise
        except SealUnusable as error:
            raise _unusable(self._file, error) from None
        self._opened = True
        return found

    def _each(self) -> Iterator[str]:
        # Lazily: for a file that is not sealed the identities are not read.
        yield from self.identities

    @property
    def fits(self) -> bool:
        """Returns whether something was opened, or nothing was met yet that is sealed for others.

        One object that is sealed for others is damage of that object: whoever may write to a bucket
        can put it there. Where nothing opens, the identities are probably the wrong ones.
        """
        return self._opened or not self._refused

    def require_fit(self) -> None:
        """Raises ConfigError where sealed objects were met, and none of them could be opened."""
        if not self.fits:
            raise self.foreign()

    def foreign(self) -> OtherIdentities:
        """Returns the error for what is sealed for others."""
        return OtherIdentities(
            f"what is sealed is sealed for other identities than those in {self._file}",
            hint="give the file of a recipient that it was sealed for: --identity FILE, or"
            " pack.identity_file",
        )

    @property
    def identities(self) -> Sequence[str]:
        """Returns the secret keys. Raises ConfigError."""
        with self._lock:
            self._file = file = self._file or self._find()
            if file is None:
                raise ConfigError(
                    "what is to be read is sealed, and no identity is given that opens it",
                    hint="name the file of an age identity by pack.identity_file"
                    " (NTT_PACK_IDENTITY_FILE), or by --identity FILE where the command has that",
                )
            return _read(file)


@cache  # A pipe gives its content once, and a drill needs the keys twice.
def _read(file: Path) -> Sequence[str]:
    try:
        # Some editors begin a file with a byte order mark.
        with file.open(encoding="utf-8-sig", errors="replace") as opened:
            lines = opened.read(_MOST_BYTES).splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read the identity file {file}",
            detail=error.strerror or str(error),
            hint="name another by --identity or pack.identity_file, or correct its permissions",
        ) from error
    found = [line for one in lines if (line := one.strip()) and not line.startswith("#")]
    if not found or not all(one.startswith(_BEGINS) for one in found):
        raise ConfigError(
            f"{file} is no identity file of age",
            detail=f"a line {_BEGINS}... is needed, and no others but comments",
            hint="`age-keygen -o FILE` makes one; what `age -p` has encrypted, `age -d` opens",
        )
    try:
        for one in found:
            read_identity(one)
    except SealUnusable as error:
        raise _unusable(file, error) from None
    return found


def _unusable(file: Path | None, error: SealUnusable) -> ConfigError:
    return ConfigError(
        f"{file} cannot be used as an identity",
        detail=str(error),
        hint="give a file as age-keygen writes it, whole",
    )


def require_sealing(recipients: Sequence[str]) -> None:
    """Raises ConfigError where nothing can be sealed for the recipients."""
    try:
        require_recipients(recipients)
    except SealUnusable as error:
        raise _cannot_seal(error) from None


def seal_writer(write: Callable[[Buffer], object], recipients: Sequence[str]) -> AgeWriter:
    """Returns a writer that seals one file for recipients, and passes its bytes to `write`.

    Raises:
        ConfigError: Nothing can be sealed for the recipients.
    """
    try:
        return AgeWriter(write, recipients)
    except SealUnusable as error:
        raise _cannot_seal(error) from None


def _cannot_seal(error: SealUnusable) -> ConfigError:
    return ConfigError(
        "cannot seal for the recipients",
        detail=str(error),
        hint="pack.recipients and --recipient take public keys, age1..., as age-keygen prints them",
    )
