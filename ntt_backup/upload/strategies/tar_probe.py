"""The `tar` strategy has this probe; see `probe.Probe`.

The trial goes into a scratch directory by a session like the run's: two batches in a row, fetched
back and compared byte by byte, with their modes. The connection that made the directory stays open
as long as it is needed: its end, however it comes, removes the directory.
"""

from __future__ import annotations

import io
import secrets
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.layout import UNKNOWN_IDENTITY, Marker, marker_text, read_marker
from ntt_backup.client.channel import Channel
from ntt_backup.client.receiver_connection import identity_in
from ntt_backup.client.remote_errors import explain_root
from ntt_backup.client.remote_shell import (
    ANSWER,
    ScriptAnswer,
    ask,
    late,
    require_success,
    shell_script,
)
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Transport
from ntt_backup.errors import BackupError, RemoteCannotStore
from ntt_backup.formatting import many
from ntt_backup.model import Batch, Receipt
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.probe import TRIAL_SECONDS, Facts, described, require_time, trial
from ntt_backup.upload.strategies.tar import TarSession
from ntt_backup.wire.framing import IDENTITY_BYTES

_STEM: Final = ".ntt-check-"
_ASKING: Final = "its system and free space"
_REMOVING: Final = "the removal of a scratch directory"
_KEPT: Final = b"kept=yes"


class ScratchDirectory:
    """A scratch directory on the remote, and what the remote says about itself (facts).

    The directory is removed when this side lets go of it: by `close`, or because it was killed.
    scratch is its path, whose name begins with stem; "" for no directory. Raises RemoteUnreachable,
    RemoteDenied and RemoteCannotStore.
    """

    def __init__(self, transport: Transport, root: str, stem: str, scratch: str) -> None:
        script = resources.files(__package__).joinpath("tar_probe.sh").read_text("utf-8")
        self._answer = ScriptAnswer()
        values = {"root": root, "stem": stem, "scratch": scratch}
        command, source = shell_script(self._answer.script(script), values)
        timeout = transport.connect_timeout
        before = time.time()
        self._channel = Channel(transport, command)
        try:
            self._channel.greet(source, ANSWER, timeout, doing=_ASKING)
            said = self._read_facts(time.monotonic() + timeout, kept=bool(scratch))
            self.facts = _facts(said, before, time.time())
        except BaseException:
            self.abort()
            raise
        if not scratch:
            self.abort()

    def close(self) -> None:
        """Removes the directory; returns when that is done."""
        deadline = time.monotonic() + TRIAL_SECONDS
        try:
            self._channel.end_input()
            while data := self._answer.hear(self._channel, deadline):
                continue
            if data is None:
                raise late(self._channel, _REMOVING)
            require_success(self._channel, self._answer, _REMOVING)
        finally:
            self.abort()

    def abort(self) -> None:
        """Ends the connection now. Never raises."""
        self._channel.abort()

    def _read_facts(self, deadline: float, *, kept: bool) -> dict[str, str]:
        """Reads name=value lines; where a directory is kept, up to the line that says so."""
        said = b""
        while not (kept and _KEPT in said) and (data := self._answer.hear(self._channel, deadline)):
            said += data
        if not (kept and _KEPT in said):
            if data is None:
                raise late(self._channel, _ASKING)
            require_success(self._channel, self._answer, _ASKING)
        lines = said.decode("utf-8", "replace").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def _facts(said: Mapping[str, str], before: float, after: float) -> Facts:
    """Returns the facts. before and after: the times of the question and of the answer."""
    if problem := said.get("problem"):
        raise explain_root(problem)
    clock = float(said["clock"]) if said.get("clock", "").isdigit() else before
    free, inodes = said.get("free_kib", ""), said.get("free_inodes", "")
    return Facts(
        system=said.get("system", "unknown system"),
        program=said.get("tar", "no tar"),
        free_bytes=int(free) * 1024 if free.isdigit() else None,
        # The remote's clock was read somewhere between, and shows whole seconds.
        skew_s=max(0.0, before - clock - 1, clock - after),
        placed=said.get("by-hash") == "present",
        free_inodes=int(inodes) if inodes.isdigit() else None,
        readable=said.get("python") == "present",
        identity=_marker(said.get("marker", "")).identity,
        names=_marker(said.get("marker", "")).hash,
        empty=said.get("empty") == "yes",
    )


def _marker(text: str) -> Marker:
    """Returns a marker; without identity for no text. Raises RemoteDenied for another text."""
    found = Marker(0, UNKNOWN_IDENTITY if text else "", "")
    with suppress(ValueError):
        found = read_marker(text.encode())
    identity_in({"target": found.identity})
    return found


class TarProbe:
    """See `probe.SessionProbe`. The spec's run_id names the scratch directory."""

    strategy = "tar"

    def __init__(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._stem = f"{_STEM}{spec.owner}"
        self._path = f"{spec.root}/{self._stem}.{spec.run_id}.{secrets.token_hex(4)}"
        self.lingers = False

    def connect(self) -> None:
        """Does nothing: each question is a connection."""

    def facts(self) -> Facts:
        return self._directory("").facts

    def try_out(self) -> str:
        scratch = self._directory(self._path)
        try:
            with trial() as (store, batches):
                self._send(store, batches)
                archive = self._fetch()
        except BaseException:
            with suppress(BackupError):
                scratch.close()
            raise
        scratch.close()
        _compare(archive, {blob.blobid for batch in batches for blob in batch.blobs})
        return f"{described(batches)} by tar, identical"

    def make_place(self) -> str:
        wanted = secrets.token_hex(IDENTITY_BYTES)
        content = marker_text(wanted, self._spec.names or "blake3")
        said = ask(
            self._spec.transport,
            resources.files(__package__).joinpath("tar_place.sh").read_text("utf-8"),
            {
                "root": self._spec.root,
                "token": wanted[:8],
                "content": content.decode("ascii").strip(),
            },
            doing="to make by-hash",
            timeout=self._spec.transport.connect_timeout,
        ).decode("utf-8", "backslashreplace")
        told, made, marker = said.rpartition("made=")
        if not made:
            raise explain_root(told.strip() or marker.strip())
        return _marker(marker.strip()).identity

    def hand_over(self) -> None:
        """Does nothing, as `close`: no connection outlives its question."""

    def close(self) -> None: ...

    def _directory(self, path: str) -> ScratchDirectory:
        """Returns a look at the remote. path: of a scratch directory; "" for none."""
        return ScratchDirectory(self._spec.transport, self._spec.root, self._stem, path)

    def _send(self, store: Store, batches: list[Batch]) -> None:
        spec = replace(self._spec, root=self._path, owner="check", run_id="check", slot="0")
        session = TarSession(spec, store)
        try:
            for batch in batches:
                session.put(batch)
            began = time.monotonic()
            while session.in_flight:
                for outcome in session.collect(1.0):
                    if not isinstance(outcome, Receipt):
                        raise outcome.error
                require_time(began)
        except BaseException:
            session.abort()
            raise
        session.close()
        self.lingers = session.lingers

    def _fetch(self) -> bytes:
        return ask(
            self._spec.transport,
            'cd "$scratch" && tar -c -f - by-hash || :',
            {"scratch": self._path},
            doing="the trial blobs back",
            timeout=TRIAL_SECONDS,
        )


def _compare(archive: bytes, sent: set[str]) -> None:
    """Raises RemoteCannotStore unless the archive holds what was sent, with mode 644."""
    arrived: dict[str, int] = {}
    # What is no archive, or ends early, brought nothing more back.
    with suppress(tarfile.TarError), tarfile.open(mode="r:", fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            name = Path(member.name).name
            if content is not None and blake3(content.read()).hexdigest() == name:
                arrived[name] = member.mode
    if arrived.keys() != sent:
        raise RemoteCannotStore(
            "what arrived is not what was sent",
            detail=f"{len(arrived)} of {many(len(sent), 'trial blob')} came back identical",
            hint="do not run the backup before this is understood",
        )
    if odd := {f"{mode:o}" for mode in arrived.values() if mode != 0o644}:
        raise RemoteCannotStore(
            f"files arrive with mode {', '.join(sorted(odd))} instead of 644",
            hint="look for an ACL or a mount option on the remote that sets modes",
        )
