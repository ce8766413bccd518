"""`fleetctl rollout`: status, history, undo, pause, resume, restart, promote and abort."""

from functools import partial
from typing import Any

import click

from fleetctl.cli.arguments import output_option, parse_duration, timeout_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.documents import list_tree, print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.objects import deployments, reader
from fleetctl.objects.change import change_objects, change_options, select_of_kind, take_action
from fleetctl.objects.targets import Selection
from fleetctl.objects.waits import poll
from fleetctl.output import printers
from insight import edits, rollouts
from insight.edits import ObjectEdit
from machinery.clock import Clock, SystemClock
from manifests import ownership
from manifests.trees import object_tree
from manifests.yaml import parser
from schemas.deployment import ModelDeployment, Revision
from store.port import Transport

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
@timeout_option("0s", "Time limit of the wait; 0 means no limit.")
@with_store
async def status(transport: Transport, what: tuple[str, ...], watch: bool, **options: Any) -> None:
    """Show the progress of a rollout, and wait until it is complete."""
    name, timeout_s = deployments.parse_name(what), parse_duration(options["timeout"])
    last = ""

    async def look() -> bool | None:
        nonlocal last
        progress = rollouts.progress_of(await deployments.read_deployment(transport, name))
        text = progress.text
        if progress.is_unobserved and (why := await reader.reconciler_problem(transport)):
            text += f"; {why}"
        if progress.is_failed:
            raise FleetctlError(text)
        if text != last:
            click.echo(text if progress.is_done else f"{text}...")
            last = text
        return progress.is_done or None

    # A store that does not answer at first is an error; later outages are waited through.
    if await look() is None and watch:
        is_done = await poll(look, SystemClock(), timeout_s or float("inf"))
        if is_done is None:
            raise FleetctlError(
                f"timed out after {timeout_s:g} s waiting for the rollout of "
                f"modeldeployment/{name}. `fleetctl describe md/{name}` shows details"
            )


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="NAME")
@click.option(
    "--revision", "number", type=click.IntRange(min=1), help="Show details of this revision."
)
@output_option("table", "yaml", "json")
@with_store
async def history(
    transport: Transport, what: tuple[str, ...], number: int | None, output: str, **_: Any
) -> None:
    """Show the revisions of a deployment: what its replicas ran before, and run now.

    The current revision is marked. spec.rollout.revisionHistoryLimit sets how many are kept.
    """
    name = deployments.parse_name(what)
    deployment = await deployments.read_deployment(transport, name)
    deployment = await rollouts.read_pinned(transport, deployment)
    revisions = await rollouts.read_revisions(transport, deployment)
    if number is not None:
        revisions = [
            revision for revision in revisions if revision.spec.revision == number
        ] or _refuse_missing_revision(revisions, name, number)
    if output != "table":
        trees = [object_tree(revision) for revision in revisions]
        print_tree(trees[0] if number is not None else list_tree(trees), output)
    elif number is not None:
        head = f"modeldeployment/{name} with revision #{number}"
        click.echo(f"{head} (template {revisions[0].spec.template})")
        text = parser.dump(deployments.template_tree(revisions[0].spec.content))
        click.echo("\n".join(f"  {line}" for line in text.splitlines()))
    else:
        table = revision_table(revisions, deployment, SystemClock())
        notes = deployments.trial_notes(revisions, deployment)
        click.echo("\n".join((f"modeldeployment/{name}", table, *notes)))


def revision_table(revisions: list[Revision], deployment: ModelDeployment, clock: Clock) -> str:
    """Return the revisions as a table, oldest first."""
    if not revisions:
        return (
            "no revisions yet; the reconciler records the first one when it observes the deployment"
        )
    now = clock.now()
    rows = [
        (
            "*" if revision.is_current else "",
            str(revision.number),
            revision.template,
            printers.age(revision.created, now),
            revision.cause or "<none>",
        )
        for revision in rollouts.history_of(revisions, deployment)
    ]
    return printers.align_columns(rows, ("CURRENT", "REVISION", "TEMPLATE", "AGE", "CHANGE-CAUSE"))


def _refuse_missing_revision(found: list[Revision], name: str, number: int) -> list[Revision]:
    there = ", ".join(str(revision.spec.revision) for revision in found) or "none"
    raise FleetctlError(
        f"unable to find revision {number} of modeldeployment/{name}; available: {there}"
    )


def _select(words: tuple[str, ...], options: dict[str, Any]) -> list[Selection]:
    return select_of_kind(words, "md", options, otherwise=deployments.NO_DEPLOYMENT)


@click.group(cls=SuggestingGroup)
def rollout() -> None:
    """Manage rollouts of deployments.

    A rollout starts when a setting changes that engines start with: model, served names, context length, concurrency
    or resources. NAME is a ModelDeployment: qwen, md/qwen or md qwen.
    """


rollout.add_command(status)
rollout.add_command(history)


@rollout.command()
@click.option(
    "--to-revision",
    "revision",
    type=click.IntRange(min=0),
    default=0,
    help="Revision to roll back to (default or 0: the previous one).",
)
@change_options("NAME...", is_of_one_kind=True)
async def undo(transport: Transport, words: tuple[str, ...], revision: int, **options: Any) -> None:
    """Roll back to an earlier revision of a deployment.

    This restores the settings that engines start with: model, served names, context length, concurrency, resources,
    and the last restart. The annotation kubernetes.io/change-cause of the revision comes back too, unless a new one was
    set for this rollback. Replicas, placement and other fields stay the same. A later apply keeps the rollback, unless
    the manifest changes.
    """
    await take_action(
        transport, "undo", _select(words, options), {**options, "revision": revision or None}
    )


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
async def refresh(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Resolve the branches of hub models again; a branch that moved becomes a new revision."""
    refreshed: ObjectEdit[ModelDeployment] = ObjectEdit(
        edit=partial(edits.as_refreshed, now=SystemClock().now()),
        manager=ownership.ROLLOUT,
        done="refreshed",
        unchanged="refreshed (no change)",
    )
    await change_objects(transport, _select(words, options), refreshed, options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
async def pause(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Pause rollouts of deployments. Lost replicas are still replaced."""
    await take_action(transport, "pause", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
async def resume(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Resume rollouts that `fleetctl rollout pause` paused."""
    await take_action(transport, "resume", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
async def promote(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """End the canary of deployments at once: the new version passes, and all replicas get it."""
    await take_action(transport, "promote", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
async def abort(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """End the canary of deployments at once: the new version fails, and the earlier one serves again.

    The spec stays as it is. `fleetctl rollout undo` rolls it back, `fleetctl rollout restart` tries again.
    """
    await take_action(transport, "abort", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
async def restart(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Restart the engines of deployments as spec.rollout allows, without dropping requests."""
    await take_action(transport, "restart", _select(words, options), options)
