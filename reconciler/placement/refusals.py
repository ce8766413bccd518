"""The reasons why a replica cannot be placed: counted by reason for one line, node by node for a table. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reconciler.placement.assumed_state import AssumedState
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import PlacementRequest, Rejection
from reconciler.placement.ranking import Ranking
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
    capacity: int = 0
    """What the largest of the nodes has in all; 0 if unknown."""
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
    group: str = ""
    """The ShardGroup that the nodes are members of; empty for a replica on a single Mac."""
    ranks: int = 1
    """The number of nodes that are needed at once."""
    whole: Rejection | None = None
    """The reason that concerns the group as a whole."""

    def noting(self, note: str) -> "Unschedulable":
        """Return a copy with a note."""
        return replace(self, note=note)


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
    found: dict[str, RefusalCount] = {}
    for why, count in counted:
        old = found.get(why.reason)
        if old is None:
            found[why.reason] = RefusalCount(
                reason=why.reason,
                count=count,
                need=why.need,
                have=why.have,
                capacity=why.capacity,
                message=why.message,
            )
            continue
        nearer = (old.need, old.have) if old.have >= why.have else (why.need, why.have)
        found[why.reason] = RefusalCount(
            reason=why.reason,
            count=old.count + count,
            need=nearer[0],
            have=nearer[1],
            capacity=max(old.capacity, why.capacity),
            message=min(old.message, why.message),
        )
    return list(found.values())


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
    is_memory = reason == "InsufficientMemory"
    return RefusalCount(
        reason=reason,
        count=len(rows),
        need=why.need,
        have=why.have,
        capacity=int(assumed.table.allocatable[rows].max()) if is_memory else 0,
        message=why.message,
    )


def sort_key(tally: RefusalCount) -> tuple[int, str]:
    """Return the sort key of a count: the reason of most nodes comes first."""
    return -tally.count, tally.reason


def _short(of: str, tally: RefusalCount) -> str:
    need = quantity.show(tally.need)
    return f"short of {of} (need {need}, best has {_amount(tally.have, unit_of=need)})"


def _short_of_memory(tally: RefusalCount) -> str:
    """Distinguish a Mac without room now from one that is too small for ever."""
    if not tally.capacity or tally.need <= tally.capacity:
        return _short("memory", tally)
    need = quantity.show(tally.need)
    largest, free = (_amount(size, unit_of=need) for size in (tally.capacity, tally.have))
    return f"too small (need {need}, the largest has {largest} in all, {free} free)"


def _amount(size: int, *, unit_of: str) -> str:
    """Return an amount, without its unit if that is the one of the other text."""
    shown = quantity.show(max(0, size))
    number, _, unit = shown.partition(" ")
    return number if unit_of.partition(" ")[2] == unit else shown


# The phrase after "3 " or "1 ". A reason that is not here is shown as its code with one node's message.
_PHRASES: Final[dict[str, Callable[[RefusalCount], str]]] = {
    "NodeNotReady": lambda _: "NotReady",
    "NodeDraining": lambda _: "draining",
    "NodeWithheld": lambda tally: f"withheld ({tally.message})",
    "DuplicateHardware": lambda tally: f"with the hardware of another node ({tally.message})",
    "VersionSkew": lambda tally: f"of another version ({tally.message})",
    "NodeFlapping": lambda tally: f"held back ({tally.message})",
    "MemoryPressure": lambda _: "under memory pressure",
    "DiskPressure": lambda _: "under disk pressure",
    "ThermalPressure": lambda _: "too hot",
    "NeedsReboot": lambda _: "in need of a reboot",
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
    "InsufficientMemory": _short_of_memory,
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
