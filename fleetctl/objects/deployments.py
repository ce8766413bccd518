"""Deployments for `fleetctl rollout`: names on the command line, compare-and-swap, and revisions."""

from collections.abc import Callable, Iterable, Sequence

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import kind_args, reader, writer
from fleetctl.objects.kind_args import kind_of
from machinery.clock import Clock
from manifests import ownership
from manifests.suggestions import not_found_message
from manifests.trees import Tree
from reconciler.rollout.revisions import content_of, new_cause, restored_cause
from schemas.deployment import ModelDeployment, Revision, RevisionTemplate, with_content
from schemas.meta import CHANGE_CAUSE, HUB_REFRESHED_AT, RESTARTED_AT
from schemas.model_snapshot import ModelSnapshot, pinned
from store import codec, keys, objects
from store.port import Transport

_NO_DEPLOYMENT = (
    "have no placement and no rollout; give a ModelDeployment: NAME or modeldeployment/NAME"
)


def parse_names(words: Sequence[str]) -> list[str]:
    """Return the names in `md/qwen`, `modeldeployment qwen` or `qwen`. Raises as `kind_args.parse_names`."""
    return kind_args.parse_names(words, kind_of("md"), otherwise=_NO_DEPLOYMENT)


def parse_name(words: Sequence[str]) -> str:
    """Return the one name in the words. Raises as `parse_names`."""
    names = parse_names(words)
    if len(names) != 1:
        raise click.UsageError("give one deployment: NAME or modeldeployment/NAME")
    return names[0]


async def read_deployment(transport: Transport, name: str) -> ModelDeployment:
    """Return the deployment with its status.

    Raises:
            FleetctlError: it does not exist; the message has the nearest name.

    """
    found = await objects.get(transport, ModelDeployment, name)
    if found is not None:
        return found
    there = [obj.name for obj in await reader.read(transport, kind_of("md"), ())]
    raise FleetctlError(not_found_message(kind_of("md"), name, there))


async def change_deployment(
    transport: Transport,
    clock: Clock,
    name: str,
    edit: writer.Edit[ModelDeployment],
    *,
    is_dry: bool = False,
) -> bool:
    """Change one deployment that is not being deleted. Raises as `writer.write_edit`."""

    def checked(obj: ModelDeployment) -> ModelDeployment | None:
        if obj.metadata.deletion_timestamp is not None:
            raise FleetctlError(f"modeldeployment/{name} is being deleted; nothing was changed")
        return edit(obj)

    there = await read_deployment(transport, name)
    written = await writer.write_edit(
        transport, clock, there, checked, manager=ownership.ROLLOUT, is_dry=is_dry
    )
    return written.is_changed


def revisions_of(found: Iterable[Revision], deployment: ModelDeployment) -> list[Revision]:
    """Return the revisions of the deployment, oldest first, without those of a deleted deployment of the same name."""
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
    """Return the revision of the deployment's current spec; None if it is not recorded yet."""
    content = content_of(deployment)
    return next((one for one in reversed(revisions) if one.spec.content == content), None)


def trial_notes(revisions: Sequence[Revision], deployment: ModelDeployment) -> list[str]:
    """Return notes about a failed canary: the failed revision, and the one that serves instead."""
    status = deployment.status
    if status is None or status.canary is None or status.canary.outcome != "Failed":
        return []
    numbers = {one.spec.template: one.spec.revision for one in revisions}
    bad, good = numbers.get(status.canary.template), numbers.get(status.stable_template)
    if bad is None:
        return []
    serves = f"revision {good} serves" if good is not None else "the previous revision serves"
    why = f" ({status.canary.message})" if status.canary.message else ""
    target = f" --to-revision {good}" if good is not None else ""
    return [
        f"revision {bad} failed as a canary{why}; {serves}. To roll back the spec: "
        f"fleetctl rollout undo {deployment.name}{target}"
    ]


def template_tree(content: RevisionTemplate) -> dict[str, Tree]:
    """Return what replicas of the revision run, as in a manifest."""
    tree: dict[str, Tree] = content.model_dump(mode="json", by_alias=True, exclude_none=True)
    if not content.restarted_at:
        del tree["restartedAt"]
    if content.sharding == "Never":
        del tree["sharding"]
    return tree


def rollback_target(
    revisions: Sequence[Revision], deployment: ModelDeployment, *, number: int | None, served: str
) -> Revision:
    """Return the revision to roll back to: the given number, or the one before the current spec.

    While a rollout is under way or has failed, that is the revision that served last: the newest other one may be a
    canary that failed, too. `served`: its template, from the deployment's status.

    Raises:
        FleetctlError: there is none, or the rollout is paused.

    """
    name = deployment.name
    if deployment.spec.rollout.paused:
        raise FleetctlError(
            f"cannot roll back modeldeployment/{name} while it is paused; "
            f"resume it first with `fleetctl rollout resume {name}`"
        )
    if not revisions:
        raise FleetctlError(
            f"no rollout history found for modeldeployment/{name}: the reconciler has not recorded a revision yet"
        )
    if number is None:
        content = content_of(deployment)
        others = [one for one in revisions if one.spec.content != content]
        if not others:
            raise FleetctlError(
                f"modeldeployment/{name} has no earlier revision; `fleetctl rollout history {name}` shows the recorded ones"
            )
        return next((one for one in reversed(others) if one.spec.template == served), others[-1])
    found = next((one for one in revisions if one.spec.revision == number), None)
    if found is None:
        there = ", ".join(str(one.spec.revision) for one in revisions)
        raise FleetctlError(
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
    found = with_restart_mark(with_content(deployment, content), content.restarted_at)
    found = _with_annotation(found, CHANGE_CAUSE, cause)
    generation = deployment.metadata.generation + 1
    metadata = found.metadata.model_copy(update={"generation": generation})
    return found.model_copy(update={"metadata": metadata})


def with_restart_mark(deployment: ModelDeployment, at: str) -> ModelDeployment:
    """Return the deployment with the time of a restart in its annotations; an empty `at` removes it."""
    return _with_annotation(deployment, RESTARTED_AT, at)


def with_refresh_mark(deployment: ModelDeployment, at: str) -> ModelDeployment:
    """Return the deployment with the time of a refresh: the branch of its hub model is resolved again."""
    return _with_annotation(deployment, HUB_REFRESHED_AT, at)


async def read_pin(transport: Transport, name: str) -> Callable[[ModelDeployment], ModelDeployment]:
    """Return the function that puts the commit of its hub model into the deployment, as its revisions have it.

    Raises:
        StoreError: the store did not answer.

    """
    item = await transport.get(keys.named(keys.SNAPSHOT_PREFIX, name))
    snapshot = None if item is None else codec.decode(ModelSnapshot, item)
    return lambda found: found if snapshot is None else pinned(found, snapshot)


def _with_annotation(deployment: ModelDeployment, key: str, text: str) -> ModelDeployment:
    """Return the deployment with an annotation; an empty text removes it."""
    annotations = {k: v for k, v in deployment.metadata.annotations.items() if k != key}
    if text:
        annotations[key] = text
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    return deployment.model_copy(update={"metadata": metadata})
