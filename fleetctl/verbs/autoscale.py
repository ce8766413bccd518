"""`fleetctl autoscale`: sets the bounds between which load decides the number of replicas."""

from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import result_options
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.objects import targets, writer
from fleetctl.objects.targets import Selection
from fleetctl.output.results import ResultPrinter
from insight import edits
from machinery.clock import SystemClock
from schemas.autoscaling import Autoscaling
from schemas.deployment import ModelDeployment

_HELP = """Let load decide the number of replicas of deployments, between two bounds.

\b
  fleetctl autoscale md/qwen --max=3
  fleetctl autoscale md/qwen --min=0 --max=3 --target-requests=4
  fleetctl autoscale md/qwen --off

The load is requests in flight and waiting. --min=0 ends the last replica when nobody asks; the first request starts it
again. Other settings of spec.autoscaling, such as schedules, stay. --off keeps the current number of replicas.
docs/operations/scaling.md describes autoscaling.
"""
_COUNT = click.IntRange(0, 10_000)


@click.command(help=_HELP, short_help="Let load decide the number of replicas of deployments.")
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option("--min", "least", type=_COUNT, help="Fewest replicas (default: as now, or 1).")
@click.option("--max", "most", type=click.IntRange(1, 10_000), help="Most replicas.")
@click.option(
    "--target-requests",
    type=click.IntRange(1, 1024),
    help="Requests that one replica should have (default: as now, or three quarters of its concurrency).",
)
@click.option("--off", is_flag=True, help="End autoscaling.")
@unsupported_flag(
    "load is counted in requests; use --target-requests=N",
    "--cpu-percent",
    "--cpu",
    takes_value=True,
)
@arguments.selector_option
@arguments.all_option
@arguments.files_option
@arguments.recursive_option
@result_options
@store_options
def autoscale(words: tuple[str, ...], **options: Any) -> None:
    """Let load decide the number of replicas of deployments, between two bounds."""
    bounds = [options[name] for name in ("least", "most", "target_requests")]
    if options["off"] == any(bound is not None for bound in bounds):
        raise click.UsageError("give --max (and --min, --target-requests), or --off")
    chosen = targets.parse_selections(words, options, verb="autoscale", is_all=options["is_all"])
    for one in chosen:
        if one.kind.type is not ModelDeployment:
            raise FleetctlError(
                f"{one.kind.plural} have no replicas; autoscale modeldeployments, such as md/NAME"
            )
    run(_autoscale(chosen, options))


def with_autoscaling(
    obj: ModelDeployment, least: int | None, most: int | None, target_requests: int | None
) -> ModelDeployment | None:
    """Return the deployment with these bounds; None keeps a value. None if nothing changes. Pure.

    Raises:
        FleetctlError: the bounds contradict each other, or the deployment is being deleted.

    """
    name, now = targets.object_ref(obj), obj.spec.autoscaling
    edits.refuse_deleted(obj)
    if now is None and most is None:
        raise FleetctlError(f"{name} is not autoscaled yet: give --max")
    given = {"min_replicas": least, "max_replicas": most, "target_requests": target_requests}
    fields = {field: value for field, value in given.items() if value is not None}
    # A low --max alone must not contradict the usual --min.
    bounds = now or Autoscaling(min_replicas=min(1, most or 1), max_replicas=most or 1)
    bounds = bounds.model_copy(update=fields)
    if bounds.min_replicas > bounds.max_replicas:
        raise FleetctlError(
            f"{name}: the fewest replicas ({bounds.min_replicas}) would be more than the most "
            f"({bounds.max_replicas}); give --min and --max"
        )
    return edits.with_spec(obj, autoscaling=bounds)


def without_autoscaling(obj: ModelDeployment, replicas: int) -> ModelDeployment | None:
    """Return the deployment with this fixed number of replicas; None if it is not autoscaled. Pure."""
    edits.refuse_deleted(obj)
    if obj.spec.autoscaling is None:
        return None
    return edits.with_spec(obj, autoscaling=None, replicas=replicas)


async def _autoscale(chosen: Sequence[Selection], options: dict[str, Any]) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)

    def edit(obj: ModelDeployment, desired: int) -> ModelDeployment | None:
        if options["off"]:
            return without_autoscaling(obj, desired)
        return with_autoscaling(obj, options["least"], options["most"], options["target_requests"])

    async with open_store(options) as transport:
        found = [
            obj
            for obj in await targets.read_all_selected(transport, chosen)
            if isinstance(obj, ModelDeployment)
        ]
        wanted = {
            obj.name: obj.status.desired_replicas if obj.status is not None else obj.spec.replicas
            for obj in found
        }
        for obj in found:
            edit(obj, wanted[obj.name])  # check all before the first write
        for obj in found:
            written = await writer.write_edit(
                transport,
                clock,
                obj,
                lambda now: edit(now, wanted[now.name]),
                manager="fleetctl-autoscale",
                is_dry=results.is_dry,
            )
            done = "autoscaling ended" if options["off"] else "autoscaled"
            results.print_object(written.obj, done if written.is_changed else f"{done} (no change)")
