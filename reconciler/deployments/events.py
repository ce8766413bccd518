"""Events about deployments: what the reconciler did, and the status changes that people should notice."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never

from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    EndPreload,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
    StartPreload,
    StartRanks,
)
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.listers.lister import Lister
from reconciler.placement.refusals import Unschedulable
from schemas import quantity, sizes
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.event import ObjectReference
from schemas.meta import Condition, ConditionStatus, Status, find_condition, is_true
from schemas.replica import FETCHING_REASONS, MODEL_PRESENT, RankAssignment, ReplicaStatus
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
        about = _about(observed)
        match action:
            case MoveReplica() | ReformReplica():
                reason, message = _moved(action)
                await self._recorder.record(about, reason, message, type_="Warning")
            case PreemptReplica(name=name, deployment=deployment, reason=reason, because=why):
                # The event belongs to the deployment that loses the replica.
                victim = self._lister.deployment(deployment)
                uid = victim.metadata.uid if victim is not None else ""
                about = ObjectReference(kind="ModelDeployment", name=deployment, uid=uid)
                message = f"{name} drains and ends: {why}"
                if reason == "GaveWay":
                    await self._recorder.record(about, "GaveWay", message)
                else:
                    await self._recorder.record(about, "Preempted", message, type_="Warning")
            case RemoveRevision() | ReleaseRanks() | StartRanks() | EndPreload():
                pass  # of no interest
            case _:
                await self._recorder.record(about, *_normal_event(action))

    async def record_replica_status(
        self, view: ReplicaView, observed: DeploymentView, old: Status | None, new: Status
    ) -> None:
        """Record changes of a replica's status: readiness, fetches of its model, corrections of its memory proof."""
        about, record = _about(observed), self._recorder.record
        before = old.conditions if old is not None else ()
        name, nodes = view.name, ", ".join(rank.node for rank in view.replica.spec.ranks)
        ready, was_ready = find_condition(new.conditions, "Ready"), is_true(before, "Ready")
        if ready is not None and not view.is_deleting:
            is_ready = ready.status is ConditionStatus.TRUE
            if is_ready and not was_ready:
                await record(about, "ReplicaReady", f"{name} on {nodes} serves")
            elif was_ready and not is_ready:
                message = f"{name} on {view.node}: {ready.reason}: {ready.message}".rstrip(": ")
                is_bad = ready.reason != "Asleep"
                type_: Literal["Normal", "Warning"] = "Warning" if is_bad else "Normal"
                await record(about, "ReplicaNotReady", message, type_=type_)
        model, model_before = (find_condition(c, MODEL_PRESENT) for c in (new.conditions, before))
        if model is not None and (model_before is None or model_before.reason != model.reason):
            await self._record_fetch(view, about, new, model, model_before)
        corrected, last = (find_condition(c, "ProofCorrected") for c in (new.conditions, before))
        if corrected is not None and (last is None or last.message != corrected.message):
            await record(about, "ProofCorrected", corrected.message, type_="Warning")

    async def _record_fetch(
        self,
        view: ReplicaView,
        about: ObjectReference,
        status: Status,
        now: Condition,
        before: Condition | None,
    ) -> None:
        """Record that a replica's model is fetched, and each new reason why it is not."""
        name, nodes = view.name, ", ".join(rank.node for rank in view.replica.spec.ranks)
        if now.status is ConditionStatus.TRUE:
            if before is not None:
                have = "have" if len(view.nodes) > 1 else "has"
                message = f"{nodes} {have} the model of {name}: {now.message}".removesuffix(": ")
                await self._recorder.record(about, "ModelFetched", message)
        elif now.reason in FETCHING_REASONS:
            if before is None or before.reason not in FETCHING_REASONS:
                # Without figures that change.
                running = status.fetches if isinstance(status, ReplicaStatus) else ()
                sources = ", ".join(
                    f"{fetch.node} fetches {sizes.show(fetch.total_bytes)} from {fetch.source}"
                    for fetch in running
                )
                message = f"{name}: {sources}".removesuffix(": ")
                await self._recorder.record(about, now.reason, message)
        else:
            where = name if len(view.nodes) > 1 else f"{name} on {nodes}"
            kind: Literal["Normal", "Warning"] = (
                "Normal" if now.reason == "FetchStarting" else "Warning"
            )
            await self._recorder.record(about, now.reason, f"{where}: {now.message}", type_=kind)

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


_NormalAction: TypeAlias = (
    CreateReplica
    | DeleteReplica
    | OrphanReplica
    | AdoptReplica
    | SaveRevision
    | RemoveReplica
    | RemoveDeployment
    | StartPreload
)


def _normal_event(action: _NormalAction) -> tuple[str, str]:
    """Return reason and message of an action that is no cause for concern."""
    normal_event: tuple[str, str]
    match action:
        case CreateReplica():
            normal_event = "ReplicaPlaced", _placed(action)
        case DeleteReplica(name=name, because=because):
            normal_event = because, f"{name} drains and ends"
        case OrphanReplica(name=name):
            normal_event = "ReplicaOrphaned", f"{name} keeps running without its deployment"
        case AdoptReplica(name=name):
            normal_event = "ReplicaAdopted", f"{name} already exists and is adopted"
        case SaveRevision(number=number, template=template):
            normal_event = "NewRevision", f"revision {number} ({template}) is the newest"
        case RemoveReplica(name=name):
            normal_event = "ReplicaRemoved", f"{name} has ended"
        case RemoveDeployment():
            normal_event = "Deleted", "its deletion is complete"
        case StartPreload(node=node, source=source):
            normal_event = "PreloadStarted", f"{node} is to have the files of {source.folder}"
        case _:
            assert_never(action)
    return normal_event


def _about(observed: DeploymentView) -> ObjectReference:
    uid = observed.deployment.metadata.uid if observed.deployment is not None else ""
    return ObjectReference(kind="ModelDeployment", name=observed.name, uid=uid)


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
