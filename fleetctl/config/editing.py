"""Changes of the configuration file that keep its comments and its order."""

import fcntl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from fleetctl.config.contexts import CONTEXTS, CURRENT, Configuration, checked
from fleetctl.config.reading import read
from fleetctl.config.settling import DEFAULT_PATH
from fleetctl.errors import FleetctlError
from machinery import files

Document = tomlkit.TOMLDocument


def edit(path: Path, change: Callable[[Document], None]) -> Configuration:
    """Change the file; what would not be readable afterwards is not written.

    Raises:
        FleetctlError: it cannot be read or written, or the change makes no configuration.

    """
    is_default = path == Path(DEFAULT_PATH).expanduser()
    # A link leads to where the user keeps such files, and stays one.
    path = path.resolve()
    try:
        if is_default:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            # A folder that nobody asked for is a typing mistake kept.
            raise FleetctlError(f"there is no folder {path.parent} for {path.name}; make it first")
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _edited(path, change)
    except OSError as error:
        raise FleetctlError(f"{path} cannot be written: {error.strerror}") from error


def _edited(path: Path, change: Callable[[Document], None]) -> Configuration:
    read(path)  # a mistake in it is told before anything is changed
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        document = tomlkit.document()
    except TOMLKitError as error:
        raise FleetctlError(f"{path} is not TOML: {error}") from error
    change(document)
    found = checked(path, document.unwrap())
    files.write_atomically(path, tomlkit.dumps(document))
    return found


def table(document: Document, name: str) -> Any:
    """Return a context's table, made if it is not there."""
    contexts = document.setdefault(CONTEXTS, tomlkit.table(is_super_table=True))
    return contexts.setdefault(name, tomlkit.table())


def put(document: Document, name: str, settings: Mapping[str, str | tuple[str, ...]]) -> None:
    """Write settings into a context; an empty one takes the key away."""
    found = table(document, name)
    for key, value in settings.items():
        if not value:
            found.pop(key, None)
        else:
            found[key] = list(value) if isinstance(value, tuple) else value
    for key, rival in (("etcd", "data-dir"), ("data-dir", "etcd")):
        if settings.get(key):
            found.pop(rival, None)


def point(document: Document, name: str) -> None:
    """Have a context be the current one; "" means none."""
    if name:
        document[CURRENT] = name
    else:
        document.pop(CURRENT, None)


def rename(document: Document, old: str, new: str) -> None:
    """Give a context another name; the current one stays current."""
    contexts: Any = document[CONTEXTS]
    contexts[new] = contexts.pop(old)
    if document.get(CURRENT) == old:
        document[CURRENT] = new


def remove(document: Document, name: str) -> None:
    """Take a context away."""
    contexts: Any = document[CONTEXTS]
    contexts.pop(name)
