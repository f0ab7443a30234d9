"""The demo's directory has a place for everything, and is removed as a whole.

Everything that the demo makes is below one directory. PostgreSQL's home may have to be elsewhere:
the path of its socket may have 107 bytes at most, and started by root it works as another user, who
must be able to get there. Then the home is a directory below /tmp, and a symbolic link leads to it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from ntt_backup.demo import bucket
from ntt_backup.demo.postgres import open_to_others
from ntt_backup.demo.ssh import SshFiles
from ntt_backup.errors import BackupError, ConfigError
from ntt_backup.process import embedded

_REMOVE_SECONDS: Final = 10.0
_PLAY: Final = """\
#!/bin/sh
# Starts this demo's servers again and opens a shell to play in; they stop when it ends.
{environment}exec {python} -m ntt_backup.demo.play {root}
"""
_COMMAND: Final = """\
#!/bin/sh
exec {python} -m ntt_backup "$@"
"""


class Scratch:
    """The demo's directory; all paths are absolute. ours: the demo has made it.

    commands: a directory for PATH, with `ntt-backup-remote` as this Python runs it. s3: where an
    object store works; not there where the remote is another machine.
    """

    def __init__(self, root: Path, *, ours: bool) -> None:
        self.root = root
        self.source = root / "store" / "by-hash"
        self.remote = root / "remote"
        self.destination = self.remote / "by-hash"
        self.ssh = SshFiles(root / "ssh")
        self.s3 = root / "s3"
        self.commands = root / "bin"
        self.settings = root / "backup-remote.toml"
        self.log = root / "backup-remote.jsonl"
        self.play = root / "play"
        self._postgres = root / "postgres"
        self._ours = ours

    @classmethod
    def create(cls, directory: Path | None) -> Self:
        """Makes it: directory, absent or empty, or a new one among the temporary files.

        Raises ConfigError.
        """
        try:
            if directory is None:
                root, ours = Path(tempfile.mkdtemp(prefix="ntt-demo-")).resolve(), True
            else:
                root = directory.expanduser().resolve()
                ours = not root.exists()
                root.mkdir(parents=True, exist_ok=True)
            if ours:
                root.chmod(0o711)  # PostgreSQL's user passes, nobody looks
            if any(root.iterdir()):
                raise ConfigError(
                    f"{root} is not empty",
                    hint="the demo works in a directory of its own: name a new one",
                )
            scratch = cls(root, ours=ours)
            scratch.ssh.directory.mkdir(mode=0o700)  # of two demos in one place, one fails here
            try:
                scratch._fill()
            except OSError:
                scratch.remove()
                raise
        except OSError as error:
            raise ConfigError(
                f"no directory for the demo in {directory or tempfile.gettempdir()}",
                detail=error.strerror or str(error),
                hint="name another one with --directory",
            ) from error
        return scratch

    def _fill(self) -> None:
        for path in (self.source, self.remote, self.commands):
            path.mkdir(parents=True)
        python = shlex.quote(sys.executable)
        _write_script(self.commands / "ntt-backup-remote", _COMMAND.format(python=python))

    def postgres_home(self) -> Path:
        """Returns the directory above that of PostgreSQL, made at the first call."""
        link = self._postgres
        if not link.exists():
            short = len(os.fsencode(link / embedded.NAME)) <= embedded.LONGEST
            if short and (open_to_others(self.root) or os.geteuid() != 0):
                link.mkdir()
            else:
                link.symlink_to(tempfile.mkdtemp(prefix="ntt-demo-postgres-", dir="/tmp"))
            link.chmod(0o711)
        return link.resolve()

    def write_settings(self, url: str, remote: Mapping[str, object]) -> None:
        """Writes the settings file.

        Args:
            url: The URL of the catalog.
            remote: The values of the table `remote`.
        """
        tables: dict[str, Mapping[str, object]] = {
            "catalog": {"url": url},
            "source": {"root": self.source},
            "remote": remote,
            "log": {"jsonl": self.log},
            "lock": {"file": self.root / "lock"},
            "host": {"key_file": self.root / "host.key"},
        }
        lines = []
        for table, values in tables.items():
            lines.append(f"\n[{table}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        self.settings.write_text("\n".join(lines).lstrip() + "\n", encoding="utf-8")

    def write_play(self) -> None:
        """Writes the script that starts the servers of a kept demo again."""
        path = _python_path()
        text = _PLAY.format(
            environment=f"export PYTHONPATH={shlex.quote(path)}\n" if path else "",
            python=shlex.quote(sys.executable),
            root=shlex.quote(str(self.root)),
        )
        _write_script(self.play, text)

    def environment(self) -> dict[str, str]:
        """Returns our environment for commands, without settings that win over the file."""
        others = ("NTT_", "PG", "AWS_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(others)}
        if self.s3.is_dir():
            kept |= bucket.environment(self.s3)
        kept["XDG_CACHE_HOME"] = str(self.root / "cache")
        kept["PATH"] = os.pathsep.join([str(self.commands), kept.get("PATH", os.defpath)])
        path = _python_path()
        return {**kept, "PYTHONPATH": path} if path else kept

    def homes(self) -> list[Path]:
        """Returns the directories that `remove` would remove."""
        return [self.root, *([self._postgres.resolve()] if self._postgres.is_symlink() else [])]

    def remove(self) -> None:
        """Removes all of it; a directory that was there before stays, empty.

        A command on the remote whose connection has just been cut may still be writing: it is given
        a few seconds to notice. Raises BackupError where something stays.
        """
        if self._postgres.is_symlink():
            _remove(self._postgres.resolve())
            self._postgres.unlink()
        for path in [self.root] if self._ours else list(self.root.iterdir()):
            if path.is_dir():
                _remove(path)
            else:
                path.unlink()


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + _REMOVE_SECONDS
    while directory.exists():
        try:
            shutil.rmtree(directory)
        except OSError as error:
            if time.monotonic() > deadline:
                raise BackupError(
                    f"{directory} could not be removed", detail=str(error), hint="remove it by hand"
                ) from error
            time.sleep(0.1)


def _toml(value: object) -> str:
    # What is a string in JSON is one in TOML, as long as nothing is cut into surrogates.
    return str(value) if isinstance(value, int) else json.dumps(str(value), ensure_ascii=False)


def _python_path() -> str:
    """Returns PYTHONPATH for another working directory; with us in it, if not installed."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [os.path.abspath(place) for place in given if place]
    ours = Path(__file__).parents[2]
    if ours.name not in ("site-packages", "dist-packages") and str(ours) not in places:
        places.insert(0, str(ours))
    return os.pathsep.join(places)


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
