"""The nodes of the Macs that a foreign file names. Pure, except for what `by_address` reads."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from nodeagent.node.identity import dns_label
from store.object_trees import Tree, name_of

_ADDRESS = re.compile(r"[0-9.]*|.*:.*")
_ADVICE: Final = (
    "Give --nodes NODE,NODE,... in the file's order (`fleetctl get nodes -o wide` lists names and addresses), or name "
    "with --context or --etcd a fleet whose agents report the address"
)


def node_name(host: str) -> str:
    """Return the node name that an agent on the host would use; empty for an address, which names no Mac."""
    bare = host.rpartition("@")[2]
    return "" if _ADDRESS.fullmatch(bare) else dns_label(bare, fallback="")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNames:
    """Finds nodes: as --nodes gives them, else by the addresses that agents report, else by host names."""

    given: tuple[str, ...] = ()
    """The nodes in the file's order; () to find them."""
    by_address: Callable[[], Mapping[str, str]] = dict
    """Returns the nodes by address; called only for a file with addresses."""
    advice: str = _ADVICE
    """Ways to name nodes, for refusals."""

    def find(self, index: int, *hosts: str) -> str:
        """Return the node of a Mac.

        Args:
            index: its place in the file.
            hosts: what the file calls it: names, addresses, and ssh destinations, the best name first.

        """
        return self.given[index] if self.given else self.look_up(*hosts)

    def look_up(self, *hosts: str) -> str:
        """Return the node with one of the names and addresses, whatever --nodes gives; "" if there is none."""
        bare = [host.rpartition("@")[2] for host in hosts if host]
        addresses = [host for host in bare if _ADDRESS.fullmatch(host)]
        known = self.by_address() if addresses else {}
        found = next((known[address] for address in addresses if address in known), "")
        return found or next(filter(None, map(node_name, bare)), "")


def reported_addresses(nodes: Iterable[Tree]) -> dict[str, str]:
    """Return the nodes by the addresses that their agents report, without those that several report."""
    found: list[tuple[str, str]] = []
    for node in nodes:
        status = node.get("status") or {}
        cables = (status.get("fabric") or {}).get("interfaces") or ()
        addresses = {status.get("address"), *(cable.get("address") for cable in cables)}
        found.extend((address, name_of(node)) for address in addresses if address)
    times = Counter(address for address, _ in found)
    return {address: name for address, name in found if times[address] == 1}
