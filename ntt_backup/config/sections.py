"""The tables of the configuration.

Each table is a frozen pydantic model. Sizes are in bytes, times in seconds. docs/settings.md has
a table of all settings with their meaning and their defaults; here stands what the code adds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ntt_backup.blobdir.layout import BY_HASH_LAYOUT, Layout
from ntt_backup.config.bandwidth_timetable import Bandwidth
from ntt_backup.config.values import (
    BlockSize,
    Command,
    Count,
    Day,
    Endpoint,
    Host,
    Kind,
    LayoutText,
    Listen,
    LocalPath,
    LockPath,
    Needs,
    Paths,
    Patterns,
    Prefixes,
    Query,
    Recipients,
    Region,
    RemotePath,
    RoleName,
    Seconds,
    Share,
    Size,
    StorageClass,
    TablePatterns,
    TargetPlace,
    TargetUrl,
    Url,
    WebUrl,
    WholeSeconds,
    conflict,
    is_loopback,
    parse_prefixes,
    parse_target_url,
    refused,
)
from ntt_backup.model import ALL_BLOBS, Part
from ntt_backup.name_hash import HashOfNames
from ntt_backup.process import embedded, postgres
from ntt_backup.wire.framing import FORMAT

# The most blobs of a batch where `batch_size` is not set, see `SendQueue.fit`. Larger batches are
# not faster.
_MOST_BLOBS: Final = 4000
# The bytes of the first batches where `batch_bytes` is not set: a worker that sends the last large
# batch alone uses one CPU and one connection, while the others have nothing to send.
_FIRST_BYTES: Final = 64 * 1024**2
# The most bytes of a batch. A larger number is a typing error, and too large for a float.
MOST_BYTES = 10**15
# The defaults of a run for the layout `packs`. With its headers and its table a pack fills ten
# parts of the usual size in a bucket, and no eleventh. A shorter interval would make more, smaller
# packs.
_PACKS: Mapping[str, int] = {
    "batch_size": 24_576,
    "batch_bytes": 318 * 1024**2,
    "window": 2,
    "poll_interval": 600,
}


# The home of the service's user, which has its state also where the service runs as another user.
SERVICE_HOME: Final = Path("/var/lib/ntt-backup")


OnChange = Literal["report", "version"]


def state_directory() -> Path:
    """Returns the directory for the state of this user's programs; of root it is the service's."""
    if os.geteuid() == 0 or os.access(SERVICE_HOME, os.W_OK):
        return SERVICE_HOME
    chosen = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(chosen) / "ntt-backup"


def _with_embedded(url: str) -> str:
    word, _, place = url.partition(":")
    if word != "embedded":
        return url
    state = Path(os.path.expanduser(place)) if place else state_directory()  # noqa: PTH111
    if not state.is_absolute():
        raise refused("embedded, or embedded: with an absolute path, is needed")
    return postgres.url_of(state / embedded.NAME)


CatalogUrl = Annotated[
    Url,
    AfterValidator(_with_embedded),
    Needs("embedded, or a PostgreSQL connection string such as postgresql://user@host/database"),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CatalogFromSettings(Section):
    """The query of another database that lists the files of the store, see `audit.register`.

    Attributes:
        url: The database, as `url` of `CatalogSettings`.
        role: The role that the query runs as; None for that of url.
        query: Its column `path` has paths below the root of the store. Optional are `size`,
            `checksum`, and `key`, which grows from row to row.
        every: The seconds between two passes.
        whole_every: The seconds between the passes that see all rows.
        channel: A channel on which the other database may notify of new rows.
        on_change: Whether a file that was changed since it was read is reported, or has a new
            version.
    """

    url: Url = Field(repr=False)
    query: Query
    role: RoleName | None = None
    every: Seconds = Field(default=300, ge=1, le=366 * 86400)
    whole_every: Seconds = Field(default=86400, ge=0, le=366 * 86400)
    channel: RoleName | None = None
    on_change: OnChange = "report"


class CatalogSettings(Section):
    """The database of the table `blobs`.

    Attributes:
        url: A libpq connection string or URI, with password. For `embedded` and `embedded:DIR` it
            becomes that of the embedded server, whose directory is below DIR.
        from_: What lists files that go by their paths.
    """

    url: CatalogUrl = Field(default="postgresql:///copyjob", repr=False)
    from_: Annotated[CatalogFromSettings | None, Needs("a table with url and query")] = Field(
        default=None, alias="from"
    )


class FilesSettings(Section):
    """Directories of the store that are walked, `[files.NAME]`, see `audit.register`.

    Attributes:
        paths: The directories, below the root of the store.
        exclude: Patterns of paths that are left out, see `snapshot.patterns`.
        every: The seconds between two passes.
        whole_every: The seconds between the passes that list all directories.
        on_change: As for `CatalogFromSettings`.
    """

    paths: Paths
    exclude: Patterns = ()
    every: Seconds = Field(default=3600, ge=1, le=366 * 86400)
    whole_every: Seconds = Field(default=7 * 86400, ge=0, le=366 * 86400)
    on_change: OnChange = "report"


class SourceSettings(Section):
    """The store.

    Attributes:
        root: The directory that holds the blobs.
        layout: Where it holds them, see `blobdir.layout.Layout`.
        hash: The hash of their contents that their names are.
        read_order: The order in which claimed blobs are read, see `source.read_ahead`.
        grace: The seconds since its last change for which a file that is missing, short or wrong is
            taken for one that is still being written.
        prefixes: The prefixes of the blobids that this host holds; none: it holds the whole store.
    """

    root: LocalPath
    layout: LayoutText = BY_HASH_LAYOUT.text
    prefixes: Prefixes = ()
    hash: HashOfNames = "blake3"
    read_order: Literal["auto", "hash", "inode", "extent"] = "auto"
    grace: Seconds = Field(default=900, ge=0, le=86400)

    @property
    def path_layout(self) -> Layout:
        return Layout(self.layout)

    @property
    def part(self) -> Part:
        """The part of the store that this host holds."""
        return parse_prefixes(self.prefixes) if self.prefixes else ALL_BLOBS


_OF_SSH: Final = ("identity_file", "ssh_config", "known_hosts", "alive_interval", "alive_count")
# The settings of `remote` that only some kinds of target have.
ONLY_FOR: Mapping[Kind, tuple[str, ...]] = {
    "ssh": _OF_SSH,
    "sftp": _OF_SSH,
    "s3": ("endpoint", "region", "addressing", "storage_class", "part_size", "ca_bundle"),
}
# The kinds of target that have no plain files, in messages.
_ONLY_PACKS: Mapping[Kind, str] = {"s3": "a bucket", "sftp": "a target by sftp"}


class RemoteSettings(Section):
    """The target: its place, and how the place is reached.

    The place is set by url, or by host, port and path. After the validation each of these has its
    part of the place, or is empty; and layout is set.
    """

    url: TargetUrl = ""
    layout: Literal["files", "packs"] | None = None
    host: Host = ""
    path: RemotePath = ""
    port: Count | None = Field(default=None, ge=1, le=65535)
    identity_file: LocalPath | None = None
    ssh_config: LocalPath | None = None
    known_hosts: LocalPath | None = None
    connect_timeout: WholeSeconds = Field(default=15, ge=1, le=600)
    alive_interval: WholeSeconds = Field(default=15, ge=1, le=600)
    alive_count: Count = Field(default=4, ge=1, le=100)
    endpoint: Endpoint | None = None
    region: Region | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    storage_class: StorageClass | None = None
    part_size: Size = Field(default=32 * 1024**2, ge=5 * 1024**2, le=5 * 1024**3)
    ca_bundle: LocalPath | None = None

    _place: TargetPlace = PrivateAttr()
    _identity: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if not self.url and not (self.host and self.path):
            raise PydanticCustomError("missing", "the place is missing")
        place = (
            parse_target_url(self.url)
            if self.url
            else TargetPlace("ssh", self.host, self.port, self.path)
        )
        for name in ("host", "port", "path"):
            if name in self.model_fields_set and getattr(self, name) != getattr(place, name):
                raise conflict(
                    "{} and {} name different places",
                    "remote.url",
                    f"remote.{name}",
                    hint="keep one of them",
                )
        kind = _ONLY_PACKS.get(place.kind)
        if kind and self.layout == "files":
            text, hint = (
                f"{{}} is files, and the target is {kind}",
                f"leave it out: {kind} has packs",
            )
            raise conflict(text, "remote.layout", hint=hint)
        layout = self.layout or ("packs" if kind else "files")
        self._place = place
        # The model is frozen for everybody else.
        self.__dict__.update(
            url=str(place), host=place.host, port=place.port, path=place.path, layout=layout
        )
        return self

    @property
    def identity(self) -> str:
        """The identity that each session must find there; "" where nothing is expected."""
        return self._identity

    def expecting(self, identity: str) -> Self:
        """Returns the same place, of which each session requires this identity."""
        expecting = self.model_copy()
        expecting._identity = identity
        return expecting

    @property
    def kind(self) -> Kind:
        return self._place.kind

    @property
    def runs_receiver(self) -> bool:
        """Whether the target runs a receiver, or commands of ours."""
        return self.kind not in _ONLY_PACKS

    @property
    def packs(self) -> bool:
        return self.layout == "packs"

    @property
    def idle(self) -> list[str]:
        """The settings that were set and have no effect for this kind of target, sorted."""
        return sorted(idle_for(self.kind) & self.model_fields_set)

    @property
    def where(self) -> str:
        """The place in events and messages: host:path, or the URL where there is no host."""
        return f"{self.host}:{self.path}" if self.host else self.url

    @property
    def blobs(self) -> str:
        """The directory `by-hash` of the target, or the marker of its packs, in messages."""
        if self.packs:
            return f"{self.url if self.kind == 's3' else self.path}/{FORMAT}"
        return f"{self.path}/by-hash"

    @property
    def bucket(self) -> str:
        return self._place.bucket

    @property
    def prefix(self) -> str:
        """The beginning of all keys in the bucket, without slashes at its ends; may be empty."""
        return self._place.prefix


def idle_for(kind: str) -> set[str]:
    """Returns the settings of `remote` that have no effect for a kind of target."""
    kinds = ONLY_FOR.items()
    names = {name for _, names in kinds for name in names}
    return names - {name for one, names in kinds if one == kind for name in names}


class RunSettings(Section):
    """The size of batches, and the waits of a run.

    Where `batch_size` is not set, the most blobs of a batch are `most_blobs`; where `batch_bytes`
    is not set, batches grow from `first_bytes`.
    """

    workers: Count = Field(default=4, ge=1, le=256)
    batch_size: Count = Field(default=1000, ge=1, le=100_000)
    batch_bytes: Size = Field(default=256 * 1024**2, ge=1, le=MOST_BYTES)
    strategy: Literal["auto", "tar", "stream", "packs"] = "auto"
    codec: Literal["auto", "none", "zlib", "zstd-1", "zstd-3", "zstd-6", "zstd-9", "zstd-12"] = (
        "auto"
    )
    bwlimit: Bandwidth | None = None
    window: Count = Field(default=4, ge=1, le=64)
    attempts: Count = Field(default=3, ge=1, le=100)
    max_failed_share: Share = Field(default=0.5, ge=0, le=1)
    verify_source: bool = Field(default=True, strict=True)
    poll_interval: Seconds = Field(default=30, ge=0.1, le=86400)
    stall_timeout: Seconds = Field(default=60, ge=1, le=3600)
    receipt_timeout: Seconds = Field(default=600, ge=1, le=86400)
    outage_timeout: Seconds = Field(default=3600, ge=0)
    backoff_base: Seconds = Field(default=1, ge=0.01, le=60)
    backoff_cap: Seconds = Field(default=60, ge=0.01, le=3600)
    skip_pgdump: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _base_below_cap(self) -> Self:
        if self.backoff_base > self.backoff_cap:
            hint = "set both, the first not above the second"
            raise conflict("{} is above {}", "run.backoff_base", "run.backoff_cap", hint=hint)
        return self

    @property
    def most_blobs(self) -> int:
        """The most blobs of any batch."""
        return self.batch_size if "batch_size" in self.model_fields_set else _MOST_BLOBS

    @property
    def first_bytes(self) -> int:
        """The most bytes of content of the first batches."""
        return self.batch_bytes if "batch_bytes" in self.model_fields_set else _FIRST_BYTES

    def for_packs(self) -> RunSettings:
        """Returns the settings for the layout `packs`, where a batch is a pack.

        The strategy is `packs`, and settings that were not set have the defaults of that layout.
        """
        unset = {name: value for name, value in _PACKS.items() if name not in self.model_fields_set}
        return self.model_copy(update={**unset, "strategy": "packs"})


class DumpSettings(Section):
    """Dumps of the catalog. keep_*: see `dump.retention`.

    beside: A run does not wait for its dump, and several targets share one (`dump.spool`).
    """

    bin: LocalPath | None = None
    mode: Literal["full", "series"] = "full"
    beside: bool = Field(default=True, strict=True)
    exclude_table_data: TablePatterns = ()
    full_every: Count = Field(default=14, ge=1, le=1000)
    keep_last: Count = Field(default=3, ge=1, le=1000)
    keep_daily: Count = Field(default=7, ge=0, le=1000)
    keep_weekly: Count = Field(default=4, ge=0, le=1000)
    keep_monthly: Count = Field(default=0, ge=0, le=1000)
    keep_yearly: Count = Field(default=0, ge=0, le=1000)
    max_age: Seconds = Field(default=7 * 86400, ge=0, le=366 * 86400)
    interval: Seconds = Field(default=86400, ge=1, le=366 * 86400)


class SnapshotSettings(Section):
    """A snapshot set, `[snapshots.NAME]`: files of which versions are kept (`snapshot.retention`).

    block_size: None: by the size of the file; every: None: only by hand.
    """

    paths: Paths
    exclude: Patterns = ()
    block_size: BlockSize | None = None
    every: Seconds | None = Field(default=None, ge=1, le=366 * 86400)
    full_every: Seconds = Field(default=30 * 86400, ge=0, le=3660 * 86400)
    keep_last: Count = Field(default=3, ge=1, le=1000)
    keep_daily: Count = Field(default=7, ge=0, le=1000)
    keep_weekly: Count = Field(default=4, ge=0, le=1000)
    keep_monthly: Count = Field(default=0, ge=0, le=1000)
    keep_yearly: Count = Field(default=0, ge=0, le=1000)


class CheckSettings(Section):
    """A check that a run does by itself.

    Attributes:
        every: The interval of the check in seconds; None: never.
        max_time: The seconds after which the check ends.
        max_bytes: The bytes after which the check ends, if it reads content.
    """

    every: Seconds | None = Field(default=None, ge=1, le=366 * 86400)
    max_time: Seconds | None = Field(default=None, ge=1, le=366 * 86400)
    max_bytes: Size | None = Field(default=None, ge=1)


class DrillSettings(CheckSettings):
    """The drill of a run.

    Attributes:
        scratch: The directory in which each drill makes one of its own.
        database: A database of the server on which each drill makes one of its own.
    """

    scratch: LocalPath = Path("/var/tmp")  # noqa: S108  each drill makes a private directory
    database: CatalogUrl = Field(default="postgresql:///postgres", repr=False)


_CHECK: Final = Needs('a table such as { every = "1d" }')


class ChecksSettings(Section):
    """The checks that a run with `--watch` does by itself, see `daemon.checks`."""

    scan: Annotated[CheckSettings, _CHECK] = CheckSettings()
    reconcile: Annotated[CheckSettings, _CHECK] = CheckSettings()
    verify: Annotated[CheckSettings, _CHECK] = CheckSettings()
    drill: Annotated[DrillSettings, _CHECK] = DrillSettings()

    @property
    def scheduled(self) -> dict[str, float]:
        """The checks that are done, with the seconds between them."""
        checks = {name: getattr(self, name).every for name in type(self).model_fields}
        return {name: every for name, every in checks.items() if every is not None}


class PolicySettings(Section):
    """What the operator promises: so many proved copies of each blob.

    Attributes:
        copies: The number of targets on which each blob has a proved copy; None: no promise.
        proved: The seconds for which a receipt or a check proves a copy.
        every: The seconds after which a run that watches counts again.
    """

    copies: Count | None = Field(default=None, ge=1, le=16)
    proved: Seconds = Field(default=90 * 86400, ge=1, le=3660 * 86400)
    every: Seconds = Field(default=6 * 3600, ge=1, le=366 * 86400)


class PackSettings(Section):
    """The sealing of packs. Commands that read need `identity_file`, and no others."""

    recipients: Recipients = ()
    identity_file: LocalPath | None = None
    unsealed_until: Day | None = None


class HostSettings(Section):
    """Settings of this host. key_file: the file of its signing key, see `config.signing_key`."""

    key_file: LocalPath | None = None


class LogSettings(Section):
    """The JSONL file, its lowest level, and the interval of `progress` events."""

    jsonl: LocalPath = Path("/var/log/ntt/backup-remote.jsonl")
    level: Literal["info", "warning", "error"] = "info"
    progress_interval: Seconds = Field(default=60, ge=0.1, le=86400)

    @property
    def notes(self) -> Path:
        """The directory of small files about targets: beside the log, or the service's home.

        A log below /var/log may be in a directory of others, where the service makes no files.
        """
        in_home = self.jsonl.is_relative_to("/var/log") and os.access(SERVICE_HOME, os.W_OK)
        return SERVICE_HOME if in_home else self.jsonl.parent


class LockSettings(Section):
    """The coordinator's PID lock. `{target}` in file stands for the target's name."""

    file: LockPath = Path("/tmp/ntt-backup-{target}.lock")  # noqa: S108  the documented default


class ControlSettings(Section):
    """The control of a running daemon: a Unix socket, as `file` of `LockSettings`.

    The default is beside the lock file, with `.sock` for `.lock`.
    """

    socket: LockPath | None = None


class MetricsSettings(Section):
    """Metrics for a monitoring system. public: whether other machines may connect to listen."""

    public: bool = Field(default=False, strict=True)
    listen: Listen | None = None
    textfile: LocalPath | None = None

    @property
    def wanted(self) -> bool:
        return self.listen is not None or self.textfile is not None

    @field_validator("listen")
    @classmethod
    def _for_whom(cls, listen: str | None, info: ValidationInfo) -> str | None:
        if listen is not None and not info.data.get("public") and not is_loopback(listen):
            raise refused(
                "127.0.0.1 or [::1] is needed, or metrics.public = true if others may read it"
            )
        return listen


NoticeKind = Literal[
    "success",
    "failure",
    "first_failure",
    "recovery",
    "outage",
    "stall",
    "action_required",
    "findings",
    "source_rot",
    "test",
]


class NotifySettings(Section):
    """The recipients of notices. In both URLs `{target}` stands for the target's name."""

    command: Command = ()
    on: Annotated[tuple[NoticeKind, ...], Needs(f"a list of {', '.join(get_args(NoticeKind))}")] = (
        # Not the end of each run, only a change of its outcome.
        tuple(kind for kind in get_args(NoticeKind) if kind not in ("success", "failure"))
    )
    outage_after: Seconds = Field(default=900, ge=1, le=366 * 86400)
    timeout: Seconds = Field(default=30, ge=1, le=600)
    ping_url: WebUrl | None = Field(default=None, repr=False)
    webhook_url: WebUrl | None = Field(default=None, repr=False)

    @property
    def wanted(self) -> bool:
        return bool(self.command or self.webhook_url or self.ping_url)
