"""A connection to the receiver begins with a greeting and a hello, then frames go both ways.

Sessions that write and sessions that read are built on it. See docs/protocol.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

from ntt_backup.client.bootstrap import bundle
from ntt_backup.client.channel import Channel
from ntt_backup.client.effort import Sender
from ntt_backup.client.error_text import explain_batch, explain_gone, explain_root
from ntt_backup.client.greeting import greet
from ntt_backup.client.local import Local
from ntt_backup.client.shared_pace import SharedPace
from ntt_backup.client.ssh import Ssh
from ntt_backup.client.throttle import Pace
from ntt_backup.client.transport import Transport
from ntt_backup.config import RemoteConfig, RemoteSettings, RunSettings, identity
from ntt_backup.config.host_key import OF_PACKS, HostKeys
from ntt_backup.errors import (
    BackupError,
    ConfigError,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteDenied,
)
from ntt_backup.pack.seal import Sign, unsigned
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import PROTOCOL, Inbox, ProtocolError
from ntt_backup.wire.write_messages import Field

_EXPLANATIONS: Final = {
    "gone": explain_gone,
    "root": explain_root,
    "storage": explain_batch,
    "dump": explain_root,
    "snapshot": explain_root,
}


def transport_to(remote: RemoteSettings) -> Transport:
    """Returns the way to a remote. Raises ConfigError for a bucket."""
    if remote.kind == "s3":
        raise ConfigError(
            "this command cannot use a bucket",
            detail=remote.url,
            hint="use a target whose url is ssh:// or file:// (--target)",
        )
    return Ssh(remote) if remote.kind == "ssh" else Local(2.0 * remote.connect_timeout)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is opened with.

    root: the remote's path, which holds `by-hash/`. owner names this host and target, run_id the
    run and slot the session within it: together they name its workspace on the remote, so that the
    next session can remove what a dead one left. pace limits what is sent, fetch what comes; effort
    is how hard what is sent is compressed.

    on_bytes is told how many bytes were handed to the transport (none, as a sign of life while
    nothing can go), and right before it on_content how much content of blobs they carry; less than
    zero for content that has to be sent again, so that the sum is what was stored and what is under
    way. meanwhile is called while the remote starts the receiver, with the descriptors on which it
    will be heard; cancelled while an answer is waited for, and may raise. stopping returns whether
    what is being sent should end soon: after the current blob, where the strategy can do that.
    sync: how the receiver makes a batch durable (`syncfs`, or `fsync` a file). bucket: the settings
    of one, where that is the target; then nothing goes over the transport. recipients: whom its
    packs are sealed for; sign: signs these as this host's. dead_before: returns the time of the
    epoch before which uploads were begun that are nobody's any more; a probe removes them.
    """

    transport: Transport
    root: str
    owner: str
    run_id: str
    slot: str
    run: RunSettings
    pace: Pace | None = None
    fetch: SharedPace | None = None
    effort: Sender | None = None
    on_bytes: Callable[[int], None] = lambda _: None
    on_content: Callable[[int], None] = lambda _: None
    meanwhile: Callable[[Sequence[int]], None] = lambda _: None
    cancelled: Callable[[], None] = lambda: None
    stopping: Callable[[], bool] = lambda: False
    sync: str = "syncfs"
    bucket: RemoteSettings | None = None
    recipients: tuple[str, ...] = ()
    sign: Sign = unsigned
    dead_before: Callable[[], float] | None = None

    @staticmethod
    def of(settings: RemoteConfig, run_id: str, slot: str, *, sends: bool = False) -> SessionSpec:
        """Returns what the settings say for a session. sends: it sends batches, which alone are for
        a bucket, too. Raises ConfigError for a bucket otherwise.
        """
        remote, run, owner = settings.remote, settings.run, identity.owner(settings)
        if remote.kind == "file" and run.codec == "auto":
            # There is no link that compression could make faster.
            run = run.model_copy(update={"codec": "none"})
        bucket = remote if sends and remote.kind == "s3" else None
        transport = transport_to(remote) if bucket is None else Local(0.0)
        return SessionSpec(
            transport,
            remote.path,
            owner,
            run_id,
            slot,
            run,
            bucket=bucket,
            recipients=settings.recipients,
            sign=partial(HostKeys.of(settings).sign, OF_PACKS) if bucket else unsigned,
        )

    def channel(self, command: str) -> Channel:
        """Starts the remote command, under this limit."""
        return Channel(
            self.transport, command, pace=self.pace, fetch=self.fetch, on_bytes=self.on_bytes
        )


def _refuse_frame(kind: int, _payload: memoryview) -> None:
    raise ProtocolError(f"a frame of type {kind} instead of READY")


class Connection:
    """A receiver that has greeted. lengths: the frames that it may send, each with its bounds.

    Raises what `greet` raises. received counts frames; numbers are those of its batches, which only
    grow.
    """

    def __init__(self, spec: SessionSpec, lengths: dict[int, tuple[int, int]]) -> None:
        command, program = bundle()
        self.spec = spec
        self.received = 0
        self.numbers = count(1)
        self._said: dict[str, Field] = {}
        self._awaits_ready = False
        self._inbox = Inbox(lengths)
        self.channel = spec.channel(command)
        try:
            spec.meanwhile(self.channel.fds)
            self.banner = greet(self.channel, program, spec.transport.connect_timeout)
        except BaseException:
            self.abort()
            raise

    def open(self, **more: Field) -> None:
        """Makes the receiver open the root, which must hold by-hash, if it has not done so yet.
        more: see `hello`.
        """
        with self.checked():
            if not (self._said or self.hello(**more)).get("placed"):
                raise explain_gone(f"{self.spec.root}/by-hash: no such directory")

    def hello(self, **more: Field) -> dict[str, Field]:
        """Makes the receiver open the root, and returns what its READY says. more: see
        `say_hello`.
        """
        self.say_hello(**more)
        return self.ready()

    def say_hello(self, **more: Field) -> None:
        """Asks the receiver to open the root, and leaves the answer to `ready`. more: fields of
        HELLO that only one kind of session sends.
        """
        spec = self.spec
        fields: dict[str, Field] = {
            "protocol": PROTOCOL,
            "root": spec.root,
            "owner": spec.owner,
            "run": spec.run_id,
            "slot": spec.slot,
            "hash": self.banner.hash,
            "sync": spec.sync,
            **more,
        }
        self._ask(write_messages.fields(framing.HELLO, fields))

    def place(
        self,
        answer: Callable[[int, memoryview], None] = _refuse_frame,
        patience: float | None = None,
    ) -> None:
        """Has the receiver make by-hash; answer and patience as for `ready`."""
        self._ask(framing.frame(framing.PLACE), answer)
        self.ready(answer, patience)

    def ready(
        self,
        answer: Callable[[int, memoryview], None] = _refuse_frame,
        patience: float | None = None,
    ) -> dict[str, Field]:
        """Returns what the READY says that was asked for. answer takes frames of other types.
        patience: seconds, where what was sent before may have to cross a slow link first.
        """
        take = partial(self._take, answer=answer)
        with self.checked():
            asked = time.monotonic()
            # The receiver may first remove what dead sessions have left.
            limit = patience or self.spec.transport.connect_timeout
            while self._awaits_ready and not self.channel.is_silent(asked, limit, time.monotonic()):
                self.spec.cancelled()
                self.channel.hear(take, 1.0)
            if self._awaits_ready:
                raise ProtocolError("no READY")
        return self._said

    def send(self, frame: bytes, hear: Callable[[bytes], None]) -> None:
        """Sends a small frame; what comes meanwhile goes to hear."""
        self.channel.send(memoryview(frame), hear, patience=self.spec.run.stall_timeout)

    def frames(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yields the frames that data completes, other than signs of life. A payload holds until
        the next frame is asked for. Raises what an ERROR frame means, and ProtocolError.
        """
        rest = memoryview(data)
        while rest:
            space = self._inbox.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            self._inbox.filled(count)
            rest = rest[count:]
            while (frame := self._inbox.next()) is not None:
                self.received += 1
                kind, payload = frame
                if kind == framing.ERROR:
                    raise _refusal(*write_messages.read_error(payload))
                if kind == framing.READY and self._awaits_ready:
                    self._awaits_ready = False
                    self._said = write_messages.read_fields(payload)
                elif kind not in (framing.PONG, framing.BUSY):
                    yield frame

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Ends the connection for any error; a ProtocolError is raised as ProtocolViolation."""
        try:
            yield
        except ProtocolError as error:
            self.abort()
            raise ProtocolViolation(detail=str(error)[:200]) from error
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        """Ends the connection in good order, in bounded time; ends it at once if it was lost."""
        if self.channel.ended:
            return
        try:
            self.send(framing.frame(framing.BYE), lambda _: None)
        except BackupError:
            self.abort()
        else:
            self.channel.close(framing.frame(framing.LEFT))

    def abort(self) -> None:
        """Ends the connection now. Never raises."""
        self.channel.abort()

    def _ask(self, frame: bytes, answer: Callable[[int, memoryview], None] = _refuse_frame) -> None:
        """Sends what a READY answers."""
        self._awaits_ready = True
        with self.checked():
            self.send(frame, partial(self._take, answer=answer))

    def _take(self, data: bytes, answer: Callable[[int, memoryview], None]) -> None:
        for kind, payload in self.frames(data):
            answer(kind, payload)


def _refusal(code: str, text: str) -> BackupError:
    """Returns the error that an ERROR frame means."""
    if code in _EXPLANATIONS:
        return _EXPLANATIONS[code](text)
    if code == "place":
        return RemoteCannotStore(
            "what is below remote.path cannot be used",
            detail=text,
            hint="by-hash, pgdump and snapshots must be directories on its file system",
        )
    if code == "time":
        return RemoteDenied(
            "the remote refuses a file name whose time lies in the future",
            detail=text,
            hint="compare the clocks of both machines (date -u); if they agree, the target already"
            " has a file with such a name: find it and remove it on the remote",
        )
    if code == "refused":
        return RemoteDenied(
            "the receiver on the remote refuses",
            detail=text,
            hint="see the forced command of our key in the remote's authorized_keys: its --root,"
            " --allow and --require",
        )
    if code == "protocol":
        # The banner has settled the version: what arrives is not what was sent.
        return ProtocolViolation(
            "the receiver on the remote does not understand what reaches it",
            detail=text,
            hint="if this happens again: something on the way alters what it carries",
        )
    return ProtocolViolation("the receiver on the remote gave up", detail=f"{code}: {text}")
