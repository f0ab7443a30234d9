"""One end of a measurement as a program: `python -m ntt_backup.bench.helper`, started by `crew`.

Several streams or workers in one process would share one interpreter, and the figure would be its
speed. So each has a process, as the workers of a run have. Tasks come as lines on stdin; for each
the helper says when it is ready, waits for the word `go`, and says what came of it. Ends with its
stdin, and with the process that started it.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from typing import Protocol

from ntt_backup.bench.sending import FetchJob, SendJob
from ntt_backup.bench.streams import DownloadJob, TripsJob, UploadJob
from ntt_backup.bench.tasks import TASK, Answer, Download, Fetch, Said, Send, Task, Trips, Upload
from ntt_backup.errors import BackupError


class Job(Protocol):
    """A task whose far side is ready. Making it, and `run`, may raise any BackupError."""

    def run(self) -> Answer: ...

    def close(self) -> None:
        """End what is left of it. Never raises."""
        ...


def make(task: Task) -> Job:
    """Connect for a task; returns when the far side is ready."""
    match task:
        case Upload():
            return UploadJob(task)
        case Download():
            return DownloadJob(task)
        case Trips():
            return TripsJob(task)
        case Send():
            return SendJob(task)
        case Fetch():
            return FetchJob(task)


def _do(task: Task) -> Said:
    started, used = time.monotonic(), _cpu_s()
    job = make(task)
    try:
        opening = time.monotonic() - started
        _say(Said(ready=True))
        sys.stdin.readline()
        answer = job.run()
    finally:
        job.close()
    return Said(answer=answer.model_copy(update={"opening_s": opening, "cpu_s": _cpu_s() - used}))


def _cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _say(said: Said) -> None:
    print(said.model_dump_json(), flush=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    while line := sys.stdin.readline():
        try:
            said = _do(TASK.validate_json(line))
        except BackupError as error:
            said = Said(**error.fields)
        _say(said)


if __name__ == "__main__":
    main()
