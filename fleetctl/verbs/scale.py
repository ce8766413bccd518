"""`fleetctl scale`: sets the number of replicas of deployments."""

from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import parse_duration, result_options
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import targets, writer
from fleetctl.objects.targets import Selection
from fleetctl.output.results import ResultPrinter
from insight import edits
from machinery.clock import Clock, SystemClock
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from store import objects
from store.errors import UnavailableError
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
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option("--replicas", type=click.IntRange(0, 10_000), help="Number of replicas. Required.")
@click.option(
    "--current-replicas",
    type=click.IntRange(0, 10_000),
    help="Fail unless the deployment has this number now.",
)
@click.option(
    "--timeout",
    default="0s",
    show_default=True,
    help="Wait until this number of replicas is ready; 0s does not wait.",
)
@arguments.version_option
@arguments.selector_option
@arguments.all_option
@arguments.files_option
@arguments.recursive_option
@result_options
@store_options
def scale(words: tuple[str, ...], **options: Any) -> None:
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
    for one in chosen:
        if one.kind.type is not ModelDeployment:
            raise FleetctlError(
                f"{one.kind.plural} have no replicas; scale modeldeployments, such as md/NAME"
            )
    run(_scale(chosen, options, parse_duration(options["timeout"])))


async def _scale(chosen: Sequence[Selection], options: dict[str, Any], timeout_s: float) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)
    replicas: int = options["replicas"]

    def edit(obj: ApiObject) -> ApiObject | None:
        targets.refuse_other_version(obj, options["resource_version"])
        assert isinstance(obj, ModelDeployment)
        return edits.with_replicas(obj, replicas, current=options["current_replicas"])

    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
        targets.refuse_several_versions(found, options["resource_version"])
        for obj in found:
            edit(obj)  # check all before the first write
        updated: list[ApiObject] = []
        for obj in found:
            written = await writer.write_edit(
                transport, clock, obj, edit, manager=edits.SCALE_MANAGER, is_dry=results.is_dry
            )
            results.print_object(
                written.obj, "scaled" if written.is_changed else "scaled (no change)"
            )
            updated.append(written.obj)
        if timeout_s and not results.is_dry:
            await _wait(transport, clock, updated, timeout_s)


async def _wait(
    transport: Transport, clock: Clock, updated: Sequence[ApiObject], timeout_s: float
) -> None:
    """Wait until exactly the requested number of replicas is ready."""
    deadline = clock.monotonic() + timeout_s
    for obj in updated:
        while (left := await _unmet(transport, obj, clock, deadline)) is not None:
            if clock.monotonic() >= deadline:
                raise FleetctlError(
                    f"timed out after {timeout_s:g} s: {targets.object_ref(obj)} {left}. The new number stays set; "
                    f"`fleetctl describe {targets.object_ref(obj)}` shows details"
                )
            await clock.sleep(_POLL_S)


async def _unmet(
    transport: Transport, updated: ApiObject, clock: Clock, deadline: float
) -> str | None:
    """Return what the deployment still waits for; None if it is complete."""
    try:
        obj = await objects.get(transport, ModelDeployment, updated.name)
    except UnavailableError as error:
        # Outages of the store are waited through.
        if clock.monotonic() >= deadline:
            raise
        return str(error)
    if obj is None or obj.metadata.uid != updated.metadata.uid:
        raise FleetctlError(f"{targets.object_ref(updated)} was deleted meanwhile")
    status, replicas = obj.status, obj.spec.replicas
    if status is None or status.observed_generation < obj.metadata.generation:
        return "was not observed by a reconciler yet"
    if status.ready_replicas == replicas == status.replicas:
        return None
    return f"has {status.ready_replicas} of {replicas} replicas ready, and {status.replicas} placed"
