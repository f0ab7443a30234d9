"""A session is opened by these parameters: the way to the target, its limits, and who hears of it.

They are the same for every session: of a receiver, of sftp, of the remote's shell, of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ntt_backup.client.channel import Channel
from ntt_backup.client.compression_level import Sender
from ntt_backup.client.throttle import Pace, SharedPace
from ntt_backup.client.transport import Local, Transport, transport_to
from ntt_backup.config import RemoteConfig, RemoteSettings, RunSettings
from ntt_backup.config.signing_key import OF_PACKS, SigningKeys
from ntt_backup.name_hash import HashOfNames
from ntt_backup.pack.format import Sign, unsigned


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The parameters of a session.

    Attributes:
        transport: The way to the remote; unused for a bucket.
        root: The path on the remote that holds `by-hash/`.
        owner: The name of this host and target. owner, run_id and slot name the workspace on the
            remote, so that the next session can remove the workspace of a dead one.
        pace: The limit of the bytes that are sent. fetch: of those that are received.
        on_bytes: Receives the number of bytes that were handed to the transport; 0 as a sign of
            life while nothing can be sent.
        on_content: Receives, right before on_bytes, the bytes of blob content among them. Negative
            for content that must be sent again, so that the sum is what is stored or under way.
        meanwhile: Is called while the remote starts the receiver.
        cancelled: Is called while an answer is awaited, and may raise.
        stopping: Returns whether sending should end after the current blob.
        sync: How the receiver makes a batch durable: by `syncfs`, or by `fsync` of each file.
        bucket: The settings of a bucket that is the target, else None.
        identity: The identity that the target must have; "" for any.
        names: The hash of names that the target must have; "" for any.
        dead_before: Returns the Unix time before which incomplete uploads were begun that belong to
            no process any more; a probe removes them.
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
    meanwhile: Callable[[], None] = lambda: None
    cancelled: Callable[[], None] = lambda: None
    stopping: Callable[[], bool] = lambda: False
    sync: str = "syncfs"
    bucket: RemoteSettings | None = None
    recipients: tuple[str, ...] = ()
    sign: Sign = unsigned
    identity: str = ""
    names: HashOfNames | Literal[""] = ""
    dead_before: Callable[[], float] | None = None

    @staticmethod
    def of(settings: RemoteConfig, run_id: str, slot: str, *, sends: bool = False) -> SessionSpec:
        """Returns the parameters of a session with these settings.

        Raises ConfigError for a bucket, unless the session `sends` batches.
        """
        remote, run, owner = settings.remote, settings.run, settings.owner
        if remote.kind == "file" and run.codec == "auto":
            # There is no link, so compression would only take time.
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
            identity=remote.identity,
            names=settings.source.hash if settings.source is not None else "",
            sign=partial(SigningKeys.of(settings).sign, OF_PACKS) if remote.packs else unsigned,
        )

    def channel(self, command: str) -> Channel:
        """Starts the remote command, under the limits of the session."""
        return Channel(
            self.transport, command, pace=self.pace, fetch=self.fetch, on_bytes=self.on_bytes
        )
