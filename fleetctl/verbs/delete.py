"""`fleetctl delete`: objects by name, by their labels, or those in manifests."""

from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.fleets import api_keys
from fleetctl.objects import targets
from fleetctl.objects.kind_args import WITH_API_KEYS
from fleetctl.objects.targets import Selection
from fleetctl.output.results import dry_run_option
from fleetctl.verbs.wait import parse_duration
from machinery.clock import Clock, SystemClock
from manifests import apply_sets
from manifests import delete as deleting
from manifests.errors import InUseError, NotFoundError, WriteRefusedError
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiObject, ObjectKey
from store import objects
from store.port import Transport

_POLL_S = 0.1
_FORCE_HINT = (
    "an object goes when its engines have ended, for memory that is still in use must not be given away twice; "
    "--cascade=background does not wait for it"
)
_GRACE_PERIOD_HINT = (
    "an engine lets requests under way finish, and unloads its model then; leave it out"
)
_DRY_RUN_SUFFIXES = {"client": " (dry run)", "server": " (server dry run)"}


@click.command()
@click.argument("what", nargs=-1, metavar="[KIND NAME... | KIND/NAME... | KIND,KIND]")
@targets.files_option
@targets.recursive_option
@targets.selector_option
@targets.all_option
@click.option(
    "--cascade",
    type=click.Choice(["foreground", "background", "orphan"]),
    default="foreground",
    show_default=True,
    help="What becomes of a ModelDeployment's replicas: they end first, and the command waits for it or not, or "
    "they stay loaded, unrouted, until a ModelDeployment of the same name takes them over.",
)
@click.option(
    "--wait/--no-wait",
    default=None,
    help="Wait until it is gone; so it does, but for --cascade=background.",
)
@click.option("--timeout", default="5m", show_default=True, help="How long to wait.")
@click.option("--ignore-not-found", is_flag=True, help="What is not there counts as deleted.")
@click.option("-o", "--output", type=click.Choice(["name"]), help="Print names only.")
@unsupported_flag(_FORCE_HINT, "--force")
@unsupported_flag(_FORCE_HINT, "--now")
@unsupported_flag(_GRACE_PERIOD_HINT, "--grace-period", takes_value=True)
@dry_run_option
@store_options
def delete(what: tuple[str, ...], **options: Any) -> None:
    """Delete objects. A ModelDeployment goes when its replicas have drained and ended; an API key at once."""
    names = api_keys.parse_names(what)
    if names is not None and not options["files"]:
        _delete_api_keys(names, options)
        return
    if not what and not options["files"]:
        raise click.UsageError("say what to delete: KIND NAME..., KIND -l LABELS, or -f FILE")
    is_all = options["is_all"]
    chosen = targets.parse_selections(
        what, options, verb="deleted", is_all=is_all, is_read=True, among=WITH_API_KEYS
    )
    timeout_s = parse_duration(options["timeout"])
    if options["wait"] is None:
        options["wait"] = options["cascade"] != "background"
    if not run(_delete_all(chosen, options, timeout_s)):
        raise click.exceptions.Exit(1)


def _delete_api_keys(names: tuple[str, ...], options: dict[str, Any]) -> None:
    for flag, key, none in (
        ("-l", "selector", ""),
        ("--all", "is_all", False),
    ):
        if options[key] != none:
            raise click.UsageError(f"API keys are deleted by name, without {flag}")
    run(
        api_keys.delete(
            names,
            options,
            lambda name: _print_result(ObjectKey("ApiKey", name), "deleted", options),
        )
    )


async def _delete_all(
    chosen: Sequence[Selection], options: dict[str, Any], timeout_s: float
) -> bool:
    """Delete what was chosen; return whether all of it went."""
    clock = SystemClock()
    async with open_store(options) as transport:
        wanted = await _selected_keys(transport, chosen)
        if options["dry_run"] != "none":
            return await _preview(transport, wanted, options)
        # All are marked before any is waited for: what one frees, another that is to go must not take.
        going: list[tuple[ObjectKey, deleting.Deletion]] = []
        is_well = True
        for key in wanted:
            try:
                done = await deleting.delete(
                    transport, *key, clock, cascade=_cascade(options["cascade"])
                )
            except (NotFoundError, InUseError, WriteRefusedError) as error:
                is_well &= _is_ignored(error, options)
            else:
                going.append((key, done))
        for key, done in going:
            if isinstance(done, deleting.PendingDeletion) and options["wait"]:
                await _wait_gone(transport, done.obj, clock, timeout_s)
            is_going = isinstance(done, deleting.PendingDeletion) and not options["wait"]
            _print_result(key, "is being deleted" if is_going else "deleted", options)
        return is_well


def _cascade(word: str) -> deleting.Cascade:
    return "orphan" if word == "orphan" else "foreground"


def _is_ignored(error: Exception, options: dict[str, Any]) -> bool:
    """Return whether it is no fault; say what it is otherwise. The others are deleted all the same."""
    if isinstance(error, NotFoundError) and options["ignore_not_found"]:
        return True
    click.echo(f"error: {error}", err=True)
    return False


def _print_result(key: ObjectKey, done: str, options: dict[str, Any]) -> None:
    name = f"{key.kind.lower()}/{key.name}"
    more = _DRY_RUN_SUFFIXES.get(options["dry_run"], "")
    click.echo(name if options["output"] == "name" else f"{name} {done}{more}")


async def _selected_keys(transport: Transport, chosen: Sequence[Selection]) -> list[ObjectKey]:
    """Return the objects, who names others before them."""
    found: list[ObjectKey] = []
    for choice in chosen:
        kind = choice.kind.name
        if choice.names:  # whether they are there is asked when they are deleted
            found.extend(ObjectKey(kind, name) for name in choice.names)
        else:
            there = await targets.read_selected(transport, choice)
            found.extend(ObjectKey(kind, obj.name) for obj in there)
    places = {kind: place for place, kind in enumerate(apply_sets.PRUNE_ORDER)}
    return sorted(found, key=lambda key: places.get(key.kind, len(places)))


async def _preview(
    transport: Transport, wanted: Sequence[ObjectKey], options: dict[str, Any]
) -> bool:
    is_well = True
    for key in wanted:
        try:
            await deleting.check_exists(transport, key)
            if options["dry_run"] == "server":
                await deleting.check_unused(transport, key, going=wanted)
        except (NotFoundError, InUseError, WriteRefusedError) as error:
            is_well &= _is_ignored(error, options)
        else:
            _print_result(key, "deleted", options)
    return is_well


async def _wait_gone(
    transport: Transport, marked: ApiObject, clock: Clock, timeout_s: float
) -> None:
    kind, name = marked.kind, marked.name
    found = kinds.by_name(kind)
    assert found is not None
    deadline = clock.monotonic() + timeout_s
    while await _is_there(transport, found, marked):
        if clock.monotonic() >= deadline:
            raise FleetctlError(
                f"{kind.lower()}/{name} is marked for deletion, but not gone after {timeout_s:g} s. "
                "It goes when its engines have ended; is a reconciler running, are its nodes there? "
                f"`fleetctl describe {kind.lower()}/{name}` says more"
            )
        await clock.sleep(_POLL_S)


async def _is_there(transport: Transport, kind: Kind, marked: ApiObject) -> bool:
    """Return whether the very object is there; a replica's name may have been taken again."""
    there = await objects.get(transport, kind.type, marked.name)
    return there is not None and there.metadata.uid == marked.metadata.uid
