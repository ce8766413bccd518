"""Contexts of the configuration file: reading and validation. Loaded by every verb that uses a context."""

import difflib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fleetctl.cli.errors import FleetctlError

Settings = Mapping[str, str | tuple[str, ...]]
"""Settings of a context, by key of the file; file names are absolute paths."""

FILES = ("etcd-ca", "etcd-cert", "etcd-key", "etcd-password-file", "api-key-file", "gateway-ca")
FOLDERS = ("data-dir", "identity-dir")
KEYS = ("etcd", *FILES[:3], "etcd-user", "etcd-password-file", "etcd-prefix", "etcd-transport",
        "data-dir", "identity-dir", "gateway", "gateway-ca", "api-key-file")  # fmt: skip
LISTS: dict[str, str] = {
    "etcd": '["http://mac-1:2379", "http://mac-2:2379"]',
    "gateway": '["http://mac-1:4000", "http://mac-2:4000"]',
}
"""Keys whose value is one URL or a list of URLs, and an example."""
CURRENT, CONTEXTS = "current-context", "contexts"


class Configuration(NamedTuple):
    """The configuration file: contexts by name, and the current one."""

    path: Path
    current: str
    contexts: Mapping[str, Settings]

    def context(self, name: str) -> Settings:
        """Return the settings of a context.

        Raises:
            FleetctlError: the context does not exist; the message names the nearest.

        """
        if name in self.contexts:
            return self.contexts[name]
        raise FleetctlError(missing_text(self, name))


def missing_text(known: Configuration, name: str) -> str:
    """Return the error message for a context that does not exist."""
    if not known.contexts:
        return (
            f"there is no context {_quoted(name)}: {known.path} has none. Create one with "
            f"`fleetctl config set-context {shlex.quote(name) if name.isprintable() else 'NAME'} --etcd URL`"
        )
    near = difflib.get_close_matches(name, known.contexts, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known.contexts))}"
    return f"there is no context {_quoted(name)} in {known.path}; {hint}"


def dangling_text(known: Configuration) -> str:
    """Return the error message for a current context that does not exist."""
    names = ", ".join(sorted(known.contexts)) or "none"
    return (
        f"{CURRENT} in {known.path} is {_quoted(known.current)}, which no longer exists; contexts: {names}. "
        "Select another one with `fleetctl config use-context NAME`, or none with `fleetctl config unset "
        "current-context`"
    )


def _quoted(name: str) -> str:
    """Return the name in quotes; escape control characters, which a terminal would execute."""
    return f"'{name}'" if name.isprintable() else repr(name)


def parse_configuration(path: Path, tree: Mapping[str, object]) -> Configuration:
    """Parse and validate the TOML tree of the file.

    Raises:
        FleetctlError: a key or value is invalid; the message names file and key.

    """
    for key in tree:
        if key not in (CURRENT, CONTEXTS):
            raise FleetctlError(f"{path}: {_unknown(key, (CURRENT, CONTEXTS))}")
    current, tables = tree.get(CURRENT, ""), tree.get(CONTEXTS, {})
    if not isinstance(current, str):
        raise FleetctlError(f'{path}: {CURRENT}: expected the name of a context, such as "home"')
    if not isinstance(tables, Mapping):
        raise FleetctlError(f"{path}: {CONTEXTS}: expected a table per context: [contexts.NAME]")
    contexts = {name: _settings(path, name, table) for name, table in tables.items()}
    return Configuration(path=path, current=current, contexts=contexts)


def _settings(path: Path, name: str, table: object) -> Settings:
    where = f"{path}: context {name}"
    if not isinstance(table, Mapping):
        raise FleetctlError(f"{where}: expected a table: [contexts.{name}]")
    settings: dict[str, str | tuple[str, ...]] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise FleetctlError(f"{where}: {_unknown(key, KEYS)}")
        if key in LISTS:
            if value not in ("", []) or key == "etcd":
                urls = [value] if isinstance(value, str) else value
                if (
                    not isinstance(urls, Sequence)
                    or not urls
                    or not all(isinstance(u, str) for u in urls)
                ):
                    raise FleetctlError(f"{where}: {key}: expected URLs, such as {LISTS[key]}")
                settings[key] = tuple(urls)
        elif not isinstance(value, str):
            raise FleetctlError(f"{where}: {key}: expected text in quotes, not {value!r}")
        elif value:
            is_path = key in (*FILES, *FOLDERS)
            settings[key] = str(absolute(path, value)) if is_path else value
    if "etcd" in settings and "data-dir" in settings:
        raise FleetctlError(f"{where}: give either etcd or data-dir, because they name two stores")
    return settings


def absolute(config: Path, text: str) -> Path:
    """Return an absolute path; relative paths start at the configuration file's folder."""
    return config.parent / Path(text).expanduser()


def _unknown(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"unknown key {key}; {hint}"


def load(path: Path) -> Configuration:
    """Read the configuration file; a missing file counts as empty.

    Raises:
        FleetctlError: the file cannot be read, or is invalid.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Configuration(path=path, current="", contexts={})
    except OSError as error:
        raise FleetctlError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FleetctlError(f"{path} is not text: {error.reason} at byte {error.start}") from error
    try:
        return parse_configuration(path, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FleetctlError(f"{path} is not TOML: {error}") from error
