"""The memory of a command and of all that it starts, by the processes' proportional sizes (PSS): a
page that several of them share counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.processes import descendants

_SAMPLE_SECONDS = 0.05


@dataclass
class Memory:
    """The largest sum that was seen, in bytes, and the processes that it is made of, the oldest
    first.
    """

    peak: int = 0
    parts: list[int] = field(default_factory=list)

    @contextmanager
    def watching(self, pid: int) -> Iterator[None]:
        """Looks at a process and its descendants again and again."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_SAMPLE_SECONDS):
                parts = [_proportional(one) for one in sorted([pid, *descendants(pid)])]
                if sum(parts) > self.peak:
                    self.peak, self.parts = sum(parts), parts

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def __str__(self) -> str:
        of = " + ".join(f"{part >> 20}" for part in self.parts if part)
        return f"{self.peak / 2**20:.0f} MiB at most ({of})"


def _proportional(pid: int) -> int:
    """Returns the proportional size of a process; 0 of one that has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return 0
