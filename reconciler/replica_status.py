"""What is true of a replica, as conditions: what the agents of its ranks say, and whether it answers. Pure."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from reconciler.groups.epochs import Epoch
from reconciler.nodes.peaks import corrections
from reconciler.observe import ReplicaView
from reconciler.placement.refusals import CRASH_LOOPING
from reconciler.status import condition, settle
from schemas.formation import Formation
from schemas.meta import Condition, Status, Truth, find_condition
from schemas.replica import RankStatus, ReplicaStatus


def replica_status(
    view: ReplicaView,
    reports: Sequence[RankStatus | None],
    *,
    old: Status | None,
    now: datetime,
) -> ReplicaStatus:
    """Return the status of a replica; `reports` are of its ranks, in this epoch."""
    found = [_ready(view, reports)]
    corrected = corrections(view.replica, reports)
    if corrected:
        found.append(condition("ProofCorrected", "MeasuredMore", corrected, holds=True))
    formation = view.replica.spec.formation
    if formation is not None and view.epoch is not None:
        found += _of_epoch(formation, view.epoch)
    generation = view.replica.metadata.generation
    return ReplicaStatus(
        observed_generation=generation,
        conditions=settle(old, found, generation=generation, now=now),
    )


def _ready(view: ReplicaView, reports: Sequence[RankStatus | None]) -> Condition:
    """Return whether it answers; if not, what the first rank says that is not ready."""
    if view.is_ready:
        return condition("Ready", "Serving", holds=True)
    if view.epoch is not None and view.epoch.over:
        return condition("Ready", view.epoch.over, view.epoch.message, holds=False)
    ranks = view.replica.spec.ranks
    prefix = [f"rank {number} on {rank.node}: " for number, rank in enumerate(ranks)]
    said = [
        (number, found)
        for number, report in enumerate(reports)
        if report is not None and (found := find_condition(report.conditions, "Ready"))
    ]
    for number, found in said:
        if found.status is not Truth.TRUE:
            head = prefix[number] if len(ranks) > 1 and found.message else ""
            return condition("Ready", found.reason, f"{head}{found.message}", holds=False)
    if reports[0] is not None and said:
        message = f"its agent on {view.node} is away; the engine may go on all the same"
        return condition("Ready", "AgentAway", message, holds=False)
    silent = [rank.node for rank, one in zip(ranks, reports, strict=True) if one is None]
    who = "its agent" if len(ranks) == 1 else f"the agent on {', '.join(silent)}"
    message = f"{who} has not reported yet"
    return condition("Ready", "WaitingForAgent", message, holds=False)


def _of_epoch(formation: Formation, epoch: Epoch) -> Iterator[Condition]:
    """Yield what of a group's epoch later looks go by, and people want to know."""
    number = f"epoch {formation.epoch}"
    if epoch.over:
        yield condition("EpochOver", epoch.over, f"{number}: {epoch.message}", holds=True)
    else:
        yield condition("EpochOver", "GoesOn", number, holds=False)
    yield condition("Steady", "Served" if epoch.is_steady else "New", number, holds=epoch.is_steady)
    if epoch.is_given_up:
        yield condition(CRASH_LOOPING, "TriedEverything", epoch.message, holds=True)
    else:
        yield condition(CRASH_LOOPING, "MayGoOn", holds=False)
