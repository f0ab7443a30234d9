"""What can be set, and what a right value is: frozen pydantic models, one a table of the file.

pydantic alone is too kind: it takes `true` for 1, reads "1,5GB" as one byte, and explains itself to
programmers. So numbers and sizes are read by functions of ours, and every field can say in the
operator's words what it needs (`needed`); pydantic's own wording is never shown.

Sizes are in bytes, times in seconds. Values are frozen, and survive the way to another process as
JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

DEFAULT_TARGET = "remote"

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?)b|b)?(?:/s)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-zA-Z]*)")
_UNITS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# More is a slip of the keyboard, and in the end no longer a float.
_MOST_BYTES = 10**15
# What no host or user name holds, and a shell would act upon; ssh refuses most of it too.
_NOT_IN_A_HOST = re.compile(r"[\s'\"`$;&<>|(){}]")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a type of value must be, to complete "... is needed"."""

    text: str


def needed(field: FieldInfo) -> str:
    """What a right value for field is, such as "a whole number from 1 to 256"."""
    parts = [*_parts(field.annotation), *field.metadata]
    texts = [part.text for part in parts if isinstance(part, Needs)]
    low = next((part.ge for part in parts if hasattr(part, "ge")), None)
    high = next((part.le for part in parts if hasattr(part, "le")), None)
    bounds = f" from {low} to {high}" if high is not None else f" of at least {low}"
    return texts[-1] + (bounds if low is not None else "")


def _parts(annotation: object) -> Iterator[object]:
    """What stands in an annotation, through `X | None` and Annotated; a choice says itself."""
    if get_origin(annotation) is Literal:
        yield Needs("one of " + ", ".join(get_args(annotation)))
    elif annotation is bool:
        yield Needs("true or false")
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    return value


def parse_size(value: object) -> int:
    """Bytes, from a number or text such as 256MiB. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("no size")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(Decimal(number) * base ** (" kmgt".index(prefix.lower()) if prefix else 0))


def parse_duration(value: object) -> float:
    """Seconds, from a number or text such as 90s, 15min, 2h, 30d or 4w. Raises ValueError for
    anything else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("no duration")
    return float(match[1]) * _UNITS[match[2].lower()]


def _line(text: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("a control character")
    text.encode()
    return text


def _host(text: str) -> str:
    """Brackets around an IPv6 address are for URLs: ssh itself takes it without."""
    bare = text.removeprefix("ssh://")
    if bare == text:
        text = re.sub(r"(^|@)\[([0-9A-Fa-f:.]+(?:%\w+)?)\]$", r"\1\2", text)
    user, _, host = bare.rpartition("@")
    if not host or ":" in user or text.startswith("-") or host.startswith("-"):
        raise ValueError("no host, a password, or an option of ssh")
    if _NOT_IN_A_HOST.search(text) or "/" in bare or re.fullmatch(r"[^:]+:\d*", text):
        raise ValueError("a path, a port, or worse")
    return text


def _local_path(value: object) -> object:
    # Path.expanduser raises RuntimeError for a user that does not exist.
    return os.path.expanduser(value) if isinstance(value, str) else value  # noqa: PTH111


def _absolute(path: Path) -> Path:
    _line(str(path))
    if not path.is_absolute():
        raise ValueError("not absolute")
    return path


def _lock_path(path: Path) -> Path:
    if re.search(r"[{}]", str(path).replace("{target}", "")):
        raise ValueError("a placeholder that is none")
    return path


def _remote_path(text: str) -> str:
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not text.startswith("/") or not parts or ".." in parts:
        raise ValueError("no directory of its own")
    return "/" + "/".join(parts)


Count = Annotated[int, BeforeValidator(_number), Needs("a whole number")]
_A_DURATION = "a duration (7d, 12h, 15min, 30s) or a number of seconds"
Seconds = Annotated[float, BeforeValidator(parse_duration), Needs(_A_DURATION)]
WholeSeconds = Annotated[int, BeforeValidator(parse_duration), Needs(_A_DURATION)]
Share = Annotated[float, BeforeValidator(_number), Needs("a share")]
Size = Annotated[int, BeforeValidator(parse_size), Needs("a size (256MiB, 1.5GB, bytes)")]
Rate = Annotated[int, BeforeValidator(parse_size), Needs("a rate (12MB/s, bytes a second)")]
Line = Annotated[str, AfterValidator(_line)]
Url = Annotated[
    Line,
    Field(min_length=1),
    Needs("a PostgreSQL connection string such as postgresql://user@host/database"),
]
Host = Annotated[
    Line,
    AfterValidator(_host),
    Needs("a host as ssh takes it (user@host, host or a Host alias; the port is remote.port)"),
]
RemotePath = Annotated[
    Line,
    AfterValidator(_remote_path),
    Needs("an absolute path on the remote, below / and without .."),
]
LocalPath = Annotated[
    Path,
    BeforeValidator(_local_path),
    AfterValidator(_absolute),
    Needs("an absolute path"),
]
LockPath = Annotated[
    LocalPath,
    AfterValidator(_lock_path),
    Needs("an absolute path with no placeholder but {target}"),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CatalogSettings(_Section):
    """Where the table `blobs` lives. url is a libpq connection string or URI, password and all."""

    url: Url = Field(default="postgresql:///copyjob", repr=False)


class SourceSettings(_Section):
    """The store. root is the directory that holds `aa/bb/<blobid>`."""

    root: LocalPath


class RemoteSettings(_Section):
    """The target. Times are in seconds. `by-hash/` lies below path."""

    host: Host
    path: RemotePath
    port: Count | None = Field(default=None, ge=1, le=65535)
    identity_file: LocalPath | None = None
    ssh_config: LocalPath | None = None
    known_hosts: LocalPath | None = None
    connect_timeout: WholeSeconds = Field(default=15, ge=1, le=600)
    alive_interval: WholeSeconds = Field(default=15, ge=1, le=600)
    alive_count: Count = Field(default=4, ge=1, le=100)


class RunSettings(_Section):
    """How the work is cut and how long we wait. Sizes are in bytes, times in seconds.

    window: batches a worker may have under way without an answer. attempts: how often a batch that
    the remote refuses is sent before it is split. codec: what `stream` compresses with; `auto`
    tries samples. verify_source: hash every blob before it is sent (`tar`; `stream` always does).
    bwlimit: bytes a second, all workers together. max_failed_share: where more of what is tried
    cannot be read, the store is blamed and not the blobs; 1: never. outage_timeout: how long
    `--once` waits for a remote, catalog or store that is away; `--watch` waits forever.
    skip_pgdump: send no dump of the catalog.
    """

    workers: Count = Field(default=4, ge=1, le=256)
    batch_size: Count = Field(default=1000, ge=1, le=100_000)
    batch_bytes: Size = Field(default=256 * 1024**2, ge=1, le=_MOST_BYTES)
    strategy: Literal["auto", "tar", "stream"] = "auto"
    codec: Literal["auto", "none", "zlib", "zstd-1", "zstd-3"] = "auto"
    bwlimit: Rate | None = Field(default=None, ge=1024, le=_MOST_BYTES)
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


class DumpSettings(_Section):
    """Dumps of the catalog. bin: the directory of pg_dump and pg_restore.

    max_age: a dump older than this many seconds is made anew even where nobody else has changed
    anything (0: always). interval: how often `--watch` looks whether one is due. keep_*: see
    `dump.retention`.
    """

    bin: LocalPath | None = None
    keep_last: Count = Field(default=3, ge=1, le=1000)
    keep_daily: Count = Field(default=7, ge=0, le=1000)
    keep_weekly: Count = Field(default=4, ge=0, le=1000)
    max_age: Seconds = Field(default=7 * 86400, ge=0, le=366 * 86400)
    interval: Seconds = Field(default=86400, ge=1, le=366 * 86400)


class LogSettings(_Section):
    """The JSONL file, and how often (seconds) a `progress` event goes into it."""

    jsonl: LocalPath = Path("/var/log/ntt/backup-remote.jsonl")
    progress_interval: Seconds = Field(default=60, ge=0.1, le=86400)


class LockSettings(_Section):
    """The coordinator's PID lock. `{target}` in the name of file stands for the target's name."""

    file: LockPath = Path("/tmp/ntt-backup-{target}.lock")  # noqa: S108  the documented default


TABLES: Mapping[str, type[_Section]] = {
    "catalog": CatalogSettings,
    "source": SourceSettings,
    "remote": RemoteSettings,
    "run": RunSettings,
    "dump": DumpSettings,
    "log": LogSettings,
    "lock": LockSettings,
}


class LayerSource(PydanticBaseSettingsSource):
    """Hands nested values, as one layer of several, to pydantic-settings."""

    def __init__(self, settings_cls: type[BaseSettings], values: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._values = values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


# The layers that the settings being read are made of, the strongest first; see `config.load`.
LAYERS: ContextVar[tuple[dict[str, Any], ...]] = ContextVar("LAYERS", default=())


class CatalogConfig(BaseSettings):
    """What `init-db`, `status` and `requeue` need: they do without a store and a remote."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    target: str = DEFAULT_TARGET
    catalog: CatalogSettings = CatalogSettings()
    source: SourceSettings | None = None
    remote: RemoteSettings | None = None
    run: RunSettings = RunSettings()
    dump: DumpSettings = DumpSettings()
    log: LogSettings = LogSettings()
    lock: LockSettings = Field(default=LockSettings(), validate_default=True)

    @field_validator("lock")
    @classmethod
    def _of_this_target(cls, lock: LockSettings, info: ValidationInfo) -> LockSettings:
        return LockSettings(file=Path(str(lock.file).replace("{target}", info.data["target"])))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, *(LayerSource(settings_cls, values) for values in LAYERS.get())


class StoreConfig(CatalogConfig):
    """What `scan` needs: the catalog and the store."""

    source: SourceSettings


class RemoteConfig(CatalogConfig):
    """What `verify`, `restore`, `dump` and `bench link` need: the remote, and no store."""

    remote: RemoteSettings


class Settings(StoreConfig, RemoteConfig):
    """Everything `run` and `check` need. Travels to the process that dumps as JSON."""

    # Of a field that both bases have, pydantic takes the first one's: there it may be missing.
    remote: RemoteSettings
