"""What our way to a file costs beside a plain socket: 20 MB up and down, and small questions.

`direct` are two processes of plain Python and a socket, which neither hash nor store. `a receiver`
is the file store of a target `file://`: a child of this process, which makes the file durable and
says its SHA-256, that is compared. `through sshd` is the same behind ssh. A question of ours asks
for one byte of the file. In turns; start it as `python -m tests.bench.scenarios`.
"""

from __future__ import annotations

import argparse
import random
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Process
from pathlib import Path
from statistics import median
from typing import Final

from ntt_backup.config import RemoteConfig
from ntt_backup.filestore.contract import Range
from ntt_backup.filestore.open import open_store
from ntt_backup.snapshot.names import SNAPSHOTS
from tests.bench.contender import Failed
from tests.bench.lab import ALIAS, lab
from tests.bench.slots import slot

_BYTES: Final = 20_000_000
_QUESTIONS: Final = 1000
_FILE: Final = "bench/20260102T030405Z-01234567/map"
_CHUNK: Final = 1 << 16

Seconds = tuple[float, float, float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.scenarios", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("/dev/shm"), metavar="DIR")
    given = parser.parse_args()
    content = random.Random(2).randbytes(_BYTES)
    with slot(given.disk) as workspace, lab("loopback", workspace.home) as link:
        local = link.destination("local")
        there = {
            "host": ALIAS,
            "path": str(link.destination("there")),
            "ssh_config": str(link.ssh_config),
            "known_hosts": str(link.known_hosts),
        }
        ways: dict[str, Callable[[], Seconds]] = {
            "direct": partial(_direct, content),
            "a receiver": partial(_ours, {"url": f"file://{local}"}, content),
            "through sshd": partial(_ours, there, content),
        }
        seen: dict[str, list[Seconds]] = {}
        for _ in range(given.rounds):
            for name, call in ways.items():
                seen.setdefault(name, []).append(call())
    print(f"{'':14}{'up ms':>8}{'down ms':>9}{'MB/s':>8}{'questions/s':>13}")
    for name, samples in seen.items():
        up, down, asked = (median(column) for column in zip(*samples, strict=True))
        rate = 2 * _BYTES / 1e6 / (up + down)
        print(f"{name:14}{up * 1e3:8.0f}{down * 1e3:9.0f}{rate:8.0f}{_QUESTIONS / asked:13,.0f}")


def _ours(remote: dict[str, str], content: bytes) -> Seconds:
    store = open_store(RemoteConfig.model_validate({"remote": remote}), SNAPSHOTS)
    try:
        began = time.perf_counter()
        file = store.write(_FILE)
        for start in range(0, len(content), _CHUNK):
            file.add(content[start : start + _CHUNK])
        file.finish()
        file.publish()
        stored = time.perf_counter()
        if b"".join(store.read(_ranges())) != content:
            raise Failed("it comes back otherwise")
        read = time.perf_counter()
        for _ in range(_QUESTIONS):
            if b"".join(store.read([Range(_FILE, 0, 1)])) != content[:1]:
                raise Failed("a byte comes back otherwise")
        asked = time.perf_counter()
        store.remove([_FILE])
    finally:
        store.close()
    return stored - began, read - stored, asked - read


def _ranges() -> list[Range]:
    most = 1 << 20
    return [Range(_FILE, at, min(most, _BYTES - at)) for at in range(0, _BYTES, most)]


def _direct(content: bytes) -> Seconds:
    ours, theirs = socket.socketpair()
    peer = Process(target=_answer, args=(theirs,), daemon=True)
    peer.start()
    began = time.perf_counter()
    ours.sendall(content)
    ours.recv(1)
    stored = time.perf_counter()
    if _received(ours) != content:
        raise Failed("it comes back otherwise")
    read = time.perf_counter()
    for _ in range(_QUESTIONS):
        ours.sendall(b"?")
        ours.recv(1)
    asked = time.perf_counter()
    ours.close()
    peer.join()
    return stored - began, read - stored, asked - read


def _answer(peer: socket.socket) -> None:
    content = _received(peer)
    peer.sendall(b"!")
    peer.sendall(content)
    for _ in range(_QUESTIONS):
        peer.recv(1)
        peer.sendall(b"!")


def _received(peer: socket.socket) -> bytearray:
    content = bytearray()
    while len(content) < _BYTES:
        content += peer.recv(_CHUNK)
    return content


if __name__ == "__main__":
    main()
