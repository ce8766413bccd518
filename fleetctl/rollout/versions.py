"""Revisions as people see them: in order, what differs, which is the current one, and back to one. Pure."""

from collections.abc import Iterable, Sequence

from fleetctl.errors import FleetctlError
from manifests.tree import Tree
from reconciler.rollout.revisions import content_of, with_content
from schemas.deployment import ModelDeployment
from schemas.meta import RESTARTED_AT
from schemas.revision import Revision, Template


def of_deployment(found: Iterable[Revision], deployment: ModelDeployment) -> list[Revision]:
    """Return the deployment's revisions, the oldest first; not those of an earlier one of the name."""
    uid = deployment.metadata.uid
    mine = [
        one
        for one in found
        if one.spec.deployment == deployment.name
        and (
            not one.metadata.owner_references
            or any(owner.uid == uid for owner in one.metadata.owner_references)
        )
    ]
    return sorted(mine, key=lambda one: one.spec.revision)


def current(revisions: Sequence[Revision], deployment: ModelDeployment) -> Revision | None:
    """Return the revision that the deployment's spec asks for now; None if it is not kept yet."""
    wanted = content_of(deployment)
    return next((one for one in reversed(revisions) if one.spec.content == wanted), None)


def trial(revisions: Sequence[Revision], deployment: ModelDeployment) -> list[str]:
    """Return what is to be said of a trial of the newest version: that it failed, and what serves instead."""
    status = deployment.status
    if status is None or status.canary is None or status.canary.outcome != "Failed":
        return []
    numbers = {one.spec.template: one.spec.revision for one in revisions}
    bad, good = numbers.get(status.canary.template), numbers.get(status.stable_template)
    if bad is None:
        return []
    serves = f"revision {good} serves" if good is not None else "the version before it serves"
    why = f" ({status.canary.message})" if status.canary.message else ""
    return [
        f"revision {bad} failed its trial{why}; {serves}. To go back for good: "
        f"fleetctl rollout undo {deployment.name}"
    ]


def tree_of(content: Template) -> dict[str, Tree]:
    """Return what the replicas run, as in a manifest."""
    tree: dict[str, Tree] = content.model_dump(mode="json", by_alias=True, exclude_none=True)
    if not content.restarted_at:
        del tree["restartedAt"]
    if content.sharding == "Never":
        del tree["sharding"]
    return tree


def target(
    revisions: Sequence[Revision], deployment: ModelDeployment, *, number: int | None
) -> Revision:
    """Return the revision to go back to: that number, or the newest that is not the current one.

    Raises:
        FleetctlError: there is none, or the deployment is paused.

    """
    name = deployment.name
    if deployment.spec.rollout.paused:
        raise FleetctlError(
            f"cannot roll back modeldeployment/{name} while it is paused; "
            f"resume it first with `fleetctl rollout resume {name}`"
        )
    if not revisions:
        raise FleetctlError(
            f"no rollout history found for modeldeployment/{name}: the reconciler has not kept a revision yet"
        )
    if number is None:
        content = content_of(deployment)
        others = [one for one in revisions if one.spec.content != content]
        if not others:
            raise FleetctlError(
                f"modeldeployment/{name} has no earlier revision to go back to; "
                f"`fleetctl rollout history {name}` shows what is kept"
            )
        return others[-1]
    found = next((one for one in revisions if one.spec.revision == number), None)
    if found is None:
        there = ", ".join(str(one.spec.revision) for one in revisions)
        raise FleetctlError(
            f"unable to find revision {number} of modeldeployment/{name}; there are {there}"
        )
    return found


def with_revision(deployment: ModelDeployment, content: Template) -> ModelDeployment | None:
    """Return the deployment as it was then, a generation later; None if it is that already."""
    if content_of(deployment) == content:
        return None
    back = restarted(with_content(deployment, content), content.restarted_at)
    generation = deployment.metadata.generation + 1
    metadata = back.metadata.model_copy(update={"generation": generation})
    return back.model_copy(update={"metadata": metadata})


def restarted(deployment: ModelDeployment, at: str) -> ModelDeployment:
    """Return the deployment with the mark of a restart; with none, if `at` is empty."""
    annotations = {
        key: text for key, text in deployment.metadata.annotations.items() if key != RESTARTED_AT
    }
    if at:
        annotations[RESTARTED_AT] = at
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    return deployment.model_copy(update={"metadata": metadata})
