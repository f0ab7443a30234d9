"""Settings are read again while a run works, as far as that is safe.

What says only how much, when or how often takes effect at once. What the workers, a lock or a
connection were made with needs a new start: that is told by name, and the old value holds until
then. Where the settings are wrong, all old ones hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from ntt_backup import events
from ntt_backup.config import Settings
from ntt_backup.daemon.events import SettingsRead, SettingsRefused
from ntt_backup.errors import ConfigError

# Tables, and keys of tables, whose new values take effect at once.
_LIVE: Final = ("log", "dump", "snapshots", "run.bwlimit", "run.poll_interval", "run.skip_pgdump")


def read_again(
    old: Settings,
    load: Callable[[], Settings],
    try_out: Callable[[Settings], None],
    names: Callable[[], Collection[str]] | None = None,
) -> tuple[Settings, list[events.Event]]:
    """Reads the settings of a run again. Returns those that hold now, and events of the changes.

    Args:
        old: The settings that hold so far.
        load: Reads the settings. Raises ConfigError.
        try_out: Raises ConfigError for settings that cannot take effect.
        names: Returns the targets that a daemon started now would serve; None where somebody else
            looks at that.
    """
    try:
        new = load()
        now, later = _differences(old, new)
        if names is not None:
            later += changed_targets([new.target], names())
        holding = _merged(old, new)
        try_out(holding)
    except ConfigError as error:
        return old, [SettingsRefused(**error.fields)]
    return holding, [SettingsRead(changed=now), *([start_needed(later)] if later else [])]


def changed_targets(served: Collection[str], now: Collection[str]) -> list[str]:
    """Returns the targets that are new in the settings, and the targets that are gone."""
    return [
        *(f"target {name} (new)" for name in now if name not in served),
        *(f"target {name} (gone)" for name in served if name not in now),
    ]


def start_needed(changed: Iterable[str]) -> events.Warning:
    """Returns the event that names the changes that need a restart of the daemon."""
    return events.Warning(reason=f"a restart is needed for what has changed: {', '.join(changed)}")


def _differences(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Returns the changed keys that take effect now, and the changed keys that need a restart."""
    now: list[str] = []
    later: list[str] = []
    before, after = _flat(old), _flat(new)
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            live = key in _LIVE or key.partition(".")[0] in _LIVE
            (now if live else later).append(key)
    return now, later


def _flat(settings: Settings) -> dict[str, Any]:
    """Returns the settings by `table.key`."""
    tables = settings.model_dump(exclude={"target"})
    # The same number means something else where it is not set: batches grow.
    tables["run"]["batch_size"] = settings.run.batch_size, settings.run.most_blobs
    return {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }


def _merged(old: Settings, new: Settings) -> Settings:
    """Returns the old settings with those new values that take effect now."""
    tables = {name: getattr(new, name) for name in _LIVE if "." not in name}
    keys = [name.removeprefix("run.") for name in _LIVE if name.startswith("run.")]
    run = old.run.model_copy(update={name: getattr(new.run, name) for name in keys})
    return old.model_copy(update={**tables, "run": run})
