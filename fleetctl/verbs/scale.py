"""`fleetctl scale`: sets the number of replicas of deployments."""

from typing import Any

import click

from fleetctl.cli.arguments import parse_duration, timeout_option
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import targets
from fleetctl.objects.change import change_objects, change_options
from fleetctl.objects.waits import poll
from insight import actions
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from store import objects
from store.port import Transport

_POLL_S = 0.1

_HELP = """Set the number of replicas of deployments.

\b
  fleetctl scale --replicas=3 md/qwen md/phi
  fleetctl scale --replicas=0 md -l team=lab
  fleetctl scale --current-replicas=2 --replicas=3 md qwen --timeout=5m
  fleetctl scale --replicas=1 -f qwen.yaml

A later apply keeps this number, unless the number in the manifest changes. If spec.autoscaling sets the number, the
command fails and shows how to change its bounds.
"""


@click.command(help=_HELP)
@click.option("--replicas", type=click.IntRange(0, 10_000), help="Number of replicas. Required.")
@click.option(
    "--current-replicas",
    type=click.IntRange(0, 10_000),
    help="Fail unless the deployment has this number now.",
)
@timeout_option("0s", "Wait until this number of replicas is ready; 0s does not wait.")
@change_options("[KIND NAME... | KIND/NAME...]")
async def scale(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Set the number of replicas of deployments."""
    if options["replicas"] is None:
        *names, last = words or ("",)
        line = (
            f". Write: fleetctl scale {' '.join(names)} --replicas={last}"
            if last.isdecimal()
            else ""
        )
        raise click.UsageError(f"Missing option '--replicas'{line}.")
    chosen = targets.parse_selections(words, options, verb="scale", is_all=options["is_all"])
    for selection in chosen:
        if selection.kind.type is not ModelDeployment:
            raise FleetctlError(
                f"{selection.kind.plural} have no replicas; scale modeldeployments, such as md/NAME"
            )
    change = actions.scale(options["replicas"], options["current_replicas"])
    timeout_s = parse_duration(options["timeout"])
    scaled = await change_objects(transport, chosen, change, options)
    if timeout_s and options["dry_run"] == "none":
        clock = SystemClock()
        deadline_s = clock.monotonic() + timeout_s
        for deployment in scaled:
            await _wait(transport, deployment, deadline_s - clock.monotonic(), timeout_s)


async def _wait(transport: Transport, scaled: ApiObject, limit_s: float, total_s: float) -> None:
    """Wait until exactly the requested number of replicas is ready."""
    ref, unmet = targets.object_ref(scaled), ""

    async def look() -> bool | None:
        nonlocal unmet
        obj = await objects.get(transport, ModelDeployment, scaled.name)
        if obj is None or obj.metadata.uid != scaled.metadata.uid:
            raise FleetctlError(f"{ref} was deleted meanwhile")
        status, replicas = obj.status, obj.spec.replicas
        if status is None or status.observed_generation < obj.metadata.generation:
            unmet = "was not observed by a reconciler yet"
            return None
        unmet = f"has {status.ready_replicas} of {replicas} replicas ready, and {status.replicas} placed"
        return status.ready_replicas == replicas == status.replicas or None

    if await poll(look, SystemClock(), limit_s) is None:
        raise FleetctlError(
            f"timed out after {total_s:g} s: {ref} {unmet}. The new number stays set; "
            f"`fleetctl describe {ref}` shows details"
        )
