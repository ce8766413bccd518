"""Rollouts of a deployment: how far the last one is, and the revisions before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from insight import edits
from schemas.deployment import ModelDeployment, Revision
from schemas.meta import Condition, ConditionStatus, find_condition
from store import objects
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """The progress of a rollout."""

    text: str
    is_done: bool = False
    is_failed: bool = False
    is_unobserved: bool = False
    """True if the reconciler has not observed the current generation of the deployment."""


def progress_of(deployment: ModelDeployment) -> RolloutProgress:
    """Return the progress according to the deployment's conditions. Pure."""
    name, status = deployment.name, deployment.status
    if deployment.metadata.deletion_timestamp is not None:
        return RolloutProgress(text=f"modeldeployment/{name} is being deleted", is_failed=True)
    found = None if status is None else find_condition(status.conditions, "Progressing")
    generation = deployment.metadata.generation
    # A status of an older generation does not count.
    if (
        found is None
        or min(status.observed_generation if status else 0, found.observed_generation) < generation
    ):
        return RolloutProgress(
            text="Waiting for the reconciler to look at the deployment", is_unobserved=True
        )
    progress = _condition_progress(name, found)
    if progress.is_done and status is not None and status.ready_replicas < status.desired_replicas:
        count = f"{status.ready_replicas} of {status.desired_replicas} replicas are ready"
        return RolloutProgress(
            text=f'Waiting for modeldeployment "{name}" rollout to finish: {count}'
        )
    return progress


def _condition_progress(name: str, found: Condition) -> RolloutProgress:
    """Return the progress according to the condition Progressing of the current generation."""
    head = f'Waiting for modeldeployment "{name}" rollout to finish'
    message = found.message or found.reason
    match found.status, found.reason:
        case ConditionStatus.TRUE, "RolloutComplete":
            return RolloutProgress(
                text=f'modeldeployment "{name}" successfully rolled out', is_done=True
            )
        case ConditionStatus.FALSE, "CanaryFailed":
            text = f'modeldeployment "{name}" was rolled back: {message}'
            return RolloutProgress(text=text, is_failed=True)
        case ConditionStatus.FALSE, reason:
            text = f'rollout of modeldeployment "{name}" failed ({reason}): {message}'
            return RolloutProgress(text=text, is_failed=True)
        case ConditionStatus.UNKNOWN, "Paused":
            why = f" ({found.message})" if found.message else ""
            return RolloutProgress(
                text=f"{head}: it is paused{why}; `fleetctl rollout resume {name}` resumes it"
            )
        case _:
            return RolloutProgress(text=f"{head}: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRevision:
    """One revision as a person looks at it."""

    number: int
    template: str
    created: datetime | None
    cause: str
    is_current: bool
    diff: str
    """The difference from the revision before; empty for the first one."""


async def read_revisions(transport: Transport, deployment: ModelDeployment) -> list[Revision]:
    """Return the recorded revisions of a deployment, oldest first. Raises StoreError."""
    return edits.revisions_of(await objects.list_all(transport, Revision), deployment)


def history_of(revisions: Sequence[Revision], deployment: ModelDeployment) -> list[PastRevision]:
    """Return the revisions, oldest first, each with what differs from the one before."""
    current = edits.current_revision(list(revisions), deployment)
    return [
        PastRevision(
            number=one.spec.revision,
            template=one.spec.template,
            created=one.metadata.creation_timestamp,
            cause=one.spec.change_cause,
            is_current=one is current,
            diff=edits.revision_diff(before, one),
        )
        for before, one in zip([None, *revisions], revisions, strict=False)
    ]
