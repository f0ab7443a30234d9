"""systemd hands over settings as credentials (LoadCredential=): secrets that no file of the
configuration, no environment and no command line holds.

A credential is a file in $CREDENTIALS_DIRECTORY, which only the service can read. One that is named
like a setting of `_HELD` is that setting; a target's own is named like `_OF_A_TARGET`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ntt_backup.config.sources import Layer, Setting, of_its_kind
from ntt_backup.errors import ConfigError
from ntt_backup.model import DEFAULT_TARGET

# Whether the setting is what the file holds, or else its path.
_HELD: Final = {
    "catalog.url": True,
    "remote.identity_file": False,
    "pack.identity_file": False,
    "host.key_file": False,
    "notify.ping_url": True,
    "notify.webhook_url": True,
}
# Below `targets.NAME.`
_OF_A_TARGET: Final = {
    "remote.identity_file": "identity_file",
    "pack.identity_file": "pack.identity_file",
}


def from_credentials(environ: Mapping[str, str], target: str, in_file: Layer) -> Layer:
    """Returns the layer of the credentials for a target. As in the file, what is for all targets
    gives way to a target's own, also to what in_file says of it alone. Raises ConfigError for a
    credential that cannot be read.
    """
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return {}
    shared = _read(Path(directory), {key: key for key in _HELD})
    if target == DEFAULT_TARGET:
        return shared
    own = f"targets.{target}."
    url = in_file["remote.url"].value if "remote.url" in in_file else "ssh:"
    shared = {
        key: setting
        for key, setting in of_its_kind(shared, str(url)).items()
        if not (key in in_file and in_file[key].origin.startswith(own))
    }
    return shared | _read(Path(directory), {key: own + name for key, name in _OF_A_TARGET.items()})


def _read(directory: Path, names: Mapping[str, str]) -> Layer:
    """Returns what the files of these names, by setting, hold or are."""
    layer = Layer()
    for key, name in names.items():
        path = directory / name
        try:
            if path.is_file():
                value = path.read_text("utf-8").strip() if _HELD[key] else str(path)
                layer[key] = Setting(value, f"the credential {name}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the credential {path}", detail=str(error)) from error
    return layer
