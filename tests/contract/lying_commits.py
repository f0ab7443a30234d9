"""A remote answers commits with what a test wants it to say."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.contract.harness import Machine

READY = {"free_bytes": 1, "total_bytes": 2, "clock_us": 0, "system": "Linux", "placed": 1}
LYING_RECEIVER = """
import os, sys
from ntt_backup.wire.framing import *
from ntt_backup.wire.messages import *
from tests.helpers.waiting import PATIENCE
inbox = Inbox(to_receiver(WRITING))
os.write(1, b"\\nNTT-RECEIVE 1 version=0 python=3.11.0 hash=sha256 codec=zlib allow=put\\n")
def say(frame): os.write(1, frame)
while True:
    count = os.readv(0, [inbox.space()])
    if not count: break
    inbox.filled(count)
    while (found := inbox.next()) is not None:
        kind, payload = found
        if kind == HELLO: say(READY.frame({ready!r}))
        if kind == COMMIT:
            number = COMMIT.read(payload)
            {answer}
{other}
"""


def lying_receiver(
    machine: Machine, answer: str, ready: dict[str, int | str] | None = None, other: str = ""
) -> Machine:
    """A remote that answers a COMMIT with Python of the test's own; other is what it does with any
    frame.
    """
    program = machine.tools / "lying.py"
    text = LYING_RECEIVER.replace("{ready!r}", repr(ready or READY))
    program.write_text(text.replace("{answer}", answer).replace("{other}", other))
    project = Path(__file__).resolve().parents[2]
    machine.tool("python3", f"PYTHONPATH={project} exec {sys.executable} {program}")
    return machine


def receipt(
    stored: int, *exceptions: tuple[int, int, str], hashed: int = 0, number: str = ""
) -> str:
    listed = ", ".join(f"Exceptional{exception!r}" for exception in exceptions)
    number = number or "number"
    return f"say(RECEIPT.frame({number}, 0, {hashed}, {stored}, [{listed}]))"
