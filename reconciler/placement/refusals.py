"""Why a replica cannot be placed: counted by reason for one line, node by node for a table. Pure."""

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

# A status is read by people; a thousand refusals say no more than twenty.
MAX_LISTED: Final = 20
CRASH_LOOPING: Final = "CrashLooping"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCount:
    """How many nodes have a reason, and the one of them that is nearest to fitting."""

    reason: str
    count: int
    need: int = 0
    have: int = 0
    message: str = ""
    """What one of them says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unschedulable:
    """Why no node, or too few of them, can take the replica."""

    nodes: int
    tallies: tuple[RefusalCount, ...]
    refusals: tuple[tuple[str, Rejection], ...]
    """The first nodes by name, with their reasons."""
    fitting: int = 0
    note: str = ""
    """What is done about it."""
    group: str = ""
    """The ShardGroup whose members the nodes are; empty for a replica that has one Mac."""
    ranks: int = 1
    """How many of them were needed at once."""
    whole: Rejection | None = None
    """What is wrong about the group as one."""

    def noting(self, note: str) -> "Unschedulable":
        """Return the same, saying what is done about it."""
        return replace(self, note=note)


def is_crash_loop(unschedulable: Unschedulable) -> bool:
    """Return whether it has its Macs, but nothing that may be run on them goes on."""
    return unschedulable.whole is not None and unschedulable.whole.reason == CRASH_LOOPING


def collect_refusals(
    draft: AssumedState, want: PlacementRequest, ranking: Ranking
) -> Unschedulable:
    """Return why the nodes do not fit, as the draft has them now."""
    judged = ranking.judged
    apart, below = ranking.is_apart, ranking.is_below_limit
    short = judged.need.of_node > ranking.room
    fits = apart & below & ~short
    tallies = _fixed(judged)
    groups = (
        ("AntiAffinity", judged.passes & ~apart),
        ("ReplicaLimit", apart & ~below),
        ("InsufficientMemory", apart & below & short),
    )
    for reason, where in groups:
        if where.any():
            tallies.append(_moving(draft, want, reason, where, ranking))
    rows = map(int, np.flatnonzero(~fits)[:MAX_LISTED])
    listed = [(draft.table.nodes[row].name, _of_node(draft, want, judged, row)) for row in rows]
    return Unschedulable(
        nodes=len(draft.table),
        tallies=tuple(sorted(tallies, key=sort_key)),
        refusals=tuple((name, why) for name, why in listed if why is not None),
        fitting=int(fits.sum()),
    )


def _of_node(
    draft: AssumedState, want: PlacementRequest, judged: EvaluatedRequest, row: int
) -> Rejection | None:
    for verdict in judged.verdicts:
        why = verdict.refusals[int(verdict.of_node[row])]
        if why is not None:
            return why
    return find_rejection(want, draft.view(row))


def _fixed(judged: EvaluatedRequest) -> list[RefusalCount]:
    """Count the refusals that do not change, each node by the first filter that refuses it."""
    counted: list[tuple[Rejection, int]] = []
    open_ = np.ones(len(judged.passes), np.bool_)
    for verdict in judged.verdicts:
        if len(verdict.refusals) == 1:
            continue
        counts = np.bincount(verdict.of_node[open_], minlength=len(verdict.refusals))
        pairs = zip(verdict.refusals, counts, strict=True)
        counted.extend((why, int(count)) for why, count in pairs if why is not None and count)
        open_ &= verdict.passes
    return count_refusals(counted)


def count_refusals(counted: Iterable[tuple[Rejection, int]]) -> list[RefusalCount]:
    """Return the refusals by reason; each comes with the number of nodes that have it."""
    found: dict[str, RefusalCount] = {}
    for why, count in counted:
        old = found.get(why.reason)
        if old is None:
            found[why.reason] = RefusalCount(
                reason=why.reason, count=count, need=why.need, have=why.have, message=why.message
            )
            continue
        nearer = (old.need, old.have) if old.have >= why.have else (why.need, why.have)
        found[why.reason] = RefusalCount(
            reason=why.reason,
            count=old.count + count,
            need=nearer[0],
            have=nearer[1],
            message=min(old.message, why.message),
        )
    return list(found.values())


def _moving(
    draft: AssumedState,
    want: PlacementRequest,
    reason: str,
    where: NDArray[np.bool_],
    ranking: Ranking,
) -> RefusalCount:
    rows = np.flatnonzero(where)
    nearest = (
        int(rows[np.argmax(ranking.room[rows])]) if reason == "InsufficientMemory" else int(rows[0])
    )
    why = find_rejection(want, draft.view(nearest))
    assert why is not None
    return RefusalCount(
        reason=reason, count=len(rows), need=why.need, have=why.have, message=why.message
    )


def sort_key(tally: RefusalCount) -> tuple[int, str]:
    """Return by what tallies are sorted: what most nodes have comes first."""
    return -tally.count, tally.reason


def _short(of: str, tally: RefusalCount) -> str:
    need, have = quantity.show(tally.need), quantity.show(max(0, tally.have))
    number, _, unit = have.partition(" ")
    best = number if need.partition(" ")[2] == unit else have
    return f"short of {of} (need {need}, best has {best})"


# In people's words, after "3 " or "1 ". What is not here is named by its code, with what one node says.
_PHRASES: Final[dict[str, Callable[[RefusalCount], str]]] = {
    "NodeNotReady": lambda _: "NotReady",
    "NodeDraining": lambda _: "draining",
    "NodeWithheld": lambda tally: f"withheld ({tally.message})",
    "DuplicateHardware": lambda tally: f"with another's hardware ({tally.message})",
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
    "ModelNotInspected": lambda _: "yet to look at the model",
    "ContextTooLong": lambda t: f"with a model made for less (need {t.need} tokens, best has {t.have})",
    "AntiAffinity": lambda _: "with replicas to keep apart from",
    "ReplicaLimit": lambda tally: f"full up (maxReplicasPerNode is {tally.have})",
    "InsufficientMemory": lambda tally: _short("memory", tally),
    "UnknownNode": lambda _: "not joined",
    "NotInGroup": lambda _: "no members of the ShardGroup",
}


def summary_line(unschedulable: Unschedulable) -> str:
    """Return the refusals as kubectl does: "0/5 nodes fit: 3 short of memory (...), 1 cordoned, 1 NotReady"."""
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
    """Return what is wrong about a group: what is wrong about all of it, or how many members there are for it."""
    name, why = f"ShardGroup {unschedulable.group}", unschedulable.whole
    if why is not None:
        return f"{name}: {why.message}"
    return (
        f"{name}: {unschedulable.fitting}/{unschedulable.nodes} members fit, "
        f"{unschedulable.ranks} are needed at once"
    )


def _coded(tally: RefusalCount) -> str:
    return f"{tally.reason} ({tally.message})"
