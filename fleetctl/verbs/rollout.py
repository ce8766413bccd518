"""`fleetctl rollout`: status, history, undo, pause, resume, restart, promote and abort."""

from functools import partial
from typing import Any

import click

from fleetctl.cli.arguments import output_option, parse_duration
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.objects import deployments, reader
from fleetctl.objects.change import change_options, run_action, run_change, select_of_kind
from fleetctl.objects.results import list_tree, tree_text
from fleetctl.objects.targets import Selection
from fleetctl.output import printers
from insight import edits, rollouts
from insight.edits import ObjectEdit
from machinery.clock import Clock, SystemClock
from manifests import ownership
from manifests.trees import object_tree
from manifests.yaml import parser
from schemas.deployment import ModelDeployment, Revision
from store.errors import UnavailableError

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
@output_option("table", "yaml", "json")
@store_options
def history(what: tuple[str, ...], number: int | None, output: str, **options: Any) -> None:
    """Show the revisions of a deployment: what its replicas ran before, and run now.

    The current revision is marked. spec.rollout.revisionHistoryLimit sets how many are kept.
    """
    click.echo(run(_history(deployments.parse_name(what), number, output, options)), nl=False)


async def _history(name: str, number: int | None, output: str, options: dict[str, Any]) -> str:
    async with open_store(options) as transport:
        deployment = await deployments.read_deployment(transport, name)
        deployment = await rollouts.read_pinned(transport, deployment)
        revisions = await rollouts.read_revisions(transport, deployment)
    if number is not None:
        revisions = [
            revision for revision in revisions if revision.spec.revision == number
        ] or _refuse_missing_revision(revisions, name, number)
    if output != "table":
        trees = [object_tree(revision) for revision in revisions]
        return tree_text(trees[0] if number is not None else list_tree(trees), output)
    if number is not None:
        text = parser.dump(deployments.template_tree(revisions[0].spec.content))
        lines = "".join(f"  {line}\n" for line in text.splitlines())
        head = f"modeldeployment/{name} with revision #{number}"
        return f"{head} (template {revisions[0].spec.template})\n{lines}"
    notes = "".join(f"{line}\n" for line in deployments.trial_notes(revisions, deployment))
    return (
        f"modeldeployment/{name}\n{revision_table(revisions, deployment, SystemClock())}\n{notes}"
    )


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
def undo(words: tuple[str, ...], revision: int, **options: Any) -> None:
    """Roll back to an earlier revision of a deployment.

    This restores the settings that engines start with: model, served names, context length, concurrency, resources,
    and the last restart. The annotation kubernetes.io/change-cause of the revision comes back too, unless a new one was
    set for this rollback. Replicas, placement and other fields stay the same. A later apply keeps the rollback, unless
    the manifest changes.
    """
    run_action("undo", _select(words, options), {**options, "revision": revision or None})


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
def refresh(words: tuple[str, ...], **options: Any) -> None:
    """Resolve the branches of hub models again; a branch that moved becomes a new revision."""
    refreshed: ObjectEdit[ModelDeployment] = ObjectEdit(
        edit=partial(edits.as_refreshed, now=SystemClock().now()),
        manager=ownership.ROLLOUT,
        done="refreshed",
        unchanged="refreshed (no change)",
    )
    run_change(_select(words, options), refreshed, options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
def pause(words: tuple[str, ...], **options: Any) -> None:
    """Pause rollouts of deployments. Lost replicas are still replaced."""
    run_action("pause", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
def resume(words: tuple[str, ...], **options: Any) -> None:
    """Resume rollouts that `fleetctl rollout pause` paused."""
    run_action("resume", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
def promote(words: tuple[str, ...], **options: Any) -> None:
    """End the canary of deployments at once: the new version passes, and all replicas get it."""
    run_action("promote", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
def abort(words: tuple[str, ...], **options: Any) -> None:
    """End the canary of deployments at once: the new version fails, and the earlier one serves again.

    The spec stays as it is. `fleetctl rollout undo` rolls it back, `fleetctl rollout restart` tries again.
    """
    run_action("abort", _select(words, options), options)


@rollout.command()
@change_options("NAME...", is_of_one_kind=True)
def restart(words: tuple[str, ...], **options: Any) -> None:
    """Restart the engines of deployments as spec.rollout allows, without dropping requests."""
    run_action("restart", _select(words, options), options)
