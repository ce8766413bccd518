"""The reasons why a replica cannot be placed: counted by reason for one line, node by node for a table. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import PlacementRequest, Rejection
from reconciler.placement.ranking import AssumedState, Ranking
from reconciler.placement.swap import LoadWait
from reconciler.placement.table import EvaluatedRequest
from schemas import quantity

# People read statuses: a thousand rejections tell no more than twenty.
MAX_LISTED: Final = 20
CRASH_LOOPING: Final = "CrashLooping"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCount:
    """The number of nodes with a reason, and the amounts of the node that is nearest to fitting."""

    reason: str
    count: int
    need: int = 0
    have: int = 0
    capacity: int | None = None
    """The most that one of them would have if it was empty; None if that makes no difference."""
    message: str = ""
    """The message of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unschedulable:
    """The reasons why no node, or too few nodes, can take the replica."""

    nodes: int
    tallies: tuple[RefusalCount, ...]
    refusals: tuple[tuple[str, Rejection], ...]
    """The first rejected nodes by name, with their reasons."""
    fitting: int = 0
    note: str = ""
    """The reconciler's next step, such as waiting or preempting."""
    wait: LoadWait | None = None
    """The expected wait of a model at zero; None if it is not known, or requests do not wait."""
    group: str = ""
    """The ShardGroup that the nodes are members of; empty for a replica on a single Mac."""
    ranks: int = 1
    """The number of nodes that are needed at once."""
    whole: Rejection | None = None
    """The reason that concerns the group as a whole."""

    @property
    def need_bytes(self) -> int:
        """The least memory that the replica needs on a node that is too small; 0 if none is."""
        short = (tally.need for tally in self.tallies if tally.reason == "InsufficientMemory")
        return min(short, default=0)

    def noting(self, note: str, wait: LoadWait | None = None) -> "Unschedulable":
        """Return a copy with a note, and the expected wait."""
        return replace(self, note=note, wait=wait)


def is_crash_loop(unschedulable: Unschedulable) -> bool:
    """Return whether the replica has its Macs, but all shapes of its group failed on them."""
    return unschedulable.whole is not None and unschedulable.whole.reason == CRASH_LOOPING


def collect_refusals(
    assumed: AssumedState, request: PlacementRequest, ranking: Ranking
) -> Unschedulable:
    """Return the reasons why the nodes do not fit, in the assumed state."""
    evaluated = ranking.evaluated
    apart, below = ranking.is_apart, ranking.is_below_limit
    short = evaluated.need.of_node > ranking.room
    fits = apart & below & ~short
    tallies = _fixed(evaluated)
    groups = (
        ("AntiAffinity", evaluated.passes & ~apart),
        ("ReplicaLimit", apart & ~below),
        ("InsufficientMemory", apart & below & short),
    )
    for reason, where in groups:
        if where.any():
            tallies.append(_moving(assumed, request, reason, where, ranking))
    rows = map(int, np.flatnonzero(~fits)[:MAX_LISTED])
    listed = [
        (assumed.table.nodes[row].name, _of_node(assumed, request, evaluated, row)) for row in rows
    ]
    return Unschedulable(
        nodes=len(assumed.table),
        tallies=tuple(sorted(tallies, key=sort_key)),
        refusals=tuple((name, why) for name, why in listed if why is not None),
        fitting=int(fits.sum()),
    )


def _of_node(
    assumed: AssumedState, request: PlacementRequest, evaluated: EvaluatedRequest, row: int
) -> Rejection | None:
    for verdict in evaluated.verdicts:
        why = verdict.refusals[int(verdict.of_node[row])]
        if why is not None:
            return why
    return find_rejection(request, assumed.view(row))


def _fixed(evaluated: EvaluatedRequest) -> list[RefusalCount]:
    """Count the rejections of the fixed filters; each node counts for the first filter that rejects it."""
    counted: list[tuple[Rejection, int]] = []
    open_ = np.ones(len(evaluated.passes), np.bool_)
    for verdict in evaluated.verdicts:
        if len(verdict.refusals) == 1:
            continue
        counts = np.bincount(verdict.of_node[open_], minlength=len(verdict.refusals))
        pairs = zip(verdict.refusals, counts, strict=True)
        counted.extend((why, int(count)) for why, count in pairs if why is not None and count)
        open_ &= verdict.passes
    return count_refusals(counted)


def count_refusals(counted: Iterable[tuple[Rejection, int]]) -> list[RefusalCount]:
    """Sum up rejections by reason; each comes with its number of nodes."""
    refusal_counts: dict[str, RefusalCount] = {}
    for why, count in counted:
        old = refusal_counts.get(why.reason)
        if old is None:
            refusal_counts[why.reason] = RefusalCount(
                reason=why.reason,
                count=count,
                need=why.need,
                have=why.have,
                capacity=why.capacity,
                message=why.message,
            )
            continue
        nearer = (old.need, old.have) if old.have >= why.have else (why.need, why.have)
        refusal_counts[why.reason] = RefusalCount(
            reason=why.reason,
            count=old.count + count,
            need=nearer[0],
            have=nearer[1],
            capacity=max(filter(None, (old.capacity, why.capacity)), default=None),
            message=min(old.message, why.message),
        )
    return list(refusal_counts.values())


def _moving(
    assumed: AssumedState,
    request: PlacementRequest,
    reason: str,
    where: NDArray[np.bool_],
    ranking: Ranking,
) -> RefusalCount:
    rows = np.flatnonzero(where)
    nearest = (
        int(rows[np.argmax(ranking.room[rows])]) if reason == "InsufficientMemory" else int(rows[0])
    )
    why = find_rejection(request, assumed.view(nearest))
    assert why is not None
    nodes = assumed.table.nodes
    is_memory = why.capacity is not None
    return RefusalCount(
        reason=reason,
        count=len(rows),
        need=why.need,
        have=why.have,
        capacity=max(nodes[row].allocatable_bytes for row in rows) if is_memory else None,
        message=why.message,
    )


def sort_key(tally: RefusalCount) -> tuple[int, str]:
    """Return the sort key of a count: the reason of most nodes comes first."""
    return -tally.count, tally.reason


def _short(of: str, tally: RefusalCount) -> str:
    """Describe a shortage that may end, or nodes that could not take the replica if they were empty."""
    is_too_small = tally.capacity is not None and tally.need > tally.capacity
    have_bytes = tally.capacity if is_too_small and tally.capacity is not None else tally.have
    need, have = quantity.show(tally.need), quantity.show(max(0, have_bytes))
    if is_too_small:
        return f"too small even when empty (need {need}, the largest has {have})"
    return f"short of {of} (need {need}, best has {have})"


# The phrase after "3 " or "1 ". A reason that is not here is shown as its code with one node's message.
_PHRASES: Final[dict[str, Callable[[RefusalCount], str]]] = {
    "NodeNotReady": lambda _: "NotReady",
    "NodeDraining": lambda _: "draining",
    "NodeWithheld": lambda tally: f"withheld ({tally.message})",
    # The message goes on with remedies; `describe` and `explain placement` show them for each node.
    "DuplicateHardware": lambda t: f"with the hardware of another node ({t.message.split('. ')[0]})",
    "VersionSkew": lambda tally: f"of another version ({tally.message})",
    "NodeFlapping": lambda tally: f"held back ({tally.message})",
    "MemoryPressure": lambda _: "under memory pressure",
    "DiskPressure": lambda _: "under disk pressure",
    "ThermalPressure": lambda _: "too hot",
    "NeedsReboot": lambda _: "in need of a reboot",
    "MetalUnavailable": lambda _: "without a working GPU",
    "InsufficientDisk": lambda tally: _short("disk", tally),
    "NodeCordoned": lambda _: "cordoned",
    "NotInPool": lambda tally: tally.message.removeprefix("it is "),
    "SelectorMismatch": lambda tally: f"not selected ({tally.message})",
    "ChipMismatch": lambda tally: f"with another chip ({tally.message})",
    "TooFewGpuCores": lambda t: f"short of GPU cores (need {t.need}, best has {t.have})",
    "ReservedForGroup": lambda _: "reserved for a ShardGroup",
    "NodeTainted": lambda tally: f"tainted ({tally.message})",
    "ModelNotInspected": lambda _: "yet to inspect the model",
    "ContextTooLong": lambda t: f"with a shorter context (need {t.need} tokens, best has {t.have})",
    "AntiAffinity": lambda _: "with replicas that antiAffinity keeps apart",
    "ReplicaLimit": lambda tally: f"full up (maxReplicasPerNode is {tally.have})",
    "InsufficientMemory": lambda tally: _short("memory", tally),
    "UnknownNode": lambda _: "not joined",
    "NotInGroup": lambda _: "no members of the ShardGroup",
}


def summary_line(unschedulable: Unschedulable) -> str:
    """Return the reasons as kubectl shows them: "0/5 nodes fit: 3 short of memory (...), 1 cordoned, 1 NotReady"."""
    if not unschedulable.nodes and not unschedulable.group:
        return "no node has joined the fleet yet; start fleet-nodeagent on a Mac"
    parts = [
        f"{tally.count} {_PHRASES.get(tally.reason, _coded)(tally)}"
        for tally in unschedulable.tallies
    ]
    head = f"{unschedulable.fitting}/{unschedulable.nodes} nodes fit"
    if unschedulable.group:
        head = _of_group(unschedulable)
    line = f"{head}: {', '.join(parts)}" if parts else head
    return f"{line}; {unschedulable.note}" if unschedulable.note else line


def _of_group(unschedulable: Unschedulable) -> str:
    """Describe a group: the reason that concerns it as a whole, or how many of its members fit."""
    name, why = f"ShardGroup {unschedulable.group}", unschedulable.whole
    if why is not None:
        return f"{name}: {why.message}"
    return (
        f"{name}: {unschedulable.fitting}/{unschedulable.nodes} members fit, "
        f"{unschedulable.ranks} are needed at once"
    )


def _coded(tally: RefusalCount) -> str:
    return f"{tally.reason} ({tally.message})"
