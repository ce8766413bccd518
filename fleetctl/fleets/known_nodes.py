"""The addresses of the fleet's agents as last seen in the store: a file beside the contexts, for commands without etcd.

An address in it is a hint. An agent proves its name by its certificate, or the request carries nothing secret.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from fleetctl.cli.connect import etcd_address
from fleetctl.cli.resolve import config_path
from machinery.files import write_atomically

FILE: Final = "known-nodes.json"
_MAX_BYTES: Final = 4 << 20
_MAX_FLEETS: Final = 16
_MAX_NODES: Final = 2000

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """The addresses of one fleet's agents: URLs by the names of nodes."""

    path: Path
    fleet: str
    """The address of its etcd."""

    def read(self) -> dict[str, str]:
        """Return the URLs; none if the file is missing or damaged."""
        found = self._tree().get(self.fleet)
        if not isinstance(found, dict):
            return {}
        return {name: url for name, url in found.items() if isinstance(url, str)}

    def remember(self, urls: Mapping[str, str]) -> None:
        """Replace the URLs. A file that cannot be written is no error: the command that remembers has another job."""
        kept = dict(sorted(urls.items())[:_MAX_NODES])
        if not kept or kept == self.read():
            return
        others = {fleet: nodes for fleet, nodes in self._tree().items() if fleet != self.fleet}
        recent = list(others.items())[-(_MAX_FLEETS - 1) :]
        content = json.dumps({**dict(recent), self.fleet: kept}, indent=2)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self.path, content)
        except OSError:
            return

    def forget(self) -> None:
        """Remove the fleet's part of the file, as far as it can be written."""
        tree = self._tree()
        if tree.pop(self.fleet, None) is not None:
            with suppress(OSError):
                write_atomically(self.path, json.dumps(tree, indent=2))

    def _tree(self) -> Tree:
        try:
            with self.path.open("rb") as file:
                tree = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return tree if isinstance(tree, dict) else {}


def known_nodes(options: Mapping[str, Any]) -> KnownNodes:
    """Return the file's part of the fleet that a command's options name."""
    folder = config_path(click.get_current_context(), may_be_new=True).parent
    return KnownNodes(folder / FILE, str(etcd_address(dict(options))))


def remember_trees(options: Mapping[str, Any], nodes: Iterable[Tree]) -> None:
    """Remember the addresses of nodes that a command has read as trees."""
    urls = {
        str(node["metadata"]["name"]): url
        for node in nodes
        if (url := (node.get("status") or {}).get("agentUrl"))
    }
    known_nodes(options).remember(urls)
