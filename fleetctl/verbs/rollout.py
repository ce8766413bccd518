"""`fleetctl rollout`: status, history, undo, pause, resume, restart, promote and abort."""

from typing import Any

import click
import orjson

from fleetctl.cli.arguments import dry_run_option, parse_duration, reason_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.objects import deployments, reader, writer
from fleetctl.output import printers
from fleetctl.output.results import ResultPrinter
from insight import edits, rollouts
from machinery.clock import Clock, SystemClock
from manifests.trees import Tree, object_tree
from manifests.yaml import parser
from schemas.deployment import ModelDeployment, Revision
from schemas.rollout import CanaryDecision
from store.errors import UnavailableError
from store.port import Transport

_LOOK_S = 0.1

_STATUS_HELP = """Show the progress of a rollout, and wait until it is complete.

\b
  fleetctl rollout status qwen --timeout 10m

Exit code 0: the rollout is complete (or in progress, with --no-watch). 1: it failed, stalled, or timed out.
"""


@click.command(help=_STATUS_HELP)
@click.argument("what", nargs=-1, required=True, metavar="NAME")
@click.option(
    "-w/ ", "--watch/--no-watch", default=True, help="Wait until the rollout is complete (default)."
)
@click.option(
    "--timeout", default="0s", show_default=True, help="Time limit of the wait; 0 means no limit."
)
@store_options
def status(what: tuple[str, ...], watch: bool, timeout: str, **options: Any) -> None:
    """Show the progress of a rollout, and wait until it is complete."""
    run(_status(deployments.parse_name(what), parse_duration(timeout), options, watch=watch))


async def _status(name: str, timeout_s: float, options: dict[str, Any], *, watch: bool) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s if timeout_s else float("inf")
    last, was_observed = "", False
    async with open_store(options) as transport:
        while True:
            try:
                progress, was_observed = (
                    rollouts.progress_of(await deployments.read_deployment(transport, name)),
                    True,
                )
                text = progress.text
                if progress.is_unobserved and (why := await reader.reconciler_problem(transport)):
                    text += f"; {why}"
            except UnavailableError:
                # Outages of the store are waited through.
                if clock.monotonic() >= deadline or not watch or not was_observed:
                    raise
                await clock.sleep(_LOOK_S)
                continue
            if progress.is_failed:
                raise FleetctlError(text)
            if text != last:
                click.echo(text if progress.is_done else f"{text}...")
                last = text
            if progress.is_done or not watch:
                return
            if clock.monotonic() >= deadline:
                raise FleetctlError(
                    f"timed out after {timeout_s:g} s waiting for the rollout of "
                    f"modeldeployment/{name}. `fleetctl describe md/{name}` shows details"
                )
            await clock.sleep(_LOOK_S)


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME")
@click.option(
    "--revision", "number", type=click.IntRange(min=1), help="Show details of this revision."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "yaml", "json"]),
    default="table",
    show_default=True,
)
@store_options
def history(what: tuple[str, ...], number: int | None, output: str, **options: Any) -> None:
    """Show the revisions of a deployment: what its replicas ran before, and run now.

    The current revision is marked. spec.rollout.revisionHistoryLimit sets how many are kept.
    """
    click.echo(run(_history(deployments.parse_name(what), number, output, options)), nl=False)


async def _history(name: str, number: int | None, output: str, options: dict[str, Any]) -> str:
    async with open_store(options) as transport:
        pin = await deployments.read_pin(transport, name)
        deployment = pin(await deployments.read_deployment(transport, name))
        found = await rollouts.read_revisions(transport, deployment)
    if number is not None:
        found = [one for one in found if one.spec.revision == number] or _refuse_missing_revision(
            found, name, number
        )
    if output != "table":
        trees: list[Tree] = [object_tree(one) for one in found]
        whole: Tree = {"apiVersion": "v1", "kind": "List", "items": trees}
        tree = trees[0] if number is not None else whole
        if output == "yaml":
            return parser.dump(tree)
        return orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode() + "\n"
    if number is not None:
        text = parser.dump(deployments.template_tree(found[0].spec.content))
        lines = "".join(f"  {line}\n" for line in text.splitlines())
        head = f"modeldeployment/{name} with revision #{number}"
        return f"{head} (template {found[0].spec.template})\n{lines}"
    notes = "".join(f"{line}\n" for line in deployments.trial_notes(found, deployment))
    return f"modeldeployment/{name}\n{revision_table(found, deployment, SystemClock())}\n{notes}"


def revision_table(revisions: list[Revision], deployment: ModelDeployment, clock: Clock) -> str:
    """Return the revisions as a table, oldest first."""
    if not revisions:
        return (
            "no revisions yet; the reconciler records the first one when it observes the deployment"
        )
    now = clock.now()
    rows = [
        (
            "*" if one.is_current else "",
            str(one.number),
            one.template,
            printers.age(one.created, now),
            one.cause or "<none>",
        )
        for one in rollouts.history_of(revisions, deployment)
    ]
    return printers.align_columns(rows, ("CURRENT", "REVISION", "TEMPLATE", "AGE", "CHANGE-CAUSE"))


def _refuse_missing_revision(found: list[Revision], name: str, number: int) -> list[Revision]:
    there = ", ".join(str(one.spec.revision) for one in found) or "none"
    raise FleetctlError(
        f"unable to find revision {number} of modeldeployment/{name}; available: {there}"
    )


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME")
@click.option(
    "--to-revision",
    "number",
    type=click.IntRange(min=0),
    default=0,
    help="Revision to roll back to (default or 0: the previous one).",
)
@dry_run_option
@store_options
def undo(what: tuple[str, ...], number: int, **options: Any) -> None:
    """Roll back to an earlier revision of a deployment.

    This restores the settings that engines start with: model, served names, context length, concurrency, resources,
    and the last restart. The annotation kubernetes.io/change-cause of the revision comes back too, unless a new one was
    set for this rollback. Replicas, placement and other fields stay the same. A later apply keeps the rollback, unless
    the manifest changes.
    """
    name = deployments.parse_name(what)
    click.echo(run(_undo(name, number or None, options)))


async def _undo(name: str, number: int | None, options: dict[str, Any]) -> str:
    """Roll back; return the status line."""
    results = ResultPrinter.of(options)
    async with open_store(options) as transport:
        there = await deployments.read_deployment(transport, name)
        revisions = await rollouts.read_revisions(transport, there)
        served = there.status.stable_template if there.status is not None else ""
        pin = await deployments.read_pin(transport, name)
        chosen: list[Revision] = []

        def edit(deployment: ModelDeployment) -> ModelDeployment | None:
            deployment = pin(deployment)
            chosen[:] = [edits.rollback_target(revisions, deployment, number=number, served=served)]
            return edits.with_revision(deployment, chosen[0], revisions[-1])

        clock = SystemClock()
        is_changed = await deployments.change_deployment(
            transport, clock, name, edit, is_dry=results.is_dry
        )
    if is_changed:
        canary = None if there.status is None else there.status.canary
        is_trial = canary is not None and canary.outcome == "Running"
        done = "rolled back, and its canary ended" if is_trial else "rolled back"
        return f"modeldeployment/{name} {done}{results.suffix}"
    number = chosen[0].spec.revision
    return f"modeldeployment/{name} skipped rollback (current template already matches revision {number})"


@click.group(cls=SuggestingGroup)
def rollout() -> None:
    """Manage rollouts of deployments.

    A rollout starts when a setting changes that engines start with: model, served names, context length, concurrency
    or resources. NAME is a ModelDeployment: qwen, md/qwen or md qwen.
    """


rollout.add_command(status)
rollout.add_command(history)
rollout.add_command(undo)


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@reason_option
@store_options
def refresh(what: tuple[str, ...], **options: Any) -> None:
    """Resolve the branches of hub models again; a branch that moved becomes a new revision."""
    now = SystemClock().now()
    run(
        _change_each(
            what, lambda deployment: edits.as_refreshed(deployment, now), "refreshed", options
        )
    )


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@reason_option
@store_options
def pause(what: tuple[str, ...], **options: Any) -> None:
    """Pause rollouts of deployments. Lost replicas are still replaced."""
    run(_change_each(what, edits.as_paused, "paused", options))


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@reason_option
@store_options
def resume(what: tuple[str, ...], **options: Any) -> None:
    """Resume rollouts that `fleetctl rollout pause` paused."""
    run(_change_each(what, edits.as_resumed, "resumed", options))


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@reason_option
@store_options
def promote(what: tuple[str, ...], **options: Any) -> None:
    """End the canary of deployments at once: the new version passes, and all replicas get it."""
    run(_decide_each(what, "promote", "promoted", options))


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@reason_option
@store_options
def abort(what: tuple[str, ...], **options: Any) -> None:
    """End the canary of deployments at once: the new version fails, and the earlier one serves again.

    The spec stays as it is. `fleetctl rollout undo` rolls it back, `fleetctl rollout restart` tries again.
    """
    run(_decide_each(what, "abort", "aborted", options))


@rollout.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME...")
@reason_option
@store_options
def restart(what: tuple[str, ...], **options: Any) -> None:
    """Restart the engines of deployments as spec.rollout allows, without dropping requests."""
    now = SystemClock().now()
    run(
        _change_each(
            what, lambda deployment: edits.as_restarted(deployment, now), "restarted", options
        )
    )


async def _change_each(
    what: tuple[str, ...],
    edit: writer.Edit[ModelDeployment],
    done: str,
    options: dict[str, Any],
) -> None:
    clock = SystemClock()
    async with open_store(options) as transport:
        for name in deployments.parse_names(what):
            await deployments.change_deployment(transport, clock, name, edit)
            click.echo(f"modeldeployment/{name} {done}")


async def _decide_each(
    what: tuple[str, ...], decision: CanaryDecision, done: str, options: dict[str, Any]
) -> None:
    clock = SystemClock()
    async with open_store(options) as transport:
        for name in deployments.parse_names(what):
            await decide_canary(transport, clock, name, decision)
            click.echo(f"modeldeployment/{name} {done}")


async def decide_canary(
    transport: Transport, clock: Clock, name: str, decision: CanaryDecision
) -> None:
    """Record a decision about the running canary of a deployment.

    Raises:
        FleetctlError: no canary runs, or the deployment was changed meanwhile.

    """
    seen = await deployments.read_deployment(transport, name)
    edits.check_canary_runs(seen, decision)
    generation = seen.metadata.generation
    await deployments.change_deployment(
        transport,
        clock,
        name,
        lambda found: edits.with_canary_decision(found, decision, generation),
    )
