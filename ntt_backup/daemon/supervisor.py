"""One worker process as the coordinator sees it: start, hear, stop, kill, start again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from ntt_backup.client.backoff import Backoff
from ntt_backup.daemon.child import EventChild
from ntt_backup.errors import WorkerFailed
from ntt_backup.process.fork import Fork
from ntt_backup.process.pipeline import Child
from ntt_backup.upload.worker_main import GO, Orders, work

RESTARTS: Final = 5
SOUND_SECONDS: Final = 600.0


def employ(orders: Orders) -> Child:
    """A worker process that waits for GO. Raises OSError where that cannot be."""
    return Fork(partial(work, orders), f"ntt-worker {orders.worker}")


class SupervisedWorker:
    """A worker process with a bounded number of restarts.

    It is the leader of its own session and process group, so `kill` ends its tar and ssh with it.
    """

    def __init__(
        self, orders: Orders, backoff: Backoff, employ: Callable[[Orders], Child] = employ
    ) -> None:
        self._employ = employ
        self.orders = orders
        self.restarts = 0
        self._started = 0.0
        self.due: float | None = 0.0
        self._backoff = backoff
        self._child: EventChild | None = None
        self._told: Orders | None = None
        self._said_goodbye = False
        self._said_nonsense = False
        self._spoke = False
        self._expected = 0.0
        self._quiet = 0.0
        self._stalled = False

    @property
    def index(self) -> int:
        return self.orders.worker

    @property
    def running(self) -> bool:
        return self._child is not None

    @property
    def fds(self) -> list[int]:
        """What becomes readable when there is news of the process."""
        return [] if self._child is None else self._child.fds

    def start(self, now: float) -> None:
        """Have it do its orders, in a process that is started if need be. now: monotonic seconds.
        Raises OSError where that cannot be.
        """
        self.due = None
        self._started = self._expected = now
        self._stalled = False
        self.prepare()
        if self._child is not None:
            self._child.tell(GO)

    def prepare(self) -> None:
        """Start the process already: it connects to the remote, and waits for `start`. Raises
        OSError where that cannot be.
        """
        if self._child is not None and self._told != self.orders:
            self._child.kill()
            self._child.reap()
            self._child = None
        if self._child is None:
            self._child = EventChild(self._employ(self.orders))
            self._told = self.orders
            self._said_goodbye = False
            self._said_nonsense = False

    def hear(self) -> Iterator[dict[str, Any]]:
        """The events that have arrived, as many as one read gives: one that talks faster than it is
        heard must not keep signals and the others waiting. Afterwards `running` is False if the
        process has ended, and then all has been heard.
        """
        child = self._child
        if child is None:
            return
        for said in child.hear():
            if isinstance(said, bytes):
                yield from self._mind_foreign(said, child.pid)
            else:
                self._said_goodbye |= said["event"] in ("worker_stop", "fatal")
                self._spoke = True
                self._quiet = said.get("quiet", 0.0)
                yield said
        if child.ended:
            status = child.reap()
            self._child = None
            if not self._said_goodbye:
                yield {
                    "event": "worker_died",
                    "pid": child.pid,
                    "status": status,
                    "detail": child.detail,
                }

    def mind_silence(self, now: float, limit: float) -> Iterator[dict[str, Any]]:
        """A `worker_stall` event, once, when it has said nothing for more than limit seconds beyond
        those for which it had announced to be quiet; `worker_stall_end` when it speaks again.
        What waits to be heard is no silence: `hear` it before.
        """
        child = self._child
        if child is None:
            return
        silent = now - self._expected
        if self._spoke:
            self._spoke = False
            self._expected = now + self._quiet
            if self._stalled:
                self._stalled = False
                yield {
                    "event": "worker_stall_end",
                    "pid": child.pid,
                    "duration_s": round(silent, 3),
                }
        elif silent > limit and not self._stalled:
            self._stalled = True
            yield {
                "event": "worker_stall",
                "pid": child.pid,
                "silent_s": round(silent, 3),
                "hint": f"`ps -o stat,wchan,args -p {child.pid}` says what it waits for: T is"
                f" stopped, `kill -CONT {child.pid}` lets it go on; D is a disk that does not"
                f" answer; `kill -KILL {child.pid}` has another one do its work, and loses nothing",
            }

    def _mind_foreign(self, line: bytes, pid: int) -> Iterator[dict[str, Any]]:
        """A library may print something; that ends no backup, and is told once."""
        if not self._said_nonsense:
            self._said_nonsense = True
            shown = line[:200].decode("utf-8", "backslashreplace")
            yield {
                "event": "warning",
                "pid": pid,
                "reason": f"worker {self.index} prints what is no event: {shown!r}",
            }

    def stop(self) -> None:
        """Ask it to finish what is in flight and end; not to be started again."""
        self.due = None
        if self._child is not None:
            self._child.tell(b"stop\n")

    def kill(self) -> None:
        """End it and all that it started, now."""
        self.due = None
        if self._child is not None:
            self._child.kill()

    def plan_restart(self, now: float, random: float) -> float:
        """Count a restart and set when it is due; seconds until then. Raises WorkerFailed at the
        limit. A worker that lived for SOUND_SECONDS starts counting anew.
        """
        if now - self._started > SOUND_SECONDS:
            self.restarts = 0
        if self.restarts == RESTARTS:
            raise WorkerFailed(
                f"worker {self.index} died {RESTARTS + 1} times",
                hint="the reason is in the log, in the worker_restart events before this",
            )
        self.restarts += 1
        wait = self._backoff.wait(self.restarts, lambda: random)
        self.due = now + wait
        return wait
