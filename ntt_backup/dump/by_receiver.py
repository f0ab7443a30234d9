"""The receiver keeps `pgdump/`, over one connection; see `remote_dir`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from ntt_backup.client.connection import OLD, SLOW, ReceiverQuestions, SessionSpec
from ntt_backup.dump.record import Contents, DumpRecord, Stored, read
from ntt_backup.errors import DumpImpossible
from ntt_backup.wire import dump_messages, framing, read_messages, write_messages
from ntt_backup.wire.framing import MAX_CHUNK, ProtocolError

# The receiver names fewer; what else lies in the directory has not come through it.
_MOST: Final = 10 * dump_messages.MAX_DUMPS


class DumpsByReceiver(ReceiverQuestions):
    """A session for the dumps in `pgdump/`. It is its own upload, of one dump at a time.

    Raises Unsupported where the remote has no Python that can run the receiver, DumpImpossible
    where a forced command takes no dumps.
    """

    sealed = 0

    def __init__(self, spec: SessionSpec) -> None:
        super().__init__(spec, dump_messages.TO_CLIENT)
        with self._connection.checked():
            if "dump" not in self.banner.allowed:
                message = "the key leads to a forced command, which takes no dumps"
                other = "; or dump the catalog by another way and set run.skip_pgdump"
                raise self.refusal(DumpImpossible, message, "dump", OLD + other)
            self._placed = bool(self._connection.hello(dumps=1).get("placed"))

    def contents(self) -> Contents:
        """Returns the dumps on the remote, and changes nothing."""
        dumps: list[Stored] = []
        with self._connection.checked():
            for kind, payload in self._answers(framing.frame(framing.DUMPS), framing.DONE):
                if kind != framing.DUMP or len(dumps) == _MOST:
                    raise ProtocolError(f"a frame of type {kind} among dumps, or too many")
                name, size, arrived, record = dump_messages.read_dump(payload)
                known = read(record.decode("utf-8", "replace"))
                dumps.append(Stored(name, size, known, arrived))
        return Contents.of(dumps, placed=self._placed)

    def try_out(self) -> None:
        """Checks that a dump could be stored; nothing of the trial is left after `close`."""
        self.upload("").send(b"0")
        self.finish()

    def drop(self, names: Sequence[str]) -> int:
        """Removes dumps with their records, and returns how many. The remote may keep some."""
        return self._do(dump_messages.named(framing.DROP, *names)) if names else 0

    def fetch(self, name: str) -> Generator[bytes, None, None]:
        """Yields a dump's content as it comes, unchecked."""
        self.require("get")
        with self._connection.checked():
            question = dump_messages.named(framing.FETCH, name)
            for kind, payload in self._answers(question, framing.BLOB_END):
                if kind != framing.PIECE:
                    raise ProtocolError(f"a frame of type {kind} within a dump")
                yield bytes(read_messages.read_piece(payload))

    # --- a dump on its way ------------------------------------------------------------------------

    def upload(self, name: str) -> DumpsByReceiver:
        """Begins to send a dump. The remote removes a dump that does not get its name: after
        `give_up`, and when this process dies.
        """
        self._name = name
        self._sent = 0
        return self

    def send(self, data: bytes) -> None:
        """Sends the next part of the dump."""
        with self._connection.checked():
            for at in range(0, len(data), MAX_CHUNK):
                piece = framing.frame(framing.DUMP_DATA, data[at : at + MAX_CHUNK])
                self._connection.send(piece, self._refuse)
        self._sent += len(data)

    def poll(self) -> None:
        """Reads what the remote has sent meanwhile; raises where the connection has ended."""
        with self._connection.checked():
            self._connection.channel.hear(self._refuse, 0.0)

    def finish(self) -> tuple[int, str]:
        """Ends the dump; returns the size and the SHA-256 of what is on the remote's stable
        storage.
        """
        with self._connection.checked():
            self._send(framing.frame(framing.DUMP_END))
            kind, payload = self._next(self._sent / SLOW)
            if kind != framing.DUMP_SUM:
                raise ProtocolError(f"a frame of type {kind} for a sum")
            size, digest = dump_messages.read_dump_sum(payload)
        return size, digest.hex()

    def name(self, record: DumpRecord) -> None:
        """Gives the dump its name, which is durable when this returns."""
        self._do(dump_messages.named(framing.NAME, self._name, record=record.to_json().encode()))

    def give_up(self) -> None:
        """Ends the connection in bounded time; the remote removes the dump. Never raises."""
        self.close()

    # --- frames -----------------------------------------------------------------------------------

    def _do(self, question: bytes) -> int:
        """Asks for a change, and returns the number of dumps that were changed."""
        with self._connection.checked():
            self._send(question)
            kind, payload = self._next()
            if kind != framing.DONE:
                raise ProtocolError(f"a frame of type {kind} for what is done")
            return write_messages.read_number(payload)

    def _refuse(self, data: bytes) -> None:
        for kind, _ in self._connection.frames(data):
            raise ProtocolError(f"a frame of type {kind} within a dump")
