"""`fleetctl apply` and `fleetctl diff`: apply manifests to the store, or show what that or a GitSource would change."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from fleetctl.cli import arguments, terminal
from fleetctl.cli.arguments import (
    parse_duration,
    result_options,
    timeout_option,
    tree_option,
)
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.documents import tree_text
from fleetctl.cli.errors import DiffError, FleetctlError
from fleetctl.objects import git_preview, git_warnings, selectors, targets
from fleetctl.objects.change import change_objects
from fleetctl.objects.kind_args import WRITABLE, kind_of
from fleetctl.objects.results import ResultPrinter
from fleetctl.objects.targets import Selection
from insight.deployment_warnings import deployment_warnings
from insight.edits import ObjectEdit
from machinery.clock import SystemClock
from machinery.gc_pause import pause_collection
from manifests import apply as applying
from manifests import ownership
from manifests.apply import ApplyOptions, ApplyPreview, ApplyResult, PruneError
from manifests.errors import ApplyError, ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.ownership import FieldConflict
from manifests.plan import change_text, change_tree, pruned_tree
from manifests.trees import Tree
from reconciler.deployments import snapshot
from schemas.deployment import ModelDeployment
from schemas.gitsource import source_of_manager
from schemas.meta import NAME_PATTERN, ApiObject
from store.codec import UndecodableError
from store.port import Transport

_IS_NAME = re.compile(NAME_PATTERN)

_OPTIONS = (
    arguments.manifests_option(is_required=False),
    arguments.recursive_option,
    click.option(
        "-l",
        "--selector",
        default="",
        help="Apply only manifests with these labels: k=v,k!=v,k,!k.",
    ),
    click.option(
        "--force-conflicts",
        is_flag=True,
        help="Overwrite fields that other field managers changed.",
    ),
    click.option(
        "--field-manager",
        default="fleetctl",
        show_default=True,
        help="Field manager to record as the owner of applied fields.",
    ),
    click.option(
        "--applyset",
        default="",
        metavar="NAME",
        help="Record the applied objects under this name, for --prune.",
    ),
    click.option(
        "--prune",
        is_flag=True,
        help="Delete objects that were applied with the same --applyset before and are no longer in the manifests.",
    ),
    click.option(
        "--prune-allowlist",
        multiple=True,
        metavar="KIND",
        help="Prune only this kind. Can be repeated.",
    ),
)


def apply_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of apply and diff: manifests, field manager and pruning."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_APPLY_HELP = """Create or change objects to match the manifests.

\b
  fleetctl apply -f fleet/
  fleetctl apply -f - --dry-run=server
  fleetctl apply --release md/qwen

All manifests are checked before anything is written. Fields that other field managers changed meanwhile (with fleetctl
scale, for example) keep their values, unless the manifests change them as well. In that case apply fails and writes
nothing; --force-conflicts lets the manifests win.

An object that a GitSource keeps is changed in its repository. Fields that its manifest has are not taken over. If an
earlier apply took some, --release gives them back.
"""


@click.command(help=_APPLY_HELP)
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@apply_options
@click.option(
    "--release",
    is_flag=True,
    help="Give up the ownership of the objects' fields, which keep their values. Takes names or -f.",
)
@result_options
@store_options
def apply(words: tuple[str, ...], **options: Any) -> None:
    """Create or change objects to match the manifests."""
    if options["release"]:
        manager = _manager(options["field_manager"])

        def release(obj: ApiObject) -> ApiObject | None:
            released = ownership.release_manifest(obj, manager)
            return None if released is obj else released

        chosen = targets.parse_selections(words, options, verb="release", is_all=None)
        unchanged = f"has no fields of {manager}"
        change = ObjectEdit(edit=release, manager=None, done="released", unchanged=unchanged)

        async def release_all() -> None:
            async with open_store(options) as transport:
                await change_objects(transport, chosen, change, options)

        run(release_all())
        return
    if words:
        raise click.UsageError(
            f"manifests need -f: fleetctl apply -f {words[0]}; names are for --release"
        )
    _require_files(options)
    apply_options = _parse_options(options)
    with pause_collection():  # ten thousand manifests live until the command ends
        _apply_files(apply_options, options)


def _apply_files(apply_options: ApplyOptions, options: dict[str, Any]) -> None:
    """Apply the files, and print what was done."""
    results = ResultPrinter.of(options)
    try:
        loaded = _load(options)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was written:\n{error}") from error
    if results.dry_run == "client":
        for item in loaded:
            results.print_declared(item.obj, "valid")
        return
    try:
        _print_outcomes(run(_apply(loaded, apply_options, options)), results)
    except PruneError as error:
        _print_outcomes(error.applied, results)
        raise FleetctlError(str(error)) from error


def _parse_options(options: dict[str, Any]) -> ApplyOptions:
    """Return the options of the apply."""
    allowed: Sequence[str] = options["prune_allowlist"]
    if options["prune"] and not options["applyset"]:
        raise click.UsageError("--prune needs --applyset NAME, which records the applied objects")
    if options["prune"] and options["selector"]:
        raise click.UsageError(
            "--prune cannot be combined with -l: it would delete the objects that -l leaves out"
        )
    if allowed and not options["prune"]:
        raise click.UsageError("--prune-allowlist needs --prune")
    if options["prune"] and options.get("dry_run") == "client":
        raise click.UsageError(
            "--prune needs the store to know what to delete; use --dry-run=server instead of --dry-run=client"
        )
    kinds = [kind_of(word, WRITABLE) for word in allowed]
    for kind in kinds:
        if not kind.written_by_users:
            raise click.UsageError(
                f"--prune-allowlist: {kind.plural} cannot be declared in manifests"
            )
    return ApplyOptions(
        manager=_manager(options["field_manager"]),
        force=options["force_conflicts"],
        apply_set=_set_name(options["applyset"]),
        prune=options["prune"],
        prune_kinds=[kind.name for kind in kinds] if kinds else None,
        server_dry_run=options.get("dry_run") == "server",
    )


def _require_files(options: dict[str, Any]) -> None:
    if not options["files"]:
        raise click.UsageError("Missing option '-f' / '--filename'.")


def _manager(name: str) -> str:
    if not name or len(name) > 128 or not name.isprintable():
        raise click.UsageError("--field-manager: give a name of 1 to 128 printable characters")
    if source_of_manager(name) is not None:
        raise click.UsageError(
            f"--field-manager: {name} is reserved for the reconciler (GitSource)"
        )
    return name


def _set_name(name: str) -> str:
    if name and not _IS_NAME.fullmatch(name):
        raise click.UsageError(
            f"--applyset: {name!r} is not a valid name; use lower-case letters, digits, '-' and '.'"
        )
    return name


def _load(options: dict[str, Any]) -> list[LoadedObject]:
    objects = load_objects(options["files"], recursive=options["recursive"], stdin=sys.stdin.buffer)
    rules = selectors.parse_labels(options["selector"])
    if not rules:
        return objects
    chosen = {id(obj) for obj in selectors.select([item.obj for item in objects], rules)}
    items = [item for item in objects if id(item.obj) in chosen]
    if not items:
        raise FleetctlError(f"no manifest has the labels {options['selector']}")
    return items


async def _apply(
    loaded: list[LoadedObject], apply_options: ApplyOptions, options: dict[str, Any]
) -> ApplyResult:
    async with open_store(options) as transport:
        try:
            done = await applying.apply(transport, loaded, SystemClock(), apply_options)
        except ManifestErrors as error:
            raise FleetctlError(f"nothing was written:\n{error}") from error
        except PruneError:
            raise
        except (ApplyError, UndecodableError) as error:
            raise FleetctlError(str(error)) from error
        await git_warnings.warn_of_objects(transport, (outcome.obj for outcome in done.outcomes))
        changed = [outcome.obj for outcome in done.outcomes if outcome.result != "unchanged"]
        await _warn_of_deployments(transport, changed)
        return done


async def _warn_of_deployments(transport: Transport, changed: Sequence[ApiObject]) -> None:
    """Print a warning for each deployment that the Macs cannot serve as it is declared."""
    deployments = [api_object for api_object in changed if isinstance(api_object, ModelDeployment)]
    if not any(
        deployment.spec.resources or deployment.spec.model.path for deployment in deployments
    ):
        return
    fleet_snapshot = await snapshot.take(transport, SystemClock())
    for model_deployment in deployments:
        for text in deployment_warnings(model_deployment, fleet_snapshot):
            click.echo(f"warning: {text}", err=True)


def _print_outcomes(applied: ApplyResult, results: ResultPrinter) -> None:
    _warn_kept(applied.kept_by_others)
    for outcome in applied.outcomes:
        results.print_object(outcome.obj, outcome.result)
    for key in applied.pruned:
        results.print_deleted(f"{key.kind.lower()}/{key.name}", "pruned")


def _warn_kept(kept: Sequence[FieldConflict]) -> None:
    for conflict in kept:
        click.echo(
            f"warning: {conflict.kept_message}. Use --force-conflicts to overwrite it", err=True
        )


_DIFF_HELP = """Show what an apply would change, or the next sync of a GitSource.

\b
  fleetctl diff -f fleet/
  fleetctl diff gs/fleet

For a GitSource, the leading reconciler fetches the newest commit and compares the live objects with it; nothing is
written, also if the source is suspended.

-o json and -o yaml print each changed field with both values, for programs.

Exit code 0: no changes; 1: changes; more than 1: an error.
"""


@click.command(help=_DIFF_HELP)
@click.argument("words", nargs=-1, metavar="[gs/NAME...]")
@apply_options
@timeout_option("2m", "For gs/NAME: time limit.")
@tree_option("Print the changes for programs.")
@store_options
def diff(words: tuple[str, ...], **options: Any) -> None:
    """Show what an apply would change, or the next sync of a GitSource."""
    if words:
        _diff_sources(words, options)
        return
    _require_files(options)
    with pause_collection():  # ten thousand manifests live until the command ends
        # Print what an apply would change; return whether that is anything.
        try:
            preview = run(_preview(_load(options), _parse_options(options), options))
        except ManifestErrors as error:
            raise DiffError(str(error)) from error
        except FleetctlError as error:
            raise DiffError(error.message) from error
        _warn_kept([conflict for change in preview.changes for conflict in change.kept_by_others])
        shown = [
            *(text for text in map(change_text, preview.changes) if text),
            *(_deletion_line(obj.kind, obj.name) for obj in preview.surplus.doomed),
        ]
        if options["output"] is not None:
            trees: list[Tree] = [
                *map(change_tree, preview.changes),
                *map(pruned_tree, preview.surplus.doomed),
            ]
            click.echo(tree_text({"changes": trees}, options["output"]), nl=False)
        else:
            for text in shown:
                click.echo(colour_diff(text), nl=False)
        differs = bool(shown)
    if differs:
        raise click.exceptions.Exit(1)


def _diff_sources(words: tuple[str, ...], options: dict[str, Any]) -> None:
    """Print the changes that the next sync of GitSources would make."""
    if options["files"]:
        raise click.UsageError("give gs/NAME, or manifests with -f, but not both")
    [chosen] = targets.parse_selections(
        words, {**options, "selector": ""}, verb="diff", is_all=None
    )
    try:
        previews = run(_request_previews(chosen, options))
    except FleetctlError as error:
        raise DiffError(error.message) from error
    if options["output"] is not None:
        trees: list[Tree] = [git_preview.preview_tree(preview) for preview in previews]
        click.echo(tree_text({"sources": trees}, options["output"]), nl=False)
    for preview in previews:
        if options["output"] is None:
            for change in preview.preview.changes:
                is_pruned = change.action == "pruned"
                text = _deletion_line(change.kind, change.name) if is_pruned else change.diff
                click.echo(colour_diff(text), nl=False)
        if preview.preview.omitted:
            click.echo(f"... and {preview.preview.omitted} more objects", err=True)
        if preview.preview.problem:
            raise DiffError(f"gitsource/{preview.source}: {preview.preview.problem}")
    if any(preview.preview.changes for preview in previews):
        raise click.exceptions.Exit(1)


async def _request_previews(
    chosen: Selection, options: dict[str, Any]
) -> list[git_preview.NamedPreview]:
    async with open_store(options) as transport:
        limit_s = parse_duration(options["timeout"])
        return await git_preview.request_all(transport, chosen, limit_s)


async def _preview(
    loaded: list[LoadedObject], apply_options: ApplyOptions, options: dict[str, Any]
) -> ApplyPreview:
    async with open_store(options) as transport:
        try:
            return await applying.preview(transport, loaded, SystemClock(), apply_options)
        except (ManifestErrors, UndecodableError) as error:
            raise FleetctlError(str(error)) from error


def _deletion_line(kind: str, name: str) -> str:
    """Return the line of a pruned object; its text, with all defaults, would hide the other changes. `-o` has it."""
    return f"{kind}/{name} would be deleted\n"


def colour_diff(text: str) -> str:
    """Return a unified diff in colours: removed lines red, added lines green."""
    return "".join(map(_colour_line, text.splitlines(keepends=True)))


def _colour_line(line: str) -> str:
    if line.startswith(("--- ", "+++ ", "@@ ")):
        return terminal.style(line, "dim")
    if line.startswith("-"):
        return terminal.style(line, "bad")
    return terminal.style(line, "good") if line.startswith("+") else line
