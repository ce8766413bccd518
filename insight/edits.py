"""Edits of objects that verbs and the dashboard share: cordon, drain, scale, rollouts. Pure."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

from manifests import ownership
from manifests.trees import Tree
from manifests.yaml import core_schema
from reconciler.deployments.rollout.revisions import content_of, new_cause, restored_cause
from schemas.deployment import ModelDeployment, Revision, with_content
from schemas.meta import CHANGE_CAUSE, HUB_REFRESHED_AT, RESTARTED_AT, ApiObject
from schemas.node import Node, Taint
from schemas.rollout import CanaryDecision, canary_decision_notes
from store.errors import EditRefusedError

Obj = TypeVar("Obj", bound=ApiObject)

CORDON_MANAGER: Final = "fleetctl-cordon"
"""The field manager of cordon, uncordon and drain."""
SCALE_MANAGER: Final = "fleetctl-scale"
"""The field manager of scale."""
SUSPEND_MANAGER: Final = "fleetctl-suspend"
"""The field manager of suspended Git sources."""
TAINT_MANAGER: Final = "fleetctl-taint"
"""The field manager of taints."""
WAKE_MANAGER: Final = "fleetctl-wake"
"""The field manager of the time until which a Mac stays awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEdit(Generic[Obj]):
    """A change of one object by a person: what it does, and the words for its result."""

    edit: Callable[[Obj], Obj | None]
    """Returns the changed object, or None if nothing changes; raises EditRefusedError. Pure."""
    manager: str | None
    """The field manager to record as the owner of the changed fields; None: `edit` records the owner itself."""
    done: str
    unchanged: str
    """The words in place of `done` if nothing changes."""

    def applied(self, current: Obj, now: datetime) -> Obj | None:
        """Return the changed object with its field manager; None if nothing changes. Pure but for `edit`.

        Raises:
            EditRefusedError: the edit makes no sense for the object, or the object is being deleted.

        """
        changed = self.edit(current)
        if changed is None:
            return None
        refuse_deleted(current)
        if self.manager is None:
            return changed
        return ownership.record_update(current, changed, self.manager, now)


def with_spec(obj: Obj, **fields: Any) -> Obj | None:
    """Return the object with these fields of its spec and the next generation; None if nothing changes. Pure."""
    spec = getattr(obj, "spec")  # noqa: B009 - each kind narrows it, so mypy sees no such field in the base
    changed = spec.model_copy(update=fields)
    if changed == spec:
        return None
    metadata = obj.metadata.model_copy(update={"generation": obj.metadata.generation + 1})
    return obj.model_copy(update={"metadata": metadata, "spec": changed})


def refuse_deleted(obj: ApiObject) -> None:
    """Refuse to change an object that is being deleted.

    Raises:
        EditRefusedError: the object is being deleted.

    """
    if obj.metadata.deletion_timestamp is not None:
        raise EditRefusedError(
            f"{obj.kind.lower()}/{obj.name} is being deleted; nothing was changed"
        )


def as_cordoned(node: Node) -> Node | None:
    """Return the cordoned node; None if nothing changes. Pure."""
    return with_spec(node, unschedulable=True)


def as_uncordoned(node: Node) -> Node | None:
    """Return the node, neither cordoned nor draining; None if nothing changes. Pure."""
    return with_spec(node, unschedulable=False, draining=False)


def as_draining(node: Node) -> Node | None:
    """Return the draining node; None if nothing changes. Pure."""
    return with_spec(node, unschedulable=True, draining=True)


def with_taints(
    node: Node,
    added: Sequence[Taint],
    removed: Sequence[tuple[str, str]] = (),
    *,
    overwrite: bool = False,
) -> Node | None:
    """Return the node with taints added and removed; None if nothing changes. Pure.

    `removed` are pairs of a key and an effect; an empty effect means all taints of the key.

    Raises:
        EditRefusedError: a taint to add exists and `overwrite` is false, or a taint to remove does not exist.

    """
    taints = node.spec.taints
    for key, effect in removed:
        if not any(_is_named(taint, key, effect) for taint in taints):
            existing = ", ".join(taint_text(taint) for taint in taints) or "none"
            name = f"{key}:{effect}" if effect else key
            raise EditRefusedError(
                f'taint "{name}" not found on node/{node.name}, which has {existing}'
            )
    fresh = {(taint.key, taint.effect): taint for taint in added}
    clashes = [taint for taint in taints if (taint.key, taint.effect) in fresh]
    if clashes and not overwrite:
        raise EditRefusedError(
            f"node/{node.name} already has {', '.join(taint_text(taint) for taint in clashes)}; "
            "change the value with --overwrite"
        )
    remaining = [
        fresh.pop((taint.key, taint.effect), taint)
        for taint in taints
        if not any(_is_named(taint, key, effect) for key, effect in removed)
    ]
    return with_spec(node, taints=(*remaining, *fresh.values()))


def _is_named(taint: Taint, key: str, effect: str) -> bool:
    return taint.key == key and effect in ("", taint.effect)


def taint_text(taint: Taint) -> str:
    """Return `KEY=VALUE:EFFECT`. Pure."""
    return f"{taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}"


def with_replicas(
    obj: ModelDeployment, replicas: int, *, current: int | None = None
) -> ModelDeployment | None:
    """Return the deployment with this number of replicas; None if nothing changes. Pure.

    Raises:
        EditRefusedError: the deployment is autoscaled, or has not the number `current`.

    """
    name = f"modeldeployment/{obj.name}"
    bounds = obj.spec.autoscaling
    if bounds is not None:
        raise EditRefusedError(
            f"{name} is autoscaled between {bounds.min_replicas} and {bounds.max_replicas} replicas; nothing was changed. "
            f"Change the bounds: fleetctl patch {name} -p 'spec: {{autoscaling: {{minReplicas: {replicas}, "
            f"maxReplicas: {max(1, replicas)}}}}}'; or end autoscaling: fleetctl patch {name} "
            f"-p 'spec: {{autoscaling: null, replicas: {replicas}}}'"
        )
    if current is not None and obj.spec.replicas != current:
        raise EditRefusedError(
            f"{name}: expected {current} replicas, but spec.replicas is {obj.spec.replicas}; nothing was changed"
        )
    return with_spec(obj, replicas=replicas)


def as_paused(deployment: ModelDeployment) -> ModelDeployment:
    """Return the deployment with its rollout paused. Pure."""
    return _with_pause(deployment, paused=True)


def as_resumed(deployment: ModelDeployment) -> ModelDeployment:
    """Return the deployment with its rollout resumed. Pure."""
    return _with_pause(deployment, paused=False)


def _with_pause(deployment: ModelDeployment, *, paused: bool) -> ModelDeployment:
    rollout = deployment.spec.rollout.model_copy(update={"paused": paused})
    changed = with_spec(deployment, rollout=rollout)
    if changed is None:
        now = "already paused" if paused else "not paused"
        raise EditRefusedError(f"modeldeployment/{deployment.name} is {now}")
    return changed


def as_restarted(deployment: ModelDeployment, now: datetime) -> ModelDeployment:
    """Return the deployment with a new version that only restarts its engines. Pure.

    Raises:
        EditRefusedError: the rollout is paused, or the deployment was restarted within this second.

    """
    name, at = deployment.name, now.strftime("%Y-%m-%dT%H:%M:%SZ")
    if deployment.spec.rollout.paused:
        raise EditRefusedError(
            f"cannot restart modeldeployment/{name} while it is paused; "
            f"resume it first with `fleetctl rollout resume {name}`"
        )
    if deployment.metadata.annotations.get(RESTARTED_AT) == at:
        raise EditRefusedError(
            f"modeldeployment/{name} was restarted within the last second; try again"
        )
    marked = with_restart_mark(deployment, at)
    # The restart counts as a change of spec: otherwise the old status would apply to the new version.
    generation = deployment.metadata.generation + 1
    metadata = marked.metadata.model_copy(update={"generation": generation})
    return marked.model_copy(update={"metadata": metadata})


def as_refreshed(deployment: ModelDeployment, now: datetime) -> ModelDeployment:
    """Return the deployment with its hub model to be resolved again. Pure.

    Raises:
        EditRefusedError: its model is a folder, or is pinned to a commit by the spec.

    """
    name, hub = deployment.name, deployment.spec.model.hub
    if hub is None:
        raise EditRefusedError(
            f"modeldeployment/{name} has a model in a folder, which is no branch"
        )
    if hub.is_pinned:
        raise EditRefusedError(
            f"modeldeployment/{name} has spec.model.hub.revision {hub.revision}, a commit, which never moves; "
            "write a branch or another commit there"
        )
    marked = with_refresh_mark(deployment, now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
    generation = deployment.metadata.generation + 1
    metadata = marked.metadata.model_copy(update={"generation": generation})
    return marked.model_copy(update={"metadata": metadata})


def check_canary_runs(deployment: ModelDeployment, decision: CanaryDecision) -> None:
    """Refuse a decision about a deployment without a running canary. Pure.

    Raises:
        EditRefusedError: no canary runs, or the rollout is paused.

    """
    ref, status = f"modeldeployment/{deployment.name}", deployment.status
    if deployment.spec.rollout.paused:
        raise EditRefusedError(
            f"{ref} is paused; resume it first with `fleetctl rollout resume {deployment.name}`"
        )
    is_current = status is not None and status.observed_generation >= deployment.metadata.generation
    canary = status.canary if status is not None and is_current else None
    if deployment.spec.rollout.canary is None or canary is None or canary.outcome != "Running":
        raise EditRefusedError(
            f"{ref} has no running canary to {decision}{_canary_hint(deployment)}"
        )


def with_canary_decision(
    deployment: ModelDeployment, decision: CanaryDecision, generation: int
) -> ModelDeployment:
    """Return the deployment with a decision about the canary of this generation. Pure.

    Raises:
        EditRefusedError: the deployment was changed meanwhile, so the decision was about another version.

    """
    meta = deployment.metadata
    if meta.generation != generation:
        raise EditRefusedError(
            f"modeldeployment/{deployment.name} was changed at the same time, so its canary was left alone; "
            f"look at it with `fleetctl rollout status {deployment.name}`, and {decision} it again"
        )
    notes = {**meta.annotations, **canary_decision_notes(decision, generation)}
    return deployment.model_copy(
        update={"metadata": meta.model_copy(update={"annotations": notes})}
    )


def _canary_hint(deployment: ModelDeployment) -> str:
    """Return what the deployment has instead of a running canary, and what to do; the end of a sentence."""
    name, status = deployment.name, deployment.status
    if deployment.spec.rollout.canary is None:
        return f": it has no spec.rollout.canary. `fleetctl rollout undo {name}` rolls back"
    if status is None or status.observed_generation < deployment.metadata.generation:
        return ": the reconciler has not looked at its newest generation; try again"
    if status.canary is None:
        return ""
    if status.canary.outcome == "Failed":
        return (
            f": it failed ({status.canary.message}). `fleetctl rollout restart {name}` tries again, "
            f"`fleetctl rollout undo {name}` rolls back the spec"
        )
    return f": it has passed. `fleetctl rollout undo {name}` rolls back"


def revisions_of(found: Iterable[Revision], deployment: ModelDeployment) -> list[Revision]:
    """Return the revisions of the deployment, oldest first, without those of a deleted deployment of the same name."""
    uid = deployment.metadata.uid
    mine = [
        revision
        for revision in found
        if revision.spec.deployment == deployment.name
        and (
            not revision.metadata.owner_references
            or any(owner.uid == uid for owner in revision.metadata.owner_references)
        )
    ]
    return sorted(mine, key=lambda one: one.spec.revision)


def current_revision(revisions: Sequence[Revision], deployment: ModelDeployment) -> Revision | None:
    """Return the revision of the deployment's current spec; None if it is not recorded yet."""
    content = content_of(deployment)
    return next(
        (revision for revision in reversed(revisions) if revision.spec.content == content), None
    )


def rollback_target(
    revisions: Sequence[Revision], deployment: ModelDeployment, *, number: int | None, served: str
) -> Revision:
    """Return the revision to roll back to: the given number, or the one before the current spec.

    While a rollout is under way or has failed, that is the revision that served last: the newest other one may be a
    canary that failed, too. `served`: its template, from the deployment's status.

    Raises:
        EditRefusedError: there is none, or the rollout is paused.

    """
    name = deployment.name
    if deployment.spec.rollout.paused:
        raise EditRefusedError(
            f"cannot roll back modeldeployment/{name} while it is paused; "
            f"resume it first with `fleetctl rollout resume {name}`"
        )
    if not revisions:
        raise EditRefusedError(
            f"no rollout history found for modeldeployment/{name}: the reconciler has not recorded a revision yet"
        )
    if number is None:
        content = content_of(deployment)
        others = [revision for revision in revisions if revision.spec.content != content]
        if not others:
            raise EditRefusedError(
                f"modeldeployment/{name} has no earlier revision; `fleetctl rollout history {name}` shows the recorded ones"
            )
        return next(
            (other for other in reversed(others) if other.spec.template == served), others[-1]
        )
    found = next((revision for revision in revisions if revision.spec.revision == number), None)
    if found is None:
        there = ", ".join(str(revision.spec.revision) for revision in revisions)
        raise EditRefusedError(
            f"unable to find revision {number} of modeldeployment/{name}; available: {there}"
        )
    return found


def with_revision(
    deployment: ModelDeployment, back: Revision, newest: Revision
) -> ModelDeployment | None:
    """Return the deployment with the version of a revision and the next generation; None if nothing changes. Pure.

    As with kubectl, the change cause of the revision comes back with it, unless a new one was annotated after the
    newest revision: that is the cause of the rollback.
    """
    content = back.spec.content
    if content_of(deployment) == content:
        return None
    cause = new_cause(deployment, newest) or restored_cause(back)
    model_deployment = with_restart_mark(with_content(deployment, content), content.restarted_at)
    model_deployment = _with_annotation(model_deployment, CHANGE_CAUSE, cause)
    generation = deployment.metadata.generation + 1
    metadata = model_deployment.metadata.model_copy(update={"generation": generation})
    return model_deployment.model_copy(update={"metadata": metadata})


def with_restart_mark(deployment: ModelDeployment, at: str) -> ModelDeployment:
    """Return the deployment with the time of a restart in its annotations; an empty `at` removes it."""
    return _with_annotation(deployment, RESTARTED_AT, at)


def with_refresh_mark(deployment: ModelDeployment, at: str) -> ModelDeployment:
    """Return the deployment with the time of a refresh: the branch of its hub model is resolved again."""
    return _with_annotation(deployment, HUB_REFRESHED_AT, at)


def _with_annotation(deployment: ModelDeployment, key: str, text: str) -> ModelDeployment:
    """Return the deployment with an annotation; an empty text removes it."""
    annotations = {k: v for k, v in deployment.metadata.annotations.items() if k != key}
    if text:
        annotations[key] = text
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    return deployment.model_copy(update={"metadata": metadata})


def revision_diff(before: Revision | None, after: Revision) -> str:
    """Return what differs between two revisions of a deployment as a unified diff."""
    texts = [
        "" if revision is None else core_schema.dump(_content_tree(revision))
        for revision in (before, after)
    ]
    lines = [text.splitlines(keepends=True) for text in texts]
    names = [
        "" if revision is None else f"revision {revision.spec.revision}"
        for revision in (before, after)
    ]
    return "".join(difflib.unified_diff(lines[0], lines[1], names[0], names[1]))


def _content_tree(revision: Revision) -> dict[str, Tree]:
    tree: dict[str, Tree] = revision.spec.content.model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    return tree
