"""A daemon tells of its settings, of what it was asked for, and of coordinators that died."""

from __future__ import annotations

from typing import Annotated

from ntt_backup.events import (
    Amount,
    Event,
    FailureFields,
    RestartFields,
    Seconds,
    one_of,
    with_detail,
)
from ntt_backup.formatting import duration, many, size
from ntt_backup.process.messages import Count, doc

CheckName = Annotated[str, one_of("scan", "reconcile", "verify", "drill", "policy")]
Uid = Annotated[Count, doc("of the user who asked for it")]


class TargetRestart(RestartFields, Event):
    """The coordinator of one of several targets will be started again.

    The coordinator has died, or has ended by an error in a run with --watch. The run_id is that of
    the daemon, which all targets share.
    """

    level = "warning"

    def _text(self) -> str:
        return self.restarts("the coordinator ended")


class SettingsRead(Event):
    """The settings were read again, as SIGHUP asks for.

    A warning follows if some of the changed settings need a restart.
    """

    changed: Annotated[list[str], doc("the settings that have new values from now on")]

    def _text(self) -> str:
        return f"read the settings again: {', '.join(self.changed) or 'nothing has changed'}"


class SettingsRefused(FailureFields, Event):
    """The settings, read again, are wrong: the old ones hold, and the run goes on."""

    text = "the old settings hold"


class Paused(Event):
    """Somebody asked to send nothing any more, until `resumed`."""

    level = "warning"
    uid: Uid

    def _text(self) -> str:
        return f"paused by user {self.uid}; `ntt-backup-remote resume` ends the pause"


class Resumed(Event):
    """Somebody asked to go on after a pause."""

    uid: Uid
    duration_s: Annotated[Amount, doc("seconds since the pause began")]

    def _text(self) -> str:
        return f"resumed by user {self.uid} after {duration(self.duration_s)}"


class BandwidthLimit(Event):
    """Another limit holds from now on."""

    bytes_per_s: Annotated[Count | None, doc("null for no limit")]
    uid: Annotated[Count | None, doc("of the user who asked for it; null: the timetable says so")]

    def _text(self) -> str:
        who = "the timetable" if self.uid is None else f"user {self.uid}"
        limit = "no limit" if self.bytes_per_s is None else f"at most {size(self.bytes_per_s)}/s"
        return f"{limit} from now on, by {who}"


class Asked(Event):
    """Somebody asked the daemon for something else."""

    do: Annotated[str, one_of("now", "stop")]
    uid: Uid

    def _text(self) -> str:
        what = "stop" if self.do == "stop" else "look for work now"
        return f"asked by user {self.uid} to {what}"


class CheckStart(Event):
    """A check of `[checks]` begins."""

    command: CheckName

    def _text(self) -> str:
        return f"{self.command} begins, as [checks] asks for"


class CheckComplete(Event):
    """A check of `[checks]` has ended."""

    command: CheckName
    blobs: Annotated[Count, doc("blobs that were checked")]
    bytes: Annotated[Count, doc("bytes of content that were read")]
    wrong: Annotated[Count, doc("blobs that are lost or not right")]
    changed: Annotated[Count, doc("blobs that were registered, or became pending again")]
    by_remote_hash: Annotated[
        Count, doc("blobs without a copy in the store, that are right by the word of the target")
    ] = 0
    unchecked: Annotated[Count, doc("blobs that neither end can hash")] = 0
    complete: Annotated[bool, doc("false where max_time or max_bytes was reached")]
    exit_code: Annotated[Count, doc("that of the command of the same name")]
    duration_s: Seconds

    def _text(self) -> str:
        found = f", {self.wrong:,} wrong" if self.wrong else ""
        changed = f", {self.changed:,} to be sent" if self.changed else ""
        part = "; not all of it" if self.command == "drill" else "; the next one continues"
        word = f", {self.by_remote_hash:,} by the remote's word" if self.by_remote_hash else ""
        word += f", {self.unchecked:,} not checked" if self.unchecked else ""
        ended = "" if self.complete else part
        blobs = f"{many(self.blobs, 'blob')} in {duration(self.duration_s)}"
        return f"{self.command}: {blobs}{found}{changed}{word}{ended}"


class CheckFailed(FailureFields, Event):
    """A check of `[checks]` ended by an error. It is tried again later."""

    command: Annotated[str, one_of("scan", "reconcile", "verify", "drill", "policy", "")]

    def _text(self) -> str:
        return f"{self.command or 'check'} failed: {with_detail(self.message, self.detail)}"


class FilesRegistered(Event):
    """What the origins of files gave, since the last such event."""

    rows: Annotated[Count, doc("rows and files that the origins gave")]
    registered: Annotated[Count, doc("files that are new, or new versions")]
    changed: Annotated[Count, doc("files that were changed since they were read")]
    gone: Annotated[Count, doc("files that an origin no longer gives")]
    duration_s: Seconds

    def _text(self) -> str:
        changed = f", {self.changed:,} changed" if self.changed else ""
        gone = f", {self.gone:,} gone" if self.gone else ""
        return f"registered {many(self.registered, 'file')}{changed}{gone}"


class FilesFailed(FailureFields, Event):
    """The files of the store could not be registered. It is tried again later."""

    text = "files are not registered"


class FilesRecovered(Event):
    """Files are registered again, or are not to be registered any more."""

    text = "files are registered again"


class ChecksRecovered(Event):
    """No check of `[checks]` fails any more, or none is asked for any more."""

    text = "the checks work again"
