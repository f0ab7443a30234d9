"""Each table of the file is a frozen pydantic model.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ntt_backup.config.target_url import Endpoint, Kind, Place, TargetUrl, parse
from ntt_backup.config.timetable import Bandwidth
from ntt_backup.config.values import (
    BlockSize,
    Command,
    Count,
    Day,
    Host,
    Listen,
    LocalPath,
    LockPath,
    Needs,
    Paths,
    Patterns,
    Recipients,
    Region,
    RemotePath,
    Seconds,
    Share,
    Size,
    StorageClass,
    Url,
    WebUrl,
    WholeSeconds,
    is_loopback,
)

# Batches grow up to so many blobs where `batch_size` is not set, see `SendQueue.fit`. Larger ones
# are no quicker.
_MOST_BLOBS: Final = 4000
# Batches begin with so many bytes where `batch_bytes` is not set: a worker that sends the last
# large one alone uses one CPU and one connection, while the others have nothing to send.
_FIRST_BYTES: Final = 64 * 1024**2
# More is a slip of the keyboard, and cannot be computed with as a float in the end.
MOST_BYTES = 10**15
# What a run to a bucket does where nothing else is set. With its headers and its table a pack fills
# ten parts of the usual size, and no eleventh. Who looks more often makes more, smaller packs.
_PACKS: Mapping[str, int] = {
    "batch_size": 24_576,
    "batch_bytes": 318 * 1024**2,
    "window": 2,
    "poll_interval": 600,
}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CatalogSettings(Section):
    """The database of the table `blobs`. url: a libpq connection string or URI, with password."""

    url: Url = Field(default="postgresql:///copyjob", repr=False)


class SourceSettings(Section):
    """The store. root is the directory that holds `aa/bb/<blobid>`. read_order: in which order what
    was claimed is read, and whether ahead: see `source.read_ahead`.
    """

    root: LocalPath
    read_order: Literal["auto", "hash", "inode", "extent"] = "auto"


# The settings of `remote` that one kind of target has, and the others not.
ONLY_FOR: Mapping[Kind, tuple[str, ...]] = {
    "ssh": ("identity_file", "ssh_config", "known_hosts", "alive_interval", "alive_count"),
    "s3": ("endpoint", "region", "addressing", "storage_class", "part_size", "ca_bundle"),
}


class RemoteSettings(Section):
    """The target: a place, and how it is reached.

    The place is set by url, or by host, port and path; each then has its part of it, and what has
    no part in it is empty. `by-hash/` lies below path. model_fields_set holds what was set.
    """

    url: TargetUrl = ""
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

    _place: Place = PrivateAttr()

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if not self.url and not (self.host and self.path):
            raise PydanticCustomError("missing", "the place is missing")
        place = parse(self.url) if self.url else Place("ssh", self.host, self.port, self.path)
        for name in ("host", "port", "path"):
            if name in self.model_fields_set and getattr(self, name) != getattr(place, name):
                raise PydanticCustomError("places", "{name} differs", {"name": name})
        self._place = place
        # What is validated is frozen for everybody else.
        self.__dict__.update(url=str(place), host=place.host, port=place.port, path=place.path)
        return self

    @property
    def kind(self) -> Kind:
        """Returns what the target is: an account on the remote, a local directory, or a bucket."""
        return self._place.kind

    @property
    def idle(self) -> list[str]:
        """Returns the settings that were set, and mean nothing for this kind."""
        others = {name for kind, names in ONLY_FOR.items() if kind != self.kind for name in names}
        return sorted(others & self.model_fields_set)

    @property
    def where(self) -> str:
        """Returns the place in events and messages: host:path, or the URL of what has no host."""
        return f"{self.host}:{self.path}" if self.kind == "ssh" else self.url

    @property
    def bucket(self) -> str:
        """Returns the bucket's name."""
        return self._place.bucket

    @property
    def prefix(self) -> str:
        """Returns what begins all keys in the bucket, without slashes at its ends; may be empty."""
        return self._place.prefix


class RunSettings(Section):
    """Says how the work is cut into batches, and how long a run waits.

    batch_size: blobs of a batch; where it is not set, batches may grow up to `most_blobs`.
    batch_bytes: where it is not set, batches grow up to it from `first_bytes`.
    window: batches that a worker may have sent without an answer. attempts: how often a batch that
    the remote refuses is sent before it is split. codec: compression of `stream`; `auto` tries
    samples. verify_source: hash every blob before it is sent (`tar`; `stream` always does).
    bwlimit: bytes a second of all workers together, by the time of the week. max_failed_share: if a
    larger share of the blobs cannot be read, the store is blamed and not the blobs; 1: never.
    outage_timeout: how long `--once` waits for a remote, catalog or store that is away; `--watch`
    waits forever.
    """

    workers: Count = Field(default=4, ge=1, le=256)
    batch_size: Count = Field(default=1000, ge=1, le=100_000)
    batch_bytes: Size = Field(default=256 * 1024**2, ge=1, le=MOST_BYTES)
    strategy: Literal["auto", "tar", "stream", "objects"] = "auto"
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
            pair = {"low": "backoff_base", "high": "backoff_cap"}
            raise PydanticCustomError("contradiction", "{low} is above {high}", pair)
        return self

    @property
    def most_blobs(self) -> int:
        """Returns the number of blobs that no batch exceeds."""
        return self.batch_size if "batch_size" in self.model_fields_set else _MOST_BLOBS

    @property
    def first_bytes(self) -> int:
        """Returns the bytes of content that the first batches may have."""
        return self.batch_bytes if "batch_bytes" in self.model_fields_set else _FIRST_BYTES

    def for_bucket(self) -> RunSettings:
        """Returns the settings for a bucket, where a batch is a pack: what was set holds, but for
        the strategy.
        """
        unset = {name: value for name, value in _PACKS.items() if name not in self.model_fields_set}
        return self.model_copy(update={**unset, "strategy": "objects"})


class DumpSettings(Section):
    """Dumps of the catalog. bin: the directory of pg_dump and pg_restore.

    max_age: a dump older than this is made anew even if nothing has changed (0: always). interval:
    how often `--watch` looks whether one is due. keep_*: see `dump.retention`. mode: whether a dump
    is whole, or may be an increment on the last one; full_every: the dumps of one chain.
    """

    bin: LocalPath | None = None
    mode: Literal["full", "series"] = "full"
    full_every: Count = Field(default=14, ge=1, le=1000)
    keep_last: Count = Field(default=3, ge=1, le=1000)
    keep_daily: Count = Field(default=7, ge=0, le=1000)
    keep_weekly: Count = Field(default=4, ge=0, le=1000)
    max_age: Seconds = Field(default=7 * 86400, ge=0, le=366 * 86400)
    interval: Seconds = Field(default=86400, ge=1, le=366 * 86400)


class SnapshotSettings(Section):
    """A set of files whose versions are kept: `[snapshots.NAME]`.

    block_size: of all its files; None: by their size. every: how often a run takes one; None: only
    by hand. full_every: how old a full version may get before the next one is full, too (0: each
    is). keep_*: see `snapshot.retention`.
    """

    paths: Paths
    exclude: Patterns = ()
    block_size: BlockSize | None = None
    every: Seconds | None = Field(default=None, ge=1, le=366 * 86400)
    full_every: Seconds = Field(default=30 * 86400, ge=0, le=3660 * 86400)
    keep_last: Count = Field(default=3, ge=1, le=1000)
    keep_daily: Count = Field(default=7, ge=0, le=1000)
    keep_weekly: Count = Field(default=4, ge=0, le=1000)


class PackSettings(Section):
    """Says how packs are sealed in a bucket. recipients: public keys of age; none: nothing is
    sealed. identity_file: the secret keys, which nothing needs but what reads. unsealed_until:
    where there are recipients, what is not sealed is read if it arrived before this day (UTC).
    """

    recipients: Recipients = ()
    identity_file: LocalPath | None = None
    unsealed_until: Day | None = None


class HostSettings(Section):
    """What belongs to this host and never to a target. key_file: see `config.host_key`."""

    key_file: LocalPath | None = None


class LogSettings(Section):
    """The JSONL file, and how often a `progress` event goes into it. level: the events of this
    level and above are written.
    """

    jsonl: LocalPath = Path("/var/log/ntt/backup-remote.jsonl")
    level: Literal["info", "warning", "error"] = "info"
    progress_interval: Seconds = Field(default=60, ge=0.1, le=86400)


class LockSettings(Section):
    """The coordinator's PID lock. `{target}` in file stands for the target's name."""

    file: LockPath = Path("/tmp/ntt-backup-{target}.lock")  # noqa: S108  the documented default


class ControlSettings(Section):
    """Says how a running daemon is asked and told. socket: a Unix socket that only its user can
    reach; `{target}` stands for the target's name. None: beside the lock file, with `.sock` for
    `.lock`.
    """

    socket: LockPath | None = None


class MetricsSettings(Section):
    """Figures for a monitoring system. listen: host:port of the page that Prometheus reads, None
    for none; public: it may be read from other machines. textfile: the file that node-exporter
    reads, None for none.
    """

    public: bool = Field(default=False, strict=True)
    listen: Listen | None = None
    textfile: LocalPath | None = None

    @property
    def wanted(self) -> bool:
        """Returns whether there are any to be made."""
        return self.listen is not None or self.textfile is not None

    @field_validator("listen")
    @classmethod
    def _for_whom(cls, listen: str | None, info: ValidationInfo) -> str | None:
        if listen is not None and not info.data.get("public") and not is_loopback(listen):
            reason = "127.0.0.1 or [::1] is needed, or metrics.public = true if others may read it"
            raise PydanticCustomError("public", "not on loopback", {"reason": reason})
        return listen


NoticeKind = Literal[
    "success",
    "failure",
    "first_failure",
    "recovery",
    "outage",
    "stall",
    "findings",
    "source_rot",
    "test",
]


class NotifySettings(Section):
    """Says whom a run tells of itself. command: a program and its arguments, which gets one JSON
    object on stdin. webhook_url: gets the same. on: the notices for these two. ping_url: a check of
    the kind of healthchecks. In both URLs `{target}` stands for the target's name. outage_after:
    how long a side is away before that is told. timeout: of the program, and of a request.
    """

    command: Command = ()
    on: Annotated[tuple[NoticeKind, ...], Needs(f"a list of {', '.join(get_args(NoticeKind))}")] = (
        # The end of each run is no news, only a change of how it ends.
        tuple(kind for kind in get_args(NoticeKind) if kind not in ("success", "failure"))
    )
    outage_after: Seconds = Field(default=900, ge=1, le=366 * 86400)
    timeout: Seconds = Field(default=30, ge=1, le=600)
    ping_url: WebUrl | None = Field(default=None, repr=False)
    webhook_url: WebUrl | None = Field(default=None, repr=False)

    @property
    def wanted(self) -> bool:
        """Returns whether anybody is to be told."""
        return bool(self.command or self.webhook_url or self.ping_url)
