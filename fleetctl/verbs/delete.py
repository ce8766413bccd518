"""`fleetctl delete`: deletes objects by name, by label, or those in manifests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import dry_run_option, parse_duration, timeout_option
from fleetctl.cli.connect import etcd_address, open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import api_keys
from fleetctl.objects import git_warnings, targets
from fleetctl.objects.kind_args import WITH_API_KEYS
from fleetctl.objects.results import ResultPrinter
from fleetctl.objects.targets import Selection
from fleetctl.objects.waits import poll
from machinery.clock import Clock, SystemClock
from manifests import apply_sets, ownership
from manifests import delete as deleting
from manifests.errors import InUseError, NotFoundError, WriteRefusedError
from schemas import kinds
from schemas.meta import ApiObject, ObjectKey
from schemas.node import Node
from store import objects
from store.errors import UndecodableError
from store.port import Transport


@click.command()
@click.argument("what", nargs=-1, metavar="[KIND NAME... | KIND/NAME... | KIND,KIND]")
@arguments.files_option
@arguments.recursive_option
@arguments.selector_option
@arguments.all_option
@click.option(
    "--cascade",
    type=click.Choice(["foreground", "background", "orphan"]),
    default="foreground",
    show_default=True,
    help="Replicas of a ModelDeployment. foreground: end them first, and wait; background: end them first, without "
    "waiting; orphan: keep them loaded, without traffic, until a ModelDeployment of the same name adopts them.",
)
@click.option(
    "--wait/--no-wait",
    default=None,
    help="Wait until the objects are gone (default, except with --cascade=background).",
)
@timeout_option("5m", "How long to wait.")
@click.option("--ignore-not-found", is_flag=True, help="Ignore objects that do not exist.")
@click.option("-o", "--output", type=click.Choice(["name"]), help="Print names only.")
@click.option(
    "--authority-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="FLEET_AUTHORITY_DIR",
    help="Folder with root.env, to delete the etcd users of deleted nodes.",
)
@dry_run_option
@store_options
def delete(what: tuple[str, ...], **options: Any) -> None:
    """Delete objects.

    A ModelDeployment is removed when its replicas have drained and ended, an API key at once. The certificates of a
    deleted node are revoked, and its name is free for another Mac.
    """
    names = api_keys.parse_names(what)
    if names is not None and not options["files"]:
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
        return
    if not what and not options["files"]:
        raise click.UsageError("which objects? Give KIND NAME..., KIND -l LABELS, or -f FILE")
    is_all = options["is_all"]
    chosen = targets.parse_selections(
        what, options, verb="deleted", is_all=is_all, is_read=True, among=WITH_API_KEYS
    )
    timeout_s = parse_duration(options["timeout"])
    if options["wait"] is None:
        options["wait"] = options["cascade"] != "background"
    if not run(_delete_all(chosen, options, timeout_s)):
        raise click.exceptions.Exit(1)


# As in Kubernetes: the object is gone, the machine is not.
_NODE_RETURNS = (
    "note: if the agent of {name} starts again, it registers the node again; `fleetctl cordon {name}` then keeps new "
    "replicas away"
)


_REVOKED = (
    "note: certificate {serial} of {name} was revoked; a Mac of this name joins with a new token"
)
_USER_STAYS = (
    "note: the agent of {name} can still use the store with its password, unless a reconciler whose --authority-dir has "
    "root.env deletes its user. Without one, run `fleetctl delete node {name} --ignore-not-found --authority-dir DIR`, "
    "where DIR has root.env"
)


async def delete_node(name: str, timeout_s: float, options: dict[str, Any]) -> bool:
    """Delete a node with its certificates and its user of etcd; return whether it could be deleted."""
    chosen = targets.parse_selections(
        ("node", name),
        {"files": (), "selector": "", **options},
        verb="deleted",
        is_all=None,
        is_read=True,
    )
    flags = {"cascade": "foreground", "wait": True, "dry_run": "none", "output": None}
    return await _delete_all(chosen, {**options, **flags, "ignore_not_found": True}, timeout_s)


async def _delete_all(
    chosen: Sequence[Selection], options: dict[str, Any], timeout_s: float
) -> bool:
    """Delete the selected objects; return whether all of them could be deleted."""
    clock = SystemClock()
    async with open_store(options) as transport:
        selected = await _selected_keys(transport, chosen)
        api_objects = await _kept_in_git(transport, selected)
        if options["dry_run"] != "none":
            return await _preview(transport, selected, api_objects, options)
        # Mark all before waiting for any: an object that is to be deleted must not use the memory that another frees.
        marked: list[tuple[ObjectKey, deleting.Deletion]] = []
        is_complete = True
        for key in selected:
            try:
                done = await deleting.delete(
                    transport, *key, clock, cascade=_cascade(options["cascade"])
                )
            except (NotFoundError, InUseError, WriteRefusedError) as error:
                is_complete &= _is_ignored(error, options)
            else:
                marked.append((key, done))
        await git_warnings.warn_of_deletions(
            transport, (api_objects[key] for key, _ in marked if key in api_objects), going=selected
        )
        for key, done in marked:
            if isinstance(done, deleting.PendingDeletion) and options["wait"]:
                await _wait_gone(transport, done.obj, clock, timeout_s)
            is_going = isinstance(done, deleting.PendingDeletion) and not options["wait"]
            _print_result(key, "is being deleted" if is_going else "deleted", options)
        nodes = [key.name for key in selected if key.kind == "Node"]
        for note in await _forget_nodes(transport, nodes, options) if nodes else ():
            if options["output"] != "name":
                click.echo(note, err=True)
        return is_complete


async def _forget_nodes(
    transport: Transport, names: Sequence[str], options: dict[str, Any]
) -> list[str]:
    """Revoke the certificates of nodes that are gone, and delete their users of etcd; return notes for the user."""
    # cryptography takes 60 ms to import, and only nodes need it.
    from fleetctl.fleets import node_removal  # noqa: PLC0415 - see above

    address = etcd_address(options)
    root = node_removal.root_address(address, options["authority_dir"])
    notes = []
    for name in names:
        if await objects.get(transport, Node, name) is not None:
            continue  # it could not be deleted, and the reason was printed
        serial = await node_removal.revoke_node(transport, SystemClock(), name)
        has_user = bool(address.username)
        if root is not None and has_user:
            has_user = False
            if await node_removal.delete_user(root, name):
                notes.append(f"note: etcd's user of {name} was deleted")
        elif has_user:
            notes.append(_USER_STAYS.format(name=name))
        if serial:
            notes.append(_REVOKED.format(serial=serial, name=name))
        elif has_user or not address.username:
            notes.append(_NODE_RETURNS.format(name=name))
    return notes


def _cascade(word: str) -> deleting.Cascade:
    return "orphan" if word == "orphan" else "foreground"


def _is_ignored(error: Exception, options: dict[str, Any]) -> bool:
    """Return whether the error is ignored; print it otherwise. The other objects are still deleted."""
    if isinstance(error, NotFoundError) and options["ignore_not_found"]:
        return True
    click.echo(f"error: {error}", err=True)
    return False


def _print_result(key: ObjectKey, done: str, options: dict[str, Any]) -> None:
    ResultPrinter.of(options).print_deleted(f"{key.kind.lower()}/{key.name}", done)


async def _selected_keys(transport: Transport, chosen: Sequence[Selection]) -> list[ObjectKey]:
    """Return the objects, with those that refer to others first."""
    object_keys: list[ObjectKey] = []
    for choice in chosen:
        kind = choice.kind.name
        if choice.names:  # the delete itself checks whether they exist
            object_keys.extend(ObjectKey(kind, name) for name in choice.names)
        else:
            matching = await targets.read_selected(transport, choice)
            object_keys.extend(ObjectKey(kind, obj.name) for obj in matching)
    places = {kind: place for place, kind in enumerate(apply_sets.PRUNE_ORDER)}
    return sorted(object_keys, key=lambda key: places.get(key.kind, len(places)))


async def _kept_in_git(
    transport: Transport, selected: Sequence[ObjectKey]
) -> dict[ObjectKey, ApiObject]:
    """Return those of the objects that GitSources keep. A document that cannot be decoded can still be deleted."""
    api_objects: dict[ObjectKey, ApiObject] = {}
    for key in selected:
        kind = kinds.by_name(key.kind)
        try:
            obj = None if kind is None else await objects.get(transport, kind.type, key.name)
        except UndecodableError:
            continue
        if obj is not None and ownership.git_entries(obj.metadata.managed_fields):
            api_objects[key] = obj
    return api_objects


async def _preview(
    transport: Transport,
    selected: Sequence[ObjectKey],
    kept: Mapping[ObjectKey, ApiObject],
    options: dict[str, Any],
) -> bool:
    is_complete, doomed = True, []
    for key in selected:
        try:
            await deleting.check_exists(transport, key)
            if options["dry_run"] == "server":
                await deleting.check_unused(transport, key, going=selected)
        except (NotFoundError, InUseError, WriteRefusedError) as error:
            is_complete &= _is_ignored(error, options)
        else:
            doomed.append(key)
            _print_result(key, "deleted", options)
    await git_warnings.warn_of_deletions(
        transport, (kept[key] for key in doomed if key in kept), going=selected
    )
    return is_complete


async def _wait_gone(
    transport: Transport, marked: ApiObject, clock: Clock, timeout_s: float
) -> None:
    ref = targets.object_ref(marked)

    async def look() -> bool | None:
        current = await objects.get(transport, type(marked), marked.name)
        # A new replica may have the same name.
        is_there = current is not None and current.metadata.uid == marked.metadata.uid
        return None if is_there else True

    if await poll(look, clock, timeout_s) is None:
        raise FleetctlError(
            f"{ref} is marked for deletion but not gone after {timeout_s:g} s. It is removed when "
            "its engines have ended. Check that a reconciler and the node agents run; "
            f"`fleetctl describe {ref}` shows details"
        )
