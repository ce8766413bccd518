"""`fleetctl scale`: how many replicas deployments have."""

from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import targets, writer
from fleetctl.objects.targets import Selection
from fleetctl.output.results import ResultPrinter, result_options
from fleetctl.verbs.wait import parse_duration
from machinery.clock import Clock, SystemClock
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from store import objects
from store.errors import UnavailableError
from store.port import Transport

_POLL_S = 0.1

_HELP = """Set how many replicas deployments have.

\b
  fleetctl scale --replicas=3 md/qwen md/phi
  fleetctl scale --replicas=0 md -l team=lab
  fleetctl scale --current-replicas=2 --replicas=3 md qwen --timeout=5m
  fleetctl scale --replicas=1 -f qwen.yaml

A manifest that is applied later does not undo it, unless the manifest's own number has changed by then. Where
spec.autoscaling decides the number, this refuses, and says how to move its bounds.
"""


@click.command(help=_HELP)
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option(
    "--replicas", type=click.IntRange(0, 10_000), required=True, help="How many there should be."
)
@click.option(
    "--current-replicas",
    type=click.IntRange(0, 10_000),
    help="Refuse, unless so many are asked for now.",
)
@click.option(
    "--timeout",
    default="0s",
    show_default=True,
    help="Wait so long until as many serve; 0: do not.",
)
@targets.version_option
@targets.selector_option
@targets.all_option
@targets.files_option
@targets.recursive_option
@result_options
@store_options
def scale(words: tuple[str, ...], **options: Any) -> None:
    """Set how many replicas deployments have."""
    chosen = targets.parse_selections(words, options, verb="scale", is_all=options["is_all"])
    for one in chosen:
        if one.kind.type is not ModelDeployment:
            raise FleetctlError(
                f"{one.kind.plural} have no replicas; scale modeldeployments, such as md/NAME"
            )
    run(_scale(chosen, options, parse_duration(options["timeout"])))


def with_replicas(
    obj: ModelDeployment, replicas: int, *, current: int | None = None
) -> ModelDeployment | None:
    """Return the deployment with so many replicas; None if it asks for them already. Pure.

    Raises:
        FleetctlError: its load decides the number, another number is asked for now than `current`, or it is going.

    """
    name = targets.object_ref(obj)
    writer.refuse_deleted(obj)
    bounds = obj.spec.autoscaling
    if bounds is not None:
        fixed = f'{{"minReplicas": {replicas}, "maxReplicas": {max(1, replicas)}}}'
        raise FleetctlError(
            f"{name} has spec.autoscaling, which decides the number of its replicas, between {bounds.min_replicas} "
            f"and {bounds.max_replicas}; nothing was changed. Move the bounds: "
            f"""fleetctl patch {name} -p '{{"spec": {{"autoscaling": {fixed}}}}}'; or end it and scale then: """
            f"""fleetctl patch {name} -p '{{"spec": {{"autoscaling": null}}}}'"""
        )
    if current is not None and obj.spec.replicas != current:
        raise FleetctlError(
            f"{name}: expected {current} replicas, and {obj.spec.replicas} are asked for now; nothing was changed"
        )
    return targets.with_spec(obj, replicas=replicas)


async def _scale(chosen: Sequence[Selection], options: dict[str, Any], timeout_s: float) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)
    replicas: int = options["replicas"]

    def edit(obj: ApiObject) -> ApiObject | None:
        targets.refuse_other_version(obj, options["resource_version"])
        assert isinstance(obj, ModelDeployment)
        return with_replicas(obj, replicas, current=options["current_replicas"])

    async with open_store(options) as transport:
        found = await targets.read_all_selected(transport, chosen)
        targets.refuse_several_versions(found, options["resource_version"])
        for obj in found:
            edit(obj)  # all are asked before one is written
        made: list[ApiObject] = []
        for obj in found:
            written = await targets.write_edit(
                transport, clock, obj, edit, manager="fleetctl-scale", is_dry=results.is_dry
            )
            results.say(written.obj, "scaled" if written.is_news else "scaled (no change)")
            made.append(written.obj)
        if timeout_s and not results.is_dry:
            await _wait(transport, clock, made, timeout_s)


async def _wait(
    transport: Transport, clock: Clock, made: Sequence[ApiObject], timeout_s: float
) -> None:
    """Wait until as many replicas serve as are asked for, and no more run."""
    deadline = clock.monotonic() + timeout_s
    for obj in made:
        while (left := await _unmet(transport, obj, clock, deadline)) is not None:
            if clock.monotonic() >= deadline:
                raise FleetctlError(
                    f"timed out after {timeout_s:g} s: {targets.object_ref(obj)} {left}. What was asked for stays; "
                    f"`fleetctl describe {targets.object_ref(obj)}` says more"
                )
            await clock.sleep(_POLL_S)


async def _unmet(
    transport: Transport, made: ApiObject, clock: Clock, deadline: float
) -> str | None:
    """Return what the deployment still lacks; None if nothing."""
    try:
        obj = await objects.get(transport, ModelDeployment, made.name)
    except UnavailableError as error:
        # A store that restarts meanwhile is part of what is waited through.
        if clock.monotonic() >= deadline:
            raise
        return str(error)
    if obj is None or obj.metadata.uid != made.metadata.uid:
        raise FleetctlError(f"{targets.object_ref(made)} was deleted meanwhile")
    status, wanted = obj.status, obj.spec.replicas
    if status is None or status.observed_generation < obj.metadata.generation:
        return "was not looked at by a reconciler yet"
    if status.ready_replicas == wanted == status.replicas:
        return None
    return f"has {status.ready_replicas} of {wanted} replicas ready, {status.replicas} are placed"
