"""The settings that commands need: the tables of `config.sections`, and how they depend on another.

A command that needs neither store nor remote has `CatalogConfig`; the others require more tables.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from blake3 import blake3
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ntt_backup.config.sections import (
    CatalogSettings,
    ChecksSettings,
    ControlSettings,
    DumpSettings,
    FilesSettings,
    HostSettings,
    LockSettings,
    LogSettings,
    MetricsSettings,
    NotifySettings,
    PackSettings,
    PolicySettings,
    RemoteSettings,
    RunSettings,
    Section,
    SnapshotSettings,
    SourceSettings,
)
from ntt_backup.config.values import conflict
from ntt_backup.model import ALL_BLOBS, DEFAULT_TARGET, Part

# The former name of NTT_BACKUP_LOG, which other programs use for logs of their own.
FORMER_LOG: Final = "NTT_LOG_JSON"
# Users' scripts rely on these names of variables, which follow no scheme.
ENVIRONMENT: Mapping[str, str] = {
    "NTT_DB_URL": "catalog.url",
    "NTT_SOURCE_ROOT": "source.root",
    "NTT_SOURCE_LAYOUT": "source.layout",
    "NTT_SOURCE_HASH": "source.hash",
    "NTT_READ_ORDER": "source.read_order",
    "NTT_GRACE": "source.grace",
    "NTT_SOURCE_PREFIXES": "source.prefixes",
    "NTT_REMOTE_URL": "remote.url",
    "NTT_REMOTE_HOST": "remote.host",
    "NTT_REMOTE_PORT": "remote.port",
    "NTT_REMOTE_PATH": "remote.path",
    "NTT_REMOTE_LAYOUT": "remote.layout",
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
    "NTT_BACKUP_LOG": "log.jsonl",
    "NTT_LOG_LEVEL": "log.level",
    "NTT_LOCK_FILE": "lock.file",
    "NTT_CONTROL_SOCKET": "control.socket",
    "NTT_METRICS_LISTEN": "metrics.listen",
    "NTT_METRICS_TEXTFILE": "metrics.textfile",
}


class CatalogConfig(BaseModel):
    """The settings of commands that need neither store nor remote, such as `status`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True
    )
    # Whether the strategy must fit the target.
    sends: ClassVar[bool] = False

    target: str = DEFAULT_TARGET
    # All media that take turns with this target, which is one of them; none where it stands alone.
    media: tuple[str, ...] = ()
    catalog: CatalogSettings = CatalogSettings()
    source: SourceSettings | None = None
    remote: RemoteSettings | None = None
    run: RunSettings = Field(default=RunSettings(), validate_default=True)
    dump: DumpSettings = DumpSettings()
    checks: ChecksSettings = ChecksSettings()
    policy: PolicySettings = PolicySettings()
    pack: PackSettings = PackSettings()
    host: HostSettings = HostSettings()
    log: LogSettings = LogSettings()
    lock: LockSettings = LockSettings()
    control: ControlSettings = ControlSettings()
    metrics: MetricsSettings = MetricsSettings()
    notify: NotifySettings = NotifySettings()
    snapshots: Mapping[str, SnapshotSettings] = Field(default_factory=dict)
    files: Mapping[str, FilesSettings] = Field(default_factory=dict, validate_default=True)

    # Of the whole file, in order; `config.examine` sets them.
    _targets: tuple[str, ...] = PrivateAttr(())

    @field_validator("run")
    @classmethod
    def _as_the_target_needs(cls, run: RunSettings, info: ValidationInfo) -> RunSettings:
        remote = info.data.get("remote")
        packs = remote is not None and remote.packs
        fitting = ("auto", "packs") if packs else ("auto", "tar", "stream")
        if cls.sends and run.strategy not in fitting:
            raise conflict(
                f"{{}} is not for this target ({info.data['target']})",
                "run.strategy",
                hint="leave it out: the layout packs takes packs, plain files stream or tar",
            )
        return run.for_packs() if packs else run

    @field_validator("files")
    @classmethod
    def _files_of_the_store(
        cls, files: Mapping[str, FilesSettings], info: ValidationInfo
    ) -> Mapping[str, FilesSettings]:
        catalog, source, checks = (info.data.get(name) for name in ("catalog", "source", "checks"))
        if files or (catalog and catalog.from_):
            text = "{} is for a store whose names are hashes"
            if checks and checks.scan.every is not None:
                hint = "leave it out: every of [catalog.from] and [files.NAME] says how often"
                raise conflict(text, "checks.scan", hint=hint)
            for name in {"layout", "prefixes"} & (source.model_fields_set if source else set()):
                hint = "leave it out: files that go by their paths lie anywhere"
                raise conflict(text, f"source.{name}", hint=hint)
        for name, one in files.items():
            if source and not all(path.is_relative_to(source.root) for path in one.paths):
                hint = "name directories below it, or let source.root be above them all"
                raise conflict(
                    "{} is not below {}", f"files.{name}.paths", "source.root", hint=hint
                )
        return files

    @model_validator(mode="after")
    def _of_this_target(self) -> Self:
        lock, socket = str(self.lock.file).replace("{target}", self.target), self.control.socket
        # Another suffix may be the target's name.
        beside = lock.removesuffix(".lock") + ".sock"
        named = str(socket or beside).replace("{target}", self.target)
        # The model is frozen for everybody else.
        self.__dict__["lock"] = LockSettings(file=Path(lock))
        self.__dict__["control"] = ControlSettings(socket=Path(named))
        return self

    @property
    def by_path(self) -> bool:
        """Whether the files of the store go by their paths, and not by their hashes."""
        return bool(self.origins)

    @property
    def origins(self) -> dict[str, float]:
        """What lists the files that go by their paths, with the seconds between two passes.

        The name of the query is empty.
        """
        found = {name: one.every for name, one in self.files.items()}
        return found if self.catalog.from_ is None else {"": self.catalog.from_.every, **found}

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of all targets of the settings, in order."""
        return self._targets or (self.target,)

    def among(self, targets: Sequence[str]) -> Self:
        """Returns these settings, which now know the names of all targets."""
        self._targets = tuple(targets)
        return self

    @property
    def due_checks(self) -> dict[str, float]:
        """The checks that a run with `--watch` does, with the seconds between them."""
        counts = {} if self.policy.copies is None else {"policy": self.policy.every}
        return {**self.checks.scheduled, **counts}

    @property
    def part(self) -> Part:
        """The part of the store, and of the catalog, that commands on this host are about."""
        return ALL_BLOBS if self.source is None else self.source.part

    @property
    def scheduled(self) -> dict[str, float]:
        """The snapshot sets that a run takes, with the seconds between versions."""
        sets = self.snapshots.items()
        return {name: one.every for name, one in sets if one.every is not None}

    @property
    def recipients(self) -> tuple[str, ...]:
        """The public keys that packs are sealed for; none where blobs lie as plain files."""
        packs = self.remote is not None and self.remote.packs
        return self.pack.recipients if packs else ()

    @property
    def owner(self) -> str:
        """The owner of sessions on the remote: 12 hex digits for machine, store, lock and target.

        A session removes the workspaces of dead sessions of its own owner only.
        """
        try:
            machine = Path("/etc/machine-id").read_text(encoding="ascii")
        except OSError:
            machine = ""
        root = self.source.root if self.source is not None else ""
        parts = (socket.gethostname(), machine.strip(), self.lock.file, root, self.target)
        return blake3("\0".join(map(str, parts)).encode()).hexdigest(length=6)


class StoreConfig(CatalogConfig):
    """The settings of `scan` and `verify --local`, which need the store."""

    source: SourceSettings


class RemoteConfig(CatalogConfig):
    """The settings of commands that need the remote."""

    remote: RemoteSettings


class Settings(StoreConfig, RemoteConfig):
    """The settings of commands that need the store and the remote."""

    # pydantic would take the field of the first base, which is optional.
    remote: RemoteSettings


class SendConfig(Settings):
    """The settings of commands that send."""

    sends = True


# The tables of tables whose names the operator chooses.
NAMED_TABLES: Final[Mapping[str, type[Section]]] = {
    "snapshots": SnapshotSettings,
    "files": FilesSettings,
}
TABLES: Mapping[str, Any] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if name not in ("target", "media", *NAMED_TABLES)
}
