"""structlog makes the lines of the log. It takes a while to load, so the first line loads it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol

# Where structlog finds rich, it loads it, and pygments, for a renderer that is not used here.
_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]  # how Python notes what is not to be had
try:
    import structlog
finally:
    if _rich is None:
        del sys.modules["rich"]
    else:
        sys.modules["rich"] = _rich

_LEADING: Final = ("timestamp", "level", "event", "run_id", "target", "host", "pid", "worker")


class Lines(Protocol):
    """Takes lines."""

    def write(self, line: str, /) -> object: ...

    def flush(self) -> object: ...


def make_logger(lines: Lines, run_id: str, target: str) -> Any:
    """Returns a logger of structlog that gives each event to lines, as one line of JSON."""
    return structlog.wrap_logger(
        structlog.WriteLogger(lines),  # type: ignore[arg-type]  # only write and flush are used
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _lead,
            structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
        ],
        wrapper_class=structlog.BoundLogger,
        context_class=dict,
        run_id=run_id,
        target=target,
        host=socket.gethostname(),
    )


def _lead(_logger: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the common fields first, in the contract's order; people read these lines too."""
    head = {key: event[key] for key in _LEADING if key in event}
    return head | {key: value for key, value in event.items() if key not in head}
