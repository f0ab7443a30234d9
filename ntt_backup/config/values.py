"""The type of a setting reads its value, and says in the operator's words which values are valid.

pydantic alone takes `true` for 1, reads "1,5GB" as one byte, and writes messages for programmers.
So numbers, sizes and durations are read by functions of our own, and messages of pydantic are never
shown. Sizes are in bytes, times in seconds.

A target's URL is `ssh://[user@]host[:port]/path`, `file:///path` or `s3://bucket/prefix`. A URL has
one meaning and one form: escapes are decoded once, written again only where they must be, and an
ambiguous URL is refused. A part that may be a password is never shown.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, get_args, get_origin
from urllib.parse import quote, unquote, urlsplit

from annotated_types import Predicate
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ntt_backup.blobdir.layout import Layout
from ntt_backup.model import Part

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?)b|b)?(?:/s)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-zA-Z]*)")
_UNITS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# Characters that no host or user name has, and that mean something to a shell.
_NOT_IN_A_HOST = re.compile(r"[\s'\"`$;&<>|(){}]")


@dataclass(frozen=True, slots=True)
class Needs:
    """Metadata of a type: a text that completes "... is needed"."""

    text: str


def needed(field: FieldInfo) -> str:
    """Returns which values are valid for a field, such as "a whole number from 1 to 256"."""
    parts = [*_parts(field.annotation), *field.metadata]
    texts = [part.text for part in parts if isinstance(part, Needs)]
    low = next((part.ge for part in parts if hasattr(part, "ge")), None)
    high = next((part.le for part in parts if hasattr(part, "le")), None)
    bounds = f" from {low} to {high}" if high is not None else f" of at least {low}"
    return texts[-1] + (bounds if low is not None else "")


def _parts(annotation: object) -> Iterator[object]:
    """Yields the parts of an annotation, also the parts of `X | None` and Annotated."""
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
    """Returns the bytes of a number or a text such as 256MiB. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a size")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(Decimal(number) * base ** (" kmgt".index(prefix.lower()) if prefix else 0))


def parse_duration(value: object) -> float:
    """Returns the seconds of a number or a text such as 90s or 4w. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("not a duration")
    return float(match[1]) * _UNITS[match[2].lower()]


def check_line(text: str) -> str:
    """Returns text. Raises ValueError for control characters and lone surrogates."""
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("a control character")
    text.encode()
    return text


def check_host(text: str) -> str:
    """Returns a host as ssh takes it. Raises ValueError if ssh or a shell could misread it."""
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


def _has_known_placeholders(value: object) -> bool:
    return not re.search(r"[{}]", str(value).replace("{target}", ""))


def check_remote_path(text: str) -> str:
    """Returns an absolute path in its shortest form. Raises ValueError, also for `/` and `..`."""
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
RoleName = Annotated[
    Line, Field(min_length=1, max_length=63), Needs("a name of at most 63 characters")
]
Query = Annotated[
    str,
    AfterValidator(lambda text: text.strip().removesuffix(";").strip()),
    Predicate(lambda text: bool(text) and "\0" not in text and len(text) < 20_000),
    Needs("one SELECT, in less than 20000 characters,"),
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
    Path,
    BeforeValidator(_local_path),
    Predicate(lambda path: path.is_absolute() and bool(check_line(str(path)))),
    Needs("an absolute path"),
]
LayoutText = Annotated[
    str,
    AfterValidator(lambda text: Layout(text).text),
    Needs(
        "a layout such as 0:2/2:4/0: or 0:2/2:4/4: (one or two directories of 2 to 4 digits, then"
        " the file)"
    ),
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
    # Symbolic links decide what .. means.
    tuple[Annotated[LocalPath, Predicate(lambda path: ".." not in path.parts)], ...],
    Field(min_length=1),
    Needs("a list of absolute paths without .."),
]
Patterns = Annotated[
    tuple[Annotated[Line, Field(min_length=1)], ...], Needs("a list of patterns for paths")
]
# So much of a pattern of pg_dump is understood here that one for our own tables can be refused.
_TABLES: Final = re.compile(r"(?:[a-z0-9_$*?]+\.)?[a-z0-9_$*?]+", re.ASCII)


def _spares_ours(pattern: str) -> bool:
    """Returns whether a pattern for tables may not match blobs, nor what is in our schema."""
    if _TABLES.fullmatch(pattern) is None:
        return False
    schema, _, table = pattern.rpartition(".")
    ours = fnmatchcase("ntt_backup", schema)
    return not ours and not (schema in ("", "public") and fnmatchcase("blobs", table))


TablePatterns = Annotated[
    tuple[Annotated[Line, Predicate(_spares_ours)], ...],
    Field(max_length=64),
    Needs(
        'a list of up to 64 patterns such as "logs.*" or "path_cache", in lowercase letters,'
        " digits, _ $ * and ?, that match neither blobs nor the schema ntt_backup,"
    ),
]
_PREFIXES: Final = re.compile(r"([0-9a-f]{1,2})(?:-([0-9a-f]{1,2}))?")


def parse_prefixes(value: object) -> Part:
    """Returns the part of a list or text such as `00-7f a3`. Raises ValueError."""
    given: dict[int, str] = {}
    words = _words(value)
    for word in words if isinstance(words, list | tuple) else ():
        match = _PREFIXES.fullmatch(word) if isinstance(word, str) else None
        if match is None:
            raise ValueError("not a prefix")
        first, last = match[1].ljust(2, "0"), (match[2] or match[1]).ljust(2, "f")
        for number in range(int(first, 16), int(last, 16) + 1):
            if number in given:
                raise refused(f"{given[number]} and {word} both have {number:02x}: give it once")
            given[number] = word
        if last < first:
            raise ValueError("a range that ends before it begins")
    if not given:
        raise ValueError("no prefix")
    return Part(tuple(sorted(given)))


Prefixes = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: str(parse_prefixes(value)).split()),
    Needs(
        "a list of prefixes of one or two lowercase hex digits, or ranges of them such as"
        ' "00-7f", the lower end first,'
    ),
]
BlockSize = Annotated[
    Size,
    Predicate({1 << bits for bits in range(12, 25)}.__contains__),
    Needs("a power of two from 4KiB to 16MiB"),
]
LockPath = Annotated[
    LocalPath,
    Predicate(_has_known_placeholders),
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
    """Returns whether only this machine can connect to host:port."""
    return ipaddress.ip_address(address_of(listen)[0]).is_loopback


def refused(reason: str) -> PydanticCustomError:
    """Returns the error for a value that is not shown. reason: which values are valid."""
    return PydanticCustomError("explained", "{reason}", {"reason": reason})


def conflict(text: str, *keys: str, hint: str) -> PydanticCustomError:
    """Returns the error for settings that contradict another. text: with {} for each key."""
    return PydanticCustomError("conflict", "conflict", {"text": text, "keys": keys, "hint": hint})


def _web_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise refused("a host, and a port from 1 to 65535 or none, is needed") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise refused("a URL that begins with https:// or http:// and a host is needed")
    # urllib takes user and password for a part of the host's name, and sends it to the DNS.
    if "@" in parts.netloc:
        raise refused("a URL without user and password is needed: these are not sent")
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise refused("%20 for a space, and %XX for each byte that is not ASCII, is needed")
    if not _has_known_placeholders(text):
        raise refused("a URL with no placeholder but {target} is needed")
    return text


Listen = Annotated[
    Line,
    Predicate(lambda text: bool(address_of(text))),
    Needs("an address and a port such as 127.0.0.1:9787 or [::1]:9787"),
]
WebUrl = Annotated[
    Line, AfterValidator(_web_url), Needs("a URL that begins with https:// or http://")
]
Command = Annotated[
    tuple[Line, ...],
    # With a name alone, PATH would decide which program runs.
    Predicate(lambda command: not command or command[0].startswith("/")),
    Needs(
        'a list of a program, by its absolute path, and its arguments, as in ["/bin/tell", "-v"],'
    ),
]


# --- the URL of a target --------------------------------------------------------------------------

Kind = Literal["ssh", "sftp", "file", "s3"]
FORMS: Final = "ssh:// or sftp://[user@]host[:port]/path, file:///path or s3://bucket/prefix"

_URL: Final = re.compile(r"(ssh|sftp|file|s3)://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_SERVER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^:\[\]]*)(?::([0-9]{0,9}))?")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_NOT_ESCAPED: Final = re.compile(r"[?#]|%(?![0-9A-Fa-f]{2})")
_ENDPOINT: Final = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:[0-9]{1,5})?(/[\w./~-]*)?")
# A key has at most 1024 bytes, and our keys continue below the prefix.
_PREFIX_BYTES: Final = 800
_AS_THEY_ARE: Final = "/+:@,=~!"


class TargetPlace(NamedTuple):
    """The place of a target; `str` gives its URL. host: the argument of ssh, with the user."""

    kind: Kind
    host: str = ""
    port: int | None = None
    path: str = ""
    bucket: str = ""
    prefix: str = ""

    def __str__(self) -> str:
        path = quote(self.path, _AS_THEY_ARE)
        if self.kind == "s3":
            return f"s3://{self.bucket}/{quote(self.prefix, _AS_THEY_ARE)}"
        if self.kind == "file" or self.host.startswith("ssh://"):
            return f"{self.host or 'file://'}{path}"
        user, at, host = self.host.rpartition("@")
        name = f"[{host.replace('%', '%25')}]" if ":" in host else quote(host, "+")
        port = f":{self.port}" if self.port is not None else ""
        return f"{self.kind}://{quote(user, '+')}{at}{name}{port}{path}"


def parse_target_url(text: str) -> TargetPlace:
    """Returns the place that a URL names.

    Raises:
        PydanticCustomError: The URL is not valid. The error shows nothing of the URL.
    """
    match = _URL.fullmatch(text)
    if match is None:
        raise refused(f"{FORMS} is needed")
    scheme, authority, path = match[1].lower(), match[2], match[3]
    user, at, server = authority.rpartition("@")
    ssh = scheme in ("ssh", "sftp")
    if at and (not ssh or ":" in user):
        raise refused("a URL without credentials is needed, for it is shown in logs")
    if _NOT_ESCAPED.search(path):
        raise refused("%3F, %23 and %25 are needed for ?, # and % in it")
    try:
        path = check_line(unquote(path, errors="strict"))
    except ValueError:
        raise refused("a path in UTF-8 without control characters is needed") from None
    if scheme == "file":
        if authority:
            raise refused("three slashes are needed: file:///mnt/usb")
        return TargetPlace("file", path=_url_path(path))
    name, port = match.groups() if (match := _SERVER.fullmatch(server)) else ("", None)
    if ssh:
        host = _host(user + at, name)
        if port and not 1 <= int(port) <= 65535:
            raise refused("a port from 1 to 65535 is needed")
        kind: Kind = "sftp" if scheme == "sftp" else "ssh"
        return TargetPlace(kind, host, int(port) if port else None, _url_path(path))
    if port is not None:
        raise refused(
            "s3://bucket/prefix, and remote.endpoint for a server and its port, is needed"
        )
    if not _BUCKET.fullmatch(name) or ".." in name:
        raise refused("the name of a bucket is needed: s3://bucket/prefix")
    prefix = "/".join(part for part in path.split("/") if part)
    if {".", ".."} & {*prefix.split("/")} or len(prefix.encode()) > _PREFIX_BYTES:
        raise refused(f"a prefix without . and .., of at most {_PREFIX_BYTES} bytes, is needed")
    return TargetPlace("s3", bucket=name, prefix=prefix)


def _host(user: str, name: str) -> str:
    # In brackets % begins a zone, and %25 is the only escape.
    bare = name[1:-1].replace("%25", "%") if name.startswith("[") else unquote(name)
    try:
        if user == "@" or (":" in bare) != name.startswith("["):
            raise ValueError("not one host")
        return check_host(check_line(unquote(user, errors="strict") + bare))
    except ValueError:
        raise refused("a host as ssh takes it is needed: ssh://[user@]host[:port]/path") from None


def _url_path(text: str) -> str:
    try:
        return check_remote_path(text)
    except ValueError:
        raise refused("an absolute path, below / and without .., is needed") from None


def _endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        raise ValueError("not a server, or credentials")
    return text.rstrip("/")


TargetUrl = Annotated[Line, AfterValidator(lambda text: str(parse_target_url(text))), Needs(FORMS)]
Endpoint = Annotated[
    Line,
    AfterValidator(_endpoint),
    Needs("a server such as https://s3.example.org:9000, without credentials,"),
]
