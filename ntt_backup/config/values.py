"""The type of a setting reads its value, and says in the operator's words what it needs.

pydantic alone takes `true` for 1, reads "1,5GB" as one byte, and explains itself to programmers. So
numbers, sizes and durations are read by functions of our own, and pydantic's wording is never
shown. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?)b|b)?(?:/s)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-zA-Z]*)")
_UNITS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# No host or user name holds these, and a shell would act upon them. ssh refuses most of them too.
_NOT_IN_A_HOST = re.compile(r"[\s'\"`$;&<>|(){}]")


@dataclass(frozen=True, slots=True)
class Needs:
    """Says what a value of a type must be, to complete "... is needed"."""

    text: str


def needed(field: FieldInfo) -> str:
    """Returns what a right value for a field is, such as "a whole number from 1 to 256"."""
    parts = [*_parts(field.annotation), *field.metadata]
    texts = [part.text for part in parts if isinstance(part, Needs)]
    low = next((part.ge for part in parts if hasattr(part, "ge")), None)
    high = next((part.le for part in parts if hasattr(part, "le")), None)
    bounds = f" from {low} to {high}" if high is not None else f" of at least {low}"
    return texts[-1] + (bounds if low is not None else "")


def _parts(annotation: object) -> Iterator[object]:
    """Yields the parts of an annotation, also those inside `X | None` and Annotated."""
    if get_origin(annotation) is Literal:
        yield Needs("one of " + ", ".join(get_args(annotation)))
    elif annotation is bool:
        yield Needs("true or false")
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value


def parse_size(value: object) -> int:
    """Returns bytes, from a number or text such as 256MiB. Raises ValueError for others."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a size")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(Decimal(number) * base ** (" kmgt".index(prefix.lower()) if prefix else 0))


def parse_duration(value: object) -> float:
    """Returns seconds, from a number or text such as 90s or 4w. Raises ValueError for others."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("not a duration")
    return float(match[1]) * _UNITS[match[2].lower()]


def check_line(text: str) -> str:
    """Returns text. Raises ValueError for control characters, and for what is not Unicode."""
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("a control character")
    text.encode()
    return text


def check_host(text: str) -> str:
    """Returns a host as ssh takes it. Raises ValueError for what ssh or a shell could misread."""
    # Brackets around an IPv6 address are for URLs: ssh itself takes it without them.
    bare = text.removeprefix("ssh://")
    if bare == text:
        text = re.sub(r"(^|@)\[([0-9A-Fa-f:.]+(?:%\w+)?)\]$", r"\1\2", text)
    user, _, host = bare.rpartition("@")
    if not host or ":" in user or text.startswith("-") or host.startswith("-"):
        raise ValueError("not a host, a password, or an option of ssh")
    if _NOT_IN_A_HOST.search(text) or "/" in bare or re.fullmatch(r"[^:]+:\d*", text):
        raise ValueError("a path, a port, or worse")
    return text


def _local_path(value: object) -> object:
    # Path.expanduser raises RuntimeError for a user that does not exist.
    return os.path.expanduser(value) if isinstance(value, str) else value  # noqa: PTH111


def _absolute(path: Path) -> Path:
    check_line(str(path))
    if not path.is_absolute():
        raise ValueError("not absolute")
    return path


def _straight(path: Path) -> Path:
    if ".." in path.parts:
        raise ValueError("what .. means is decided by symlinks")
    return path


def _block_size(size: int) -> int:
    if size not in (1 << bits for bits in range(12, 25)):
        raise ValueError("not a size of blocks")
    return size


def _lock_path(path: Path) -> Path:
    if re.search(r"[{}]", str(path).replace("{target}", "")):
        raise ValueError("an unknown placeholder")
    return path


def check_remote_path(text: str) -> str:
    """Returns an absolute path in its shortest form. Raises ValueError for others, `/` and `..`."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not text.startswith("/") or not parts or ".." in parts:
        raise ValueError("not a directory of its own")
    return "/" + "/".join(parts)


def _words(value: object) -> object:
    return [one for one in re.split(r"[,\s]+", value) if one] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_number), Needs("a whole number")]
_A_DURATION = "a duration (7d, 12h, 15min, 30s) or a number of seconds"
Seconds = Annotated[float, BeforeValidator(parse_duration), Needs(_A_DURATION)]
WholeSeconds = Annotated[int, BeforeValidator(parse_duration), Needs(_A_DURATION)]
Share = Annotated[float, BeforeValidator(_number), Needs("a share")]
Size = Annotated[int, BeforeValidator(parse_size), Needs("a size (256MiB, 1.5GB, bytes)")]
Line = Annotated[str, AfterValidator(check_line)]
Url = Annotated[
    Line,
    Field(min_length=1),
    Needs("a PostgreSQL connection string such as postgresql://user@host/database"),
]
Host = Annotated[
    Line,
    AfterValidator(check_host),
    Needs("a host as ssh takes it (user@host, host or a Host alias; the port is remote.port)"),
]
RemotePath = Annotated[
    Line,
    AfterValidator(check_remote_path),
    Needs("an absolute path on the remote, below / and without .."),
]
LocalPath = Annotated[
    Path, BeforeValidator(_local_path), AfterValidator(_absolute), Needs("an absolute path")
]
Region = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$"), Needs("a region's name such as eu-central-1")
]
StorageClass = Annotated[
    str, Field(pattern=r"^[A-Z0-9_]{1,32}$"), Needs("a storage class such as STANDARD_IA")
]
Day = Annotated[date, Needs("a day such as 2026-12-31")]
Recipients = Annotated[
    tuple[Annotated[str, Field(pattern=r"^age1[a-z0-9]{58}$")], ...],
    BeforeValidator(_words),
    Field(max_length=64),
    Needs("a list of up to 64 public keys of age, age1... with 62 characters,"),
]
Paths = Annotated[
    tuple[Annotated[LocalPath, AfterValidator(_straight)], ...],
    Field(min_length=1),
    Needs("a list of absolute paths without .."),
]
Patterns = Annotated[
    tuple[Annotated[Line, Field(min_length=1)], ...], Needs("a list of patterns for paths")
]
BlockSize = Annotated[Size, AfterValidator(_block_size), Needs("a power of two from 4KiB to 16MiB")]
LockPath = Annotated[
    LocalPath,
    AfterValidator(_lock_path),
    Needs("an absolute path with no placeholder but {target}"),
]


def address_of(listen: str) -> tuple[str, int]:
    """Returns the IP address and the port of host:port. Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("no port")
    ipaddress.ip_address(bare)
    return bare, int(port)


def is_loopback(listen: str) -> bool:
    """Returns whether only this machine can reach host:port."""
    return ipaddress.ip_address(address_of(listen)[0]).is_loopback


def _listen(text: str) -> str:
    address_of(text)
    return text


def refused(reason: str) -> PydanticCustomError:
    """Returns an error that says what is needed instead of a value, and shows nothing of it."""
    return PydanticCustomError("explained", "{reason}", {"reason": reason})


def _web_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise refused("a host, and a port from 1 to 65535 or none, is needed") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise refused("a URL that begins with https:// or http:// and a host is needed")
    # urllib takes a user and a password for a part of the host's name, and asks the DNS for it.
    if "@" in parts.netloc:
        raise refused("a URL without user and password is needed: these are not sent")
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise refused("%20 for a space, and %XX for each byte that is not ASCII, is needed")
    if re.search(r"[{}]", text.replace("{target}", "")):
        raise refused("a URL with no placeholder but {target} is needed")
    return text


def _program(command: tuple[str, ...]) -> tuple[str, ...]:
    if command and not command[0].startswith("/"):
        raise ValueError("which program it is depends on PATH")
    return command


Listen = Annotated[
    Line,
    AfterValidator(_listen),
    Needs("an address and a port such as 127.0.0.1:9787 or [::1]:9787"),
]
WebUrl = Annotated[
    Line,
    AfterValidator(_web_url),
    Needs("a URL that begins with https:// or http://"),
]
Command = Annotated[
    tuple[Line, ...],
    AfterValidator(_program),
    Needs(
        'a list of a program, by its absolute path, and its arguments, as in ["/bin/tell", "-v"],'
    ),
]
