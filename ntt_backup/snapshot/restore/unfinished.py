"""A directory is marked while a restore into it is not finished.

A restored file has its size and time long before its content is on the disk. A power cut can leave
the file with both, and with zeros as its content. The marker is on the disk before the first file
is written, and it is removed after the last sync. While it is there, no file is taken for right
because of its size and time: its content is compared.

The marker names each restore that did not finish, by version and patterns. Only the same restore,
or one of the whole version, has looked at all files that the earlier one may have left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.open import FILE, closing, names_in
from ntt_backup.process.durable import write_durably
from ntt_backup.snapshot.restore.tree import MARKER

_MOST_BYTES: Final = 1 << 20


class Unfinished:
    """Marks a directory until `end`. Raises OSError.

    Args:
        to: The directory that is restored into.
        root: An open descriptor of the directory; it is not closed.
        version: The version that is restored, as `SET@VERSION`.
        patterns: The patterns that choose files of the version; none for all files.

    Attributes:
        doubt: Whether an earlier restore into the directory did not finish.
    """

    def __init__(self, to: Path, root: int, version: str, patterns: Sequence[str]) -> None:
        self._path = to / MARKER
        self._root = root
        self._line = json.dumps([version, *sorted(patterns)])
        # Without patterns, this restore looks at all files of the version.
        self._settled = self._line[:-1] if not patterns else self._line
        self._remove_left_overs()
        self.doubt = os.access(MARKER, os.F_OK, dir_fd=root, follow_symlinks=False)
        self._others = [one for one in self._read() if not one.startswith(self._settled)]
        self._write([*self._others, self._line])

    def end(self) -> None:
        """Removes the mark of this restore, once all of its files are durable."""
        if self._others:
            self._write(self._others)
        else:
            os.unlink(MARKER, dir_fd=self._root)

    def _remove_left_overs(self) -> None:
        """Removes what a power cut has left of a marker that was being written."""
        for name in names_in(self._root):
            if name.startswith(f".{MARKER}."):
                os.unlink(name, dir_fd=self._root)

    def _read(self) -> list[str]:
        with suppress(OSError), closing(os.open(MARKER, FILE, dir_fd=self._root)) as fd:
            return os.read(fd, _MOST_BYTES).decode("utf-8", "surrogateescape").splitlines()
        return []

    def _write(self, lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        write_durably(self._path, text.encode("utf-8", "surrogateescape"), 0o600)
