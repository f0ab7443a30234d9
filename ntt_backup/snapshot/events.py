"""The snapshots that a run takes have these events; see `ntt_backup.events`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ntt_backup.events import Amount, Event, FailureFields, Seconds, with_detail
from ntt_backup.formatting import duration, many, size
from ntt_backup.process.messages import Count, doc

SetName = Annotated[str, doc("the set: NAME of [snapshots.NAME]")]
VersionName = Annotated[str, Field(pattern=r"^\d{8}T\d{6}Z-[0-9a-f]{8}$")]
Read = Annotated[Count, doc("bytes of files that were read")]
Stored = Annotated[Count, doc("bytes of packs, compressed")]


class SnapshotStart(Event):
    """A version of a set is being taken."""

    set: SetName

    def _text(self) -> str:
        return f"taking a snapshot of {self.set}"


class SnapshotProgress(Event):
    """The version so far: every log.progress_interval seconds."""

    set: SetName
    files: Annotated[Count, doc("entries so far, also those that have not changed")]
    read: Read
    stored: Stored
    eta_s: Annotated[
        Amount | None, doc("seconds, by the size of the last version; null where none is known")
    ]

    def _text(self) -> str:
        left = "" if self.eta_s is None else f", about {duration(self.eta_s)} left"
        files = many(self.files, "file")
        did = f"{files}, {size(self.read)} read, {size(self.stored)} stored"
        return f"snapshot of {self.set}: {did}{left}"


class SnapshotComplete(Event):
    """The version is on the remote's stable storage, and can be restored."""

    set: SetName
    version: VersionName
    parent: Annotated[str, doc("the version that it is an increment of; empty for a full one")]
    files: Annotated[Count, doc("all entries: directories, too")]
    bytes: Annotated[Count, doc("bytes of all its files")]
    read: Read
    stored: Stored
    changed: Annotated[Count, doc("files that were read")]
    unsettled: Annotated[Count, doc("files that changed as often as they were read")]
    unreadable: Annotated[Count, doc("files that could not be read: it lacks them")]
    forgotten: Annotated[Count, doc("versions past retention that were removed")]
    duration_s: Seconds

    def _text(self) -> str:
        lacks = f"; {many(self.unreadable, 'file')} could NOT be read" if self.unreadable else ""
        gone = f"; {many(self.forgotten, 'version')} removed" if self.forgotten else ""
        return (
            f"snapshot of {self.set}: {self.version}, {many(self.files, 'file')},"
            f" {size(self.bytes)}; {size(self.read)} read, {size(self.stored)} stored in"
            f" {duration(self.duration_s)}{gone}{lacks}"
        )


class SnapshotFailed(FailureFields, Event):
    """No version of the set was made, but the upload of blobs continues.

    The field exit_code holds the exit code of `snapshot take`. The run ends with exit code 7 unless
    another cause decides its exit code.
    """

    set: Annotated[str, doc("the set; empty where the process died before any began")]

    def _text(self) -> str:
        of = f" of {self.set}" if self.set else ""
        return f"no snapshot{of}: {with_detail(self.message, self.detail)}"


class SnapshotsRecovered(Event):
    """Snapshots no longer fail: a version of each set was taken, or is not due yet.

    A run that watches emits this event once after `snapshot_failed`.
    """

    text = "no snapshot fails any more"
