"""What a link of the lab really gives, measured before each case: a claim is no measurement.

It is shown with the figures, so that a reader can see what they were taken on.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass

from tests.bench.lab import SHAPES, Lab, LabError

_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a link really gives: MB/s of one stream and of four together, and the round trip."""

    one_mb_s: float
    four_mb_s: float
    round_trip_ms: float


def measure(lab: Lab) -> Measured:
    """Find out what it really gives: about three seconds, more where it is slow."""
    shape = SHAPES[lab.link]
    size = int(1.5 * (shape.bytes_a_second if shape else 400e6))
    trip = _round_trip_ms(lab)
    one, four = (_throughput(lab, streams, size, trip / 1000) for streams in (1, 4))
    return Measured(one / 1e6, four / 1e6, trip)


def _throughput(lab: Lab, streams: int, size: int, trip: float) -> float:
    """Bytes a second of random data that `cat` takes on the remote.

    Without the handshake, and without the round trip (seconds) of the last byte.
    """
    block = random.randbytes(1 << 20)
    count = max(1, size // streams // len(block))
    ready, start = threading.Barrier(streams + 1), threading.Barrier(streams + 1)

    def send() -> None:
        argv = lab.argv("echo; cat >/dev/null; echo", "-c", "aes128-gcm@openssh.com")
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ssh:
            assert ssh.stdin is not None
            assert ssh.stdout is not None
            ssh.stdout.readline()
            ready.wait(_WAIT_SECONDS)
            start.wait(_WAIT_SECONDS)
            for _ in range(count):
                ssh.stdin.write(block)
            ssh.stdin.close()
            ssh.stdout.readline()

    threads = [threading.Thread(target=send, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        ready.wait(_WAIT_SECONDS)
    except threading.BrokenBarrierError:
        raise LabError(f"no ssh session over {lab.link} in {_WAIT_SECONDS:.0f} s") from None
    started = time.perf_counter()
    start.wait(_WAIT_SECONDS)
    for thread in threads:
        thread.join()
    return streams * count * len(block) / (time.perf_counter() - started - trip)


def _round_trip_ms(lab: Lab, count: int = 21) -> float:
    """The median time of one byte to the remote's `cat` and back."""
    times = []
    argv = lab.argv("exec cat")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as ssh:
        assert ssh.stdin is not None
        assert ssh.stdout is not None
        for _ in range(count + 1):
            started = time.perf_counter()
            ssh.stdin.write(b"-")
            ssh.stdout.read(1)
            times.append((time.perf_counter() - started) * 1000)
        ssh.stdin.close()
    return statistics.median(times[1:])  # the first is the handshake
