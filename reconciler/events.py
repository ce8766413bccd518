"""Events about deployments: what the reconciler did, and the status changes that people should notice."""

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
from schemas.meta import Status, find_condition
from schemas.replica import RankAssignment
from store.events import EventRecorder

# Reasons of Progressing that people should notice.
_ALARMS = ("Stalled", "CanaryFailed")


class DeploymentEvents:
    """Records events about deployments."""

    def __init__(self, lister: Lister, recorder: EventRecorder) -> None:
        self._lister = lister
        self._recorder = recorder

    async def record_action(self, action: Action, observed: DeploymentView) -> None:
        """Record an action as an event of its deployment."""
        uid = observed.deployment.metadata.uid if observed.deployment is not None else ""
        about = ObjectReference(kind="ModelDeployment", name=observed.name, uid=uid)
        match action:
            case CreateReplica():
                await self._recorder.record(about, "ReplicaPlaced", _placed(action))
            case MoveReplica() | ReformReplica():
                reason, message = _moved(action)
                await self._recorder.record(about, reason, message, type_="Warning")
            case DeleteReplica(name=name, because=because):
                await self._recorder.record(about, because, f"{name} drains and ends")
            case PreemptReplica(name=name, deployment=deployment, because=why):
                # The event belongs to the deployment that loses the replica.
                victim = self._lister.deployment(deployment)
                uid = victim.metadata.uid if victim is not None else ""
                about = ObjectReference(kind="ModelDeployment", name=deployment, uid=uid)
                message = f"{name} drains and ends: {why}"
                await self._recorder.record(about, "Preempted", message, type_="Warning")
            case OrphanReplica(name=name):
                message = f"{name} keeps running without its deployment"
                await self._recorder.record(about, "ReplicaOrphaned", message)
            case AdoptReplica(name=name):
                message = f"{name} already exists and is adopted"
                await self._recorder.record(about, "ReplicaAdopted", message)
            case SaveRevision(number=number, template=template):
                message = f"revision {number} ({template}) is the newest"
                await self._recorder.record(about, "NewRevision", message)
            case RemoveReplica(name=name):
                await self._recorder.record(about, "ReplicaRemoved", f"{name} has ended")
            case RemoveRevision() | RemoveDeployment() | ReleaseRanks():
                pass  # of no interest, or the deployment of the event is gone
            case _:
                assert_never(action)

    async def record_replica_status(
        self, observed: DeploymentView, old: Status | None, new: Status
    ) -> None:
        """Record a new correction of a replica's memory proof."""
        corrected = find_condition(new.conditions, "ProofCorrected")
        before = None if old is None else find_condition(old.conditions, "ProofCorrected")
        if corrected is None or (before is not None and before.message == corrected.message):
            return
        uid = observed.deployment.metadata.uid if observed.deployment is not None else ""
        about = ObjectReference(kind="ModelDeployment", name=observed.name, uid=uid)
        await self._recorder.record(about, "ProofCorrected", corrected.message, type_="Warning")

    async def record_status(
        self,
        deployment: ModelDeployment,
        old: ModelDeploymentStatus | None,
        new: ModelDeploymentStatus,
        unschedulable: Unschedulable | None,
    ) -> None:
        """Record the changes of a deployment's status that people should notice."""
        about = ObjectReference(
            kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid
        )
        placed, placed_before = _reason_of(new, "Placed"), _reason_of(old, "Placed")
        if unschedulable is not None and placed != placed_before:
            await self._recorder.record(about, "Unschedulable", placed[1], type_="Warning")
            for node, why in unschedulable.refusals:
                message = f"{node}: {why.message}"
                await self._recorder.record(about, why.reason, message, type_="Warning")
        progress = _reason_of(new, "Progressing")
        has_changed = progress[0] != _reason_of(old, "Progressing")[0]
        if has_changed and progress[0] in _ALARMS:
            await self._recorder.record(about, progress[0], progress[1], type_="Warning")
        elif has_changed and progress[0] == "RolloutComplete":
            await self._recorder.record(about, "RolloutComplete", progress[1])
        if old is not None and old.desired_replicas != new.desired_replicas:
            message = f"{old.desired_replicas} -> {new.desired_replicas} replicas"
            await self._recorder.record(about, "Scaled", message)


def _placed(action: CreateReplica) -> str:
    note = ", set by spec.resources.memory" if action.ranks[0].memory.overridden else ""
    need = " + ".join(quantity.show(rank.memory.total_bytes) for rank in action.ranks)
    return f"{action.name} goes to {_nodes(action.ranks)} and needs {need}{note}"


def _moved(action: MoveReplica | ReformReplica) -> tuple[str, str]:
    """Return the reason and message for a replica that was moved or reformed."""
    match action:
        case MoveReplica(name=name, ranks=ranks):
            return "ReplicaMoved", f"{name} goes to {_nodes(ranks)}: its node is lost"
        case ReformReplica(name=name, ranks=ranks, form=form, because=because):
            shape = f", as fallback {form.fallback} of {form.group}" if form.fallback else ""
            return "ReplicaReformed", f"{name} starts again on {_nodes(ranks)}{shape}: {because}"


def _nodes(ranks: Sequence[RankAssignment]) -> str:
    return ", ".join(rank.node for rank in ranks)


def _reason_of(found: ModelDeploymentStatus | None, type_: str) -> tuple[str, str]:
    condition = None if found is None else find_condition(found.conditions, type_)
    return ("", "") if condition is None else (condition.reason, condition.message)
