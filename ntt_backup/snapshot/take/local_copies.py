"""Local copies of the manifest and the map of a set's last version, which a take compares with.

The repository has the truth. A copy on this machine saves fetching it, and may be deleted at any
time. Beside the copies stands which versions this machine has made, see `snapshot.origins`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ntt_backup.blobdir.descriptors import DIRECTORY, closing
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.errors import DestinationError
from ntt_backup.filestore.contract import FileStore
from ntt_backup.snapshot.names import MANIFEST, MAP
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.versions import Version, content


class Copies:
    """Keeps manifests and maps of a set in a directory of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def origins(self, keys: SigningKeys, target: str = "") -> Origins:
        """Returns the origins of versions of the set, as far as this machine knows them."""
        return Origins(keys, lambda _: self._directory, target)

    def paths(self, version: str) -> tuple[Path, Path]:
        """Returns where the manifest and the map of a version are, or may be written."""
        return self._directory / f"{version}.{MANIFEST}", self._directory / f"{version}.{MAP}"

    def fetch(self, repository: FileStore, version: Version) -> None:
        """Copies both from the repository. Raises OSError, FileMissing."""
        self.drop(version.name)
        for path, file in zip(self.paths(version.name), (MANIFEST, MAP), strict=True):
            part = path.with_suffix(".part")
            with part.open("wb") as out:
                if (one := version.file(file)) is not None:
                    out.writelines(content(repository, one))
            part.replace(path)

    def drop(self, version: str) -> None:
        """Removes a version's."""
        for path in self.paths(version):
            with suppress(OSError):
                path.unlink()

    def keep_only(self, version: str) -> None:
        """Removes all but a version's."""
        for path in self._directory.glob("*.*"):
            if path not in self.paths(version):
                with suppress(OSError):
                    path.unlink()


def cannot_keep(error: OSError) -> DestinationError:
    """Returns what is raised where the copies cannot be written."""
    return DestinationError(
        "what a snapshot needs on this machine cannot be written",
        detail=str(error),
        hint="free space there, or set XDG_CACHE_HOME or TMPDIR to another directory",
    )


@contextmanager
def open_copies(directory: Path) -> Iterator[Copies]:
    """Yields the copies of manifests and maps in a directory.

    The copies are in a temporary directory where the directory cannot be written or another take
    uses it.

    Raises:
        DestinationError: The temporary directory cannot be written either.
    """
    with ExitStack() as stack:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = stack.enter_context(closing(os.open(directory, DIRECTORY)))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # Others: a file system that cannot lock a directory.
                if isinstance(error, BlockingIOError):
                    raise
            probe = directory / "probe.part"
            probe.touch()
            probe.unlink()
        except OSError:
            try:
                directory = Path(stack.enter_context(TemporaryDirectory(prefix="ntt-snapshot-")))
            except OSError as error:
                raise cannot_keep(error) from error
        yield Copies(directory)
