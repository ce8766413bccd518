"""Contexts as values: what the configuration file says, checked. Pure, and imported by every verb: stays light.

The configuration file, read; no file says as much as an empty one. Imported by every verb: stays light.
"""

import difflib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fleetctl.cli.errors import FleetctlError

Settings = Mapping[str, str | tuple[str, ...]]
"""What one context says, by its key in the file; files as absolute paths."""

FILES = ("etcd-ca", "etcd-cert", "etcd-key", "etcd-password-file", "api-key-file")
KEYS = ("etcd", *FILES[:3], "etcd-user", "etcd-password-file", "etcd-prefix", "etcd-transport",
        "data-dir", "gateway", "api-key-file")  # fmt: skip
CURRENT, CONTEXTS = "current-context", "contexts"


class Configuration(NamedTuple):
    """The configuration file: contexts by name, and which one counts unless another is said."""

    path: Path
    current: str
    contexts: Mapping[str, Settings]

    def context(self, name: str) -> Settings:
        """Return what a context says.

        Raises:
            FleetctlError: there is no such context; with the nearest.

        """
        if name in self.contexts:
            return self.contexts[name]
        raise FleetctlError(missing_text(self, name))


def missing_text(known: Configuration, name: str) -> str:
    """Return the refusal for a context that is not there."""
    if not known.contexts:
        return (
            f"there is no context {_quoted(name)}: {known.path} has none. Make one with "
            f"`fleetctl config set-context {shlex.quote(name) if name.isprintable() else 'NAME'} --etcd URL`"
        )
    near = difflib.get_close_matches(name, known.contexts, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known.contexts))}"
    return f"there is no context {_quoted(name)} in {known.path}; {hint}"


def dangling_text(known: Configuration) -> str:
    """Return the refusal for a current context that is not there."""
    there = ", ".join(sorted(known.contexts)) or "none"
    return (
        f"{CURRENT} in {known.path} names {_quoted(known.current)}, which is not there any more; there are {there}. "
        "`fleetctl config use-context NAME` makes another the current one, `fleetctl config unset current-context` "
        "none"
    )


def _quoted(name: str) -> str:
    """Return a name between quotes as the user wrote it, but for what a terminal would obey."""
    return f"'{name}'" if name.isprintable() else repr(name)


def parse_configuration(path: Path, tree: Mapping[str, object]) -> Configuration:
    """Return what the file's tree says.

    Raises:
        FleetctlError: it says what no configuration says; with the file and the key.

    """
    for key in tree:
        if key not in (CURRENT, CONTEXTS):
            raise FleetctlError(f"{path}: {_unknown(key, (CURRENT, CONTEXTS))}")
    current, tables = tree.get(CURRENT, ""), tree.get(CONTEXTS, {})
    if not isinstance(current, str):
        raise FleetctlError(f'{path}: {CURRENT}: write the name of a context, such as "home"')
    if not isinstance(tables, Mapping):
        raise FleetctlError(f"{path}: {CONTEXTS}: write a table for each: [contexts.NAME]")
    contexts = {name: _settings(path, name, table) for name, table in tables.items()}
    return Configuration(path=path, current=current, contexts=contexts)


def _settings(path: Path, name: str, table: object) -> Settings:
    where = f"{path}: context {name}"
    if not isinstance(table, Mapping):
        raise FleetctlError(f"{where}: write a table: [contexts.{name}]")
    found: dict[str, str | tuple[str, ...]] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise FleetctlError(f"{where}: {_unknown(key, KEYS)}")
        if key == "etcd":
            found[key] = _urls(where, value)
        elif not isinstance(value, str):
            raise FleetctlError(f"{where}: {key}: expected text in quotes, not {value!r}")
        elif value:
            is_path = key in FILES or key == "data-dir"
            found[key] = str(absolute(path, value)) if is_path else value
    if "etcd" in found and "data-dir" in found:
        raise FleetctlError(f"{where}: keep etcd or data-dir: they are two stores")
    return found


def _urls(where: str, value: object) -> tuple[str, ...]:
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, Sequence) or not urls or not all(isinstance(u, str) for u in urls):
        raise FleetctlError(
            f'{where}: etcd: expected URLs, such as ["http://mac-1:2379", "http://mac-2:2379"]'
        )
    return tuple(urls)


def absolute(config: Path, text: str) -> Path:
    """Return a path of the file: those that are not absolute begin at the file's folder."""
    return config.parent / Path(text).expanduser()


def _unknown(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"unknown key {key}; {hint}"


def load(path: Path) -> Configuration:
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
        return parse_configuration(path, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FleetctlError(f"{path} is not TOML: {error}") from error
