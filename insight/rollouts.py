"""Rollouts of a deployment: how far the last one is, and the revisions before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from insight import edits
from insight.changes import ChangeFilter, RecordedChange, list_changes
from manifests.change_records import changed_fields
from manifests.trees import show_path
from schemas.deployment import ModelDeployment, Revision, RevisionTemplate, with_content
from schemas.meta import RESTARTED_AT, Condition, ConditionStatus, find_condition
from schemas.model_snapshot import ModelSnapshot, pinned
from store import codec, keys, objects
from store.errors import NotFoundError
from store.port import Transport

# Paths of a deployment's document that a revision holds, as the audit log writes them.
_CONTENT_FIELDS: Final = frozenset(
    field.alias or name for name, field in RevisionTemplate.model_fields.items()
)
_RESTART_PATH: Final = show_path(("metadata", "annotations", RESTARTED_AT))


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
    condition = None if status is None else find_condition(status.conditions, "Progressing")
    generation = deployment.metadata.generation
    # A status of an older generation does not count.
    if (
        condition is None
        or min(status.observed_generation if status else 0, condition.observed_generation)
        < generation
    ):
        return RolloutProgress(
            text="Waiting for the reconciler to look at the deployment", is_unobserved=True
        )
    progress = _condition_progress(name, condition)
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


async def read_pinned(transport: Transport, deployment: ModelDeployment) -> ModelDeployment:
    """Return the deployment with the commit that its hub reference stands for now. Raises StoreError."""
    snapshot = await read_snapshot(transport, deployment.name)
    return deployment if snapshot is None else pinned(deployment, snapshot)


async def read_snapshot(transport: Transport, name: str) -> ModelSnapshot | None:
    """Return what the hub reference of a deployment stands for now; None if it has none. Raises StoreError."""
    item = await transport.get(keys.named(keys.SNAPSHOT_PREFIX, name))
    return None if item is None else codec.decode(ModelSnapshot, item)


async def read_revision_before(
    transport: Transport, deployment: ModelDeployment, change_id: str
) -> int | None:
    """Return the revision that a deployment had before a recorded change; None if none has that content.

    Raises:
        NotFoundError: no such change of the deployment is recorded.
        StoreError: the store does not answer.

    """
    wanted = ChangeFilter(kind=deployment.kind, name=deployment.name)
    changes = await list_changes(transport, wanted)
    place = next((at for at, one in enumerate(changes) if one.id == change_id), None)
    if place is None:
        raise NotFoundError(f"no change {change_id[:80]} of {deployment.name} is recorded")
    now = await read_pinned(transport, deployment)
    revisions = await read_revisions(transport, deployment)
    revision = revision_before(revisions, now, changes[place:])
    return None if revision is None else revision.spec.revision


def revision_before(
    revisions: Sequence[Revision], now: ModelDeployment, changes: Sequence[RecordedChange]
) -> Revision | None:
    """Return the revision with the content that a deployment had before the first of its changes. Pure.

    `changes`: that one and all later ones, oldest first: each is taken back from what is there now. None if no revision
    has the content, or the record of a change is not complete.
    """
    before: dict[str, str | None] = {}
    current: dict[str, str | None] = {}
    for change in reversed(changes):
        for obj in change.record.objects:
            if (obj.kind, obj.name) != (now.kind, now.name):
                continue
            if obj.more_fields or obj.verb != "update":
                return None
            fields = [field for field in obj.fields if _is_content(field.path)]
            before |= {field.path: field.old for field in fields}
            current = {field.path: field.new for field in fields} | current
    differing = {path: old for path, old in before.items() if old != current[path]}
    return next(
        (revision for revision in reversed(revisions) if _fields_of(revision, now) == differing),
        None,
    )


def _fields_of(revision: Revision, now: ModelDeployment) -> dict[str, str | None]:
    """Return the fields of a revision that the deployment does not have so now, as the audit log writes them."""
    content = revision.spec.content
    then = edits.with_restart_mark(with_content(now, content), content.restarted_at)
    documents = [codec.encode_spec(deployment) for deployment in (then, now)]
    return {
        field.path: field.old for field in changed_fields(*documents) if _is_content(field.path)
    }


def _is_content(path: str) -> bool:
    """Return whether a path of a deployment's document is of its version."""
    head, _, rest = path.partition(".")
    field = rest.partition(".")[0].partition("[")[0]
    return path == _RESTART_PATH or (head == "spec" and field in _CONTENT_FIELDS)
