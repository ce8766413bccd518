"""Which deployments the verbs of `fleetctl rollout` are about.

Revisions as people see them: in order, what differs, which is the current one, and back to one. Pure.
"""

from collections.abc import Iterable, Sequence

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import reader, targets
from fleetctl.objects.kind_args import kind_of
from machinery.clock import Clock
from manifests.trees import Tree
from reconciler.rollout.revisions import content_of, with_content
from schemas import kinds
from schemas.deployment import ModelDeployment, Revision, RevisionTemplate
from schemas.meta import RESTARTED_AT
from store import objects
from store.port import Transport


def parse_names(words: Sequence[str]) -> list[str]:
    """Return the names in `md/qwen`, `modeldeployment qwen` or `qwen`.

    Raises:
        click.UsageError: it is of another kind, or there is no name.

    """
    first = words[0]
    # A kind and its names, unless the word is the name of a deployment that stands alone.
    rest = words[1:] if "/" not in first and len(words) > 1 and kinds.by_alias(first) else words
    if rest is not words:
        _check_kind(first)
    found = []
    for word in rest:
        kind, slash, name = word.partition("/")
        if slash:
            _check_kind(kind)
        found.append(name if slash else word)
    return found


def parse_name(words: Sequence[str]) -> str:
    """Return the one name in the words; `names_of` has the errors."""
    names = parse_names(words)
    if len(names) != 1:
        raise click.UsageError("one deployment at a time; write NAME or modeldeployment/NAME")
    return names[0]


def _check_kind(word: str) -> None:
    kind = kind_of(word)
    if kind.type is not ModelDeployment:
        raise click.UsageError(
            f"{kind.plural} are neither placed nor rolled out; write NAME or modeldeployment/NAME"
        )


async def read_deployment(transport: Transport, name: str) -> ModelDeployment:
    """Return the deployment with its status.

    Raises:
        FleetctlError: there is none of that name; with the nearest.

    """
    found = await objects.get(transport, ModelDeployment, name)
    if found is not None:
        return found
    there = [obj.name for obj in await reader.read(transport, kind_of("md"), ())]
    raise FleetctlError(reader.not_found_message(kind_of("md"), name, there))


async def change_deployment(
    transport: Transport,
    clock: Clock,
    name: str,
    edit: targets.Edit[ModelDeployment],
    *,
    is_dry: bool = False,
) -> bool:
    """Change one deployment that is not being deleted; `targets.write` has the errors."""

    def checked(obj: ModelDeployment) -> ModelDeployment | None:
        if obj.metadata.deletion_timestamp is not None:
            raise FleetctlError(f"modeldeployment/{name} is being deleted; nothing was changed")
        return edit(obj)

    there = await read_deployment(transport, name)
    written = await targets.write_edit(
        transport, clock, there, checked, manager="fleetctl-rollout", is_dry=is_dry
    )
    return written.is_news


def revisions_of(found: Iterable[Revision], deployment: ModelDeployment) -> list[Revision]:
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


def current_revision(revisions: Sequence[Revision], deployment: ModelDeployment) -> Revision | None:
    """Return the revision that the deployment's spec asks for now; None if it is not kept yet."""
    wanted = content_of(deployment)
    return next((one for one in reversed(revisions) if one.spec.content == wanted), None)


def trial_notes(revisions: Sequence[Revision], deployment: ModelDeployment) -> list[str]:
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


def template_tree(content: RevisionTemplate) -> dict[str, Tree]:
    """Return what the replicas run, as in a manifest."""
    tree: dict[str, Tree] = content.model_dump(mode="json", by_alias=True, exclude_none=True)
    if not content.restarted_at:
        del tree["restartedAt"]
    if content.sharding == "Never":
        del tree["sharding"]
    return tree


def rollback_target(
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


def with_revision(deployment: ModelDeployment, content: RevisionTemplate) -> ModelDeployment | None:
    """Return the deployment as it was then, a generation later; None if it is that already."""
    if content_of(deployment) == content:
        return None
    back = with_restart_mark(with_content(deployment, content), content.restarted_at)
    generation = deployment.metadata.generation + 1
    metadata = back.metadata.model_copy(update={"generation": generation})
    return back.model_copy(update={"metadata": metadata})


def with_restart_mark(deployment: ModelDeployment, at: str) -> ModelDeployment:
    """Return the deployment with the mark of a restart; with none, if `at` is empty."""
    annotations = {
        key: text for key, text in deployment.metadata.annotations.items() if key != RESTARTED_AT
    }
    if at:
        annotations[RESTARTED_AT] = at
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    return deployment.model_copy(update={"metadata": metadata})
