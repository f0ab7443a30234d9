"""These tables have all that can be set, and say what each command needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ntt_backup.config.sections import (
    CatalogSettings,
    ControlSettings,
    DumpSettings,
    HostSettings,
    LockSettings,
    LogSettings,
    MetricsSettings,
    NotifySettings,
    PackSettings,
    RemoteSettings,
    RunSettings,
    SnapshotSettings,
    SourceSettings,
)
from ntt_backup.model import DEFAULT_TARGET

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
    "NTT_PACK_UNSEALED_UNTIL": "pack.unsealed_until",
    "NTT_HOST_KEY": "host.key_file",
    "NTT_LOG_JSON": "log.jsonl",
    "NTT_LOG_LEVEL": "log.level",
    "NTT_LOCK_FILE": "lock.file",
    "NTT_CONTROL_SOCKET": "control.socket",
    "NTT_METRICS_LISTEN": "metrics.listen",
    "NTT_METRICS_TEXTFILE": "metrics.textfile",
}


class CatalogConfig(BaseModel):
    """The settings of `init-db`, `status` and `requeue`, which need neither store nor remote."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True
    )
    # Whether the strategy must be one that serves the target.
    sends: ClassVar[bool] = False

    target: str = DEFAULT_TARGET
    catalog: CatalogSettings = CatalogSettings()
    source: SourceSettings | None = None
    remote: RemoteSettings | None = None
    run: RunSettings = Field(default=RunSettings(), validate_default=True)
    dump: DumpSettings = DumpSettings()
    pack: PackSettings = PackSettings()
    host: HostSettings = HostSettings()
    log: LogSettings = LogSettings()
    lock: LockSettings = Field(default=LockSettings(), validate_default=True)
    control: ControlSettings = Field(default=ControlSettings(), validate_default=True)
    metrics: MetricsSettings = MetricsSettings()
    notify: NotifySettings = NotifySettings()
    snapshots: Mapping[str, SnapshotSettings] = Field(default_factory=dict)

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

    @field_validator("control")
    @classmethod
    def _beside_the_lock(cls, control: ControlSettings, info: ValidationInfo) -> ControlSettings:
        if control.socket is not None:
            name = str(control.socket).replace("{target}", info.data["target"])
            return ControlSettings(socket=Path(name))
        if (lock := info.data.get("lock")) is None:
            return control
        # Another suffix may be the target's name.
        return ControlSettings(socket=Path(str(lock.file).removesuffix(".lock") + ".sock"))

    @property
    def scheduled(self) -> dict[str, float]:
        """Returns the snapshot sets that a run takes, with the seconds from one version to the
        next.
        """
        sets = self.snapshots.items()
        return {name: one.every for name, one in sets if one.every is not None}

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
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if name not in ("target", "snapshots")
}
