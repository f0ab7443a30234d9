"""Publishes staged files: gives them their names in a blob directory, never over good content.

A plain `rename` would replace whatever has the name, and a look before it would race. So the kernel
is asked to rename only to a free name (`renameat2`). Where it is taken, equal content is kept; what
differs is replaced only for a caller that knows which of the two is right.

The caller syncs the content before it is published, and the directories afterwards.
"""

from __future__ import annotations

import errno
import os
import stat

from ntt_backup.blobdir.descriptors import FILE, closing, error_line, rename_new
from ntt_backup.blobdir.layout import BY_HASH_LAYOUT, BlobDirectory, Layout, kind_of
from ntt_backup.wire.messages import PRESENT, REFUSED, REPLACED

_CHUNK = 1 << 18


class Publisher:
    """Puts files into a blob directory. It keeps open the directories that were used last, until it
    is closed; `entered` are the paths of all that were used.

    may_replace: content that differs from what is staged is known to be wrong. by_file: syncs what
    is found present too, because no sync of the whole file system follows.
    """

    def __init__(
        self,
        by_hash: int,
        device: int,
        may_replace: bool,
        by_file: bool = False,
        layout: Layout = BY_HASH_LAYOUT,
    ) -> None:
        self._target = BlobDirectory(by_hash, device, layout=layout)
        self._may_replace = may_replace
        self._by_file = by_file
        self.entered: set[str] = set()

    def close(self) -> None:
        """Closes the directories that are open."""
        self._target.close()

    def publish(self, digest: bytes, directory: int, name: bytes) -> tuple[int, str] | None:
        """Gives a staged file its name. Raises OSError.

        Returns None where the name was free, else a verdict and a text: REPLACED, or else PRESENT
        or REFUSED, and the file stays staged.
        """
        blobid, layout = digest.hex(), self._target.layout
        place = layout.directory(blobid)
        target = self._target.directory(place, make=True)
        self.entered.update((place.partition("/")[0], place))
        final = blobid[layout.file_at :].encode("ascii")
        try:
            rename_new(directory, name, target, final)
            return None
        except FileExistsError:
            mode = os.stat(final, dir_fd=target, follow_symlinks=False).st_mode
        found = kind_of(mode)
        if stat.S_ISREG(mode):
            try:
                found = self._other_content(directory, name, target, final)
            except PermissionError as problem:
                return (REFUSED, error_line(problem))
            if not found:
                return (PRESENT, "")
        if not self._may_replace or stat.S_ISDIR(mode):
            return (REFUSED, f"{found} stands in its place")
        os.rename(name, final, src_dir_fd=directory, dst_dir_fd=target)
        return (REPLACED, f"{found} stood there")

    def move(self, path: str, directory: int, name: str) -> bool:
        """Publishes a directory `aa`, or `aa/bb`, with all that is in it, where there is none.
        Returns False where that fails: the error shows again, and is reported, file by file.
        """
        above, _, last = path.rpartition("/")
        try:
            target = self._target.directory(above, make=True)
            rename_new(directory, name.encode("ascii"), target, last.encode("ascii"))
        except OSError:
            return False
        return True

    def _other_content(self, directory: int, name: bytes, target: int, final: bytes) -> str:
        """Returns in words what stands there; "" where it is the same content."""
        ours = os.open(name, FILE, dir_fd=directory)
        with closing(ours), closing(os.open(final, FILE, dir_fd=target)) as found:
            if os.fstat(ours).st_size != os.fstat(found).st_size:
                return "other content"
            chunk = None
            while chunk != b"":
                chunk = os.read(ours, _CHUNK)
                try:
                    theirs = os.read(found, _CHUNK)
                except OSError as problem:
                    if problem.errno != errno.EIO:
                        raise
                    return "content that cannot be read"  # A bad sector: the new file has others.
                if chunk != theirs:
                    return "other content"
            if self._by_file:
                os.fsync(found)
            return ""
