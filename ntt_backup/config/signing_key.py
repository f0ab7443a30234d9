"""The signing key of this host proves which files on a target this host has written.

Messages and documents call it the host key. It has nothing to do with the host keys of ssh.

The content of a target cannot be trusted: whoever has the sender's ssh key, or may write into the
bucket, can plant a dump, a version of a snapshot set, or a sealed pack. Their checksums prove that
they are complete, not who made them. So this host signs the files that it writes with a secret that
no target gets, and compares each signature when it reads.

The signature is a MAC (BLAKE3 in its keyed mode, with a key derived for each purpose): whoever can
verify it can also make it. That is right here, since the same host, or the machine that replaces
it, does both. The file holds one key per line. The first key signs; all keys verify, so that hosts
that share a target, and a key that was replaced, remain known.

The file must be backed up: without it a new machine can still restore everything, but nothing
proves who made it (the option --trust-target).
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3

from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import SERVICE_HOME
from ntt_backup.process.durable import write_durably

_LINE: Final = re.compile(r"ntt-host-key-1 ([0-9a-f]{64})")
_SIGNATURE: Final = re.compile(r"([0-9a-f]{16}):([0-9a-f]{64})")
_MOST_BYTES: Final = 64 << 10
_CONTEXT: Final = "ntt_backup 2026-11 host key "
# The purpose of the signature of a sealed pack.
OF_PACKS: Final = "pack"
# The home of the service's user. Root's commands read the same key there.
SERVICE_KEY: Final = SERVICE_HOME / "host.key"
_HEAD: Final = """\
# The host key of ntt-backup-remote: it proves which dumps, snapshots and packs this host made.
# Keep a copy off this host and off every target. The first line signs, all lines verify.
"""


class Origin(StrEnum):
    """The maker of a file, by its signature."""

    OURS = "this host"  # A key in the file made the signature.
    ELSEWHERE = "another target"  # The same, for a file that was stored on another target.
    UNKNOWN = "unknown"  # There is no signature, or its key is not in the file.
    FORGED = "forged"  # The signature names a key in the file, and that key did not make it.

    @property
    def text(self) -> str:
        """The origin in words that follow the name of a dump or version and `is`."""
        return _TEXTS[self][0]

    @property
    def why(self) -> str:
        """The reason, as a sentence about a dump or a version."""
        return _TEXTS[self][1]


_TEXTS: Final = {
    Origin.OURS: ("of this host", "this host signed it, or has a note of it"),
    Origin.ELSEWHERE: (
        "of another target of this host",
        "it is signed for another target of this host: this target was renamed or copied, or"
        " somebody has put it here",
    ),
    Origin.UNKNOWN: (
        "not of this host",
        "no key of this host has signed it: whoever may add to the target can have made it",
    ),
    Origin.FORGED: ("FORGED", "it names a key of this host, which did not sign it"),
}


class SigningKey(NamedTuple):
    """A key. secret: 32 bytes. name: 16 hex digits, from which the secret cannot be derived."""

    secret: bytes
    name: str

    @staticmethod
    def of(secret: bytes) -> SigningKey:
        named = blake3(secret, derive_key_context=_CONTEXT + "name")
        return SigningKey(secret, named.hexdigest(length=8))

    def mac(self, purpose: str, data: bytes) -> str:
        """Returns the MAC of data, 64 hex digits. purpose: the kind of data, such as `dump`."""
        key = blake3(self.secret, derive_key_context=_CONTEXT + purpose).digest()
        return blake3(data, key=key).hexdigest()


class SigningKeys:
    """The keys of a file.

    Args:
        keys: The keys. The first one signs, all verify.
        path: The file.
        problem: Why there are no keys, or an error of the file, in one line for people; else "".
        expected: Whether there should be keys: the settings name the file, or the file exists.
    """

    def __init__(
        self, keys: Sequence[SigningKey], path: Path, problem: str = "", *, expected: bool = True
    ) -> None:
        self._keys = {key.name: key for key in keys}
        self.path = path
        self.problem = problem
        self.expected = expected

    @staticmethod
    def of(settings: CatalogConfig) -> SigningKeys:
        """Returns the keys of this host.

        If the file is missing or not valid, the result has no keys and a problem: backups continue
        without signatures.
        """
        path = key_file(settings)
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            expected = settings.host.key_file is not None
            return SigningKeys((), path, f"there is no host key {path}", expected=expected)
        except OSError as error:
            return SigningKeys((), path, f"the host key {path} cannot be read: {error.strerror}")
        lines = data.decode("ascii", "replace").splitlines()
        said = [line for line in lines if line.strip() and not line.startswith("#")]
        known = [_LINE.fullmatch(line.strip()) for line in said]
        if len(data) > _MOST_BYTES or not known or None in known:
            return SigningKeys((), path, f"{path} is not a file of host keys")
        # The access control list of a systemd credential is shown as permissions of the group.
        others = found.st_mode & (stat.S_IRWXO | stat.S_IWGRP)
        problem = f"other users may read the host key {path}: chmod 600 it" if others else ""
        return SigningKeys([SigningKey.of(bytes.fromhex(m[1])) for m in known if m], path, problem)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def missing_key(self) -> str:
        """The consequence of a missing key, and its remedy, for people; "" if there is a key."""
        if self:
            return ""
        remedy = (
            "correct that file or its mode, or put the copy of the key back"
            if self.path.exists()
            else "put the copy of the key back, or `ntt-backup-remote init-db` makes a new one"
        )
        return (
            f"{self.problem}: nothing that this host sends is signed, and a restore must trust the"
            f" target; {remedy}"
        )

    @property
    def name(self) -> str:
        """The name of the key that signs, 16 hex digits; "" if there is no key."""
        return next(iter(self._keys), "")

    def sign(self, purpose: str, data: bytes) -> str:
        """Returns the signature of data, `NAME:MAC` in hex; "" if this host has no key.

        purpose: the kind of data, such as `dump`. A signature is valid for one purpose only.
        """
        for key in self._keys.values():
            return f"{key.name}:{key.mac(purpose, data)}"
        return ""

    def origin(self, purpose: str, data: bytes, signature: str) -> Origin:
        """Returns the maker of data, by a signature that may be any text. purpose: as in `sign`."""
        match = _SIGNATURE.fullmatch(signature)
        key = self._keys.get(match[1]) if match is not None else None
        if match is None or key is None:
            return Origin.UNKNOWN
        right = hmac.compare_digest(key.mac(purpose, data), match[2])
        return Origin.OURS if right else Origin.FORGED


def key_file(settings: CatalogConfig) -> Path:
    """Returns the path of the signing key.

    The path is `host.key_file`; or else a file in the home of the service's user if that exists, or
    in this user's configuration directory. A directory that XDG_CONFIG_HOME names goes before both.
    """
    if settings.host.key_file is not None:
        return settings.host.key_file
    if chosen := os.environ.get("XDG_CONFIG_HOME"):
        return Path(chosen) / "ntt-backup" / SERVICE_KEY.name
    if SERVICE_KEY.parent.is_dir():
        return SERVICE_KEY
    with suppress(RuntimeError):  # Not every user has a home.
        return Path.home() / ".config" / "ntt-backup" / SERVICE_KEY.name
    return SERVICE_KEY


def make_signing_key(path: Path) -> str:
    """Makes a new signing key, mode 0600, unless the file exists.

    The file belongs to the owner of its directory, where root makes it: root's first command must
    not leave a key that the service's user cannot read.

    Returns:
        One line for people about the file that was made, or the error; "" where the file exists.
    """
    text = f"{_HEAD}ntt-host-key-1 {secrets.token_hex(32)}\n"
    try:
        owner = None
        if os.geteuid() == 0 and path.parent.is_dir():
            found = path.parent.stat()
            owner = (found.st_uid, found.st_gid)
        write_durably(path, text.encode("ascii"), 0o600, owner=owner, replace=False)
    except OSError as error:
        if path.is_file():
            return ""
        return f"warning: the host key {path} cannot be made: {error.strerror or error}"
    return f"made the host key {path}: keep a copy off this host, and never on a target"
