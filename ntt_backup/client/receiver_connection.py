"""A connection to the receiver begins with a greeting and a hello, then frames go both ways.

Sessions that write use a connection; sessions that ask extend it by the wait for an answer. See
docs/protocol.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Final, TypeVar

from ntt_backup.blobdir.layout import is_identity
from ntt_backup.client.bootstrap import bundle, greet
from ntt_backup.client.channel import PATIENCE_FACTOR
from ntt_backup.client.remote_errors import explain_batch, explain_gone, explain_root, other_names
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import (
    AnotherTarget,
    BackupError,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.name_hash import HashOfNames, hash_of_names
from ntt_backup.wire import messages
from ntt_backup.wire.framing import FORMAT, IDENTITY, PROTOCOL, Buffer, Inbox, ProtocolError
from ntt_backup.wire.messages import Field
from ntt_backup.wire.stored_names import PLACES

# The bytes a second at which a slow disk is read for a checksum.
SLOW: Final = 5_000_000
# The most seconds that a size adds to a wait: the remote itself may have stated that size.
_MOST_PATIENCE: Final = 86_400.0
# The rest of a hint where the receiver may be too old to know a word of --allow.
OLD: Final = (
    " (a receiver that does not know the word is old: copy it again, see `ntt-backup-remote"
    " install-receiver --write FILE`)"
)
_EXPLANATIONS: Final = {
    "gone": explain_gone,
    "root": explain_root,
    "storage": explain_batch,
    "dump": explain_root,
    "snapshot": explain_root,
    "packs": explain_batch,
    "prune": explain_batch,
}


E = TypeVar("E", bound=BackupError)


class ReceiverConnection:
    """A connection to a receiver that has greeted.

    Args:
        spec: The parameters of the session.
        lengths: The types of frames that the receiver may send, each with the bounds of its length.

    Attributes:
        received: The number of frames that were received.
        numbers: The numbers for batches, which only grow.
        said: The fields of the last READY; none before it.

    Raises:
        BackupError: As `greet` raises.
    """

    def __init__(self, spec: SessionSpec, lengths: dict[int, tuple[int, int]]) -> None:
        command, program = bundle()
        self.spec = spec
        self.received = 0
        self.numbers = count(1)
        self.said: dict[str, Field] = {}
        self._awaits_ready = False
        self._inbox = Inbox(lengths)
        self.channel = spec.channel(command)
        try:
            spec.meanwhile()
            self.banner = greet(self.channel, program, spec.transport.connect_timeout)
        except BaseException:
            self.channel.abort()
            raise

    def open(self, **more: Field) -> None:
        """Has the receiver open the root, unless that was done.

        more: see `hello`. Raises RemoteUnreachable where there is no by-hash below the root.
        """
        with self.checked():
            said = self.said or self.hello(**more)
            if not said.get("placed"):
                raise explain_gone(f"{self.spec.root}/by-hash: no such directory")
            self.require_identity()
            if self.spec.names and self.spec.names != self.hash_of_names:
                raise other_names(self.spec.names, self.hash_of_names)

    def hello(self, **more: Field) -> dict[str, Field]:
        """Has the receiver open the root, and returns the fields of READY.

        more: fields of HELLO that only one kind of session sends.
        """
        spec = self.spec
        fields: dict[str, Field] = {
            "protocol": PROTOCOL,
            "root": spec.root,
            "owner": spec.owner,
            "run": spec.run_id,
            "slot": spec.slot,
            "hash": self.hash,
            "sync": spec.sync,
            **({"names": spec.names} if spec.names == "sha256" else {}),
            **more,
        }
        self._await_ready(messages.HELLO.frame(fields))
        return self.said

    def place(self, identity: bytes = b"") -> dict[str, Field]:
        """Has the receiver create by-hash, and give the target an identity where it has none.

        Returns the fields of READY.
        """
        self._await_ready(messages.PLACE.frame(identity))
        return self.said

    def require_identity(self) -> None:
        """Raises AnotherTarget unless the target has the identity that the session expects."""
        expected, said = self.spec.identity, self.said
        if not expected or (found := identity_in(said)) == expected:
            return
        if found is None:
            raise old_receiver()
        if not (found or said.get("placed") or said.get("packs")):
            raise explain_gone(f"{self.spec.root}: it has no blobs, and no identity")
        raise AnotherTarget(expected, found)

    @property
    def hash(self) -> str:
        """The hash of the session: that of names, where the receiver can compute it."""
        return "sha256" if self.spec.names == "sha256" else self.banner.hash

    @property
    def hash_of_names(self) -> HashOfNames:
        """The hash of names on the target."""
        return hash_of_names(self.said.get("names"))

    def send(self, frame: Buffer, hear: Callable[[bytes], None]) -> None:
        """Sends a frame, or a part of one; hear receives the data that arrives meanwhile."""
        self.channel.send(memoryview(frame), hear, patience=self.spec.run.stall_timeout)

    def frames(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yields type and payload of the frames that data completes, except for signs of life.

        A payload is valid until the next frame is taken.

        Raises:
            BackupError: The receiver sent an ERROR.
            ProtocolError: A frame is malformed.
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
                if kind == messages.ERROR:
                    raise _refusal(*messages.ERROR.read(payload))
                if kind == messages.READY and self._awaits_ready:
                    self._awaits_ready = False
                    self.said = messages.READY.read(payload)
                elif kind not in (messages.PONG, messages.BUSY):
                    yield frame

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Ends the connection at any error, and raises a ProtocolError as ProtocolViolation."""
        try:
            yield
        except ProtocolError as error:
            self.abort()
            raise ProtocolViolation(detail=str(error)[:200]) from error
        except BaseException:
            self.abort()
            raise

    def require(self, word: str) -> None:
        """Raises Unsupported if the receiver's `--allow` lacks `list`, `verify` or `get`."""
        if word not in self.banner.allowed:
            message = f"the receiver on the remote may not {word}"
            raise self.refusal(
                Unsupported, message, word, ", or use another key (remote.identity_file)"
            )

    def refusal(self, kind: type[E], message: str, word: str, more: str = OLD) -> E:
        """Returns the error for a forced command whose `--allow` lacks a word.

        more: the rest of the hint.
        """
        return kind(
            message,
            detail=f"its --allow lists {','.join(sorted(self.banner.allowed))}",
            hint=f"add {word} to --allow in the line of our key in the remote's"
            f" authorized_keys{more}",
        )

    def require_life(self, asked: float, more_patience: float) -> None:
        """Raises RemoteUnreachable after silence, or after mere signs of life for too long.

        Args:
            asked: The time of the question, in monotonic seconds.
            more_patience: Seconds that are added to the usual time during which signs of life
                suffice: for a size that the remote has stated a day at most.
        """
        run, now = self.spec.run, time.monotonic()
        if now - max(asked, self.channel.heard) > run.stall_timeout:
            said = f"nothing came for {run.stall_timeout:.0f} s"
        elif now - asked > PATIENCE_FACTOR * run.receipt_timeout + min(
            more_patience, _MOST_PATIENCE
        ):
            said = f"nothing but signs of life came for {now - asked:.0f} s"
        else:
            return
        raise RemoteUnreachable("the remote does not answer", detail=said)

    def close(self) -> None:
        """Ends the connection in good order within a bounded time, or at once if it was lost."""
        if self.channel.ended:
            return
        try:
            self.send(messages.BYE.frame(), lambda _: None)
        except BackupError:
            self.abort()
        else:
            self.channel.close(messages.LEFT.frame())

    def abort(self) -> None:
        """Ends the connection immediately. Never raises."""
        self.channel.abort()

    def _await_ready(self, question: bytes) -> None:
        """Sends a frame that the receiver answers by READY, and waits for the answer."""
        self._awaits_ready = True
        with self.checked():
            self.send(question, self._expect_ready)
            asked = time.monotonic()
            # The receiver may first remove the workspaces of dead sessions.
            limit = self.spec.transport.connect_timeout
            while self._awaits_ready and not self.channel.is_silent(asked, limit, time.monotonic()):
                self.spec.cancelled()
                self.channel.hear(self._expect_ready, 1.0)
            if self._awaits_ready:
                raise ProtocolError("no READY")

    def _expect_ready(self, data: bytes) -> None:
        for kind, _ in self.frames(data):
            raise ProtocolError(f"a frame of type {kind} instead of READY")


def identity_in(said: Mapping[str, Field]) -> str | None:
    """Returns the identity in the fields of a READY; "" for none, None from an old receiver.

    Raises RemoteDenied for a marker that the receiver cannot read.
    """
    found = said.get("target")
    if found is None:
        return None
    if found == "" or is_identity(str(found)):
        return str(found)
    raise RemoteDenied(
        "the identity of the target cannot be read",
        detail=f"{FORMAT} or {IDENTITY} in its root is no file of this program, or of a newer one",
        hint="look at that file on the target; remove it only where it was damaged, and the next"
        " run makes another one",
    )


def old_receiver(
    message: str = "the receiver on the remote does not tell the identity of the target",
) -> RemoteDenied:
    """Returns the error for a receiver of an earlier version."""
    return RemoteDenied(
        message,
        detail="it is of an earlier version",
        hint="copy it again: see `ntt-backup-remote install-receiver --write FILE`",
    )


def _refusal(code: str, text: str) -> BackupError:
    """Returns the error for code and text of an ERROR frame."""
    if code in _EXPLANATIONS:
        return _EXPLANATIONS[code](text)
    if code == "place":
        return RemoteCannotStore(
            "what is below remote.path cannot be used",
            detail=text,
            hint="by-hash, packs, blobs, pgdump and snapshots must be directories of its disk",
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
    if code == "protocol" and PLACES in text:
        return old_receiver("the receiver on the remote does not know the list of files of a dump")
    if code == "protocol":
        # The greeting has settled the version: the data was altered on its way.
        return ProtocolViolation(
            "the receiver on the remote received an invalid message",
            detail=text,
            hint="if this happens again, something on the connection alters data",
        )
    return ProtocolViolation("the receiver on the remote gave up", detail=f"{code}: {text}")
