"""A process of its own serves the metrics: a page for Prometheus, a file for node-exporter.

It hears the runs. The page needs nothing but figures in memory; a file system or a catalog that
hangs holds up a thread of its own each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from ntt_backup.config import Settings
from ntt_backup.config.values import address_of
from ntt_backup.daemon.child import tell_parent
from ntt_backup.daemon.listeners import Heard, ListenerProcess
from ntt_backup.daemon.web_server import BriefRequest, WebServer
from ntt_backup.events import RunStart, Warning

if TYPE_CHECKING:
    from ntt_backup.daemon.metrics.figures import CatalogFigures, Figures

_WRITE_SECONDS: Final = 15.0
# A short run's file shall have what the catalog knows, too.
_FIRST_ANSWER_SECONDS: Final = 2.0
# How long the end waits for the last file: its file system may not answer.
_LAST_WRITE_SECONDS: Final = 10.0


def metrics_process(settings: Settings) -> ListenerProcess:
    """Returns the process that serves the metrics of all runs."""
    return ListenerProcess("metrics", partial(_serve, settings))


def check(settings: Settings) -> tuple[str, str]:
    """Returns the place of the metrics, and a warning; neither stops a run."""
    listen, textfile = settings.metrics.listen, settings.metrics.textfile
    warnings = []
    if listen is not None:
        try:
            WebServer(*address_of(listen), BriefRequest).server_close()
        except OSError as error:
            warnings.append(_trouble(listen, error))
    if textfile is not None and not os.access(textfile.parent, os.W_OK | os.X_OK):
        why = "may not be written to" if textfile.parent.is_dir() else "is missing"
        warnings.append(f"no metrics in {textfile}: its directory {why}")
    if textfile is not None and textfile.suffix != ".prom":
        warnings.append(f"node-exporter reads *.prom, and not {textfile}")
    return f"in {textfile}" if listen is None else f"http://{listen}", "; ".join(warnings)


def _trouble(place: object, error: OSError) -> str:
    return f"no metrics at {place}: {error.strerror or error}"


def _serve(settings: Settings, heard: Iterator[Heard]) -> None:
    from ntt_backup.daemon.metrics.figures import CatalogFigures, Figures

    figures, over = Figures(settings.scheduled), Event()
    catalog = CatalogFigures(settings, figures)
    clock = Thread(target=_keep_time, args=(settings, figures, catalog, over), daemon=True)
    clock.start()
    for target, what in heard:
        figures.take(target, what, time.time())
        if isinstance(what, RunStart):
            catalog.wanted.set()
    over.set()
    clock.join(_LAST_WRITE_SECONDS)


def _keep_time(settings: Settings, figures: Figures, catalog: CatalogFigures, over: Event) -> None:
    """Serves the page and writes the file. A failure is told once, and retried."""
    from prometheus_client import MetricsHandler, generate_latest

    listen, textfile = settings.metrics.listen, settings.metrics.textfile

    class Handler(BriefRequest, MetricsHandler):
        registry = figures.registry

    complained: set[object] = set()
    served = False

    def attempt(place: object, work: Callable[[], object]) -> bool:
        try:
            work()
        except OSError as error:
            if place not in complained:
                complained.add(place)
                tell_parent(Warning(reason=_trouble(place, error)))
            return False
        complained.discard(place)
        return True

    def open_page(listen: str) -> None:
        server = WebServer(*address_of(listen), Handler)
        Thread(target=server.serve_forever, daemon=True).start()

    while True:
        if listen is not None and not served:
            served = attempt(listen, partial(open_page, listen))
        catalog.answered.wait(_FIRST_ANSWER_SECONDS)
        ended = over.is_set()
        figures.pass_time(time.time())
        if textfile is not None:
            attempt(textfile, lambda: _write(textfile, generate_latest(figures.registry)))
        if ended:
            return
        over.wait(_WRITE_SECONDS)


def _write(path: Path, text: bytes) -> None:
    """Writes the file in one step: node-exporter reads whole ones, and only *.prom."""
    new = path.with_name(f"{path.name}.new")
    # Others may write to the directory: what one of them put there is not written through.
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o644), "wb") as file:
        os.fchmod(file.fileno(), 0o644)  # node-exporter is another user, whatever our umask.
        file.write(text)
    new.replace(path)
