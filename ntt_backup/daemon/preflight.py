"""The preflight finds out, before a run sends anything, whether everything is in place.

A test connection that only says `echo` proves little: the real job once hung in X11 forwarding, and
in an account's own RemoteCommand, where the echo had passed by another way. So the preflight does
what the job does, with the same options: it opens the job's own session; and a check sends two
real batches in a row that leave no trace on the remote. How is the strategy's: see
`strategies.probe.Probe`. The preflight asks whoever holds the session by the words of
`worker_main`.

Each step says ok, a warning, or what is wrong and what to do. Steps are independent where they can
be, so that one call shows all that is wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from ntt_backup.catalog import (
    connection,
    history,
    identities,
    listed_files,
    privileges,
    proofs,
    selection,
    stats,
)
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.schema_check import verify_rights, verify_schema
from ntt_backup.client.receiver_connection import old_receiver
from ntt_backup.client.remote_errors import explain_gone, other_names
from ntt_backup.config import Settings, application_name
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.errors import (
    BackupError,
    ConfigError,
    RemoteCannotStore,
    RemoteUnreachable,
    SourceError,
)
from ntt_backup.formatting import duration, many, size
from ntt_backup.model import Blob, PendingEstimate, Reason
from ntt_backup.process.messages import Done, RemoteProbed
from ntt_backup.rollback_detection import lost_key
from ntt_backup.source.paths import Paths
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.probe import NOT_APPEND_ONLY, Facts
from ntt_backup.upload.worker_main import PLACE, PROBE, TRY_OUT

# Has the remote do a word of `worker_main`, and returns its answer. Raises as `Session` does.
Ask = Callable[[bytes], RemoteProbed | Done]

_SKEW_SECONDS: Final = 5.0
_LEAST_INODES: Final = 1000
_LEAST_FREE: Final = 64 * 1024 * 1024
_SAMPLE: Final = 8
_ESTIMATE_MS: Final = 2000
_SEARCH_MS: Final = 1000
_ID_SHOWN: Final = 64
_CLOCKS: Final = (
    "the clocks of this host and of the remote differ by {}: see `timedatectl` on both, and set up"
    " NTP where the time is wrong"
)
_UNREADABLE: Final = (
    "the remote has no python3: it takes blobs, but verify, reconcile, restore, drill and snapshot"
    " will not work; `ntt-backup-remote check` says what to do"
)


@dataclass(frozen=True, slots=True)
class CheckStep:
    """The result of one step: a text, a warning of what deserves a look, or the error."""

    text: str = ""
    warning: str = ""
    error: BackupError | None = None
    name: str = ""


def require_known(catalog: Connection, settings: Settings) -> None:
    """Raises ConfigError where the catalog knows no blob at all and the store has some.

    Nothing is pending then, and "done" would be true and a lie: it is the first day, or another
    database than the one that knows the blobs.
    """
    if settings.by_path or selection.any_known(catalog):
        return
    try:
        Store.of(settings.source).probe()
    except SourceError:
        return
    where = [connection.describe(settings.catalog.url), f"{settings.source.root}"]
    raise ConfigError(
        "the catalog knows no blob, and the store has some",
        detail="; ".join([*where, *settings.part.words]),
        hint="`ntt-backup-remote scan` registers them; or correct catalog.url (NTT_DB_URL)",
    )


class Preflight:
    """Takes the steps that a check and the start of a run have in common, one after the other.

    Between two steps, `pending` says whether there is something to send, as far as is known,
    `estimate` how much, and `strategy` by which strategy, once the remote was reached.

    Args:
        settings: Of the run.
        check: Whether nothing may be made on the remote. Otherwise by-hash is made where it is
            missing and nothing was copied yet.
        watch: Whether a catalog without blobs is no error, since blobs may be registered later.
    """

    def __init__(self, settings: Settings, *, check: bool = False, watch: bool = False) -> None:
        self._settings = settings
        self._check = check
        self._watch = watch
        paths = Paths(self._look_up_paths) if settings.by_path else None
        self._store = Store.of(settings.source, paths=paths)
        self._catalog: Connection | None = None
        self._facts: Facts | None = None
        self._any_copied: bool | None = None
        self._sizes: list[int] = []
        self._packs = settings.remote.packs
        self.strategy: str | None = None
        self.pending = False
        self.estimate: PendingEstimate | None = None

    def steps(self, ask: Ask) -> Iterator[CheckStep]:
        """Yields each step as it is done; none raises a BackupError."""
        part = self._settings.part.words
        source = guarded("source", lambda: CheckStep("; ".join([self._store.probe(), *part])))
        yield source
        yield guarded("catalog", self._look_at_catalog)
        if (catalog := self._catalog) is not None:
            yield guarded("rights", lambda: self._rights(catalog))
            yield guarded("marks", lambda: self._look_for_marks(catalog))
            if source.error is None:
                yield guarded("pending", lambda: self._look_for_pending(catalog))
        yield guarded("remote", lambda: self._look_at_remote(ask))
        if (facts := self._facts) is not None:
            if self._check:
                yield guarded("transfer", lambda: _transfer(ask))
            yield guarded("clock", lambda: _clock(facts))
            if catalog is not None:
                yield guarded("space", lambda: self._look_for_space(catalog, facts))
                if not facts.placed:
                    name = "store" if self._packs else "by-hash"
                    yield guarded(name, lambda: self._look_for_place(catalog, ask, facts))
                yield guarded("identity", lambda: self._look_for_identity(catalog, ask))

    def _look_up_paths(self, blobids: Sequence[str]) -> Mapping[str, list[bytes]]:
        assert self._catalog is not None  # The blobs come from there.
        return listed_files.places_of(self._catalog, blobids)

    def close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()

    def _look_at_catalog(self) -> CheckStep:
        settings = self._settings
        name = application_name("check" if self._check else "")
        conn = connection.connect(settings.catalog.url, name, part=settings.part)
        try:
            connection.refuse_shared_session(conn, settings.catalog.url)
            command = "check" if self._check else privileges.of("run", packs=self._packs)
            warnings = verify_schema(conn, settings.target, command)
            if settings.by_path:
                verify_schema(conn, settings.target, "files by path")
        except BaseException:
            conn.close()
            raise
        self._catalog = conn
        server = conn.info.parameter_status("server_version") or "unknown"
        text = f"{connection.describe(settings.catalog.url)}, PostgreSQL {server}"
        return CheckStep(text, warning="; ".join(warnings))

    def _rights(self, catalog: Connection) -> CheckStep:
        verify_rights(catalog, self._settings.target, privileges.of("run", packs=self._packs))
        return CheckStep(f"{catalog.info.user} may do what a run does")

    def _look_for_marks(self, catalog: Connection) -> CheckStep:
        target = self._settings.target
        contact = proofs.first_contact(catalog, target)
        if said := contact.warning(history.last_checks(catalog, target)):
            return CheckStep(warning=f"{said}: {proofs.RECONCILE}")
        return CheckStep("no mark of another program is left unchecked")

    def _look_for_pending(self, catalog: Connection) -> CheckStep:
        """Looks for a few pending blobs in the store: a wrong source.root shows here."""
        target = self._settings.target
        sample = selection.first_pending(catalog, target, _SAMPLE, _SEARCH_MS)
        if sample is None:
            self.pending = True
            blobs = many(self._estimate(catalog).blobs, "pending blob")
            said = (
                f"about {blobs}; none was looked at, since finding one takes long: the index has"
                " many dead entries, which VACUUM removes once no older transaction is left"
            )
            return CheckStep(warning=said)
        if not sample:
            if self._settings.by_path:
                return CheckStep("no file that was read is pending")
            try:
                require_known(catalog, self._settings)
            except ConfigError as error:
                if not self._watch:
                    raise
                return CheckStep(warning=f"{error}; {error.hint}")
            return CheckStep("nothing is pending")
        self.pending = True
        self._estimate(catalog)
        return self._look_in_store(sample)

    def _look_in_store(self, sample: list[Blob]) -> CheckStep:
        checked = self._store.inspect(sample, verify=False)
        # A wrong source.hash has to show before a new target gets a marker, which keeps it.
        smallest = sorted(checked.ready, key=lambda blob: blob.expected)[:1]
        self._store.inspect(smallest, verify=True)
        self._sizes = [blob.size for blob in checked.ready if blob.size is not None]
        looked = many(len(sample), "examined pending blob")
        if not checked.failed:
            return CheckStep(f"{looked} can be sent")
        reasons = Counter(failure.reason for failure in checked.failed)
        if reasons[Reason.MISSING] == len(sample):
            said = f"none of {looked} is in {self._store.root}; is the whole store mounted?"
            return CheckStep(warning=said)
        counted = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        first = checked.failed[0]
        said = (
            f"{len(checked.failed)} of {looked} cannot be sent: {counted}, such as"
            f" {first.blobid[:_ID_SHOWN]} ({first.detail or first.reason}); a run leaves such blobs"
            ' out, marks them as failed and ends with 7: see "Failed blobs" in docs/first-aid.md'
        )
        return CheckStep(warning=said)

    def _look_at_remote(self, ask: Ask) -> CheckStep:
        answer = ask(PROBE)
        assert isinstance(answer, RemoteProbed)
        self._facts = found = Facts(**answer.facts)
        self.strategy = answer.strategy
        remote = self._settings.remote
        where = remote.url if remote.kind == "s3" else remote.host or "this machine"
        if found.other_layout and not found.placed:
            raise ConfigError(
                f"the target has {'plain files' if self._packs else 'packs'}, and remote.layout is"
                f" {remote.layout}",
                detail=remote.where,
                hint="set remote.layout as it was, or name another directory as the target",
            )
        # What has blobs and no marker is of an earlier version.
        theirs = found.names or ("blake3" if found.placed and not found.empty else "")
        if theirs not in ("", ours := self._settings.source.hash):
            raise other_names(ours, theirs)
        if self.strategy == "tar" and self._settings.by_path:
            raise ConfigError(
                "files that go by their paths cannot be sent by the strategy tar",
                hint="install python3 on the remote, or use a target with remote.layout = packs",
            )
        text = f"{where}: {found.system}, {found.program}; strategy {self.strategy}"
        signs = self._packs and self._settings.pack.recipients
        lost = lost_key(self._settings, SigningKeys.of(self._settings)) if signs else ""
        return CheckStep(text, warning=lost)

    def _look_for_place(self, catalog: Connection, ask: Ask, facts: Facts) -> CheckStep:
        """Creates by-hash for a new target, and warns then if nothing can be read from the remote.

        Later, a missing by-hash means a disk that is not mounted: a new by-hash would fill the disk
        below the mount point.
        """
        remote = self._settings.remote
        path = remote.blobs
        if self._copied(catalog):
            but = ", but the catalog has blobs copied to it"
            if self._packs:
                from ntt_backup.packstore import marker

                raise marker.gone(path, but)
            raise explain_gone(f"{path} is missing{but}")
        if self._check:
            return CheckStep(f"{path} will be made by the first run")
        identity = self._make_place(ask) or facts.identity  # An old receiver tells none.
        self._facts = replace(facts, identity=identity, placed=True)
        return CheckStep(f"{path} was made", warning="" if facts.readable else _UNREADABLE)

    def _look_for_identity(self, catalog: Connection, ask: Ask) -> CheckStep:
        """Requires the place whose blobs are marked in the catalog.

        At the first contact the place gets an identity, and the catalog notes it.
        """
        target, facts = self._settings.target, self._facts
        assert facts is not None
        found = facts.identity
        if found is None:
            if identities.known_identity(catalog, target):
                raise old_receiver()
            return CheckStep(warning=f"{old_receiver()}; {old_receiver().hint}")
        copied = partial(self._copied, catalog)
        if facts.empty and not found and copied():
            path = self._settings.remote.blobs
            raise explain_gone(f"{path} is empty, but the catalog has blobs copied to it")
        identities.require_own(catalog, target, found, empty=facts.empty, copied=copied)
        if self._check:
            return CheckStep(found or "the first run gives the target one")
        if not found:
            found = self._make_place(ask)
        if not found:
            raise old_receiver()
        identities.note_identity(catalog, target, found)
        return CheckStep(found)

    def _copied(self, catalog: Connection) -> bool:
        """Returns whether any blob is marked as copied. Asks once, since that may take long."""
        if self._any_copied is None:
            self._any_copied = selection.any_copied(catalog, self._settings.target)
        return self._any_copied

    def _refuse_bare_mount_point(self) -> None:
        """Raises RemoteUnreachable where a daemon would take a bare mount point for a new disk.

        While disks are swapped the mount point is empty, as a new medium is.
        """
        settings, remote = self._settings, self._settings.remote
        if not (self._watch and settings.media and remote.kind == "file"):
            return
        with suppress(OSError):
            here = Path(remote.path).stat().st_dev
            if here in (Path("/").stat().st_dev, settings.source.root.stat().st_dev):
                raise RemoteUnreachable(
                    "no medium is there",
                    detail=f"{remote.path} is on a file system of this machine",
                    hint="mount the disk; a run without --watch begins a new medium wherever it is",
                )

    def _make_place(self, ask: Ask) -> str:
        """Has the remote make what is missing of the place; returns the identity of the place."""
        self._refuse_bare_mount_point()
        answer = ask(PLACE)
        assert isinstance(answer, Done)
        return answer.text

    def _estimate(self, catalog: Connection) -> PendingEstimate:
        if self.estimate is None:
            target = self._settings.target
            self.estimate = stats.pending_estimate(catalog, target, _ESTIMATE_MS)
        return self.estimate

    def _look_for_space(self, catalog: Connection, facts: Facts) -> CheckStep:
        estimate = self._estimate(catalog)
        need, unsized = _need(estimate, self._sizes)
        about = "" if estimate.exact and not estimate.unsized else "about "
        if self._settings.remote.kind == "s3":
            return CheckStep(f"{about}{size(need)} pending{unsized}")
        if facts.free_bytes is None:
            return CheckStep(warning="the remote does not say how much space is free")
        free = size(facts.free_bytes)
        text = f"{free} free, {about}{size(need)} pending{unsized}"
        # A guess is no reason to refuse.
        if facts.free_bytes < min(_LEAST_FREE, max(estimate.bytes, 1)):
            raise RemoteCannotStore(
                "the remote is full", detail=text, hint="free space on the remote"
            )
        files = many(estimate.blobs, "blob")
        if (inodes := facts.free_inodes) is not None:
            said = f"{inodes:,} inodes free, {about}{files} pending"
            if inodes < min(_LEAST_INODES, max(estimate.blobs, 1)):
                raise RemoteCannotStore(
                    "the remote has no inodes left",
                    detail=said,
                    hint="remove files on the remote, or move to a file system with more inodes"
                    " (df -i; mkfs.ext4 -N)",
                )
            if inodes < estimate.blobs:
                return CheckStep(warning=f"not all will fit: {said}")
        if facts.free_bytes < need:
            return CheckStep(warning=f"not all will fit: {text}")
        return CheckStep(text)


def _need(estimate: PendingEstimate, sizes: list[int]) -> tuple[int, str]:
    """Returns the pending bytes, and a remark on the guessed part of them.

    A blob without a size is taken for one like the others, or else like those of these sizes.
    """
    unsized, sized = estimate.unsized, estimate.blobs - estimate.unsized
    if not unsized:
        return estimate.bytes, ""
    said = f"{unsized:,} of {many(estimate.blobs, 'blob')} have no size in the catalog"
    if not (sized or sizes):
        return estimate.bytes, f" ({said} and are not counted)"
    mean = estimate.bytes // sized if sized else sum(sizes) // len(sizes)
    return estimate.bytes + mean * unsized, f" ({said} and are estimated at {size(mean)} each)"


def guarded(name: str, work: Callable[[], CheckStep]) -> CheckStep:
    """Returns the step that work returns, or a step with the error that work raises."""
    try:
        return replace(work(), name=name)
    except BackupError as error:
        return CheckStep(error=error, name=name)


def _transfer(ask: Ask) -> CheckStep:
    """Sends trial blobs; warns of a bucket where a thief of the credentials may delete."""
    began = time.monotonic()
    answer = ask(TRY_OUT)
    assert isinstance(answer, Done)
    text = f"{answer.text}, {time.monotonic() - began:.1f} s"
    return CheckStep(text, warning=text if NOT_APPEND_ONLY in text else "")


def _clock(facts: Facts) -> CheckStep:
    if facts.skew_s is None:
        return CheckStep("the remote does not tell its time")
    if facts.skew_s > _SKEW_SECONDS:
        return CheckStep(warning=_CLOCKS.format(duration(facts.skew_s)))
    return CheckStep("the clocks agree")
