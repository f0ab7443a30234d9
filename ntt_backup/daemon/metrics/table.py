"""The table of all metrics is the one place that names a metric.

The one of docs/monitoring.md is made from it (`python -m tests.metrics_table`). Names follow the
conventions of Prometheus: base units, counters end in `_total`. No label holds free text: each has
few values, known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

PREFIX: Final = "ntt_backup_"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. text: for its HELP and the documentation."""

    kind: Kind
    labels: tuple[str, ...]
    text: str


def _metric(kind: Kind, labels: str, text: str) -> Metric:
    return Metric(kind, tuple(labels.split()), text)


METRICS: Final[Mapping[str, Metric]] = {
    "build_info": _metric("gauge", "version", "Always 1; the version stands in the label."),
    "up": _metric("gauge", "target", "1 while a run works or waits for the target, 0 at its end."),
    "last_heard_timestamp_seconds": _metric(
        "gauge", "target", "When the run last said anything: every second while its workers live."
    ),
    "run_start_timestamp_seconds": _metric("gauge", "target", "When the run began."),
    "blobs_copied_total": _metric(
        "counter", "target worker", "Blobs on the remote's stable storage, recorded in the ledger."
    ),
    "copied_bytes_total": _metric("counter", "target worker", "Content of the copied blobs."),
    "wire_bytes_total": _metric(
        "counter", "target worker", "Bytes handed to the transport for batches that are settled."
    ),
    "blobs_failed_total": _metric("counter", "target worker", "Blobs that were marked as failed."),
    "failures_total": _metric(
        "counter", "target reason", "The same by reason; see Failed blobs in first-aid.md."
    ),
    "blobs_still_failed": _metric(
        "gauge",
        "target",
        "Blobs that are failed now, by whatever run, without those that somebody says to know of.",
    ),
    "blobs_pending": _metric(
        "gauge", "target", "Blobs still to send; may be an estimate; missing until it is known."
    ),
    "eta_seconds": _metric(
        "gauge", "target", "Until nothing is pending; missing while that is not known."
    ),
    "link_bytes_per_second": _metric(
        "gauge", "target", "Bytes handed to the transport, a second, over the last minute."
    ),
    "batch_duration_seconds": _metric(
        "histogram", "target worker", "From a batch's start to its receipt."
    ),
    "receipt_duration_seconds": _metric(
        "histogram",
        "target worker",
        "From a batch's last byte to its receipt: the way, what is still queued, and the remote's"
        " disk.",
    ),
    "batch_retries_total": _metric(
        "counter",
        "target worker reason",
        "Batches that are sent again: their answer was lost (link), was none (protocol), or said"
        " no (rejected).",
    ),
    "batch_splits_total": _metric(
        "counter", "target worker", "Batches that kept failing, and are sent again in halves."
    ),
    "workers": _metric("gauge", "target state", "Workers by what they do."),
    "paused": _metric("gauge", "target", "1 while somebody has told the run to pause."),
    "worker_restarts_total": _metric(
        "counter", "target worker", "Worker processes that died and are started again."
    ),
    "run_restarts_total": _metric(
        "counter", "target", "With several targets: runs that died, failed or hung, started again."
    ),
    "worker_stalls_total": _metric(
        "counter", "target worker", "How often a worker said nothing for run.stall_timeout."
    ),
    "outage": _metric(
        "gauge",
        "target what",
        "1 while somebody misses the remote, the catalog, the store (source), or what the start"
        " needs (preflight).",
    ),
    "outage_seconds_total": _metric("counter", "target what", "How long outages lasted so far."),
    "dump_failures_total": _metric("counter", "target", "Dumps of the catalog that failed."),
    "snapshot_failures_total": _metric("counter", "target set", "Snapshots that failed."),
    "last_success_timestamp_seconds": _metric(
        "gauge",
        "target",
        "When a run last ended with 0; with --watch also when it last had nothing left to send.",
    ),
    "last_run_end_timestamp_seconds": _metric("gauge", "target", "When a run last ended."),
    "last_run_exit_code": _metric(
        "gauge",
        "target",
        "The exit code of that run; 1 where it was killed, or its end could not be noted.",
    ),
    "last_dump_timestamp_seconds": _metric(
        "gauge", "target", "When the catalog was last dumped to the remote."
    ),
    "last_snapshot_timestamp_seconds": _metric(
        "gauge", "target set", "When the last version of the set was taken."
    ),
    "last_check_timestamp_seconds": _metric(
        "gauge", "target command", "When verify, reconcile, drill or restore last found all right."
    ),
    "last_check_wrong_blobs": _metric(
        "gauge", "target command", "Blobs that its last call found lost or not right."
    ),
    "missed_on_target": _metric(
        "gauge",
        "target",
        "The newest dump and versions of this host that the target lacks: it may have been rolled"
        " back.",
    ),
}
