"""`format.json` makes the root of a target a store of packs: written once, and never again."""

from __future__ import annotations

import secrets

from ntt_backup.blobdir.layout import (
    MARKER_VERSION,
    MAX_MARKER,
    UNKNOWN_IDENTITY,
    Marker,
    marker_text,
    read_marker,
)
from ntt_backup.errors import NameTaken, RemoteDenied, RemoteUnreachable
from ntt_backup.filestore.contract import FileArchived, FileMissing, PackTarget, SharedStore
from ntt_backup.name_hash import HashOfNames, hash_of_names
from ntt_backup.wire.framing import FORMAT, IDENTITY_BYTES


def read(store: SharedStore) -> bytes | None:
    """Returns the id of the store; None where there is no store yet. Raises as `find` does."""
    found = find(store)
    return None if found is None else bytes.fromhex(found.identity)


def names_in(store: SharedStore) -> HashOfNames:
    """Returns the hash of names in the store. Raises as `find` does."""
    found = find(store)
    return "blake3" if found is None else hash_of_names(found.hash)


def find(store: SharedStore) -> Marker | None:
    """Returns the marker of the store; None where there is no store yet.

    Raises:
        RemoteDenied: Another program, or a newer version of ours, has written the marker.
    """
    try:
        text = store.fetch(FORMAT, 0, MAX_MARKER)
    except FileMissing:
        return None
    except FileArchived as error:
        raise RemoteDenied(
            "the store in the bucket cannot be read",
            detail=f"{FORMAT} lies in an archive class",
            hint="thaw it, and let the bucket's rules archive packs/ and blobs/ alone",
        ) from error
    try:
        found = read_marker(text)
    except ValueError:
        raise RemoteDenied(
            "the target holds something else than a store",
            detail=f"{FORMAT} is no file of this program: {text[:80]!r}",
            hint="set remote.url to a prefix, or a directory, of its own",
        ) from None
    if found.identity == UNKNOWN_IDENTITY:
        raise RemoteDenied(
            "the store on the target is of a newer version of this program",
            detail=f"{FORMAT} says {found.version}, and {MARKER_VERSION} is known",
            hint="update this program",
        )
    return found


def gone(path: str, detail: str = "") -> RemoteUnreachable:
    """Returns the error for a target that should have a store and has none: an outage.

    path: the path or URL of the marker. detail: the rest of the detail.
    """
    return RemoteUnreachable(
        "the target holds no store of packs",
        detail=f"{path} is missing{detail}",
        hint="is remote.url right, and its disk mounted? Where the target was really lost, see"
        " 'When the remote has lost its disk' in docs/first-aid.md",
    )


def make(target: PackTarget, names: HashOfNames = "blake3") -> bytes:
    """Returns the id of the store; makes the store where there is none. Raises as `read` does.

    names: The hash of names in a new store.
    """
    if (found := read(target)) is not None:
        return found
    identity = secrets.token_bytes(IDENTITY_BYTES)
    file = target.write(FORMAT)
    file.add(marker_text(identity.hex(), names))
    try:
        file.finish()
        file.publish()
    except NameTaken:
        identity = b""
    finally:
        file.discard()
    # Of several that make it at once, what stands is true: a weak server lets the last one win.
    return read(target) or identity
