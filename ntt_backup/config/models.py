"""What can be set: one frozen pydantic model for each table of the file.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

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
from ntt_backup.config.values import (
    Count,
    Host,
    LocalPath,
    LockPath,
    Rate,
    Recipients,
    Region,
    RemotePath,
    Seconds,
    Share,
    Size,
    StorageClass,
    Url,
    WholeSeconds,
)
from ntt_backup.model import DEFAULT_TARGET

# More is a slip of the keyboard, and cannot be computed with as a float in the end.
MOST_BYTES = 10**15
# What a run to a bucket does where nothing else is set. With its headers and its table a pack fills
# ten parts of the usual size, and no eleventh. Who looks more often makes more, smaller packs.
_PACKS: Mapping[str, int] = {
    "batch_size": 32_768,
    "batch_bytes": 318 * 1024**2,
    "window": 2,
    "poll_interval": 600,
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CatalogSettings(_Section):
    """The database of the table `blobs`. url: a libpq connection string or URI, with password."""

    url: Url = Field(default="postgresql:///copyjob", repr=False)


class SourceSettings(_Section):
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


class RemoteSettings(_Section):
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
        """What the target is: an account on the remote, a local directory, or a bucket."""
        return self._place.kind

    @property
    def idle(self) -> list[str]:
        """The settings that were set, and mean nothing for this kind."""
        others = {name for kind, names in ONLY_FOR.items() if kind != self.kind for name in names}
        return sorted(others & self.model_fields_set)

    @property
    def where(self) -> str:
        """The place in events and messages: host:path, or the URL of what has no host."""
        return f"{self.host}:{self.path}" if self.kind == "ssh" else self.url

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self._place.bucket

    @property
    def prefix(self) -> str:
        """What begins all keys in the bucket, without slashes at its ends; may be empty."""
        return self._place.prefix


class RunSettings(_Section):
    """How the work is cut into batches, and how long a run waits.

    window: batches that a worker may have sent without an answer. attempts: how often a batch that
    the remote refuses is sent before it is split. codec: compression of `stream`; `auto` tries
    samples. verify_source: hash every blob before it is sent (`tar`; `stream` always does).
    bwlimit: bytes a second of all workers together. max_failed_share: if a larger share of the
    blobs cannot be read, the store is blamed and not the blobs; 1: never. outage_timeout: how long
    `--once` waits for a remote, catalog or store that is away; `--watch` waits forever.
    """

    workers: Count = Field(default=4, ge=1, le=256)
    batch_size: Count = Field(default=1000, ge=1, le=100_000)
    batch_bytes: Size = Field(default=256 * 1024**2, ge=1, le=MOST_BYTES)
    strategy: Literal["auto", "tar", "stream", "objects"] = "auto"
    codec: Literal["auto", "none", "zlib", "zstd-1", "zstd-3", "zstd-6", "zstd-9", "zstd-12"] = (
        "auto"
    )
    bwlimit: Rate | None = Field(default=None, ge=1024, le=MOST_BYTES)
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

    def for_bucket(self) -> RunSettings:
        """Returns the settings for a bucket, where a batch is a pack: what was set holds, but for
        the strategy.
        """
        unset = {name: value for name, value in _PACKS.items() if name not in self.model_fields_set}
        return self.model_copy(update={**unset, "strategy": "objects"})


class DumpSettings(_Section):
    """Dumps of the catalog. bin: the directory of pg_dump and pg_restore.

    max_age: a dump older than this is made anew even if nothing has changed (0: always). interval:
    how often `--watch` looks whether one is due. keep_*: see `dump.retention`.
    """

    bin: LocalPath | None = None
    keep_last: Count = Field(default=3, ge=1, le=1000)
    keep_daily: Count = Field(default=7, ge=0, le=1000)
    keep_weekly: Count = Field(default=4, ge=0, le=1000)
    max_age: Seconds = Field(default=7 * 86400, ge=0, le=366 * 86400)
    interval: Seconds = Field(default=86400, ge=1, le=366 * 86400)


class PackSettings(_Section):
    """How packs are sealed in a bucket. recipients: public keys of age; none: nothing is sealed.
    identity_file: the secret keys, which nothing needs but what reads.
    """

    recipients: Recipients = ()
    identity_file: LocalPath | None = None


class LogSettings(_Section):
    """The JSONL file, and how often a `progress` event goes into it."""

    jsonl: LocalPath = Path("/var/log/ntt/backup-remote.jsonl")
    progress_interval: Seconds = Field(default=60, ge=0.1, le=86400)


class LockSettings(_Section):
    """The coordinator's PID lock. `{target}` in file stands for the target's name."""

    file: LockPath = Path("/tmp/ntt-backup-{target}.lock")  # noqa: S108  the documented default


# Scripts rely on the names of the variables, which follow no scheme.
ENVIRONMENT: Mapping[str, str] = {
    "NTT_DB_URL": "catalog.url",
    "NTT_SOURCE_ROOT": "source.root",
    "NTT_READ_ORDER": "source.read_order",
    "NTT_REMOTE_URL": "remote.url",
    "NTT_REMOTE_HOST": "remote.host",
    "NTT_REMOTE_PORT": "remote.port",
    "NTT_REMOTE_PATH": "remote.path",
    "NTT_SSH_KEY": "remote.identity_file",
    "NTT_SSH_CONFIG": "remote.ssh_config",
    "NTT_KNOWN_HOSTS": "remote.known_hosts",
    "NTT_S3_ENDPOINT": "remote.endpoint",
    "NTT_WORKERS": "run.workers",
    "NTT_BATCH_SIZE": "run.batch_size",
    "NTT_BATCH_BYTES": "run.batch_bytes",
    "NTT_STRATEGY": "run.strategy",
    "NTT_CODEC": "run.codec",
    "NTT_PG_BIN": "dump.bin",
    "NTT_PACK_RECIPIENTS": "pack.recipients",
    "NTT_PACK_IDENTITY_FILE": "pack.identity_file",
    "NTT_LOG_JSON": "log.jsonl",
    "NTT_LOCK_FILE": "lock.file",
}


class CatalogConfig(BaseModel):
    """The settings of `init-db`, `status` and `requeue`, which need neither store nor remote."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    # Whether the strategy must be one that serves the target.
    sends: ClassVar[bool] = False

    target: str = DEFAULT_TARGET
    catalog: CatalogSettings = CatalogSettings()
    source: SourceSettings | None = None
    remote: RemoteSettings | None = None
    run: RunSettings = Field(default=RunSettings(), validate_default=True)
    dump: DumpSettings = DumpSettings()
    pack: PackSettings = PackSettings()
    log: LogSettings = LogSettings()
    lock: LockSettings = Field(default=LockSettings(), validate_default=True)

    @field_validator("run")
    @classmethod
    def _as_the_target_needs(cls, run: RunSettings, info: ValidationInfo) -> RunSettings:
        remote = info.data.get("remote")
        bucket = remote is not None and remote.kind == "s3"
        fitting = ("auto", "objects") if bucket else ("auto", "tar", "stream")
        if cls.sends and run.strategy not in fitting:
            raise PydanticCustomError("strategy", "it does not serve the target")
        return run.for_bucket() if bucket else run

    @field_validator("lock")
    @classmethod
    def _of_this_target(cls, lock: LockSettings, info: ValidationInfo) -> LockSettings:
        return LockSettings(file=Path(str(lock.file).replace("{target}", info.data["target"])))

    @property
    def recipients(self) -> tuple[str, ...]:
        """Whom what is sent is sealed for: nobody where the target is no bucket."""
        bucket = self.remote is not None and self.remote.kind == "s3"
        return self.pack.recipients if bucket else ()


class StoreConfig(CatalogConfig):
    """The settings of `scan` and `verify --local`: the catalog and the store."""

    source: SourceSettings


class RemoteConfig(CatalogConfig):
    """The settings of the commands that need the remote, and the store not or not always."""

    remote: RemoteSettings


class Settings(StoreConfig, RemoteConfig):
    """The settings of the commands that need the catalog, the store and the remote."""

    # pydantic would take the first base's field, which may be missing.
    remote: RemoteSettings


class SendConfig(Settings):
    """The settings of the commands that send: the strategy is one for the kind of target."""

    sends = True


TABLES: Mapping[str, Any] = {
    name: field.annotation for name, field in Settings.model_fields.items() if name != "target"
}
