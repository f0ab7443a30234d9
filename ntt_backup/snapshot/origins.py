"""Who made a version of a set: this host, somebody else, or somebody who plays this host.

Whoever may add files to a target can plant a version, and the sums in a manifest only prove that
the manifest is whole. So a host with a signing key signs each manifest. A host without one still
knows what it made itself: it keeps the sum of each manifest in its cache, which may be deleted at
any time; then nothing proves any more who made those versions.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ntt_backup.config import RemoteConfig
from ntt_backup.config.signing_key import Origin, SigningKeys
from ntt_backup.filestore.local_cache import directory_for
from ntt_backup.process.durable import write_durably
from ntt_backup.snapshot.format.manifest import Header, Seal
from ntt_backup.wire.stored_names import is_version

_PURPOSE: Final = "snapshot"
_FILE: Final = "made"
_LINE: Final = re.compile(r"(\S{25}) ([0-9a-f]{64})")
# Nobody keeps more versions of a set.
_MOST_LINES: Final = 10_000
_MOST_BYTES: Final = 1 << 20


@dataclass
class Origins:
    """Tells who made versions.

    The cache is the directory on this machine, by set, with the sums of the manifests that this
    host made.

    Attributes:
        target: The name of the target in the settings of this host.
    """

    _keys: SigningKeys
    _cache: Callable[[str], Path] | None = None
    target: str = ""
    _known: dict[str, Mapping[str, str]] = field(default_factory=dict)

    @staticmethod
    def of(settings: RemoteConfig) -> Origins:
        """Returns what this host knows of the versions on the target of the settings."""
        cache = directory_for("snapshots", settings.remote)
        return Origins(SigningKeys.of(settings), cache.joinpath, settings.target)

    @property
    def signed(self) -> bool:
        """Returns whether this host has a key, and so signs its versions."""
        return bool(self._keys)

    @property
    def keys(self) -> SigningKeys:
        """Returns the keys of this host."""
        return self._keys

    def sign(self, data: bytes) -> str:
        """Returns the signature of `Seal.signed`; "" where this host has no key."""
        return self._keys.sign(_PURPOSE, data)

    def names(self, of_set: str, version: str) -> bool:
        """Returns whether this host has made a version of this name.

        The target may have another version under the name now, see `of_seal`.
        """
        return version in self.made(of_set)

    def of_seal(self, header: Header, seal: Seal) -> Origin:
        """Returns who made the manifest of a version.

        Args:
            header: What stands first in the manifest.
            seal: What stands last in it. That the header and the entries fit the seal is for
                whoever reads the manifest to prove.
        """
        if self.made(header.set).get(header.version) == seal.digest:
            return Origin.OURS
        origin = self._keys.origin(_PURPOSE, seal.signed, seal.signature)
        elsewhere = origin is Origin.OURS and header.target != self.target
        return Origin.ELSEWHERE if elsewhere else origin

    def made(self, of_set: str) -> Mapping[str, str]:
        """Returns the sums of the manifests of a set that this host made, by version."""
        if of_set not in self._known and self._cache is not None:
            found: list[re.Match[str] | None] = []
            with suppress(OSError), (self._cache(of_set) / _FILE).open("rb") as file:
                lines = file.read(_MOST_BYTES).decode("ascii", "replace").splitlines()
                found = [_LINE.fullmatch(line) for line in lines]
            self._known[of_set] = {one[1]: one[2] for one in found if one and is_version(one[1])}
        return self._known.get(of_set, {})

    def keep_made(self, of_set: str, version: str, digest: str = "") -> None:
        """Keeps the sum of a manifest that this host is about to name. Raises OSError.

        Without the digest of its `Seal`, a version is forgotten whose manifest did not get its
        name.
        """
        assert self._cache is not None
        known = {**self.made(of_set), version: digest}
        known = self._known[of_set] = {one: sum for one, sum in known.items() if sum}
        lines = [f"{name} {sum}\n" for name, sum in known.items()][-_MOST_LINES:]
        write_durably(self._cache(of_set) / _FILE, "".join(lines).encode("ascii"), 0o600)


NO_KEYS: Final = SigningKeys((), Path())
# Knows nothing: all versions are of an unknown origin.
NOBODY: Final = Origins(NO_KEYS)
