"""The verb `fleetctl simulate`: runs the reconciler and agents on a simulated fleet, and reports each step."""

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import click
from pydantic import ValidationError

from fleetctl.cli.arguments import manifests_option, output_option, recursive_option
from fleetctl.cli.connect import run
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.simulate import fleet_file, report, week
from fleetctl.simulate.fleet_file import FleetFile
from fleetctl.simulate.report import LossOutcome, SimulationStep
from fleetctl.simulate.simulated_fleet import SimulatedFleet, run_fleet
from insight import simulated_macs
from insight.simulated_macs import FleetNode
from machinery import virtual_time
from manifests.errors import ApplyError, ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.suggestions import did_you_mean
from manifests.trees import Tree
from models.hub.hub_settings import hub_endpoint_option, hub_settings
from schemas.node import ModelGeometry

_HELP = """Simulate a fleet with these manifests: where replicas are placed, and what happens when a node fails.

\b
  fleetctl simulate -f fleet/ --fleet fleet.yaml
  fleetctl simulate -f fleet/ --fleet fleet.yaml --fail studio-1
  fleetctl simulate -f fleet/ --fleet fleet.yaml --add "Apple M4 Max:128Gi"
  fleetctl simulate -f fleet/ --fleet fleet.yaml --lose-each
  fleetctl simulate --week week.yaml

The command runs the real reconciler and agents, with simulated engines and in virtual time, on the Macs that fleet.yaml
describes. Hours pass in a moment. It reads only the given files, and writes nothing. A model of a hub that fleet.yaml
does not describe is looked up there, without a token; no weights are read.
--week plays a recorded week of requests against a policy of spec.power of a NodePool, and compares awake hours, energy and
waiting time with Macs that are always on. docs/operations/simulate.md describes both files.
"""


@click.command(help=_HELP, short_help="Simulate a fleet, its placement and the loss of nodes.")
@manifests_option(is_required=False)
@recursive_option
@click.option(
    "--fleet",
    "fleet_path",
    help="File with the Macs and models, such as examples/simulate/fleet.yaml.",
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
@click.option(
    "--lose-each",
    is_flag=True,
    help="Then answer which single Mac the fleet may lose: simulate the loss of each, one fleet for each.",
)
@click.option(
    "--week",
    "week_path",
    help="Instead: file with requests by hour, such as examples/simulate/week.yaml, for sleep and wake of Macs.",
)
@hub_endpoint_option
@output_option("table", "json", "yaml")
def simulate(
    files: tuple[str, ...],
    recursive: bool,
    fleet_path: str | None,
    **options: Any,
) -> None:
    """Simulate a fleet with these manifests, and print each step."""
    if options["week_path"]:
        if files or fleet_path:
            raise click.UsageError("--week needs neither -f nor --fleet: its file names the Macs")
        _play_week(options["week_path"], options["output"])
        return
    if not files or not fleet_path:
        raise click.UsageError("give -f with manifests and --fleet, or --week")
    failing, added = options["failing"], options["added"]
    if options["lose_each"] and (failing or added):
        raise click.UsageError("--lose-each starts from the whole fleet; remove --fail and --add")
    printer = _StepPrinter(output=options["output"])
    try:
        fleet, document = fleet_file.read_fleet(fleet_path)
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
        fleet_file.check_models(loaded, fleet, document.source)
        hubs = hub_settings(options)
        described = fleet_file.geometries(fleet)
        of_hubs = run(fleet_file.hub_geometries(loaded, described, hubs))
        folders = fleet_file.as_folders(loaded)
        scenario = Scenario(fleet=fleet, geometries={**described, **of_hubs}, loaded=folders)
        newcomers = [_parse_added_node(text, number) for number, text in enumerate(added, start=1)]
        names = [name for node in fleet.nodes for name in node.names()]
        for name in failing:
            if name not in names:
                hint = did_you_mean(name, names, "Its nodes are")
                raise FleetctlError(f"--fail: the fleet has no node {name}. {hint}")
        if len(set(failing)) < len(failing):
            raise FleetctlError("--fail: a node can fail only once; name each node once")
        taken = [node.name for node in newcomers if node.name in names]
        if taken:
            raise FleetctlError(f"--add: the fleet already has a node {taken[0]}; rename that one")
        random.seed(0)  # retry jitter: the same files always give the same output
        virtual_time.run(_run(scenario, failing, newcomers, printer.add))
        losses = _lose_each(scenario) if options["lose_each"] else None
        printer.end(losses)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was simulated:\n{error}") from error
    except ApplyError as error:
        raise FleetctlError(str(error)) from error


def _play_week(path: str, output: str) -> None:
    try:
        results = week.compare(week.read_week(path))
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was simulated:\n{error}") from error
    if output == "table":
        click.echo(week.results_text(results), nl=False)
        return
    print_tree({"policies": [week.result_tree(result) for result in results]}, output)


@dataclass(slots=True, kw_only=True)
class _StepPrinter:
    """Prints each step as text at once; as JSON or YAML, all of them at the end."""

    output: Literal["table", "json", "yaml"]
    trees: list[Tree] = field(default_factory=list)

    def add(self, step: SimulationStep) -> None:
        if self.output == "table":
            click.echo(report.step_text(step))
        self.trees.append(report.step_tree(step))

    def end(self, losses: Sequence[LossOutcome] | None) -> None:
        """Print the rest; `losses` is None without --lose-each."""
        tree: dict[str, Tree] = {"steps": self.trees}
        if losses is not None:
            tree["loseEach"] = [report.loss_tree(loss) for loss in losses]
            if self.output == "table":
                click.echo(report.losses_text(losses))
        if self.output != "table":
            print_tree(tree, self.output)


def _parse_added_node(text: str, number: int) -> FleetNode:
    chip, _, memory = text.rpartition(":")
    tree = json.dumps({"name": f"added-{number}", "chip": chip, "memory": memory})
    try:
        return FleetNode.model_validate_json(tree)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
        raise click.UsageError(
            f'--add {text}: {why}; expected CHIP:MEMORY, such as "Apple M4 Max:128Gi"'
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The Macs, models and manifests of a simulation."""

    fleet: FleetFile
    geometries: Mapping[str, ModelGeometry]
    """Those of the models, by path."""
    loaded: Sequence[LoadedObject]


async def _run(
    scenario: Scenario,
    failing: Sequence[str],
    newcomers: Sequence[FleetNode],
    add: Callable[[SimulationStep], None],
) -> None:
    """Apply the manifests, then fail and add nodes one after the other; `add` receives each step."""
    async with run_fleet(scenario.geometries) as simulated:
        step = await _first_step(simulated, scenario.fleet, scenario.loaded)
        add(step)
        for name in failing:
            simulated.fail(name)
            step = await _step(simulated, f"power loss of {name}", step)
            add(step)
        for node in newcomers:
            await simulated.join(simulated_macs.node_status(node, node.name))
            event = f"{node.name} joins ({node.chip}, {node.memory})"
            step = await _step(simulated, event, step)
            add(step)


def _lose_each(scenario: Scenario) -> list[LossOutcome]:
    """Simulate the loss of each Mac, every time in a fleet of its own."""
    names = [name for node in scenario.fleet.nodes for name in node.names()]
    loss_outcomes: list[LossOutcome] = []

    def keep(step: SimulationStep) -> None:
        if step.before is not None:
            loss_outcomes.append(LossOutcome(node=name, step=step))

    with ProgressLine() as progress:
        for number, name in enumerate(names, start=1):
            progress.show(f"power loss of {name} ({number} of {len(names)})")
            random.seed(0)
            virtual_time.run(_run(scenario, (name,), (), keep))
    return loss_outcomes


async def _first_step(
    simulated: SimulatedFleet, fleet: FleetFile, loaded: Sequence[LoadedObject]
) -> SimulationStep:
    for node in fleet.nodes:
        for name in node.names():
            await simulated.join(simulated_macs.node_status(node, name), node.taints)
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
