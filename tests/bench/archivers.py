"""Programs that keep a repository of their own form: how each makes, fills and reads one.

Each is told as its own documentation says, with its defaults but for what stands here. A repository
lies in a directory of this machine, behind ssh, or in a bucket.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.contender import Contender, Job, compare
from tests.bench.lab import ALIAS, Lab

_PASSWORD: Final = "bench"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program works: work is its own, data what it takes, repository where to. link: None
    for this machine; bucket: the endpoint and the name of one, in place of both.
    """

    link: Lab | None
    work: Path
    data: Path
    repository: Path
    bucket: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository, as commands. They run in the directory that is taken, or restored into.

    take: a version of it; the argument numbers them from 1. version: what `take` named its version,
    by what it has printed and the number. restore: a version into a directory.
    """

    environ: dict[str, str]
    create: Sequence[Sequence[str]]
    take: Callable[[int], Sequence[str]]
    version: Callable[[str, int], str]
    restore: Callable[[str, Path], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Archiver:
    """A program. tool: its name on PATH. at: gives its repository in a place; buckets: also in
    one.
    """

    name: str
    tool: str
    at: Callable[[Place], Repository]
    version_argv: tuple[str, ...] = ("--version",)
    buckets: bool = True


def _restic(place: Place) -> Repository:
    """It encrypts, compresses, and looks for duplicates."""
    where = here = str(place.repository)
    program = ["restic"]
    if place.bucket:
        where = here = f"s3:{'/'.join(place.bucket)}/restic"
    elif place.link:
        sftp = shlex.join([*place.link.ssh, ALIAS, "-s", "sftp"])
        where = f"sftp:{ALIAS}:{place.repository}"
        program += ["-o", f"sftp.command={sftp}"]
    return Repository(
        {
            "RESTIC_REPOSITORY": where,
            "RESTIC_PASSWORD": _PASSWORD,
            "RESTIC_CACHE_DIR": str(place.work / "cache"),
            "RESTIC_PROGRESS_FPS": "0.1",
        },
        [["restic", "-r", here, "init"]],
        lambda _: [*program, "backup", "--json", "."],
        lambda said, _: str(json.loads(said.splitlines()[-1])["snapshot_id"]),
        lambda version, to: [*program, "restore", version, "--target", str(to)],
    )


def _kopia(place: Place) -> Repository:
    """It encrypts, compresses with zstd, and splits files into chunks of 4 MiB on average."""
    storage = ["filesystem", f"--path={place.repository}"]
    if place.bucket:
        server, bucket = place.bucket[0].removeprefix("http://"), place.bucket[1]
        storage = ["s3", f"--endpoint={server}", "--disable-tls", f"--bucket={bucket}"]
        storage += ["--prefix=kopia/"]
    elif place.link:
        ssh, *options = place.link.ssh
        storage = ["sftp", "--external", f"--ssh-command={ssh}", f"--host={ALIAS}"]
        storage += [f"--ssh-args={' '.join(options)}", f"--username={place.link.user}"]
        storage += [f"--path={place.repository}"]
    return Repository(
        {
            "KOPIA_PASSWORD": _PASSWORD,
            "KOPIA_CONFIG_PATH": str(place.work / "kopia.config"),
            "KOPIA_CACHE_DIRECTORY": str(place.work / "cache"),
            "KOPIA_LOG_DIR": str(place.work / "logs"),
            "KOPIA_CHECK_FOR_UPDATES": "false",
            "KOPIA_USE_KEYRING": "false",
        },
        [
            ["kopia", "repository", "create", *storage],
            ["kopia", "policy", "set", "--global", "--compression=zstd"],
        ],
        lambda _: ["kopia", "snapshot", "create", "--no-progress", "--json", "."],
        lambda said, _: str(json.loads(said)["id"]),
        lambda version, to: ["kopia", "snapshot", "restore", version, str(to)],
    )


def _borg(place: Place) -> Repository:
    """To a `borg serve` at the remote: lz4 as by default, not encrypted, which is quicker."""
    return Repository(
        _borgs_environ(place, "borg"),
        [["borg", "init", "-e", "none"]],
        lambda number: ["borg", "create", f"::{number}", "."],
        lambda _, number: str(number),
        lambda version, _: ["borg", "extract", f"::{version}"],
    )


def _borg2(place: Place) -> Repository:
    """The beta of borg 2: lz4 as by default, and by the cheaper of its two modes that do not
    encrypt, which authenticates what is stored.
    """
    # To borg 2 a path is absolute after a second slash only.
    return Repository(
        {**_borgs_environ(place, "borg2", root="/"), "BORG_PASSPHRASE": _PASSWORD},
        [["borg2", "repo-create", "--encryption", "authenticated-blake3"]],
        lambda number: ["borg2", "create", str(number), "."],
        lambda _, number: str(number),
        lambda version, _: ["borg2", "extract", version],
    )


def _borgs_environ(place: Place, tool: str, root: str = "") -> dict[str, str]:
    where = f"{place.repository}/repository"
    if place.bucket:
        where = f"s3:{'/'.join(place.bucket)}/borg"
    elif place.link:
        where = f"ssh://{ALIAS}{root}{where}"
    return {
        "BORG_REPO": where,
        "BORG_BASE_DIR": str(place.work / "borg"),
        "BORG_REMOTE_PATH": shutil.which(tool) or "",
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
        **({"BORG_RSH": shlex.join(place.link.ssh)} if place.link else {}),
    }


RESTIC: Final = Archiver("restic", "restic", _restic, ("version",))
KOPIA: Final = Archiver("kopia", "kopia", _kopia)
BORG: Final = Archiver("borg", "borg", _borg, buckets=False)
BORG2: Final = Archiver("borg2", "borg2", _borg2)
ARCHIVERS: Final = (RESTIC, KOPIA, BORG, BORG2)


class Archived(Contender):
    """A program whose repository is behind ssh, or in a directory; it is read back once."""

    local = True

    def __init__(self, program: Archiver) -> None:
        self.name, self._program = program.name, program
        self.tools = (program.tool,)
        self.version_argv = (program.tool, *program.version_argv)

    def prepare(self, job: Job) -> None:
        self._repository = self._program.at(self._place(job))
        job.environ |= self._repository.environ
        for argv in self._repository.create:
            job.call(argv)

    def run(self, job: Job) -> float:
        return job.call(self._repository.take(1), cwd=job.store.root)

    def check(self, job: Job) -> None:
        if job.thorough:
            restored = job.scratch / "restored"
            restored.mkdir()
            self._restore(job, (job.scratch / "stdout").read_text(), restored)
            compare(job.store, restored)

    def _restore(self, job: Job, said: str, to: Path) -> float:
        """Restores what `run` took, when it said this; seconds."""
        version = self._repository.version(said, 1)
        return job.call(self._repository.restore(version, to), cwd=to)

    def _place(self, job: Job) -> Place:
        link = None if job.local else job.lab
        return Place(link, job.scratch, job.store.root, job.destination)
