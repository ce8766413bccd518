"""What is told of a simulation: tables and sentences for people, trees for machines. Pure.

`fleetctl simulate`: the real reconciler and agents on an invented fleet, in virtual time. Touches no fleet.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import click
from pydantic import ValidationError

from fleetctl.cli.errors import FleetctlError
from fleetctl.output.printers import align_columns
from fleetctl.simulate import fleet_file
from fleetctl.simulate.fleet_file import FleetFile, FleetNode
from fleetctl.simulate.simulated_fleet import FleetSnapshot, ReplicaPlace, SimulatedFleet, run_fleet
from fleetctl.verbs.apply import files_option, recursive_option
from machinery import virtual_time
from manifests.errors import ApplyError, ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.suggestions import not_found_message
from manifests.trees import Tree
from manifests.yaml import parser
from schemas import duration, quantity
from schemas.kinds import by_name
from schemas.node import NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationStep:
    """One thing that happened to the fleet, and the fleet at rest afterwards."""

    event: str
    """For people: "power loss of studio-1"."""
    took_s: float
    """From the event until it last changed which replicas answer."""
    picture: FleetSnapshot
    before: FleetSnapshot | None = None
    """None for the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMove:
    """What became of one replica."""

    deployment: str
    before: ReplicaPlace | None
    after: ReplicaPlace | None


def replica_moves(step: SimulationStep) -> list[ReplicaMove]:
    """Return who came, went or was moved; one that went and one that came of a deployment are one move."""
    if step.before is None:
        return []
    was = {place.uid: place for place in step.before.places}
    is_ = {place.uid: place for place in step.picture.places}
    gone = sorted((p for uid, p in was.items() if uid not in is_), key=_by_replica)
    come = sorted((p for uid, p in is_.items() if uid not in was), key=_by_replica)
    found: list[ReplicaMove] = []
    for place in gone:
        same = [p for p in come if p.deployment == place.deployment]
        # Its own name first: what is moved off a lost node keeps it.
        to = min(same, key=lambda p: (p.replica != place.replica, p.replica), default=None)
        if to is not None:
            come.remove(to)
        found.append(ReplicaMove(deployment=place.deployment, before=place, after=to))
    found.extend(ReplicaMove(deployment=p.deployment, before=None, after=p) for p in come)
    return sorted(found, key=lambda move: _by_replica(move.before or move.after))


def _lost_places(step: SimulationStep) -> list[ReplicaPlace]:
    """Return who answered before, and is there without an answer."""
    assert step.before is not None
    answered = {place.uid for place in step.before.places if place.answers}
    return [p for p in step.picture.places if p.uid in answered and not p.answers]


def step_text(step: SimulationStep, machines: Mapping[str, NodeStatus]) -> str:
    """Return what people read about one step."""
    parts = [f"{step.event}: {_headline(step)}"]
    changed = replica_moves(step)
    if step.before is not None:
        told = [*map(_move_sentence, changed), *map(_stranded_sentence, _lost_places(step))]
        parts.append("\n".join(told) or "Nothing moved.")
    if step.before is None or changed:
        parts.append(_placement_table(step.picture, machines))
    parts.append(_missing_text(step.picture))
    return "\n\n".join(part for part in parts if part) + "\n"


def step_tree(step: SimulationStep, machines: Mapping[str, NodeStatus]) -> dict[str, Tree]:
    """Return the same for machines."""
    return {
        "event": step.event,
        "tookSeconds": round(step.took_s, 1),
        "isQuiet": step.picture.is_quiet,
        "placements": [
            {
                "deployment": place.deployment,
                "replica": place.replica,
                "node": place.node,
                "memoryBytes": place.memory_bytes,
                "shareOfNode": round(_share(place, machines), 3),
                "answers": place.answers,
            }
            for place in step.picture.places
        ],
        "missing": [
            {
                "deployment": lack.deployment,
                "missing": lack.missing,
                "wanted": lack.wanted,
                "why": lack.why,
            }
            for lack in step.picture.lacks
        ],
        "moves": [
            {
                "deployment": move.deployment,
                "from": _place_tree(move.before),
                "to": _place_tree(move.after),
            }
            for move in replica_moves(step)
        ],
        "lost": [place.replica for place in _lost_places(step)] if step.before is not None else [],
    }


def _by_replica(place: ReplicaPlace | None) -> tuple[str, str]:
    return ("", "") if place is None else (place.deployment, place.replica)


def _headline(step: SimulationStep) -> str:
    answering = sum(place.answers for place in step.picture.places)
    count = f"{answering} of {step.picture.wanted} replicas answer"
    if not step.picture.is_quiet:
        return f"{count}; the fleet did not come to rest within a day"
    return f"{count} after {duration.show(step.took_s)}" if step.took_s > 0 else count


def _placement_table(picture: FleetSnapshot, machines: Mapping[str, NodeStatus]) -> str:
    rows = [
        (
            place.deployment,
            place.replica,
            place.node,
            quantity.show(place.memory_bytes),
            f"{_share(place, machines):.0%}",
            "yes" if place.answers else "no",
        )
        for place in picture.places
    ]
    titles = ("DEPLOYMENT", "REPLICA", "NODE", "MEMORY", "OF NODE", "ANSWERS")
    used = Counter[str]()
    for place in picture.places:
        used[place.node] += place.memory_bytes
    full = [
        (
            name,
            machine.chip,
            quantity.show(machine.allocatable_bytes),
            quantity.show(used[name]),
            f"{used[name] / machine.allocatable_bytes:.0%}",
        )
        for name, machine in sorted(machines.items())
        if used[name]
    ]
    nodes = align_columns(full, ("NODE", "CHIP", "FOR MODELS", "USED", "FULL"))
    return f"{align_columns(rows, titles)}\n\n{nodes}" if rows else "Nothing is placed."


def _share(place: ReplicaPlace, machines: Mapping[str, NodeStatus]) -> float:
    return place.memory_bytes / machines[place.node].allocatable_bytes


def _missing_text(picture: FleetSnapshot) -> str:
    return "\n".join(
        f"{lack.deployment}: {lack.missing} of {lack.wanted} replicas missing: {lack.why}"
        for lack in picture.lacks
    )


def _move_sentence(move: ReplicaMove) -> str:
    before, after = move.before, move.after
    if before is None:
        return f"{_name(after)} starts on {_node(after)}"
    if after is None:
        return f"{before.replica} is lost with {before.node}, and not replaced"
    name = (
        before.replica
        if before.replica == after.replica
        else f"{before.replica}, now {after.replica},"
    )
    return f"{name} moves from {before.node} to {after.node}"


def _stranded_sentence(place: ReplicaPlace) -> str:
    return f"{place.replica} is lost with {place.node}, and has no other place"


def _name(place: ReplicaPlace | None) -> str:
    return place.replica if place is not None else ""


def _node(place: ReplicaPlace | None) -> str:
    return place.node if place is not None else ""


def _place_tree(place: ReplicaPlace | None) -> Tree:
    return None if place is None else {"replica": place.replica, "node": place.node}


_HELP = """Show what an invented fleet would do with the manifests: what goes where, and what a Mac's loss does.

\b
  fleetctl simulate -f fleet/ --fleet fleet.yaml
  fleetctl simulate -f fleet/ --fleet fleet.yaml --fail studio-1
  fleetctl simulate -f fleet/ --fleet fleet.yaml --add "Apple M4 Max:128Gi"

It is the reconciler and the agents themselves at work, on Macs that fleet.yaml describes, without engines and in a
time of their own: hours pass in a moment. Nothing outside this command is read but the files, and nothing is written.
docs/operations/simulate.md says what fleet.yaml may hold.
"""


@click.command(help=_HELP)
@files_option
@recursive_option
@click.option("--fleet", "fleet_path", required=True, help="The Macs and models: fleet.yaml.")
@click.option(
    "--fail",
    "failing",
    multiple=True,
    metavar="NODE",
    help="Take the power from this node; may be repeated, one after the other.",
)
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar="CHIP:MEMORY",
    help='Then add a node, such as "Apple M4 Max:128Gi"; may be repeated.',
)
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table")
def simulate(
    files: tuple[str, ...],
    recursive: bool,
    fleet_path: str,
    failing: tuple[str, ...],
    added: tuple[str, ...],
    output: Literal["table", "json", "yaml"],
) -> None:
    """Read the files, run the fleet, and print what became of it."""
    try:
        fleet, document = fleet_file.read_fleet(fleet_path)
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
        fleet_file.check_models(loaded, fleet, document.source)
        newcomers = [_parse_added_node(text, number) for number, text in enumerate(added, start=1)]
        _check_names(fleet, failing, newcomers)
        random.seed(0)  # the jitter of retries: the same files, the same words
        virtual_time.run(_run(fleet, loaded, failing, newcomers, output))
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was simulated:\n{error}") from error
    except ApplyError as error:
        raise FleetctlError(str(error)) from error


def _parse_added_node(text: str, number: int) -> FleetNode:
    chip, _, memory = text.rpartition(":")
    tree = json.dumps({"name": f"added-{number}", "chip": chip, "memory": memory})
    try:
        return FleetNode.model_validate_json(tree)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise click.UsageError(
            f'--add {text}: {why}; write CHIP:MEMORY as in "Apple M4 Max:128Gi"'
        ) from error


def _check_names(fleet: FleetFile, failing: Sequence[str], newcomers: Sequence[FleetNode]) -> None:
    names = [name for node in fleet.nodes for name in node.names()]
    kind = by_name("Node")
    assert kind is not None
    for name in failing:
        if name not in names:
            raise FleetctlError(f"--fail: {not_found_message(kind, name, names)}")
    if len(set(failing)) < len(failing):
        raise FleetctlError("--fail: a node can be lost once only; name each node once")
    taken = [node.name for node in newcomers if node.name in names]
    if taken:
        raise FleetctlError(f"--add: the fleet has a node {taken[0]} already; rename that one")


async def _run(
    fleet: FleetFile,
    loaded: Sequence[LoadedObject],
    failing: Sequence[str],
    newcomers: Sequence[FleetNode],
    output: Literal["table", "json", "yaml"],
) -> None:
    trees: list[Tree] = []

    def tell(step: SimulationStep, world: SimulatedFleet) -> SimulationStep:
        if output == "table":
            click.echo(step_text(step, world.machines))
        trees.append(step_tree(step, world.machines))
        return step

    async with run_fleet(fleet_file.geometries(fleet)) as world:
        step = tell(await _first_step(world, fleet, loaded), world)
        for name in failing:
            world.fail(name)
            step = tell(await _step(world, f"power loss of {name}", step), world)
        for node in newcomers:
            await world.join(fleet_file.node_status(node, node.name))
            event = f"{node.name} joins ({node.chip}, {node.memory})"
            step = tell(await _step(world, event, step), world)
    if output == "json":
        click.echo(json.dumps({"steps": trees}, indent=2))
    if output == "yaml":
        click.echo(parser.dump({"steps": trees}), nl=False)


async def _first_step(
    world: SimulatedFleet, fleet: FleetFile, loaded: Sequence[LoadedObject]
) -> SimulationStep:
    for node in fleet.nodes:
        for name in node.names():
            await world.join(fleet_file.node_status(node, name), node.taints)
    await world.rest()
    return await _step(world, "apply", None, loaded)


async def _step(
    world: SimulatedFleet,
    event: str,
    before: SimulationStep | None,
    loaded: Sequence[LoadedObject] = (),
) -> SimulationStep:
    """Wait until the fleet is at rest after the event, which has just happened or is an apply."""
    began = world.clock.monotonic()
    if loaded:
        await world.apply(loaded)
    picture = await world.rest()
    return SimulationStep(
        event=event,
        took_s=max(0.0, world.moved_at - began),
        picture=picture,
        before=before.picture if before is not None else None,
    )
