"""Columns of what the fleet writes itself: nodes, replicas, endpoints, events. Pure."""

from fleetctl import documents
from fleetctl.columns.cells import (
    AGE,
    NAME,
    UNKNOWN,
    Cell,
    Column,
    Columns,
    Moment,
    at,
    condition,
    number,
    reason,
    since,
    text,
    texts,
)
from fleetctl.documents import Tree
from schemas import sizes

_PROOF = (
    *("weightsBytes", "kvCacheBytes", "activationBytes", "overheadBytes"),
    *("prefixCacheBytes", "adapterBytes", "draftBytes"),
)


def _node_ready(node: Tree, moment: Moment) -> str:
    words = ["Ready" if documents.name_of(node) in moment.ready_nodes else "NotReady"]
    if at(node, "spec", "unschedulable"):
        words.append("Cordoned")
    if at(node, "spec", "draining"):
        words.append("Draining")
    words += [
        str(one.get("type"))
        for one in documents.conditions_of(node)
        if one.get("status") == "True" and one.get("type") != "Ready"
    ]
    return ",".join(words)


def _of_node(field: str) -> Cell:
    def cell(node: Tree, _: Moment) -> str:
        return UNKNOWN if node.get("status") is None else str(at(node, "status", field))

    return cell


def _bytes_of(field: str) -> Cell:
    def cell(node: Tree, _: Moment) -> str:
        status = node.get("status")
        return UNKNOWN if status is None else sizes.show(int(status[field]))

    return cell


def _ranks(replica: Tree, _: Moment) -> str:
    return ",".join(rank["node"] for rank in at(replica, "spec", "ranks") or ())


def _memory(replica: Tree, _: Moment) -> str:
    return sizes.show(sum(_proven(rank["memory"]) for rank in at(replica, "spec", "ranks") or ()))


def _proven(proof: Tree) -> int:
    """Return a rank's bytes, as schemas.replica.MemoryProof.total_bytes."""
    return int(proof.get("overrideBytes") or sum(proof.get(part) or 0 for part in _PROOF))


def _together(replica: Tree, _: Moment) -> str:
    """Return how a replica's ranks work together: `Tensor x2 ring, epoch 3, fallback 1`."""
    made = at(replica, "spec", "formation")
    if made is None:
        return "-"
    back = f", fallback {made['fallback']}" if made.get("fallback") else ""
    ranks = len(replica["spec"]["ranks"])
    return f"{made['parallelism']} x{ranks} {made['backend']}, epoch {made['epoch']}{back}"


def _seats(test: Tree, _: Moment) -> str:
    return ",".join(seat["node"] for seat in at(test, "spec", "seats") or ())


def _about(event: Tree, _: Moment) -> str:
    return f"{at(event, 'spec', 'about', 'kind')}/{at(event, 'spec', 'about', 'name')}"


COLUMNS: dict[str, Columns] = {
    "Node": (
        NAME,
        Column("STATUS", _node_ready),
        Column("CHIP", _of_node("chip")),
        Column("MEMORY", _bytes_of("memoryBytes")),
        Column("FOR MODELS", _bytes_of("allocatableBytes")),
        AGE,
        Column("CPU", _of_node("cpuCores"), is_wide=True),
        Column("GPU", _of_node("gpuCores"), is_wide=True),
        Column("OS", _of_node("osVersion"), is_wide=True),
        Column("ADDRESS", _of_node("address"), is_wide=True),
        Column("VERSION", _of_node("agentVersion"), is_wide=True),
    ),
    "Replica": (
        NAME,
        Column("READY", condition("Ready")),
        Column("NODE", _ranks),
        Column("MEMORY", _memory),
        AGE,
        Column("TOGETHER", _together, is_wide=True),
        Column("WHY", reason("Ready"), is_wide=True),
    ),
    "Endpoint": (
        NAME,
        Column("NODE", text("spec", "node")),
        Column("URL", text("spec", "url")),
        Column("SERVED NAMES", texts("spec", "servedNames")),
    ),
    "Revision": (
        NAME,
        Column("DEPLOYMENT", text("spec", "deployment")),
        Column("REVISION", text("spec", "revision")),
        AGE,
    ),
    "Event": (
        Column("LAST SEEN", since("spec", "lastSeen"), is_timeless=False),
        Column("TYPE", text("spec", "type")),
        Column("REASON", text("spec", "reason")),
        Column("OBJECT", _about),
        Column("COUNT", number("spec", "count"), is_wide=True),
        Column("SOURCE", text("spec", "source"), is_wide=True),
        Column("MESSAGE", text("spec", "message")),
    ),
    "FabricTest": (
        NAME,
        Column("BACKEND", text("spec", "formation", "backend")),
        Column("NODES", _seats),
        AGE,
    ),
}
