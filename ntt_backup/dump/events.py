"""A dump of the catalog has these events; see `ntt_backup.events`."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from ntt_backup.events import Amount, Event, FailureFields, Seconds, one_of
from ntt_backup.formatting import duration, size
from ntt_backup.process.messages import Count, Positive, doc

_NAME: Final = r"^\d{8}T\d{6}Z-[0-9a-f]{8}\.dump$"
DumpName = Annotated[str, Field(pattern=_NAME, description="below pgdump/ on the remote")]
_REASONS: Final = {
    "first": "there is none yet",
    "changed": "it may have changed since the last time",
    "old": "the last one is old",
    "marked": "the last one was begun before the first blob was copied",
    "asked": "as asked",
}


class DumpStart(Event):
    """The catalog is being dumped to the remote."""

    reason: Annotated[str, one_of(*_REASONS)]
    program: Annotated[str, doc("the version of pg_dump")]

    def _text(self) -> str:
        return f"dumping the catalog ({_REASONS[self.reason]})"


class DumpWaits(Event):
    """One pg_dump has written a dump for several targets. It waits on this machine for each."""

    targets: Annotated[Positive, doc("that take the dump")]
    bytes: Annotated[Count, doc("on this machine, until all of them have it")]
    duration_s: Annotated[Seconds, doc("of pg_dump")]

    def _text(self) -> str:
        return (
            f"dumped the catalog for {self.targets} targets, {size(self.bytes)} in"
            f" {duration(self.duration_s)}"
        )


class DumpComplete(Event):
    """The dump is on the remote's stable storage, checked and named."""

    name: DumpName
    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    base: Annotated[
        str, Field(pattern=_NAME + "|^$", description="the dump that it is an increment on, if any")
    ]
    text_bytes: Annotated[Count, doc("of what pg_dump wrote")]
    duration_s: Seconds
    mb_per_s: Annotated[Amount, doc("10^6 bytes a second")]
    kept: Annotated[Positive, doc("dumps of this catalog on the remote now")]
    pruned: Annotated[Count, doc("dumps that were removed")]

    def _text(self) -> str:
        of = f" of {size(self.text_bytes)}, an increment," if self.base else ""
        return (
            f"dumped the catalog: {self.name}, {size(self.bytes)}{of} in"
            f" {duration(self.duration_s)}; {self.kept} kept, {self.pruned} removed"
        )


class DumpSkipped(Event):
    """Nothing has changed in the catalog's database since the last dump."""

    name: DumpName

    def _text(self) -> str:
        return f"dump skipped: nobody else has changed the catalog since {self.name}"


class DumpRecovered(Event):
    """Dumps no longer fail: one was made, none is due yet, or none is wanted.

    A run that watches emits this event once after `dump_failed`.
    """

    text = "no dump of the catalog fails any more"


class DumpFailed(FailureFields, Event):
    """The dump of the catalog failed, but the upload of blobs continues.

    The field exit_code holds the exit code of the command `dump`. The run ends with exit code 7
    unless another cause decides its exit code.
    """

    text = "the catalog is not dumped"
