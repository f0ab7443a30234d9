"""The receiver is a program with options and a banner, which reports its defects.

It starts in two ways. Sent along with the connection, `serve` restricts nothing: a client that can
do that has a shell on this machine. Installed as a forced command (`ntt-backup-receive`), `main`
reads from its own command line what the client may do, and ignores what the client asked ssh for.

A session waits until its receiver is loaded, so what only some need is loaded where it is needed;
and what the banner does not need, behind it: the client answers the banner meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import sys
from collections.abc import Sequence

from ntt_backup import __version__
from ntt_backup.receiver import codec, hashing
from ntt_backup.receiver.terms import ALLOWED, REQUIRED, Terms
from ntt_backup.wire import framing, messages

_IDLE_SECONDS = 3600.0
_PIPE_BYTES = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ntt-backup-receive`, the command="..." of a line in authorized_keys."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="ntt-backup-receive",
        description="Receive blobs from ntt-backup-remote on standard input.",
    )
    parser.add_argument("--root", required=True, help="the only directory it works in")
    parser.add_argument(
        "--allow",
        type=_allowed,
        default=frozenset(("put", "list", "verify", "get")),
        help="what a client may do: " + ",".join(ALLOWED),
    )
    parser.add_argument(
        "--require",
        action="append",
        choices=REQUIRED,
        default=[],
        help="blake3: serve nobody where names cannot be checked; sha256: take no other names",
    )
    parser.add_argument("--idle-timeout", type=float, default=_IDLE_SECONDS, metavar="SECONDS")
    options = parser.parse_args(argv)
    require = frozenset(options.require)
    return serve(options.root, options.allow, options.idle_timeout, require)


def serve(
    root: str | None = None,
    allow: frozenset[str] = frozenset(ALLOWED),
    idle_timeout: float = _IDLE_SECONDS,
    require: frozenset[str] = frozenset(),
) -> int:
    """Greets, serves one session on standard input and output, and returns the exit status."""
    hashes = hashing.available()
    program = None
    if messages.BLAKE3 not in hashes:
        from ntt_backup.receiver import b3sum

        program = b3sum.find()
    terms = Terms(root, allow, idle_timeout, hashes, codec.available(), program, require)
    if terms.lacking:
        print(f"ntt-backup-receive: {terms.lacking}", file=sys.stderr, flush=True)
    os.umask(0o022)
    with contextlib.suppress(OSError):  # A larger pipe saves system calls; a socket keeps its size.
        fcntl.fcntl(0, getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_BYTES)
    os.write(1, _banner(terms))
    from ntt_backup.receiver.dispatcher import Receiver

    if not select.select([0], [], [], 0)[0]:
        from ntt_backup.receiver import write_session  # noqa: F401 - most sessions write
    for fd in (0, 1):
        os.set_blocking(fd, False)
    gc.freeze()  # What is loaded stays: no collection need look at it.
    receiver = Receiver(terms, 0, 1)
    try:
        return receiver.run()
    except Exception as problem:  # noqa: BLE001 - the client must hear of any defect
        import traceback

        traceback.print_exc()
        text = f"{type(problem).__name__}: {problem}"
        if isinstance(problem, OSError):
            from ntt_backup.blobdir.descriptors import error_line

            text = error_line(problem)
        os.set_blocking(1, True)
        with contextlib.suppress(OSError):
            os.write(1, messages.ERROR.frame("internal", text))
        return 1
    finally:
        for fd in (0, 1):
            os.set_blocking(fd, True)


def _banner(terms: Terms) -> bytes:
    python = ".".join(str(part) for part in sys.version_info[:3])
    codecs = {number: name for name, number in messages.CODECS.items()}
    facts = {
        "version": __version__,
        "python": python,
        "hash": ",".join(messages.NAMES_OF_HASHES[number] for number in terms.hashes),
        "check": terms.checked_with,
        "codec": ",".join(codecs[number] for number in terms.codecs),
        "allow": ",".join(word for word in ALLOWED if word in terms.allow),
    }
    said = " ".join(f"{name}={value}" for name, value in facts.items())
    line = f"NTT-RECEIVE {framing.PROTOCOL} {said}".encode("ascii")
    return b"\n%s sum=%s\n" % (line, framing.banner_sum(line).encode("ascii"))


def _allowed(text: str) -> frozenset[str]:
    import argparse

    asked = frozenset(text.split(","))
    if not asked <= frozenset(ALLOWED):
        raise argparse.ArgumentTypeError(f"any of {','.join(ALLOWED)}")
    return asked
