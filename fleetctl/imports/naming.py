"""Names: which Mac of the fleet a host is, what an object is called, which names clients go on using. Pure."""

import re
from collections.abc import Sequence

from fleetctl.imports.foreign import Foreign
from nodeagent.identity import label

_ADDRESS = re.compile(r"[0-9.]*|.*:.*")


def node_named(host: str) -> str:
    """Return the name that an agent on the host gives its node; empty for an address, which names no Mac."""
    bare = host.rpartition("@")[2]
    return "" if _ADDRESS.fullmatch(bare) else label(bare, fallback="")


def nodes_of(
    source: Foreign, hosts: Sequence[tuple[tuple[str | int, ...], str]], given: Sequence[str]
) -> tuple[str, ...]:
    """Return the node of each host (its place in the file, and what stands there); notes refusals."""
    if given and len(given) != len(hosts):
        source.refuse(
            hosts[0][0] if hosts else (),
            f"names {len(hosts)} Macs, and --nodes {len(given)}",
            "Name one for each, in the file's order",
        )
        return ()
    found: list[str] = []
    for index, (path, host) in enumerate(hosts):
        name = given[index] if given else node_named(host)
        if not name:
            source.refuse(
                path,
                f"does not say which node {host} is",
                "Write --nodes NODE,NODE,... in the file's order (`fleetctl get nodes` shows them)",
            )
        elif name in found:
            source.refuse(
                path, f"is the second Mac called {name}", "Write --nodes with other names"
            )
        found.append(name)
    return tuple(found)


def object_name(text: str, fallback: str) -> str:
    """Return the name as an object may have it: of `mlx-community/Qwen3-8B-4bit` it is `qwen3-8b-4bit`."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.")[:100] or fallback


def served(name: str, *others: str | None) -> list[str]:
    """Return the names that clients use besides the object's own, those that can be served."""
    wanted = [one for one in others if one and one != name]
    return [
        one
        for one in dict.fromkeys(wanted)
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", one) and len(one) <= 200
    ]
