"""The verb `fleetctl simulate`: runs the reconciler and agents on a simulated fleet, and reports each step."""

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import click
from pydantic import ValidationError

from fleetctl.cli.arguments import manifests_option, recursive_option
from fleetctl.cli.errors import FleetctlError
from fleetctl.output.printers import align_columns
from fleetctl.simulate import fleet_file
from fleetctl.simulate.fleet_file import FleetFile, FleetNode
from fleetctl.simulate.simulated_fleet import FleetSnapshot, ReplicaPlace, SimulatedFleet, run_fleet
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
    """An event, and the state of the fleet after it."""

    event: str
    """Text such as "power loss of studio-1"."""
    took_s: float
    """Seconds from the event to the last change of the serving replicas."""
    state: FleetSnapshot
    before: FleetSnapshot | None = None
    """None for the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMove:
    """A replica that started, moved or was lost."""

    deployment: str
    before: ReplicaPlace | None
    after: ReplicaPlace | None


def replica_moves(step: SimulationStep) -> list[ReplicaMove]:
    """Return all changes; a lost and a new replica of one deployment count as a move."""
    if step.before is None:
        return []
    previous = {place.uid: place for place in step.before.places}
    current = {place.uid: place for place in step.state.places}
    removed = sorted((p for uid, p in previous.items() if uid not in current), key=_by_replica)
    added = sorted((p for uid, p in current.items() if uid not in previous), key=_by_replica)
    moves: list[ReplicaMove] = []
    for place in removed:
        same = [p for p in added if p.deployment == place.deployment]
        # Prefer the same name: a replica that is moved off a lost node keeps its name.
        to = min(same, key=lambda p: (p.replica != place.replica, p.replica), default=None)
        if to is not None:
            added.remove(to)
        moves.append(ReplicaMove(deployment=place.deployment, before=place, after=to))
    moves.extend(ReplicaMove(deployment=p.deployment, before=None, after=p) for p in added)
    return sorted(moves, key=lambda move: _by_replica(move.before or move.after))


def _lost_places(step: SimulationStep) -> list[ReplicaPlace]:
    """Return replicas that served before and still exist, but no longer serve."""
    assert step.before is not None
    served = {place.uid for place in step.before.places if place.is_serving}
    return [p for p in step.state.places if p.uid in served and not p.is_serving]


def step_text(step: SimulationStep, machines: Mapping[str, NodeStatus]) -> str:
    """Return a step as text."""
    parts = [f"{step.event}: {_headline(step)}"]
    moves = replica_moves(step)
    if step.before is not None:
        sentences = [*map(_move_sentence, moves), *map(_stranded_sentence, _lost_places(step))]
        parts.append("\n".join(sentences) or "Nothing moved.")
    if step.before is None or moves:
        parts.append(_placement_table(step.state, machines))
    parts.append(_missing_text(step.state))
    return "\n\n".join(part for part in parts if part) + "\n"


def step_tree(step: SimulationStep, machines: Mapping[str, NodeStatus]) -> dict[str, Tree]:
    """Return a step for `-o json` and `-o yaml`."""
    return {
        "event": step.event,
        "tookSeconds": round(step.took_s, 1),
        "isQuiet": step.state.is_quiet,
        "placements": [
            {
                "deployment": place.deployment,
                "replica": place.replica,
                "node": place.node,
                "memoryBytes": place.memory_bytes,
                "shareOfNode": round(_share(place, machines), 3),
                "answers": place.is_serving,
            }
            for place in step.state.places
        ],
        "missing": [
            {
                "deployment": one.deployment,
                "missing": one.missing,
                "wanted": one.wanted,
                "why": one.why,
            }
            for one in step.state.missing
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
    serving = sum(place.is_serving for place in step.state.places)
    count = f"{serving} of {step.state.wanted} replicas answer"
    if not step.state.is_quiet:
        return f"{count}; the fleet still changed after a day"
    return f"{count} after {duration.show(step.took_s)}" if step.took_s > 0 else count


def _placement_table(state: FleetSnapshot, machines: Mapping[str, NodeStatus]) -> str:
    rows = [
        (
            place.deployment,
            place.replica,
            place.node,
            quantity.show(place.memory_bytes),
            f"{_share(place, machines):.0%}",
            "yes" if place.is_serving else "no",
        )
        for place in state.places
    ]
    titles = ("DEPLOYMENT", "REPLICA", "NODE", "MEMORY", "OF NODE", "ANSWERS")
    used = Counter[str]()
    for place in state.places:
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


def _missing_text(state: FleetSnapshot) -> str:
    return "\n".join(
        f"{one.deployment}: {one.missing} of {one.wanted} replicas missing: {one.why}"
        for one in state.missing
    )


def _move_sentence(move: ReplicaMove) -> str:
    before, after = move.before, move.after
    if before is None:
        return f"{_name(after)} starts on {_node(after)}"
    if after is None:
        return f"{before.replica} is lost with {before.node}, and is not replaced"
    name = (
        before.replica
        if before.replica == after.replica
        else f"{before.replica}, now {after.replica},"
    )
    return f"{name} moves from {before.node} to {after.node}"


def _stranded_sentence(place: ReplicaPlace) -> str:
    return f"{place.replica} is lost with {place.node}, and no other node can take it"


def _name(place: ReplicaPlace | None) -> str:
    return place.replica if place is not None else ""


def _node(place: ReplicaPlace | None) -> str:
    return place.node if place is not None else ""


def _place_tree(place: ReplicaPlace | None) -> Tree:
    return None if place is None else {"replica": place.replica, "node": place.node}


_HELP = """Simulate a fleet with these manifests: where replicas are placed, and what happens when a node fails.

\b
  fleetctl simulate -f fleet/ --fleet fleet.yaml
  fleetctl simulate -f fleet/ --fleet fleet.yaml --fail studio-1
  fleetctl simulate -f fleet/ --fleet fleet.yaml --add "Apple M4 Max:128Gi"

The command runs the real reconciler and agents, with simulated engines and in virtual time, on the Macs that fleet.yaml
describes. Hours pass in a moment. It reads only the given files, and writes nothing.
docs/operations/simulate.md describes fleet.yaml.
"""


@click.command(help=_HELP)
@manifests_option
@recursive_option
@click.option(
    "--fleet", "fleet_path", required=True, help="File with the Macs and models (fleet.yaml)."
)
@click.option(
    "--fail",
    "failing",
    multiple=True,
    metavar="NODE",
    help="Cut the power of this node; repeatable, one after the other.",
)
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar="CHIP:MEMORY",
    help='Add a node after that, such as "Apple M4 Max:128Gi"; repeatable.',
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
    """Simulate a fleet with these manifests, and print each step."""
    try:
        fleet, document = fleet_file.read_fleet(fleet_path)
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
        fleet_file.check_models(loaded, fleet, document.source)
        newcomers = [_parse_added_node(text, number) for number, text in enumerate(added, start=1)]
        _check_names(fleet, failing, newcomers)
        random.seed(0)  # retry jitter: the same files always give the same output
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
            f'--add {text}: {why}; expected CHIP:MEMORY, such as "Apple M4 Max:128Gi"'
        ) from error


def _check_names(fleet: FleetFile, failing: Sequence[str], newcomers: Sequence[FleetNode]) -> None:
    names = [name for node in fleet.nodes for name in node.names()]
    kind = by_name("Node")
    assert kind is not None
    for name in failing:
        if name not in names:
            raise FleetctlError(f"--fail: {not_found_message(kind, name, names)}")
    if len(set(failing)) < len(failing):
        raise FleetctlError("--fail: a node can fail only once; name each node once")
    taken = [node.name for node in newcomers if node.name in names]
    if taken:
        raise FleetctlError(f"--add: the fleet already has a node {taken[0]}; rename that one")


async def _run(
    fleet: FleetFile,
    loaded: Sequence[LoadedObject],
    failing: Sequence[str],
    newcomers: Sequence[FleetNode],
    output: Literal["table", "json", "yaml"],
) -> None:
    trees: list[Tree] = []

    def report(step: SimulationStep, simulated: SimulatedFleet) -> SimulationStep:
        if output == "table":
            click.echo(step_text(step, simulated.machines))
        trees.append(step_tree(step, simulated.machines))
        return step

    async with run_fleet(fleet_file.geometries(fleet)) as simulated:
        step = report(await _first_step(simulated, fleet, loaded), simulated)
        for name in failing:
            simulated.fail(name)
            step = report(await _step(simulated, f"power loss of {name}", step), simulated)
        for node in newcomers:
            await simulated.join(fleet_file.node_status(node, node.name))
            event = f"{node.name} joins ({node.chip}, {node.memory})"
            step = report(await _step(simulated, event, step), simulated)
    if output == "json":
        click.echo(json.dumps({"steps": trees}, indent=2))
    if output == "yaml":
        click.echo(parser.dump({"steps": trees}), nl=False)


async def _first_step(
    simulated: SimulatedFleet, fleet: FleetFile, loaded: Sequence[LoadedObject]
) -> SimulationStep:
    for node in fleet.nodes:
        for name in node.names():
            await simulated.join(fleet_file.node_status(node, name), node.taints)
    await simulated.rest()
    return await _step(simulated, "apply", None, loaded)


async def _step(
    simulated: SimulatedFleet,
    event: str,
    before: SimulationStep | None,
    loaded: Sequence[LoadedObject] = (),
) -> SimulationStep:
    """Apply the manifests, if any, and wait until the fleet stops changing after the event."""
    began = simulated.clock.monotonic()
    if loaded:
        await simulated.apply(loaded)
    state = await simulated.rest()
    return SimulationStep(
        event=event,
        took_s=max(0.0, simulated.moved_at - began),
        state=state,
        before=before.state if before is not None else None,
    )
