"""Strategies say how batches travel. Another strategy registers here, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import Unsupported
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.probe import Ahead, SessionProbe
from ntt_backup.upload.strategies.session import Session
from ntt_backup.upload.strategies.stream import open_stream
from ntt_backup.upload.strategies.stream_probe import StreamProbe
from ntt_backup.upload.strategies.tar import TarSession
from ntt_backup.upload.strategies.tar_probe import TarProbe


@dataclass(frozen=True, slots=True)
class Strategy:
    """Makes the sessions of one way to send.

    Attributes:
        open: Returns a session that is ready to take batches.
        probe: Returns a look at the remote, which may leave `open` a connection.
        packs: Whether the strategy is for the layout `packs`.
    """

    open: Callable[[SessionSpec, Store, Ahead | None], Session]
    probe: Callable[[SessionSpec], SessionProbe]
    packs: bool = False


def _open_packs(spec: SessionSpec, store: Store, ahead: Ahead | None) -> Session:
    # What only packs need is loaded for them only.
    from ntt_backup.upload.strategies.packs import open_packs

    return open_packs(spec, store, ahead)


def _probe_packs(spec: SessionSpec) -> SessionProbe:
    from ntt_backup.upload.strategies.packs_probe import probe_packs

    return probe_packs(spec)


STRATEGIES: Mapping[str, Strategy] = {
    "stream": Strategy(open_stream, StreamProbe),
    "tar": Strategy(lambda spec, store, _: TarSession(spec, store), TarProbe),
    "packs": Strategy(_open_packs, _probe_packs, packs=True),
}


def open_session(name: str, spec: SessionSpec, store: Store, ahead: Ahead | None = None) -> Session:
    """Opens a session of the strategy of that name. Raises as `Session` does.

    Args:
        name: The name of the strategy.
        spec: The parameters of the session.
        store: The local store.
        ahead: What a probe has opened, to go on with; None for nothing.
    """
    return STRATEGIES[name].open(spec, store, ahead)


def open_probe(name: str, spec: SessionSpec) -> SessionProbe:
    """Returns a connected probe of the strategy of that name. Raises as `Session` does.

    name may be `auto`: `stream` where the remote can run it, else `tar`.
    """
    if name == "auto":
        try:
            return open_probe("stream", spec)
        except Unsupported:
            name = "tar"
    probe = STRATEGIES[name].probe(spec)
    probe.connect()
    return probe
