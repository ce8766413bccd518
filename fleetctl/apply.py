"""`fleetctl apply` and `fleetctl diff`: manifests against the store."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from fleetctl import selector, terminal
from fleetctl.connect import opened, run, store_options
from fleetctl.elsewhere import taught
from fleetctl.errors import DiffError, FleetctlError
from fleetctl.kinds import WRITABLE, kind_of
from fleetctl.results import Results, result_options
from machinery.clock import SystemClock
from manifests import apply as applying
from manifests import diff as differing
from manifests.apply import Applied, ApplyOptions, Prospect, PruneError
from manifests.errors import ApplyError, ManifestErrors
from manifests.load import Loaded, load_objects
from manifests.ownership import Clash
from manifests.plan import Change, Configured
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
_ELSEWHERE = (
    taught(
        "write -f DIR where DIR has an overlay.yaml, or: kustomize build DIR | fleetctl apply -f -",
        "-k",
        "--kustomize",
        takes_value=True,
    ),
    taught("apply always is a three-way merge by field owner; leave it out", "--server-side"),
)


def apply_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that say which manifests are applied, by whom, and what is pruned."""
    for option in reversed((files_option, recursive_option, *_OPTIONS, *_ELSEWHERE)):
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
    wanted = _wanted(options)
    results = Results.of(options)
    try:
        loaded = _load(options)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was written:\n{error}") from error
    if results.dry_run == "client":
        for item in loaded:
            results.declare(item.obj, "valid")
        return
    try:
        _show(run(_apply(loaded, wanted, options)), results)
    except PruneError as error:
        _show(error.applied, results)
        raise FleetctlError(str(error)) from error


def _wanted(options: dict[str, Any]) -> ApplyOptions:
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


def _load(options: dict[str, Any]) -> list[Loaded]:
    found = load_objects(options["files"], recursive=options["recursive"], stdin=sys.stdin.buffer)
    rules = selector.parse(options["selector"])
    if not rules:
        return found
    chosen = {id(obj) for obj in selector.select([item.obj for item in found], rules)}
    left = [item for item in found if id(item.obj) in chosen]
    if not left:
        raise FleetctlError(f"no manifest has the labels {options['selector']}")
    return left


async def _apply(loaded: list[Loaded], wanted: ApplyOptions, options: dict[str, Any]) -> Applied:
    async with opened(options) as transport:
        try:
            return await applying.apply(transport, loaded, SystemClock(), wanted)
        except ManifestErrors as error:
            raise FleetctlError(f"nothing was written:\n{error}") from error
        except PruneError:
            raise
        except (ApplyError, UndecodableError) as error:
            raise FleetctlError(str(error)) from error


def _show(applied: Applied, results: Results) -> None:
    _warn(applied.kept)
    for outcome in applied.outcomes:
        results.say(outcome.obj, outcome.result)
    for key in applied.pruned:
        results.gone(f"{key.kind.lower()}/{key.name}", "pruned")


def _warn(kept: Sequence[Clash]) -> None:
    for clash in kept:
        click.echo(f"warning: {clash.kept}. --force-conflicts puts it back", err=True)


@click.command()
@apply_options
@store_options
def diff(**options: Any) -> None:
    """Show what an apply would change. Exit code 0: nothing, 1: something, more: it failed."""
    try:
        prospect = run(_look(_load(options), _wanted(options), options))
    except ManifestErrors as error:
        raise DiffError(str(error)) from error
    except FleetctlError as error:
        raise DiffError(error.message) from error
    _warn([clash for change in prospect.changes for clash in change.kept])
    shown = [
        *(text for text in map(change_text, prospect.changes) if text),
        *(differing.text(obj, None) for obj in prospect.surplus.doomed),
    ]
    for text in shown:
        click.echo(coloured(text), nl=False)
    if shown:
        raise click.exceptions.Exit(1)


async def _look(loaded: list[Loaded], wanted: ApplyOptions, options: dict[str, Any]) -> Prospect:
    async with opened(options) as transport:
        try:
            return await applying.look(transport, loaded, SystemClock(), wanted)
        except (ManifestErrors, UndecodableError) as error:
            raise FleetctlError(str(error)) from error


def change_text(change: Change) -> str:
    """Return the difference that a change makes; empty if it makes none."""
    before = change.before if isinstance(change, Configured) else None
    if not isinstance(change, Configured) and change.obj.metadata.resource_version:
        return ""  # unchanged
    return differing.text(before, change.obj)


def coloured(text: str) -> str:
    """Return a difference as terminals show it: what goes red, what comes green."""
    return "".join(map(_coloured, text.splitlines(keepends=True)))


def _coloured(line: str) -> str:
    if line.startswith(("--- ", "+++ ", "@@ ")):
        return terminal.style(line, "dim")
    if line.startswith("-"):
        return terminal.style(line, "bad")
    return terminal.style(line, "good") if line.startswith("+") else line
