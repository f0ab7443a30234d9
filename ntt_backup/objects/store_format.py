"""`format.json`, which makes a prefix of a bucket a store: written once, and never again."""

from __future__ import annotations

import json
import re
import secrets
from hashlib import sha256
from typing import Final

from ntt_backup.errors import RemoteDenied, RemoteUnreachable
from ntt_backup.objects.bucket import Bucket, ObjectArchived, ObjectExists, ObjectMissing
from ntt_backup.objects.keys import FORMAT

VERSION: Final = 1
_ID_BYTES: Final = 16
_ID: Final = re.compile(r"[0-9a-f]{32}")
_LONGEST: Final = 4096


def read(bucket: Bucket) -> bytes | None:
    """Returns the id of the store; None where there is no store yet. Raises RemoteDenied where
    another program, or a newer version of ours, has written it.
    """
    try:
        text = bucket.get_range(FORMAT, 0, _LONGEST)
    except ObjectMissing:
        return None
    except ObjectArchived as error:
        raise RemoteDenied(
            "the store in the bucket cannot be read",
            detail=f"{FORMAT} lies in an archive class",
            hint="thaw it, and let the bucket's rules archive packs/ and blobs/ alone",
        ) from error
    try:
        found = json.loads(text)
        version, store = found["format"], found["store"]
    except (ValueError, KeyError, TypeError, RecursionError):
        version = store = None
    if version == VERSION and isinstance(store, str) and _ID.fullmatch(store):
        return bytes.fromhex(store)
    if isinstance(version, int) and version > VERSION:
        raise RemoteDenied(
            "the store in the bucket is of a newer version of this program",
            detail=f"{FORMAT} says {version}, and {VERSION} is known",
            hint="update this program",
        )
    raise RemoteDenied(
        "the bucket holds something else than a store",
        detail=f"{FORMAT} is no file of this program: {text[:80]!r}",
        hint="set remote.url to a prefix of its own",
    )


def gone(url: str, detail: str = "") -> RemoteUnreachable:
    """Returns the error for a bucket that should have a store and has none: an outage."""
    return RemoteUnreachable(
        "the bucket holds no store",
        detail=f"{url}/{FORMAT} is missing{detail}",
        hint="is remote.url right, and its prefix too? Where the bucket was really lost, see"
        " 'When the remote has lost its disk' in docs/first-aid.md",
    )


def make(bucket: Bucket) -> bytes:
    """Returns the id of the store; makes the store where there is none. Raises as `read` does."""
    if (found := read(bucket)) is not None:
        return found
    store = secrets.token_bytes(_ID_BYTES)
    text = json.dumps({"format": VERSION, "store": store.hex()}).encode() + b"\n"
    try:
        bucket.put(FORMAT, text, sha256(text).digest())
    except ObjectExists:
        store = b""
    # Of several that make it at once, what stands is true: a weak server lets the last one win.
    return read(bucket) or store
