"""A way to a remote that alters single bits of what it carries: `python flip.py BOOK COMMAND...`.

It stands between the sender and the command (a shell, or ssh), where ssh's integrity does not
reach. Each time it is started it takes the next line of BOOK, a direction, a byte and a bit:
`up 1000 3` alters bit 3 of byte 1000 of what is sent. Bytes are counted from the end of the
receiver's program (up) or from its banner's (down). When the book is used up everything passes.

The command runs in a session of its own, as a remote does: who kills us does not reach it, and it
learns of our end by that of its input.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

PIECE = 1 << 16


def take(book: Path) -> tuple[str, int, int]:
    with book.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first, *rest = file.read().splitlines() or [""]
        file.seek(0)
        file.truncate()
        file.write("".join(f"{line}\n" for line in rest))
    if not first:
        return "", 0, 0
    direction, byte, bit = first.split()
    return direction, int(byte), int(bit)


def carry(source: IO[bytes], sink: IO[bytes], skip: int, begin: bytes, byte: int, bit: int) -> None:
    """All of source, altered at a byte that is counted from after skip bytes, and from after the
    end of the line that starts with begin, if there is one to wait for. byte < 0: not altered.
    """
    seen, counting, at = b"", not begin, 0
    while piece := os.read(source.fileno(), PIECE):
        out = bytearray(piece)
        offset = 0
        if not counting:
            seen += piece
            found = seen.find(begin)
            end = seen.find(b"\n", found) + 1 if found >= 0 else 0
            if end:
                counting, offset = True, len(piece) - (len(seen) - end)
        if counting:
            target = skip + byte - at + offset
            if byte >= 0 and offset <= target < len(out):
                out[target] ^= 1 << bit
            at += len(out) - offset
        try:
            sink.write(out)
            sink.flush()
        except BrokenPipeError:
            return


def main() -> int:
    from ntt_backup.client.bootstrap import bundle

    book, command = Path(sys.argv[1]), sys.argv[2:]
    if not any("NTT-LOADER" in word for word in command):
        os.execvp(command[0], command)
    direction, byte, bit = take(book)
    program = len(bundle()[1])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        sink, source = child.stdin, child.stdout
        assert sink is not None
        assert source is not None
        up = byte if direction == "up" else -1
        down = byte if direction == "down" else -1

        def send() -> None:
            carry(sys.stdin.buffer, sink, program, b"", up, bit)
            sink.close()

        threading.Thread(target=send, daemon=True).start()
        carry(source, sys.stdout.buffer, 0, b"NTT-RECEIVE", down, bit)
        return child.wait()


if __name__ == "__main__":
    sys.exit(main())
