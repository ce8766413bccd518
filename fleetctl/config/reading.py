"""The configuration file, read; no file says as much as an empty one. Imported by every verb: stays light."""

import tomllib
from pathlib import Path

from fleetctl.config.contexts import Configuration, checked
from fleetctl.errors import FleetctlError


def read(path: Path) -> Configuration:
    """Return what the file says.

    Raises:
        FleetctlError: it cannot be read, or is not what it should be.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Configuration(path=path, current="", contexts={})
    except OSError as error:
        raise FleetctlError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FleetctlError(f"{path} is not text: {error.reason} at byte {error.start}") from error
    try:
        return checked(path, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FleetctlError(f"{path} is not TOML: {error}") from error
