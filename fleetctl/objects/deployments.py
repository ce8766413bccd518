"""Deployments for `fleetctl rollout`: names on the command line, compare-and-swap, and revisions."""

from collections.abc import Sequence

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import kind_args, reader
from fleetctl.objects.kind_args import kind_of
from manifests.suggestions import not_found_message
from manifests.trees import Tree
from schemas.deployment import ModelDeployment, Revision, RevisionTemplate
from store import objects
from store.port import Transport

NO_DEPLOYMENT = (
    "have no placement and no rollout; give a ModelDeployment: NAME or modeldeployment/NAME"
)


def parse_names(words: Sequence[str]) -> list[str]:
    """Return the names in `md/qwen`, `modeldeployment qwen` or `qwen`. Raises as `kind_args.parse_names`."""
    return kind_args.parse_names(words, kind_of("md"), otherwise=NO_DEPLOYMENT)


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
    model_deployment = await objects.get(transport, ModelDeployment, name)
    if model_deployment is not None:
        return model_deployment
    there = [obj.name for obj in await reader.read(transport, kind_of("md"), ())]
    raise FleetctlError(not_found_message(kind_of("md"), name, there))


def trial_notes(revisions: Sequence[Revision], deployment: ModelDeployment) -> list[str]:
    """Return notes about a failed canary: the failed revision, and the one that serves instead."""
    status = deployment.status
    if status is None or status.canary is None or status.canary.outcome != "Failed":
        return []
    numbers = {revision.spec.template: revision.spec.revision for revision in revisions}
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
