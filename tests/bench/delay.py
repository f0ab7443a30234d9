"""A TCP proxy that delays: every byte reaches the other side so many milliseconds after it came.

netem would be the obvious way, but many kernels are built without it. toxiproxy does the same and
carries as much; but it knows whole milliseconds only, and may hold 32 MB a connection, seconds of a
slow link, where this holds what sockets' buffers would. It delays and nothing else: how much passes
is the affair of the link behind it, and a megabyte may be under way, several times the
bandwidth-delay product.

A new connection pays a round trip for the handshake, as on a real link. TCP's slow start is
missing, for the client's TCP ends here. That favours whoever opens many connections.

Started by `lab` as a process of its own: `python -m tests.bench.delay --help`.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections import deque
from contextlib import suppress

_CHUNK = 256 * 1024
_UNDER_WAY = 1024 * 1024
_SOCKET_BUFFER = 512 * 1024


class _Pipe:
    """One direction of one connection: `read` and `write` run in a thread each."""

    def __init__(self, delay_s: float, opened: float) -> None:
        self._delay_s = delay_s
        self._opened = opened
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._broken = False

    def read(self, source: socket.socket) -> None:
        """Take what comes until it ends; b"" is the end."""
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            due = max(time.monotonic(), self._opened) + self._delay_s
            with self._changed:
                self._changed.wait_for(lambda: self._held < _UNDER_WAY or self._broken)
                if self._broken:
                    return
                self._chunks.append((due, data))
                self._held += len(data)
                self._changed.notify_all()

    def write(self, sink: socket.socket) -> None:
        """Hand on what is due, and the end as an end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks)
                due, data = self._chunks[0]
            if (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            try:
                if data:
                    sink.sendall(data)
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                data = b""
            with self._changed:
                self._chunks.popleft()
                self._held -= len(data)
                self._broken = not data
                self._changed.notify_all()
            if not data:
                return


def serve(listener: socket.socket, target: tuple[str, int], delay_s: float) -> None:
    """Take connections forever, and carry each to target; delay_s is that of one direction."""
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_carry, args=(client, target, delay_s), daemon=True).start()


def _carry(client: socket.socket, target: tuple[str, int], delay_s: float) -> None:
    # The client's kernel thinks it is connected already. In truth it would be so in a round trip,
    # and the server would know half a one later.
    opened = time.monotonic() + 2 * delay_s
    up, down = _Pipe(delay_s, opened), _Pipe(delay_s, opened)
    with client, socket.socket() as server:
        threads = [threading.Thread(target=up.read, args=(client,), daemon=True)]
        threads[0].start()
        time.sleep(3 * delay_s)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        try:
            server.connect(target)
        except OSError:
            client.shutdown(socket.SHUT_RDWR)
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work, end in ((up.write, server), (down.read, server), (down.write, client)):
            threads.append(threading.Thread(target=work, args=(end,), daemon=True))
            threads[-1].start()
        for writer in (threads[1], threads[3]):
            writer.join()
        # The readers, where one is left: its peer never closed.
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def main() -> None:
    """Listen on a port of 127.0.0.1 and delay what goes to a server and comes from it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.delay", description=main.__doc__)
    parser.add_argument("port", type=int, help="where to listen")
    parser.add_argument("to", help="HOST:PORT of the server")
    parser.add_argument("milliseconds", type=float, help="the delay of each direction")
    parser.add_argument("--mark", help="ignored; to be seen in the list of processes")
    options = parser.parse_args()
    host, _, port = options.to.rpartition(":")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        listener.bind(("127.0.0.1", options.port))
        listener.listen(128)
        with suppress(KeyboardInterrupt):
            serve(listener, (host, int(port)), options.milliseconds / 1000)


if __name__ == "__main__":
    main()
