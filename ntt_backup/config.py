"""Settings: read once, validated once, frozen.

Flags win over the environment, the environment over the TOML file, the file over the defaults. The
problem with layered settings is finding out where a wrong value came from; so each source remembers the
name the operator wrote (`--workers`, `NTT_WORKERS`, `run.workers in /etc/...`), and a value that fails
validation is reported in one line with that name, what it was, and what would be right.

pydantic-settings layers and validates; only the names of the environment variables (they do not follow
one scheme, scripts rely on them) and the origin of each value are kept here. Called by `cli` only;
workers get the finished object as JSON.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ntt_backup.errors import ConfigError

DEFAULT_FILE = Path("/etc/ntt/backup-remote.toml")
DEFAULT_TARGET = "remote"

ENVIRONMENT: Mapping[str, str] = {
    "NTT_DB_URL": "catalog.url",
    "NTT_SOURCE_ROOT": "source.root",
    "NTT_REMOTE_HOST": "remote.host",
    "NTT_REMOTE_PORT": "remote.port",
    "NTT_REMOTE_PATH": "remote.path",
    "NTT_SSH_KEY": "remote.identity_file",
    "NTT_SSH_CONFIG": "remote.ssh_config",
    "NTT_KNOWN_HOSTS": "remote.known_hosts",
    "NTT_WORKERS": "run.workers",
    "NTT_BATCH_SIZE": "run.batch_size",
    "NTT_BATCH_BYTES": "run.batch_bytes",
    "NTT_STRATEGY": "run.strategy",
    "NTT_LOG_JSON": "log.jsonl",
    "NTT_LOCK_FILE": "lock.file",
}

_TARGET_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")


def _one_line(text: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("must not contain control characters or newlines")
    return text


def _host(text: str) -> str:
    if not text or text.startswith("-") or any(char.isspace() for char in text):
        raise ValueError("a host as ssh takes it: user@host, host, or a Host alias")
    return text


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


def _expand(value: object) -> object:
    return os.path.expanduser(value) if isinstance(value, str) else value


def _remote_path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("an absolute path on the remote")
    return text.rstrip("/") or "/"


LocalPath = Annotated[Path, BeforeValidator(_expand), AfterValidator(_absolute)]
Line = Annotated[str, AfterValidator(_one_line)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CatalogSettings(_Section):
    """Where the table `blobs` lives. url is a libpq connection string or URI."""

    url: Line = "postgresql:///copyjob"


class SourceSettings(_Section):
    """The store. root is the directory that holds `aa/bb/<blobid>`."""

    root: LocalPath


class RemoteSettings(_Section):
    """The target. Times are in seconds. `by-hash/` and `pgdump/` lie below path."""

    host: Annotated[Line, AfterValidator(_host)]
    path: Annotated[Line, AfterValidator(_remote_path)]
    port: int | None = Field(default=None, ge=1, le=65535)
    identity_file: LocalPath | None = None
    ssh_config: LocalPath | None = None
    known_hosts: LocalPath | None = None
    connect_timeout: int = Field(default=15, ge=1, le=600)
    alive_interval: int = Field(default=15, ge=1, le=600)
    alive_count: int = Field(default=4, ge=1, le=100)


class RunSettings(_Section):
    """How the work is cut and how long we wait. Sizes are in bytes, times in seconds.

    window: batches a worker may have under way without an answer. attempts: how often a batch that the
    remote refuses is sent before it is split. verify_source: hash every blob before it is sent.
    outage_timeout: how long `--once` waits for a remote or catalog that is away; `--watch` waits forever.
    """

    workers: int = Field(default=4, ge=1, le=256)
    batch_size: int = Field(default=1000, ge=1, le=100_000)
    batch_bytes: ByteSize = Field(default=ByteSize(256 * 1024**2), ge=1)
    strategy: Literal["auto", "tar"] = "auto"
    bwlimit: ByteSize | None = Field(default=None, ge=1024)
    window: int = Field(default=4, ge=1, le=64)
    attempts: int = Field(default=3, ge=1, le=100)
    verify_source: bool = True
    poll_interval: float = Field(default=30, ge=0.1, le=86400)
    stall_timeout: float = Field(default=60, ge=1, le=3600)
    receipt_timeout: float = Field(default=600, ge=1, le=86400)
    outage_timeout: float = Field(default=3600, ge=0)
    backoff_base: float = Field(default=1, ge=0.01, le=60)
    backoff_cap: float = Field(default=60, ge=0.01, le=3600)


class LogSettings(_Section):
    """The JSONL file, and how often (seconds) a `progress` event goes into it."""

    jsonl: LocalPath = Path("/var/log/ntt/backup-remote.jsonl")
    progress_interval: float = Field(default=60, ge=0.1, le=86400)


class LockSettings(_Section):
    """The coordinator's PID lock. Other targets than `remote` get a file of their own by default."""

    file: LocalPath = Path("/tmp/ntt-backup-remote.lock")  # noqa: S108  the documented default


@dataclass
class _Layer:
    """One source of values: nested values for pydantic, and the operator's name for each key."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: object, origin: str) -> None:
        section, _, name = key.partition(".")
        self.values.setdefault(section, {})[name] = value
        self.origins[key] = origin


class _LayerSource(PydanticBaseSettingsSource):
    """Hands a layer to pydantic-settings, which merges layers key by key."""

    def __init__(self, settings_cls: type[BaseSettings], layer: _Layer) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._layer.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._layer.values


class CatalogConfig(BaseSettings):
    """What `init-db`, `status` and `requeue` need: they work where no store or remote is configured."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    target: str = DEFAULT_TARGET
    catalog: CatalogSettings = CatalogSettings()
    source: SourceSettings | None = None
    remote: RemoteSettings | None = None
    run: RunSettings = RunSettings()
    log: LogSettings = LogSettings()
    lock: LockSettings = LockSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class StoreConfig(CatalogConfig):
    """What `scan` needs: the catalog and the store."""

    source: SourceSettings


class Settings(StoreConfig):
    """Everything `run` and `check` need. Travels to the workers as JSON."""

    remote: RemoteSettings


ConfigT = TypeVar("ConfigT", bound=CatalogConfig)


def load(
    model: type[ConfigT],
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    target: str = DEFAULT_TARGET,
) -> ConfigT:
    """Read all layers and return validated settings.

    flags maps `section.key` to the value given on the command line (None: not given). file is
    `--config`; without it `NTT_CONFIG`, else /etc/ntt/backup-remote.toml where that exists.
    Raises ConfigError, one line for the first thing that is wrong.
    """
    if not _TARGET_NAME.fullmatch(target):
        raise ConfigError(
            f"target {target!r} is not a name",
            hint="a target is lowercase letters, digits and _, at most 31, starting with a letter",
        )
    layers = (_flag_layer(flags or {}), _environment_layer(environ), _file_layer(file, environ, target))

    class Layered(model):  # type: ignore[valid-type, misc]  # the base is the caller's choice
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_LayerSource(settings_cls, layer) for layer in layers)

    try:
        layered = Layered()
    except ValidationError as error:
        raise _explain(error, layers) from error
    settings = model.model_validate({**layered.model_dump(exclude_unset=True), "target": target})
    if target != DEFAULT_TARGET and "file" not in settings.lock.model_fields_set:
        lock = LockSettings(file=Path(f"/tmp/ntt-backup-{target}.lock"))  # noqa: S108
        settings = settings.model_copy(update={"lock": lock})
    return settings


def _flag_layer(flags: Mapping[str, object]) -> _Layer:
    layer = _Layer()
    for key, value in flags.items():
        if value is not None:
            layer.put(key, value, "--" + key.partition(".")[2].replace("_", "-"))
    return layer


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    layer = _Layer()
    for name, key in ENVIRONMENT.items():
        if name in environ:
            layer.put(key, environ[name], f"environment variable {name}")
    return layer


def _file_layer(file: Path | None, environ: Mapping[str, str], target: str) -> _Layer:
    if file is None and environ.get("NTT_CONFIG"):
        file = Path(environ["NTT_CONFIG"])
    if file is None:
        if not DEFAULT_FILE.exists():
            return _Layer()
        file = DEFAULT_FILE
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {file}",
            detail=error.strerror or str(error),
            hint="give another with --config or NTT_CONFIG, or mend its permissions",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML", detail=str(error)) from error
    tables = _with_target(tables, target, file)
    layer = _Layer()
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{section} in {file} stands outside a table",
                hint="settings are table.key, for example [run] workers = 4",
            )
        for name, value in table.items():
            layer.put(f"{section}.{name}", value, f"{section}.{name} in {file}")
        layer.values.setdefault(section, {})
    return layer


def _with_target(tables: dict[str, Any], target: str, file: Path) -> dict[str, Any]:
    """Lay `[targets.NAME]` over `[remote]`; every other target's table is left aside."""
    targets = tables.pop("targets", {})
    if not isinstance(targets, dict) or not all(isinstance(one, dict) for one in targets.values()):
        raise ConfigError(f"targets in {file} must hold tables", hint="[targets.NAME] host = ...")
    if target == DEFAULT_TARGET:
        return tables
    if target not in targets:
        known = ", ".join(sorted(targets)) or "none"
        raise ConfigError(
            f"target {target!r} is not in {file}",
            detail=f"targets there: {known}",
            hint=f"add a table [targets.{target}] with host and path",
        )
    remote = tables.get("remote", {})
    if not isinstance(remote, dict):
        raise ConfigError(f"remote in {file} must be a table")
    # host, port and path belong together: a target that names a host must not inherit another's path.
    shared = {key: value for key, value in remote.items() if key not in ("host", "port", "path")}
    return {**tables, "remote": {**shared, **targets[target]}}


def _explain(error: ValidationError, layers: tuple[_Layer, ...]) -> ConfigError:
    """One line for the first error: the operator's name for the key, the value, what would be right."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    origin = next((layer.origins[key] for layer in layers if key in layer.origins), key)
    if first["type"] == "missing":
        return _missing(key)
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"unknown setting {origin}", hint="see docs/operations.md for the list of settings"
        )
    message = first["msg"].removeprefix("Value error, ")
    shown = _masked(key, first.get("input"))
    return ConfigError(f"{origin} is {shown}", detail=message[:1].lower() + message[1:])


def _missing(key: str) -> ConfigError:
    needed = {"source": "source.root", "remote": "remote.host"}.get(key, key)
    variable = next((name for name, known in ENVIRONMENT.items() if known == needed), None)
    section, _, name = needed.partition(".")
    ways = [f"{name} = ... under [{section}] in the configuration file"]
    if variable:
        ways.insert(0, f"the environment variable {variable}")
    return ConfigError(f"{needed} is not set", hint="set it by " + ", or ".join(ways))


def _masked(key: str, value: object) -> str:
    return "(not shown)" if key == "catalog.url" else repr(value)
