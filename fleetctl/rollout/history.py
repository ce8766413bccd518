"""`fleetctl rollout history` and `undo`: what a deployment ran, and back to it."""

from typing import Any

import click
import orjson

from fleetctl import printers
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.results import Results, dry_run_option
from fleetctl.rollout import named, versions
from machinery.clock import Clock, SystemClock
from manifests import yamlio
from manifests.tree import Tree, tree_of
from schemas.deployment import ModelDeployment
from schemas.revision import Revision
from store import objects
from store.port import Transport


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME")
@click.option("--revision", "number", type=click.IntRange(min=1), help="Show this one in full.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "yaml", "json"]),
    default="table",
    show_default=True,
)
@store_options
def history(what: tuple[str, ...], number: int | None, output: str, **options: Any) -> None:
    """Show the revisions of a deployment: what its replicas ran, and run now.

    The current one is marked. The number of those that are kept is spec.rollout.revisionHistoryLimit.
    """
    click.echo(run(_history(named.one_name(what), number, output, options)), nl=False)


async def _history(name: str, number: int | None, output: str, options: dict[str, Any]) -> str:
    async with opened(options) as transport:
        deployment = await named.read(transport, name)
        found = await _revisions(transport, deployment)
    if number is not None:
        found = [one for one in found if one.spec.revision == number] or _absent(
            found, name, number
        )
    if output != "table":
        trees: list[Tree] = [tree_of(one) for one in found]
        whole: Tree = {"apiVersion": "v1", "kind": "List", "items": trees}
        tree = trees[0] if number is not None else whole
        if output == "yaml":
            return yamlio.dump(tree)
        return orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode() + "\n"
    if number is not None:
        text = yamlio.dump(versions.tree_of(found[0].spec.content))
        lines = "".join(f"  {line}\n" for line in text.splitlines())
        head = f"modeldeployment/{name} with revision #{number}"
        return f"{head} (template {found[0].spec.template})\n{lines}"
    notes = "".join(f"{line}\n" for line in versions.trial(found, deployment))
    return f"modeldeployment/{name}\n{table(found, deployment, SystemClock())}\n{notes}"


def table(revisions: list[Revision], deployment: ModelDeployment, clock: Clock) -> str:
    """Return the revisions as a table, the oldest first."""
    if not revisions:
        return "no revisions are kept yet; the reconciler keeps the first one when it sees the deployment"
    now, current = clock.now(), versions.current(revisions, deployment)
    rows = [
        (
            "*" if one is current else "",
            str(one.spec.revision),
            one.spec.template,
            printers.age(one.metadata.creation_timestamp, now),
            one.spec.change_cause or "<none>",
        )
        for one in revisions
    ]
    return printers.lined_up(rows, ("CURRENT", "REVISION", "TEMPLATE", "AGE", "CHANGE-CAUSE"))


def _absent(found: list[Revision], name: str, number: int) -> list[Revision]:
    there = ", ".join(str(one.spec.revision) for one in found) or "none"
    raise FleetctlError(
        f"unable to find revision {number} of modeldeployment/{name}; there are {there}"
    )


async def _revisions(transport: Transport, deployment: ModelDeployment) -> list[Revision]:
    found = await objects.list_all(transport, Revision)
    return versions.of_deployment(found, deployment)


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME")
@click.option(
    "--to-revision",
    "number",
    type=click.IntRange(min=0),
    default=0,
    help="Which one; 0 or left out, the one before.",
)
@dry_run_option
@store_options
def undo(what: tuple[str, ...], number: int, **options: Any) -> None:
    """Go back to an earlier revision of a deployment; the reconciler rolls it out like any change.

    What engines are started with goes back: model, served names, context length, concurrency, resources, and the
    last restart. Replicas, placement and the like stay as they are. A manifest that is applied later leaves it so,
    unless it says something new by then.
    """
    name = named.one_name(what)
    click.echo(run(_undo(name, number or None, options)))


async def _undo(name: str, number: int | None, options: dict[str, Any]) -> str:
    """Go back; return what became of it."""
    results = Results.of(options)
    async with opened(options) as transport:
        revisions = await _revisions(transport, await named.read(transport, name))
        chosen: list[Revision] = []

        def edit(deployment: ModelDeployment) -> ModelDeployment | None:
            chosen[:] = [versions.target(revisions, deployment, number=number)]
            return versions.with_revision(deployment, chosen[0].spec.content)

        clock = SystemClock()
        is_news = await named.change(transport, clock, name, edit, is_dry=results.is_dry)
    if is_news:
        return f"modeldeployment/{name} rolled back{results.suffix}"
    number = chosen[0].spec.revision
    return f"modeldeployment/{name} skipped rollback (current template already matches revision {number})"
