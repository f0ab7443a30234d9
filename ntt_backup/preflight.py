"""Is everything in place? Asked by `check`, by the systemd unit, and by every run before it starts.

A test connection that only says `echo` proves little: the real job once hung in X11 forwarding, and
in an account's own RemoteCommand, where the echo had passed by another way. So the preflight does
what the job does, with the same options: it opens the job's own session, sends two real batches in
a row into a scratch directory on the remote, fetches them back and compares. Two in a row, because
that shows that the far side finds the border between them.

Each step says ok, a warning, or what is wrong and what to do. Steps are independent where they can
be, so that one call shows all that is wrong. Called by `cli` (check) and `coordinator` (run).
"""

from __future__ import annotations

import io
import os
import platform
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Final

import humanize
from blake3 import blake3

from ntt_backup import __version__, identity
from ntt_backup.catalog import db, figures, verify_schema
from ntt_backup.config import Settings
from ntt_backup.errors import BackupError, RemoteCannotStore, RemoteDenied
from ntt_backup.events import EventLog
from ntt_backup.lock import pid_lock
from ntt_backup.model import Batch, Blob, Reason, Receipt, relative_path
from ntt_backup.process import output_of
from ntt_backup.store import Store
from ntt_backup.strategy import open_session, resolve
from ntt_backup.strategy.session import SessionPlan
from ntt_backup.transport.shell import ask
from ntt_backup.transport.ssh import Ssh
from ntt_backup.transport.storage import explain_gone, explain_root

_TRIAL_SIZES: Final = ((1, 513, 70_000), (0, 4096))
_TRIAL_SECONDS: Final = 60.0
_SKEW_SECONDS: Final = 5.0
_LEAST_FREE: Final = 64 * 1024 * 1024
_SAMPLE: Final = 8
_ESTIMATE_MS: Final = 2000


@dataclass(frozen=True, slots=True)
class Step:
    """What one step found. error is set where it failed, warning where it only deserves a look."""

    name: str
    text: str = ""
    warning: str = ""
    error: BackupError | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the remote says about itself. Bytes and epoch seconds. placed: by-hash is there."""

    free_bytes: int | None
    skew_s: float
    system: str
    tar: str
    placed: bool


def check(settings: Settings) -> Iterator[Step]:
    """All steps, as they are done; none raises. Changes nothing, here or there."""
    yield _guarded("log", lambda: _log(settings))
    yield _guarded("lock", lambda: _lock(settings))
    yield from _steps(settings, f"check-{os.getpid()}", try_out=True, prepare=False)


def require(
    settings: Settings, run_id: str, *, watch: bool, alive: Callable[[], None]
) -> list[str]:
    """What a run needs, its own lock and log apart; the warnings. Raises the first step's error.

    A run that has nothing to send and will end tries out no transfer. by-hash on the remote is made
    where it is missing and nothing was copied yet. alive is called between steps.
    """
    warnings = []
    for step in _steps(settings, run_id, try_out=watch, prepare=True):
        if step.error is not None:
            raise step.error
        if step.warning:
            warnings.append(f"{step.name}: {step.warning}")
        alive()
    return warnings


def _steps(settings: Settings, run_id: str, *, try_out: bool, prepare: bool) -> Iterator[Step]:
    """try_out: send trial blobs also where nothing is pending. prepare: make by-hash if need be."""
    source = _guarded("source", lambda: _source(settings))
    yield source
    catalog = _guarded("catalog", lambda: _catalog(settings))
    yield catalog
    if source.error is None and catalog.error is None:
        sample: list[Blob] = []
        yield _guarded("pending", lambda: _pending(settings, sample))
        try_out = try_out or bool(sample)
    stem = f".ntt-check-{identity.owner(settings)}"
    scratch = f"{settings.remote.path}/{stem}.{run_id}"
    facts: list[Facts] = []

    def remote() -> Step:
        facts.append(remote_facts(settings, stem, scratch if try_out else ""))
        return Step("", f"{settings.remote.host}: {facts[0].system}, {facts[0].tar}")

    step = _guarded("remote", remote)
    yield step
    if step.error is not None:
        yield _guarded("versions", _versions)
        return
    if try_out:
        yield _guarded("transfer", lambda: _transfer(settings, scratch))
    yield _guarded("clock", lambda: _clock(facts[0]))
    if catalog.error is None:
        yield _guarded("space", lambda: _space(settings, facts[0]))
        if not facts[0].placed:
            yield _guarded("by-hash", lambda: _by_hash(settings, prepare=prepare))
    yield _guarded("versions", _versions)


def _guarded(name: str, work: Callable[[], Step]) -> Step:
    try:
        return replace(work(), name=name)
    except BackupError as error:
        return Step(name, error=error)


def _log(settings: Settings) -> Step:
    EventLog(settings.log.jsonl, "check").close()
    return Step("", str(settings.log.jsonl))


def _lock(settings: Settings) -> Step:
    with pid_lock(settings.lock.file):
        return Step("", f"{settings.lock.file} is free")


def _source(settings: Settings) -> Step:
    return Step("", Store(settings.source.root).probe())


def _catalog(settings: Settings) -> Step:
    conn = db.connect(settings.catalog.url, identity.application(settings) + "/check")
    try:
        warnings = verify_schema(conn, settings.target)
        server = conn.info.parameter_status("server_version") or "unknown"
        text = f"{db.describe(settings.catalog.url)}, PostgreSQL {server}"
        return Step("", text, warning="; ".join(warnings))
    finally:
        conn.close()


def _pending(settings: Settings, sample: list[Blob]) -> Step:
    """A few pending blobs, put into sample, are looked for in the store: a wrong source.root shows
    here.
    """
    conn = db.connect(settings.catalog.url, identity.application(settings) + "/check")
    try:
        sample += islice(figures.iter_pending(conn, settings.target), _SAMPLE)
    finally:
        conn.close()
    if not sample:
        return Step("", "nothing is pending")
    checked = Store(settings.source.root).inspect(sample, verify=False)
    missing = [one for one in checked.failed if one.reason is Reason.MISSING]
    if len(missing) == len(sample):
        return Step(
            "",
            "",
            warning=f"none of {len(sample)} pending blobs looked for is in {settings.source.root}",
        )
    return Step("", f"{len(checked.ready)} of {len(sample)} pending blobs looked at can be sent")


def remote_facts(settings: Settings, stem: str, scratch: str) -> Facts:
    """Ask the remote about itself, and have it make the scratch directory unless that is ""."""
    script = resources.files("ntt_backup.transport").joinpath("probe.sh").read_text("utf-8")
    before = time.time()
    answer = ask(
        Ssh(settings.remote),
        script,
        {"root": settings.remote.path, "stem": stem, "scratch": scratch},
        doing="its system and free space",
        timeout=2.0 * settings.remote.connect_timeout,
    )
    after = time.time()
    said = dict(
        line.split("=", 1) for line in answer.decode("utf-8", "replace").splitlines() if "=" in line
    )
    if problem := said.get("problem"):
        raise explain_root(problem)
    theirs = float(said["clock"]) if said.get("clock", "").isdigit() else before
    # Their clock was read somewhere between, and shows whole seconds.
    skew = max(0.0, before - theirs - 1, theirs - after)
    free = said.get("free_kib", "")
    return Facts(
        free_bytes=int(free) * 1024 if free.isdigit() else None,
        skew_s=skew,
        system=said.get("system", "unknown system"),
        tar=said.get("tar", "no tar"),
        placed=said.get("by-hash") == "present",
    )


def _transfer(settings: Settings, scratch: str) -> Step:
    """Two batches in a row through the job's own session, fetched back, compared, and removed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ntt-check-") as place:
        batches = [_make_batch(Path(place), sizes) for sizes in _TRIAL_SIZES]
        try:
            _send(settings, Path(place), scratch, batches)
        except BackupError:
            with suppress(BackupError):
                _fetch_and_remove(settings, scratch)
            raise
        archive = _fetch_and_remove(settings, scratch)
    sent = {blob.blobid for batch in batches for blob in batch.blobs}
    _compare(archive, sent)
    return Step(
        "",
        f"{len(sent)} trial blobs in {len(batches)} batches by {resolve(settings.run.strategy)},"
        f" identical, {time.monotonic() - began:.1f} s",
    )


def _fetch_and_remove(settings: Settings, scratch: str) -> bytes:
    return ask(
        Ssh(settings.remote),
        'cd "$scratch" && tar -c -f - by-hash; cd / && rm -rf "$scratch"',
        {"scratch": scratch},
        doing="the trial blobs back, and the removal of its scratch directory",
        timeout=_TRIAL_SECONDS,
    )


def _make_batch(place: Path, sizes: tuple[int, ...]) -> Batch:
    blobs = []
    for size in sizes:
        content = os.urandom(size)
        blobid = blake3(content).hexdigest()
        path = place / relative_path(blobid)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        blobs.append(Blob(blobid, size))
    return Batch("trial", tuple(blobs))


def _send(settings: Settings, place: Path, scratch: str, batches: list[Batch]) -> None:
    session = open_session(
        settings.run.strategy,
        SessionPlan(
            transport=Ssh(settings.remote),
            store=Store(place),
            root=scratch,
            owner="check",
            run_id="check",
            slot="0",
            run=settings.run,
            bytes_per_second=None,
            on_bytes=lambda _: None,
        ),
    )
    try:
        for batch in batches:
            session.put(batch)
        deadline = time.monotonic() + _TRIAL_SECONDS
        while session.in_flight:
            for outcome in session.collect(1.0):
                if not isinstance(outcome, Receipt):
                    raise outcome.error
            if time.monotonic() > deadline:
                raise RemoteDenied(
                    "the remote gave no receipt for the trial batches",
                    detail=f"waited {_TRIAL_SECONDS:.0f} s for it to extract and sync them",
                )
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
            detail=f"{len(arrived)} of {len(sent)} trial blobs are identical",
            hint="do not run the backup before this is understood",
        )
    if odd := {f"{mode:o}" for mode in arrived.values() if mode != 0o644}:
        raise RemoteCannotStore(
            f"files arrive with mode {', '.join(sorted(odd))} instead of 644",
            hint="look for an ACL or a mount option there that sets modes",
        )


def _by_hash(settings: Settings, *, prepare: bool) -> Step:
    """by-hash is missing below remote.path. Made at the start of a target's life; later that means
    a disk that is not mounted, and what would be made there would fill the disk below.
    """
    conn = db.connect(settings.catalog.url, identity.application(settings) + "/check")
    try:
        begun = figures.any_copied(conn, settings.target)
    finally:
        conn.close()
    path = f"{settings.remote.path}/by-hash"
    if begun:
        raise explain_gone(f"{path} is missing, but the catalog has blobs copied to it")
    if not prepare:
        return Step("", f"{path} will be made by the first run")
    ask(
        Ssh(settings.remote),
        'umask 022; mkdir "$path" || [ -d "$path" ]',
        {"path": path},
        doing="to make by-hash",
        timeout=2.0 * settings.remote.connect_timeout,
    )
    return Step("", f"{path} was made")


def _clock(facts: Facts) -> Step:
    if facts.skew_s > _SKEW_SECONDS:
        return Step("", warning=f"the remote's clock is {facts.skew_s:.0f} s off; set up NTP there")
    return Step("", "the clocks agree")


def _space(settings: Settings, facts: Facts) -> Step:
    conn = db.connect(settings.catalog.url, identity.application(settings) + "/check")
    try:
        estimate = figures.pending_bytes_estimate(conn, settings.target, _ESTIMATE_MS)
    finally:
        conn.close()
    if estimate is None:
        return Step("", warning="the catalog took too long to say how much is pending")
    if facts.free_bytes is None:
        return Step("", warning="the remote does not say how much space is free")
    about = "" if estimate.exact else "about "
    need = humanize.naturalsize(estimate.bytes)
    free = humanize.naturalsize(facts.free_bytes)
    text = f"{free} free, {about}{need} pending"
    if facts.free_bytes < min(_LEAST_FREE, max(estimate.bytes, 1)):
        raise RemoteCannotStore("the remote is full", detail=text, hint="free space there")
    if facts.free_bytes < estimate.bytes:
        return Step("", warning=f"not all will fit: {text}")
    return Step("", text)


def _versions() -> Step:
    tools = [_version(["tar", "--version"]), _version(["ssh", "-V"])]
    return Step(
        "", f"ntt-backup {__version__}, Python {platform.python_version()}, " + ", ".join(tools)
    )


def _version(argv: list[str]) -> str:
    said = output_of(argv, timeout=5.0)
    return said.splitlines()[0] if said else f"{argv[0]} of unknown version"
