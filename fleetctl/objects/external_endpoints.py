"""External endpoints of routes as rows of `fleetctl get endpoints`."""

from collections.abc import Iterable
from typing import Any, TypeAlias
from urllib.parse import urlsplit

Tree: TypeAlias = dict[str, Any]


def external_trees(routes: Iterable[Tree]) -> list[Tree]:
    """Return a tree for each external endpoint, in the form of an Endpoint; its name is ROUTE/NAME."""
    return [_tree(route, one) for route in routes for one in route["spec"].get("external") or ()]


def _tree(route: Tree, external: Tree) -> Tree:
    metadata = route["metadata"]
    return {
        "apiVersion": route["apiVersion"],
        "kind": "Endpoint",
        "metadata": {
            "name": f"{metadata['name']}/{external['name']}",
            "labels": {},
            "creationTimestamp": metadata.get("creationTimestamp"),
        },
        "spec": {
            "external": True,
            "node": urlsplit(external["url"]).hostname or "",
            "url": external["url"],
            "model": external["model"],
            "servedNames": [route["spec"]["model"]],
        },
    }
