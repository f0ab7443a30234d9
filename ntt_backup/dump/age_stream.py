"""Seals a dump by age while it is sent, and opens it while it is read.

The file is one of age's own: `age -d` opens it without this program. The library takes and gives
whole streams, and a dump comes in pieces; so the library has a thread of its own, behind a pipe.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

from ntt_backup.blobdir.staging import write_all
from ntt_backup.config.sealing import Keyring, require_sealing
from ntt_backup.pack.seal import age, known_identities

_PIECE: Final = 1 << 20
_FOR_OTHERS: Final = "No matching keys"


class Sealing:
    """Seals what is given for recipients. Raises ConfigError."""

    def __init__(self, recipients: Sequence[str]) -> None:
        known = require_sealing(recipients)
        source, into = os.pipe()
        self._into = into
        self._sealed = _Collected()
        self._done = _in_thread(_encrypt, source, self._sealed, known)

    def add(self, data: bytes) -> bytes:
        """Returns what was sealed meanwhile: not all of it, perhaps nothing."""
        write_all(self._into, memoryview(data))
        return self._sealed.take()

    def end(self) -> bytes:
        """Returns the rest."""
        os.close(self._into)
        self._into = -1
        self._done.result()
        return self._sealed.take()

    def close(self) -> None:
        """Ends the thread, whatever was sealed."""
        if self._into >= 0:
            os.close(self._into)
            self._into = -1


def opened(pieces: Iterator[bytes], keyring: Keyring) -> Generator[bytes, None, None]:
    """Yields what was sealed; less than all of it where it was altered or cut off. Raises what
    pieces raises, OtherIdentities, and ConfigError where no identity is given.
    """
    known = known_identities(keyring.identities)
    out, into = os.pipe()
    source = _Asked(pieces)
    done = _in_thread(_decrypt, source, into, known)
    try:
        while data := os.read(out, _PIECE):
            yield data
    finally:
        os.close(out)
    error = done.exception()
    if source.error is not None:
        raise source.error
    if isinstance(error, age().DecryptError) and _FOR_OTHERS in str(error):
        raise keyring.foreign()


class _Collected:
    """Takes what the library writes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        with self._lock:
            self._data += data
        return len(data)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        with self._lock:
            data, self._data = bytes(self._data), bytearray()
        return data


class _Asked:
    """Gives pieces as the library asks for them. error: what they raised."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""
        self.error: Exception | None = None

    def read(self, most: int) -> bytes:
        try:
            while not self._rest and (piece := next(self._pieces, None)) is not None:
                self._rest = piece
        except Exception as error:  # noqa: BLE001 - for the library it is the end; `opened` raises it
            self.error = error
        data, self._rest = self._rest[:most], self._rest[most:]
        return data


class _Into:
    """Writes into a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int:
        write_all(self._fd, memoryview(data))
        return len(data)

    def flush(self) -> None: ...


def _encrypt(source: int, sealed: _Collected, known: list[Any]) -> None:
    with open(source, "rb", buffering=0) as file:
        age().encrypt_io(file, sealed, known)


def _decrypt(source: _Asked, into: int, known: list[Any]) -> None:
    try:
        age().decrypt_io(source, _Into(into), known)
    finally:
        os.close(into)


def _in_thread(work: Any, *values: object) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            work(*values)
        except Exception as error:  # noqa: BLE001  whoever waits raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="age", daemon=True).start()
    return done
