"""A target's URL: `ssh://[user@]host[:port]/path`, `file:///path`, `s3://bucket/prefix`.

A URL has one meaning and one form: escapes are decoded once, written again only where they must be,
and what could be read in two ways is refused. What may be a password is never shown.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple
from urllib.parse import quote, unquote

from pydantic import AfterValidator

from ntt_backup.config.values import (
    Line,
    Needs,
    check_host,
    check_line,
    check_remote_path,
    refused,
)

Kind = Literal["ssh", "file", "s3"]
FORMS: Final = "ssh://[user@]host[:port]/path, file:///path or s3://bucket/prefix"

_URL: Final = re.compile(r"(ssh|file|s3)://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_SERVER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^:\[\]]*)(?::([0-9]{0,9}))?")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_NOT_ESCAPED: Final = re.compile(r"[?#]|%(?![0-9A-Fa-f]{2})")
_ENDPOINT: Final = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:[0-9]{1,5})?(/[\w./~-]*)?")
# A key has at most 1024 bytes, and ours go on below the prefix.
_PREFIX_BYTES: Final = 800
_AS_THEY_ARE: Final = "/+:@,=~!"


class Place(NamedTuple):
    """Says where a target is; printed, it is the URL. host is as ssh takes it, with the user."""

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
        return f"ssh://{quote(user, '+')}{at}{name}{port}{path}"


def parse(text: str) -> Place:
    """Returns the place that a URL names. Raises PydanticCustomError, which says what is needed and
    shows nothing of the URL.
    """
    match = _URL.fullmatch(text)
    if match is None:
        raise refused(f"{FORMS} is needed")
    scheme, authority, path = match[1].lower(), match[2], match[3]
    user, at, server = authority.rpartition("@")
    if at and (scheme != "ssh" or ":" in user):
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
        return Place("file", path=_path(path))
    name, port = match.groups() if (match := _SERVER.fullmatch(server)) else ("", None)
    if scheme == "ssh":
        return Place("ssh", _host(user + at, name), _port(port), _path(path))
    if port is not None:
        raise refused(
            "s3://bucket/prefix, and remote.endpoint for a server and its port, is needed"
        )
    return Place("s3", bucket=_bucket(name), prefix=_prefix(path))


def _host(user: str, name: str) -> str:
    # In brackets % begins a zone, and only %25 is an escape.
    bare = name[1:-1].replace("%25", "%") if name.startswith("[") else unquote(name)
    try:
        if user == "@" or (":" in bare) != name.startswith("["):
            raise ValueError("not one host")
        return check_host(check_line(unquote(user, errors="strict") + bare))
    except ValueError:
        raise refused("a host as ssh takes it is needed: ssh://[user@]host[:port]/path") from None


def _port(text: str | None) -> int | None:
    if text and not 1 <= int(text) <= 65535:
        raise refused("a port from 1 to 65535 is needed")
    return int(text) if text else None


def _path(text: str) -> str:
    try:
        return check_remote_path(text)
    except ValueError:
        raise refused("an absolute path, below / and without .., is needed") from None


def _bucket(name: str) -> str:
    if not _BUCKET.fullmatch(name) or ".." in name:
        raise refused("the name of a bucket is needed: s3://bucket/prefix")
    return name


def _prefix(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    prefix = "/".join(parts)
    if {".", ".."} & {*parts} or len(prefix.encode()) > _PREFIX_BYTES:
        raise refused(f"a prefix without . and .., of at most {_PREFIX_BYTES} bytes, is needed")
    return prefix


def _endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        raise ValueError("not a server, or credentials")
    return text.rstrip("/")


TargetUrl = Annotated[Line, AfterValidator(lambda text: str(parse(text))), Needs(FORMS)]
Endpoint = Annotated[
    Line,
    AfterValidator(_endpoint),
    Needs("a server such as https://s3.example.org:9000, without credentials,"),
]
