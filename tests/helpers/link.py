"""A TCP link that can fail: cut, stalled, slow, or cut after so many bytes, without privileges.

Outages are the daemon's daily bread, yet iptables and tc need root and a spare network. So this
proxy stands between a client and a server on 127.0.0.1 and misbehaves on demand. It runs an event
loop in a thread of its own; its methods may be called from any thread and return once they have
taken effect.

Used through the fixture `link` (in front of the test sshd) or as `with Link(host, port) as link` in
front of anything else that speaks TCP.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Self, TypeVar

import pytest

from tests.helpers.sshd import Sshd, free_port
from tests.helpers.waiting import PATIENCE, wait_until

_MIB = 1 << 20
_CHUNK = 64 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

T = TypeVar("T")


class Link:
    """A proxy on 127.0.0.1:`port`, which stays the same over `cut` and `restore`.

    sent counts the bytes that went from clients to the server since the start, received those that
    came back.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.host = "127.0.0.1"
        self.port = free_port()
        self.sent = 0
        self.received = 0
        self._target = (target_host, target_port)
        self._allowance: int | None = None
        self._then: Callable[[], Coroutine[None, None, None]] = self._cut
        self._rate: float | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._flowing = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self.resume()
        self.restore()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset every connection on both sides, and refuse new ones until `restore`."""
        self._call(self._cut())

    def restore(self) -> None:
        """Take connections again. Those that were cut stay dead, as after a real outage."""
        self._call(self._listen())

    def drop_twice(self) -> None:
        """Reset every connection, and take new ones at once; twice, each time in the middle of what
        comes back.
        """
        for _ in range(2):
            self._await_received(self.received + 2 * _MIB)
            self.cut()
            self.restore()

    def _await_received(self, count: int) -> None:
        wait_until(lambda: self.received > count, f"{count} bytes to come back")

    def stall(self) -> None:
        """Pass nothing on, in either direction; connections stay open and new ones seem to open."""
        self._call(self._set_flowing(False))

    def resume(self) -> None:
        """End a stall; what was held up goes on."""
        self._call(self._set_flowing(True))

    def throttle(self, bytes_per_second: float | None) -> None:
        """Pass on so much in each direction of each connection, and no more; None: no limit."""
        self._call(self._set_rate(bytes_per_second))

    def cut_after(self, size: int) -> None:
        """Cut once `size` more bytes have gone from clients to the server; not one more goes."""
        self._call(self._allow(size, self._cut))

    def stall_after(self, size: int) -> None:
        """Stall at such a moment."""
        self._call(self._allow(size, self._stall))

    @property
    def stalled(self) -> bool:
        """Whether nothing is passed on."""
        return not self._flowing.is_set()

    def _call(self, work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=PATIENCE)

    async def _allow(self, size: int, then: Callable[[], Coroutine[None, None, None]]) -> None:
        self._allowance, self._then = size, then

    async def _stall(self) -> None:
        self._allowance = None
        self._flowing.clear()

    async def _set_rate(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second

    async def _set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _listen(self) -> None:
        self._allowance = None
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, self.host, self.port)

    async def _cut(self) -> None:
        self._allowance = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._connections:
            if writer.is_closing():
                continue
            link_end: socket.socket = writer.get_extra_info("socket")
            link_end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        self._connections.clear()

    async def _shut(self) -> None:
        await self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._connections.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._connections.add(far_writer)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, upstream=True),
                self._pump(far_reader, writer, upstream=False),
            )
        except OSError:
            pass  # one side is gone; the other is told below
        finally:
            for end in (writer, far_writer):
                self._connections.discard(end)
                end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upstream: bool
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._flowing.wait()
            if self._rate is not None:
                await asyncio.sleep(len(chunk) / self._rate)
            while chunk:
                part = chunk
                if upstream and self._allowance is not None:
                    part = chunk[: self._allowance]
                    self._allowance -= len(part)
                writer.write(part)
                await writer.drain()
                chunk = chunk[len(part) :]
                if upstream:
                    self.sent += len(part)
                    if self._allowance == 0:
                        await self._then()
                    if writer.is_closing():
                        return
                    await self._flowing.wait()
                else:
                    self.received += len(part)
        await self._flowing.wait()
        if writer.can_write_eof():
            writer.write_eof()


@pytest.fixture
def link(remote: Sshd) -> Iterator[Link]:
    """A faulty link to the test sshd; `remote.through(link.port)` is the way in over it."""
    with Link(remote.host, remote.port) as link:
        yield link
