"""Who made a version of a set: this host, somebody else, or somebody who plays this host.

Whoever may add files to a target can plant a version, and the sums in a manifest only prove that
the manifest is whole. So a host with a host key signs each manifest. A host without one still knows
what it made itself: it keeps the sum of each manifest in its cache, which may be deleted at any
time; then nothing proves any more who made those versions.

A genuine manifest may come from another target of this host, where somebody could read it. So the
header, which the signature binds, names the target as this host's settings call it. An id that the
target itself keeps would do less: whoever may write there could give it the id of another target.
A target that was renamed, or copied to a place of another name, has no version of this host at
first; the sums in the cache still tell this machine those that it sent to this very place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from ntt_backup.config import RemoteConfig
from ntt_backup.config.host_key import HostKeys, Origin
from ntt_backup.filestore.cache import directory_for
from ntt_backup.process.durable import write_durably
from ntt_backup.snapshot.format.manifest import Header, Seal
from ntt_backup.wire.stored_names import is_version

_PURPOSE: Final = "snapshot"
_FILE: Final = "made"
_LINE: Final = re.compile(r"(\S{25}) ([0-9a-f]{64})")
# Nobody keeps more versions of a set.
_MOST_LINES: Final = 10_000
_MOST_BYTES: Final = 1 << 20

Sums = Mapping[str, str]


class Origins:
    """Tells who made versions.

    Args:
        keys: The keys of this host.
        made: Returns the sums of the manifests of a set that this host made, by version.
        target: The name of the target in the settings of this host.
    """

    def __init__(
        self, keys: HostKeys, made: Callable[[str], Sums] = lambda _: {}, target: str = ""
    ) -> None:
        self._keys = keys
        self._made = made
        self.target = target
        self._known: dict[str, Sums] = {}

    @staticmethod
    def of(settings: RemoteConfig) -> Origins:
        """Returns what this host knows of the versions on the target of the settings."""
        cache = directory_for("snapshots", settings.remote)

        def made(of_set: str) -> Sums:
            return read_made(cache / of_set)

        return Origins(HostKeys.of(settings), made, settings.target)

    @property
    def signed(self) -> bool:
        """Returns whether this host has a key, and so signs its versions."""
        return bool(self._keys)

    def sign(self, data: bytes) -> str:
        """Returns the signature of `Seal.signed`; "" where this host has no key."""
        return self._keys.sign(_PURPOSE, data)

    def names(self, of_set: str, version: str) -> bool:
        """Returns whether this host has made a version of this name.

        The target may have another version under the name now, see `of_seal`.
        """
        return version in self._sums(of_set)

    def of_seal(self, header: Header, seal: Seal) -> Origin:
        """Returns who made the manifest of a version.

        Args:
            header: What stands first in the manifest.
            seal: What stands last in it. That the header and the entries fit the seal is for
                whoever reads the manifest to prove.
        """
        if self._sums(header.set).get(header.version) == seal.digest:
            return Origin.OURS
        origin = self._keys.origin(_PURPOSE, seal.signed, seal.signature)
        elsewhere = origin is Origin.OURS and header.target != self.target
        return Origin.ELSEWHERE if elsewhere else origin

    def _sums(self, of_set: str) -> Sums:
        if of_set not in self._known:
            self._known[of_set] = self._made(of_set)
        return self._known[of_set]


NO_KEYS: Final = HostKeys((), Path())
# Knows nothing: all versions are of an unknown origin.
NOBODY: Final = Origins(NO_KEYS)


def read_made(directory: Path) -> dict[str, str]:
    """Returns the sums of the manifests that this host made, by version.

    The result is empty where the file in the directory is missing or cannot be read.
    """
    with suppress(OSError), (directory / _FILE).open("rb") as file:
        lines = file.read(_MOST_BYTES).decode("ascii", "replace").splitlines()
        found = [match for line in lines if (match := _LINE.fullmatch(line))]
        return {one[1]: one[2] for one in found if is_version(one[1])}
    return {}


def add_made(directory: Path, version: str, digest: str) -> None:
    """Keeps the sum of a manifest that this host is about to name. Raises OSError.

    Args:
        directory: Where the copies of the set are kept on this host.
        version: The version.
        digest: The digest of `Seal`.
    """
    _keep(directory, {**read_made(directory), version: digest})


def drop_made(directory: Path, version: str) -> None:
    """Forgets a version whose manifest did not get its name. Raises OSError."""
    known = read_made(directory)
    if known.pop(version, None) is not None:
        _keep(directory, known)


def _keep(directory: Path, known: Sums) -> None:
    lines = [f"{name} {digest}\n" for name, digest in known.items()][-_MOST_LINES:]
    write_durably(directory / _FILE, "".join(lines).encode("ascii"), 0o600)
