"""`fleetctl rollout pause`, `resume` and `restart`; and the group that all of them are in."""

from datetime import datetime
from typing import Any

import click

from fleetctl import targets
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.lazy import SuggestingGroup
from fleetctl.rollout import named, versions
from fleetctl.rollout.history import history, undo
from fleetctl.rollout.status import status
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment
from schemas.meta import RESTARTED_AT


@click.group(cls=SuggestingGroup)
def rollout() -> None:
    """See and steer how deployments go from one version to the next.

    A new version begins with any change of what engines are started with: model, served names, context length,
    concurrency, resources. NAME is a ModelDeployment: qwen, md/qwen or md qwen.
    """


rollout.add_command(status)
rollout.add_command(history)
rollout.add_command(undo)


def paused(deployment: ModelDeployment) -> ModelDeployment:
    """Return the deployment with its rollout paused. Pure."""
    return _with_pause(deployment, paused=True)


def resumed(deployment: ModelDeployment) -> ModelDeployment:
    """Return the deployment with its rollout going on. Pure."""
    return _with_pause(deployment, paused=False)


def _with_pause(deployment: ModelDeployment, *, paused: bool) -> ModelDeployment:
    rollout = deployment.spec.rollout.model_copy(update={"paused": paused})
    changed = targets.with_spec(deployment, rollout=rollout)
    if changed is None:
        now = "already paused" if paused else "not paused"
        raise FleetctlError(f"modeldeployment/{deployment.name} is {now}")
    return changed


def restarted(deployment: ModelDeployment, now: datetime) -> ModelDeployment:
    """Return the deployment as a new version, though nothing of it changed. Pure.

    Raises:
        FleetctlError: it is paused, or was restarted within this second.

    """
    name, at = deployment.name, now.strftime("%Y-%m-%dT%H:%M:%SZ")
    if deployment.spec.rollout.paused:
        raise FleetctlError(
            f"cannot restart modeldeployment/{name} while it is paused; "
            f"resume it first with `fleetctl rollout resume {name}`"
        )
    if deployment.metadata.annotations.get(RESTARTED_AT) == at:
        raise FleetctlError(
            f"modeldeployment/{name} was restarted within this second already; wait for the next one"
        )
    marked = versions.restarted(deployment, at)
    # What engines are started with counts as spec: else a status of before would speak of this version, too.
    generation = deployment.metadata.generation + 1
    metadata = marked.metadata.model_copy(update={"generation": generation})
    return marked.model_copy(update={"metadata": metadata})


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@store_options
def pause(what: tuple[str, ...], **options: Any) -> None:
    """Hold back new versions of deployments; replicas that are lost are replaced all the same."""
    run(_each(what, paused, "paused", options))


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@store_options
def resume(what: tuple[str, ...], **options: Any) -> None:
    """Go on with what `fleetctl rollout pause` held back."""
    run(_each(what, resumed, "resumed", options))


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@store_options
def restart(what: tuple[str, ...], **options: Any) -> None:
    """Start the engines of deployments anew, as spec.rollout says: no request is dropped."""
    now = SystemClock().now()
    run(_each(what, lambda deployment: restarted(deployment, now), "restarted", options))


async def _each(
    what: tuple[str, ...],
    edit: targets.Edit[ModelDeployment],
    done: str,
    options: dict[str, Any],
) -> None:
    clock = SystemClock()
    async with opened(options) as transport:
        for name in named.names_of(what):
            await named.change(transport, clock, name, edit)
            click.echo(f"modeldeployment/{name} {done}")
