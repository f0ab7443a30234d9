"""A look at a remote that the `tar` strategy will send to; see `session.Probe`.

The trial goes into a scratch directory, by the job's own session: two batches in a row, fetched
back and compared byte by byte, with the modes that the files have there.

Called by `preflight`, through the registry, and by `bench` for its own scratch directory.
"""

from __future__ import annotations

import io
import tarfile
import time
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.errors import BackupError, RemoteCannotStore
from ntt_backup.model import Batch, Receipt
from ntt_backup.strategy.session import Facts, SessionPlan
from ntt_backup.strategy.tar import TarSession
from ntt_backup.strategy.trial import TRIAL_SECONDS, Deadline, trial
from ntt_backup.transport import Transport
from ntt_backup.transport.shell import ask
from ntt_backup.transport.storage import explain_root
from ntt_backup.wording import many

_STEM: Final = ".ntt-check-"


def remote_facts(transport: Transport, root: str, stem: str, scratch: str) -> Facts:
    """Ask the remote about itself, and have it make the scratch directory unless that is "".

    What earlier ones left there is removed; their names begin with stem.
    """
    script = resources.files("ntt_backup.transport").joinpath("probe.sh").read_text("utf-8")
    before = time.time()
    answer = ask(
        transport,
        script,
        {"root": root, "stem": stem, "scratch": scratch},
        doing="its system and free space",
        timeout=transport.connect_timeout,
    )
    after = time.time()
    said = dict(
        line.split("=", 1) for line in answer.decode("utf-8", "replace").splitlines() if "=" in line
    )
    if problem := said.get("problem"):
        raise explain_root(problem)
    theirs = float(said["clock"]) if said.get("clock", "").isdigit() else before
    free = said.get("free_kib", "")
    return Facts(
        system=said.get("system", "unknown system"),
        program=said.get("tar", "no tar"),
        free_bytes=int(free) * 1024 if free.isdigit() else None,
        # Their clock was read somewhere between, and shows whole seconds.
        skew_s=max(0.0, before - theirs - 1, theirs - after),
        placed=said.get("by-hash") == "present",
    )


class TarProbe:
    """See `session.Probe`. The plan's run_id names the scratch directory."""

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._stem = f"{_STEM}{plan.owner}"
        self._scratch = f"{plan.root}/{self._stem}.{plan.run_id}"

    def facts(self, *, will_try_out: bool) -> Facts:
        plan = self._plan
        scratch = self._scratch if will_try_out else ""
        return remote_facts(plan.transport, plan.root, self._stem, scratch)

    def try_out(self) -> str:
        with trial(self._plan, self._scratch) as (plan, batches):
            try:
                _send(plan, batches)
            except BackupError:
                with suppress(BackupError):
                    self._fetch_and_remove()
                raise
            archive = self._fetch_and_remove()
        sent = {blob.blobid for batch in batches for blob in batch.blobs}
        _compare(archive, sent)
        trial_batches = many(len(batches), "batch", "batches")
        return f"{many(len(sent), 'trial blob')} in {trial_batches} by tar, identical"

    def make_place(self) -> None:
        said = ask(
            self._plan.transport,
            'umask 022; { mkdir "$place" 2>&1 || [ -d "$place" ]; } && echo made',
            {"place": f"{self._plan.root}/by-hash"},
            doing="to make by-hash",
            timeout=self._plan.transport.connect_timeout,
        )
        if said.split()[-1:] != [b"made"]:
            raise explain_root(said.decode("utf-8", "backslashreplace").strip())

    def close(self) -> None:
        """Nothing is kept between questions."""

    def _fetch_and_remove(self) -> bytes:
        return ask(
            self._plan.transport,
            'cd "$scratch" && tar -c -f - by-hash; cd / && rm -rf "$scratch"',
            {"scratch": self._scratch},
            doing="the trial blobs back, and the removal of its scratch directory",
            timeout=TRIAL_SECONDS,
        )


def _send(plan: SessionPlan, batches: list[Batch]) -> None:
    session = TarSession(replace(plan, owner="check", run_id="check", slot="0"))
    try:
        for batch in batches:
            session.put(batch)
        deadline = Deadline()
        while session.in_flight:
            for outcome in session.collect(1.0):
                if not isinstance(outcome, Receipt):
                    raise outcome.error
            deadline.check()
    except BaseException:
        session.abort()
        raise
    session.close()


def _compare(archive: bytes, sent: set[str]) -> None:
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
            hint="look for an ACL or a mount option there that sets modes",
        )
