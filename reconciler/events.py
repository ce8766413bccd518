"""What the reconciler did and found, as events for people."""

from collections.abc import Sequence
from typing import assert_never

from reconciler.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
)
from reconciler.listers.lister import Lister
from reconciler.placement.refusals import Unschedulable
from reconciler.views import DeploymentView
from schemas import quantity
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.event import ObjectReference
from schemas.meta import ObjectKey, Status, find_condition
from schemas.replica import RankAssignment
from store.events import EventRecorder

# Of Progressing, what somebody should know who is not looking.
_ALARMS = ("Stalled", "CanaryFailed")


class DeploymentEvents:
    """Records events about deployments."""

    def __init__(self, fleet: Lister, recorder: EventRecorder) -> None:
        self._fleet = fleet
        self._recorder = recorder

    async def told(self, action: Action, seen: DeploymentView) -> None:
        """Record what was done as an event of the deployment."""
        uid = seen.deployment.metadata.uid if seen.deployment is not None else ""
        about = ObjectReference(kind="ModelDeployment", name=seen.name, uid=uid)
        match action:
            case CreateReplica():
                await self._recorder.record(about, "ReplicaPlaced", _placed(action))
            case MoveReplica() | ReformReplica():
                reason, message = _moved(action)
                await self._recorder.record(about, reason, message, type_="Warning")
            case DeleteReplica(name=name, because=because):
                await self._recorder.record(about, because, f"{name} is to drain and end")
            case PreemptReplica(name=name, deployment=deployment, because=why):
                # It is the victim's people who will ask.
                theirs = self._fleet.spec(ObjectKey("ModelDeployment", deployment))
                uid = theirs.metadata.uid if theirs is not None else ""
                about = ObjectReference(kind="ModelDeployment", name=deployment, uid=uid)
                message = f"{name} is to drain and end: {why}"
                await self._recorder.record(about, "Preempted", message, type_="Warning")
            case OrphanReplica(name=name):
                message = f"{name} goes on without its deployment"
                await self._recorder.record(about, "ReplicaOrphaned", message)
            case AdoptReplica(name=name):
                message = f"{name} was there already and is taken over"
                await self._recorder.record(about, "ReplicaAdopted", message)
            case SaveRevision(number=number, template=template):
                message = f"revision {number} ({template}) is the newest"
                await self._recorder.record(about, "NewRevision", message)
            case RemoveReplica(name=name):
                await self._recorder.record(about, "ReplicaRemoved", f"{name} has ended")
            case RemoveRevision() | RemoveDeployment() | ReleaseRanks():
                pass  # of interest to nobody, or there is nothing left to hang an event on
            case _:
                assert_never(action)

    async def told_replica(self, seen: DeploymentView, old: Status | None, new: Status) -> None:
        """Record what of a replica's status is news to the people of its deployment."""
        corrected = find_condition(new.conditions, "ProofCorrected")
        before = None if old is None else find_condition(old.conditions, "ProofCorrected")
        if corrected is None or (before is not None and before.message == corrected.message):
            return
        uid = seen.deployment.metadata.uid if seen.deployment is not None else ""
        about = ObjectReference(kind="ModelDeployment", name=seen.name, uid=uid)
        await self._recorder.record(about, "ProofCorrected", corrected.message, type_="Warning")

    async def told_status(
        self,
        deployment: ModelDeployment,
        old: ModelDeploymentStatus | None,
        new: ModelDeploymentStatus,
        unschedulable: Unschedulable | None,
    ) -> None:
        """Record what of a deployment's status is news that people should not miss."""
        about = ObjectReference(
            kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid
        )
        placed, before = _said(new, "Placed"), _said(old, "Placed")
        if unschedulable is not None and placed != before:
            await self._recorder.record(about, "Unschedulable", placed[1], type_="Warning")
            for node, why in unschedulable.refusals:
                message = f"{node}: {why.message}"
                await self._recorder.record(about, why.reason, message, type_="Warning")
        moved, was = _said(new, "Progressing"), _said(old, "Progressing")
        if moved[0] != was[0] and moved[0] in _ALARMS:
            await self._recorder.record(about, moved[0], moved[1], type_="Warning")
        elif moved[0] != was[0] and moved[0] == "RolloutComplete":
            await self._recorder.record(about, "RolloutComplete", moved[1])
        if old is not None and old.desired_replicas != new.desired_replicas:
            message = f"{old.desired_replicas} -> {new.desired_replicas} replicas"
            await self._recorder.record(about, "Scaled", message)


def _placed(action: CreateReplica) -> str:
    said = ", as spec.resources.memory says" if action.ranks[0].memory.overridden else ""
    need = " + ".join(quantity.show(rank.memory.total_bytes) for rank in action.ranks)
    return f"{action.name} goes to {_nodes(action.ranks)} and needs {need}{said}"


def _moved(action: MoveReplica | ReformReplica) -> tuple[str, str]:
    """Return what happened to a replica, in one word and for people."""
    match action:
        case MoveReplica(name=name, ranks=ranks):
            return "ReplicaMoved", f"{name} goes to {_nodes(ranks)}: its node is lost"
        case ReformReplica(name=name, ranks=ranks, form=form, because=because):
            what = f", as fallback {form.fallback} of {form.group}" if form.fallback else ""
            return "ReplicaReformed", f"{name} starts again on {_nodes(ranks)}{what}: {because}"


def _nodes(ranks: Sequence[RankAssignment]) -> str:
    return ", ".join(rank.node for rank in ranks)


def _said(found: ModelDeploymentStatus | None, type_: str) -> tuple[str, str]:
    condition = None if found is None else find_condition(found.conditions, type_)
    return ("", "") if condition is None else (condition.reason, condition.message)
