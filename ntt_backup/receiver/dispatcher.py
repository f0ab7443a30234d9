"""Dispatches the frames of a session: HELLO chooses the kind of session, which handles the others.

A session writes blobs (`write_session`), reads them (`read_session`), or is for the files in an
area beside them (`file_session`). This loop takes the frames, and never waits for a disk.
`docs/protocol.md` is the contract.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ntt_backup.blobdir.descriptors import can_syncfs
from ntt_backup.receiver.connection import Connection
from ntt_backup.receiver.workspace import Refusal, Workspace
from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import ProtocolError

if TYPE_CHECKING:
    from ntt_backup.receiver.question_session import QuestionSession
    from ntt_backup.receiver.terms import Terms
    from ntt_backup.receiver.write_session import WriteSession

AnyWorkspace = TypeVar("AnyWorkspace", bound=Workspace)

_OWNER_ALPHABET = frozenset("0123456789abcdefghijklmnopqrstuvwxyz")
# No dot: a stage's name joins the session's names with dots.
_NAME_ALPHABET = _OWNER_ALPHABET | frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ-_")
_CHOICES = {
    "hash": ("sha256", "blake3"),
    "sync": ("syncfs", "fsync"),
    "names": ("sha256", "blake3"),
}


class Receiver:
    """One session between the banner and the end of the connection."""

    def __init__(self, terms: Terms, reading: int, writing: int) -> None:
        self._terms = terms
        self._connection = Connection(reading, writing, terms.idle_timeout)
        self._dismissed = False  # The client has said BYE.
        self._workspace: Workspace | None = None
        self._by_file = False
        self._session: WriteSession | QuestionSession | None = None
        self._handlers: dict[int, Callable[[memoryview], None]] = {messages.HELLO: self._hello}

    def run(self) -> int:
        """Runs the session and returns the exit status. However it ends, its stage is removed."""
        refusal: Refusal | None = None
        try:
            for part in (self._loop, self._finish):
                try:
                    part()
                except Refusal as found:
                    refusal = refusal or found
                except ProtocolError as found:
                    refusal = refusal or Refusal("protocol", str(found))
        finally:
            if self._session is not None:
                self._session.close()
            if self._workspace is not None:
                self._workspace.leave()
        if refusal is not None:
            self._connection.say(messages.ERROR.frame(refusal.code, refusal.text))
        elif self._dismissed:
            self._connection.say(messages.LEFT.frame())
        self._connection.close()
        return 0 if refusal is None else 1

    def _loop(self) -> None:
        connection = self._connection
        while not connection.ended:
            session = self._session
            progress = session is not None and session.advance()
            if connection.choked or (session is not None and session.busy):
                if not progress:
                    self._wait(reading=False)
                continue
            found = connection.next()
            if found is not None:
                self._take(*found)
            elif not connection.read():
                self._wait(reading=True)

    def _finish(self) -> None:
        """Answers what is committed, whether or not the client still listens."""
        self._connection.ended = True
        session = self._session
        if session is None:
            return
        session.interrupt()
        session.advance()
        while session.working:
            self._wait(reading=False)
            session.advance()

    def _wait(self, reading: bool) -> None:
        self._connection.wait(reading, self._session is not None and self._session.working)
        if (
            not self._connection.ended
            and self._workspace is not None
            and self._workspace.superseded
        ):
            raise Refusal("superseded", "a newer session of this worker has begun")

    def _take(self, kind: int, payload: memoryview) -> None:
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a frame of type {kind} is not expected now")
        handler(payload)

    def _hello(self, payload: memoryview) -> None:
        asked = messages.HELLO.read(payload)
        protocol = asked.get("protocol")
        if protocol != framing.PROTOCOL:
            raise Refusal("protocol", f"protocol {protocol} is not spoken by this receiver")
        root, owner, run, slot = (_text(asked, name) for name in ("root", "owner", "run", "slot"))
        for name, value, most, alphabet in (
            ("owner", owner, 32, _OWNER_ALPHABET),
            ("run", run, 64, _NAME_ALPHABET),
            ("slot", slot, 32, _NAME_ALPHABET),
        ):
            if not 1 <= len(value) <= most or not alphabet.issuperset(value):
                raise ProtocolError(f"{name} is not a name")
        asked.setdefault("names", "blake3")
        for name, choices in _CHOICES.items():
            if asked.get(name) not in choices:
                raise ProtocolError(f"{name} is none of {', '.join(choices)}")
        terms = self._terms
        kind, names = (messages.HASHES[_text(asked, name)] for name in ("hash", "names"))
        if names == messages.BLAKE3 and terms.lacking:
            raise Refusal("refused", terms.lacking)
        if kind not in terms.hashes:
            raise ProtocolError("a hash that was not offered")
        if names == messages.SHA256 and kind != names:
            raise ProtocolError("names of another hash than that of the session")
        if terms.root is not None and os.path.normpath(root) != os.path.normpath(terms.root):
            raise Refusal("refused", f"this receiver is for {terms.root} only")
        reading, files = asked.get("reading"), asked.get("files")
        if reading and files:
            raise ProtocolError("a session of two kinds")
        # --root itself, not the client's spelling of it: `a/../b` leads elsewhere where `a` is a
        # symlink.
        root = terms.root or root
        self._by_file = asked["sync"] == "fsync"
        if files:
            self._begin_with_files(root, files)
        elif reading:
            self._begin_to_read(root)
        else:
            self._require("put", "blobs")
            if "sha256" in terms.require and names != messages.SHA256:
                raise Refusal("refused", "--require sha256 is given, and these names are BLAKE3")
            self._begin_to_write(root, (owner, run, slot), kind, names)
        self._handlers[messages.PING] = lambda payload: self._connection.say(
            messages.PONG.frame(messages.PING.read(payload))
        )
        self._handlers[messages.BYE] = self._bye
        self._ready()

    # Modules are loaded by the sessions that need them: source that travels is compiled each time.

    def _begin_to_read(self, root: str) -> None:
        from ntt_backup.receiver.read_session import ReadSession

        workspace = self._enter(Workspace(root))
        session = ReadSession(workspace, self._terms, self._connection)
        self._answer(session, messages.WRITING | messages.READING)

    def _begin_with_files(self, root: str, called: messages.Field) -> None:
        from ntt_backup.receiver.file_areas import AREAS
        from ntt_backup.receiver.file_session import FileSession

        area = AREAS.get(str(called))
        if area is None:
            raise ProtocolError(f"files is none of {', '.join(AREAS)}")
        self._require(area.word, area.called)
        workspace = self._enter(Workspace(root))
        files = area(workspace.root)
        self._answer(FileSession(files, self._terms, self._connection), messages.ANY)

    def _answer(self, session: QuestionSession, sessions: int) -> None:
        self._session = session
        self._connection.admit(messages.to_receiver(sessions))
        self._handlers = session.handlers()

    def _require(self, word: str, what: str) -> None:
        if word not in self._terms.allow:
            raise Refusal("refused", f"this receiver takes no {what} (--allow)")

    def _begin_to_write(self, root: str, name: tuple[str, str, str], kind: int, names: int) -> None:
        from ntt_backup.receiver.write_session import WriteSession
        from ntt_backup.receiver.write_workspace import WriteWorkspace

        workspace = self._enter(WriteWorkspace(root, *name, self._connection.show_life))
        terms, connection = self._terms, self._connection
        self._session = WriteSession(workspace, terms, connection, kind, self._by_file, names)

        def place(payload: memoryview) -> None:
            identity = messages.PLACE.read(payload)
            workspace.place()
            if identity:
                workspace.identify(identity.hex(), messages.NAMES_OF_HASHES[names])
            self._ready()

        self._handlers = {**self._session.handlers(), messages.PLACE: place}

    def _enter(self, workspace: AnyWorkspace) -> AnyWorkspace:
        self._workspace = workspace
        self._by_file = self._by_file or not can_syncfs(workspace.device)
        return workspace

    def _ready(self) -> None:
        workspace = self._workspace
        assert workspace is not None
        free, total = workspace.free()
        system = os.uname()
        fields: dict[str, messages.Field] = {
            "free_bytes": free,
            "total_bytes": total,
            "free_inodes": workspace.free_inodes(),
            "clock_us": int(time.time() * 1e6),
            "system": f"{system.sysname} {system.release}",
            "sync": "fsync" if self._by_file else "syncfs",
            "placed": int(workspace.placed),
            "packs": int(workspace.has_packs),
            "empty": int(workspace.empty),
            "target": workspace.identity,
            "names": workspace.hash_of_names,
        }
        self._connection.say(messages.READY.frame(fields))

    def _bye(self, payload: memoryview) -> None:
        if self._session is not None and not self._session.between_batches:
            raise ProtocolError("a BYE within a batch")
        if self._connection.waiting:
            raise ProtocolError("more after a BYE")
        self._connection.ended = self._dismissed = True


def _text(asked: dict[str, messages.Field], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is missing")
    return value
