"""`fleetctl apply` and `fleetctl diff`: manifests against the store."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from fleetctl.cli import terminal
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import DiffError, FleetctlError
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.objects import selectors
from fleetctl.objects.kind_args import WRITABLE, kind_of
from fleetctl.output.results import ResultPrinter, result_options
from machinery.clock import SystemClock
from manifests import apply as applying
from manifests import diff as differing
from manifests.apply import ApplyOptions, ApplyPreview, ApplyResult, PruneError
from manifests.errors import ApplyError, ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.ownership import FieldConflict
from manifests.plan import Change, ConfiguredObject
from schemas.meta import NAME_PATTERN
from store.codec import UndecodableError

_IS_NAME = re.compile(NAME_PATTERN)

files_option = click.option(
    "-f",
    "--filename",
    "files",
    multiple=True,
    required=True,
    help="File, folder or - for standard input; may be repeated.",
)
recursive_option = click.option(
    "-R", "--recursive", is_flag=True, help="Folders with all below them."
)

_OPTIONS = (
    click.option(
        "-l", "--selector", default="", help="Only manifests with these labels: k=v,k!=v,k,!k."
    ),
    click.option("--force-conflicts", is_flag=True, help="The manifests win over other writers."),
    click.option(
        "--field-manager",
        default="fleetctl",
        show_default=True,
        help="As whose the manifests are recorded.",
    ),
    click.option(
        "--applyset",
        default="",
        metavar="NAME",
        help="Remember under this name what was applied, for --prune.",
    ),
    click.option(
        "--prune",
        is_flag=True,
        help="Delete what was applied under the name before, and is in the manifests no more.",
    ),
    click.option(
        "--prune-allowlist",
        multiple=True,
        metavar="KIND",
        help="Prune this kind only; may be repeated.",
    ),
)
_UNSUPPORTED_FLAGS = (
    unsupported_flag(
        "write -f DIR where DIR has an overlay.yaml, or: kustomize build DIR | fleetctl apply -f -",
        "-k",
        "--kustomize",
        takes_value=True,
    ),
    unsupported_flag(
        "apply always is a three-way merge by field owner; leave it out", "--server-side"
    ),
)


def apply_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that say which manifests are applied, by whom, and what is pruned."""
    for option in reversed((files_option, recursive_option, *_OPTIONS, *_UNSUPPORTED_FLAGS)):
        command = option(command)
    return command


@click.command()
@apply_options
@result_options
@store_options
def apply(**options: Any) -> None:
    """Declare what is in the manifests: create it, or change what is there to match.

    Everything is checked before anything is written; what is there already is left alone. What others changed
    since (fleetctl scale, a label) stays as they have it, unless the manifests say something new of it: then nothing
    is written, and --force-conflicts decides for the manifests.
    """
    wanted = _parse_options(options)
    results = ResultPrinter.of(options)
    try:
        loaded = _load(options)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was written:\n{error}") from error
    if results.dry_run == "client":
        for item in loaded:
            results.declare(item.obj, "valid")
        return
    try:
        _print_outcomes(run(_apply(loaded, wanted, options)), results)
    except PruneError as error:
        _print_outcomes(error.applied, results)
        raise FleetctlError(str(error)) from error


def _parse_options(options: dict[str, Any]) -> ApplyOptions:
    """Return what the flags ask for."""
    allowed: Sequence[str] = options["prune_allowlist"]
    if options["prune"] and not options["applyset"]:
        raise click.UsageError("--prune needs --applyset NAME: what it does not name stays")
    if options["prune"] and options["selector"]:
        raise click.UsageError(
            "--prune does not go with -l: what -l leaves out would be deleted. Leave one of them out"
        )
    if allowed and not options["prune"]:
        raise click.UsageError("--prune-allowlist says what --prune may delete; give both")
    if options["prune"] and options.get("dry_run") == "client":
        raise click.UsageError(
            "--prune with --dry-run=client: what would be deleted is known to the store alone; write --dry-run=server"
        )
    kinds = [kind_of(word, WRITABLE) for word in allowed]
    for kind in kinds:
        if not kind.written_by_users:
            raise click.UsageError(f"--prune-allowlist: no manifest declares {kind.plural}")
    return ApplyOptions(
        manager=_manager(options["field_manager"]),
        force=options["force_conflicts"],
        apply_set=_set_name(options["applyset"]),
        prune=options["prune"],
        prune_kinds=[kind.name for kind in kinds] if kinds else None,
        server_dry_run=options.get("dry_run") == "server",
    )


def _manager(name: str) -> str:
    if not name or len(name) > 128 or not name.isprintable():
        raise click.UsageError("--field-manager: expected a name of 1 to 128 printable characters")
    if name.startswith("gitsource/"):
        raise click.UsageError(f"--field-manager: {name} is the reconciler's, for a GitSource")
    return name


def _set_name(name: str) -> str:
    if name and not _IS_NAME.fullmatch(name):
        raise click.UsageError(
            f"--applyset: {name!r} is no name: lower-case letters, digits, '-' and '.'"
        )
    return name


def _load(options: dict[str, Any]) -> list[LoadedObject]:
    found = load_objects(options["files"], recursive=options["recursive"], stdin=sys.stdin.buffer)
    rules = selectors.parse_labels(options["selector"])
    if not rules:
        return found
    chosen = {id(obj) for obj in selectors.select([item.obj for item in found], rules)}
    left = [item for item in found if id(item.obj) in chosen]
    if not left:
        raise FleetctlError(f"no manifest has the labels {options['selector']}")
    return left


async def _apply(
    loaded: list[LoadedObject], wanted: ApplyOptions, options: dict[str, Any]
) -> ApplyResult:
    async with open_store(options) as transport:
        try:
            return await applying.apply(transport, loaded, SystemClock(), wanted)
        except ManifestErrors as error:
            raise FleetctlError(f"nothing was written:\n{error}") from error
        except PruneError:
            raise
        except (ApplyError, UndecodableError) as error:
            raise FleetctlError(str(error)) from error


def _print_outcomes(applied: ApplyResult, results: ResultPrinter) -> None:
    _warn_kept(applied.kept_by_others)
    for outcome in applied.outcomes:
        results.say(outcome.obj, outcome.result)
    for key in applied.pruned:
        results.gone(f"{key.kind.lower()}/{key.name}", "pruned")


def _warn_kept(kept: Sequence[FieldConflict]) -> None:
    for clash in kept:
        click.echo(f"warning: {clash.kept_message}. --force-conflicts puts it back", err=True)


@click.command()
@apply_options
@store_options
def diff(**options: Any) -> None:
    """Show what an apply would change. Exit code 0: nothing, 1: something, more: it failed."""
    try:
        prospect = run(_preview(_load(options), _parse_options(options), options))
    except ManifestErrors as error:
        raise DiffError(str(error)) from error
    except FleetctlError as error:
        raise DiffError(error.message) from error
    _warn_kept([clash for change in prospect.changes for clash in change.kept_by_others])
    shown = [
        *(text for text in map(change_text, prospect.changes) if text),
        *(differing.diff_text(obj, None) for obj in prospect.surplus.doomed),
    ]
    for text in shown:
        click.echo(colour_diff(text), nl=False)
    if shown:
        raise click.exceptions.Exit(1)


async def _preview(
    loaded: list[LoadedObject], wanted: ApplyOptions, options: dict[str, Any]
) -> ApplyPreview:
    async with open_store(options) as transport:
        try:
            return await applying.preview(transport, loaded, SystemClock(), wanted)
        except (ManifestErrors, UndecodableError) as error:
            raise FleetctlError(str(error)) from error


def change_text(change: Change) -> str:
    """Return the difference that a change makes; empty if it makes none."""
    before = change.before if isinstance(change, ConfiguredObject) else None
    if not isinstance(change, ConfiguredObject) and change.obj.metadata.resource_version:
        return ""  # unchanged
    return differing.diff_text(before, change.obj)


def colour_diff(text: str) -> str:
    """Return a difference as terminals show it: what goes red, what comes green."""
    return "".join(map(_colour_line, text.splitlines(keepends=True)))


def _colour_line(line: str) -> str:
    if line.startswith(("--- ", "+++ ", "@@ ")):
        return terminal.style(line, "dim")
    if line.startswith("-"):
        return terminal.style(line, "bad")
    return terminal.style(line, "good") if line.startswith("+") else line
