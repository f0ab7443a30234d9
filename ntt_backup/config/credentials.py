"""systemd hands over settings as credentials (LoadCredential=): secrets that no file of the
configuration, no environment and no command line holds.

A credential is a file in $CREDENTIALS_DIRECTORY, which only the service can read. One that is named
like a setting of `_HELD` is that setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ntt_backup.config.sources import Layer, Setting
from ntt_backup.errors import ConfigError

# Whether the setting is what the file holds, or else its path.
_HELD: Final = {
    "catalog.url": True,
    "remote.identity_file": False,
    "pack.identity_file": False,
    "notify.ping_url": True,
    "notify.webhook_url": True,
}


def from_credentials(environ: Mapping[str, str]) -> Layer:
    """Returns the layer of the credentials. Raises ConfigError for one that cannot be read."""
    directory = environ.get("CREDENTIALS_DIRECTORY")
    layer = Layer()
    for key, held in _HELD.items() if directory else ():
        path = Path(directory or "", key)
        try:
            if path.is_file():
                value = path.read_text("utf-8").strip() if held else str(path)
                layer[key] = Setting(value, f"the credential {key}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the credential {path}", detail=str(error)) from error
    return layer
