"""The service's files are written and removed here: units, user, log rotation, sample settings.

Each file that is written ends with the hash of what stands above. So it is known later whether an
operator has changed it, and what was changed is never replaced or removed. The settings are the
operator's from the first moment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.process.durable import sync_directory, write_durably

PROGRAM: Final = "/usr/local/bin/ntt-backup-remote"
SETTINGS: Final = Path("etc/ntt/backup-remote.toml")
UNITS: Final = Path("systemd/system")
USER: Final = "ntt-backup"
# Neither systemd nor logrotate reads such a file, and administrators know the suffix.
BESIDE: Final = ".dpkg-dist"
# The first release of systemd that sends SIGHUP by itself, and waits for the end of a reload.
_NOTIFY_RELOAD: Final = 253
_SEAL: Final = "# ntt-backup-remote install-service, sha256 of the above: "
# The drop-ins of a unit of ours, and the units that have them.
_RUNS: Final = ("ntt-backup-remote", "ntt-backup-remote-once", "ntt-backup-remote@")
_OF_USER: Final = (*_RUNS, "ntt-backup-remote-page")
_AS_USER: Final = """\
# The service runs as this account. Its keys for ssh are in its own home, which is read-only for the
# service: what the service keeps is in /var/lib/ntt-backup.
[Service]
User={user}
Group=
Environment=XDG_CACHE_HOME=/var/lib/ntt-backup/.cache
"""
_READS_ALL: Final = """\
# The service reads every file, and writes none that it could not write before. Of the programs that
# it starts only tar, which reads the store, has this capability, too.
[Service]
CapabilityBoundingSet=CAP_DAC_READ_SEARCH
AmbientCapabilities=CAP_DAC_READ_SEARCH
# It would open files that the sandbox hides.
SystemCallFilter=~open_by_handle_at
"""
_SEALED: Final = re.compile(rf"(?s)(.*\n){re.escape(_SEAL)}([0-9a-f]{{64}})\n")


def _sample() -> Path:
    """Returns the directory of the sample files: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "systemd"
    return inside if inside.is_dir() else package.parent / "systemd"


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """A file of the service. path: relative to the root of the host."""

    path: Path
    text: str

    def write(self, root: Path) -> str:
        """Writes the file below root, unless an operator has changed it. Returns the action.

        Raises OSError.
        """
        path = root / self.path
        found = _read(path)
        if found is not None and self.path == SETTINGS:
            return "kept"
        if found == self.text:
            return "unchanged"
        if found is not None and not _is_ours(found):
            beside = path.with_name(path.name + BESIDE)
            write_durably(beside, self.text.encode())
            return f"kept, since it was changed by hand; what it would be is in {beside.name}"
        write_durably(path, self.text.encode(), 0o640 if self.path == SETTINGS else 0o644)
        return "written"

    def remove(self, root: Path) -> str:
        """Removes the file below root, unless it is the work of an operator. Returns the action.

        Raises OSError.
        """
        path = root / self.path
        path.with_name(path.name + BESIDE).unlink(missing_ok=True)
        found = _read(path)
        if found is None:
            return "not there"
        if self.path == SETTINGS or not _is_ours(found):
            return "kept"
        path.unlink()
        sync_directory(path.parent)
        if path.parent.name.endswith(".service.d"):
            with suppress(OSError):  # It has other drop-ins.
                path.parent.rmdir()
        return "removed"


def service_files(
    program: str, prefix: Path | None = None, systemd: int = 0, user: str = USER
) -> Iterator[ServiceFile]:
    """Yields the files of the service.

    Args:
        program: The path of the program that the units start.
        prefix: The directory that holds the files of a package in its lib; None: the files are
            placed below /etc.
        systemd: The release of systemd that will read the files; 0 if the release is not known.
        user: The account that owns the state of the service.
    """
    sample = _sample()
    lib = Path("etc") if prefix is None else Path(*prefix.parts[prefix.is_absolute() :], "lib")
    places = {"sysusers.d": lib, "tmpfiles.d": lib, "logrotate.d": Path("etc")}
    for unit in sorted([*sample.glob("*.service"), *sample.glob("*.timer")]):
        text = unit.read_text("utf-8").replace(PROGRAM, program)
        if systemd >= _NOTIFY_RELOAD:
            text = text.replace("\nType=notify\n", "\nType=notify-reload\n")
            text = re.sub(r"\n# [^\n]*\nExecReload=[^\n]*", "", text)
        yield ServiceFile(lib / UNITS / unit.name, _sealed(text))
    for directory, place in places.items():
        for file in sorted((sample / directory).iterdir()):
            text = file.read_text("utf-8")
            if directory == "tmpfiles.d":  # /etc/ntt stays root's.
                text = re.sub(rf"(?m)^(d \S+ +\d+) {USER} ", rf"\1 {user} ", text)
            yield ServiceFile(place / directory / file.name, _sealed(text))
    yield ServiceFile(SETTINGS, (sample / SETTINGS.name).read_text("utf-8"))


def is_sample(path: Path) -> bool:
    """Returns whether a settings file is the sample of the service, unchanged."""
    with suppress(OSError):
        return _read(path) == (_sample() / SETTINGS.name).read_text("utf-8")
    return False


def user_files(user: str) -> Iterator[ServiceFile]:
    """Yields the drop-ins that have the units run as another account."""
    yield from _drop_ins(_OF_USER, "user.conf", _AS_USER.format(user=user))


def read_all_files() -> Iterator[ServiceFile]:
    """Yields the drop-ins that let the service read every file."""
    yield from _drop_ins(_RUNS, "read-all.conf", _READS_ALL)


def _drop_ins(units: Collection[str], name: str, text: str) -> Iterator[ServiceFile]:
    for unit in units:
        yield ServiceFile(Path("etc", UNITS, f"{unit}.service.d", name), _sealed(text))


def service_user(root: Path) -> str:
    """Returns the account that the service runs as, by the drop-in of `user_files`."""
    found = re.search(r"(?m)^User=(\S+)$", _read(root / next(user_files(USER)).path) or "")
    return USER if found is None else found[1]


def _sealed(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{text}{_SEAL}{digest}\n"


def _is_ours(text: str) -> bool:
    """Returns whether the text is unchanged since this program wrote it."""
    match = _SEALED.fullmatch(text)
    return match is not None and _sealed(match[1]) == text


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
