"""`fleetctl delete`: objects by name, or those in manifests."""

import sys
from typing import Any

import click

from fleetctl import apikeys
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.kinds import target_of
from fleetctl.wait import parse_duration
from machinery.clock import Clock, SystemClock
from manifests import delete as deleting
from manifests.errors import InUseError, ManifestErrors, NotFoundError, RefusedError
from manifests.load import load_objects
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiObject
from store import objects
from store.port import Transport

# The reverse of the order in which they are applied: who names others goes before them.
_ORDER = ("GitSource", "ModelRoute", "ModelDeployment", "ShardGroup", "NodePool", "Node")
_LOOK_S = 0.1


@click.command()
@click.argument("what", nargs=-1, metavar="[KIND NAME... | KIND/NAME]")
@click.option("-f", "--filename", "files", multiple=True, help="Delete what is in the manifests.")
@click.option("-R", "--recursive", is_flag=True, help="Folders with all below them.")
@click.option(
    "--cascade",
    type=click.Choice(["foreground", "orphan"]),
    default="foreground",
    show_default=True,
    help="What becomes of a ModelDeployment's replicas: they end first, or stay loaded, unrouted, "
    "until a ModelDeployment of the same name takes them over.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is gone.")
@click.option("--timeout", default="5m", show_default=True, help="How long to wait.")
@click.option("--ignore-not-found", is_flag=True, help="What is not there counts as deleted.")
@store_options
def delete(what: tuple[str, ...], **options: Any) -> None:
    """Delete objects. A ModelDeployment goes when its replicas have drained and ended; an API key at once."""
    names = apikeys.names_of(what)
    if names is not None and not options["files"]:
        run(apikeys.delete(names, options))
        return
    wanted = _wanted(what, options)
    run(_delete_all(wanted, options, parse_duration(options["timeout"])))


def _wanted(what: tuple[str, ...], options: dict[str, Any]) -> list[tuple[str, str]]:
    if bool(what) == bool(options["files"]):
        raise click.UsageError("say what to delete: KIND NAME..., or -f FILE")
    if what:
        target = target_of(what)
        if not target.names:
            raise click.UsageError(f"which {target.kind.plural}? Name them")
        return [(target.kind.name, name) for name in target.names]
    try:
        loaded = load_objects(
            options["files"], recursive=options["recursive"], stdin=sys.stdin.buffer
        )
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was deleted:\n{error}") from error
    found = [(item.obj.kind, item.obj.name) for item in loaded]
    return sorted(found, key=lambda key: (_ORDER.index(key[0]), key[1]))


async def _delete_all(
    wanted: list[tuple[str, str]], options: dict[str, Any], timeout_s: float
) -> None:
    clock = SystemClock()
    async with opened(options) as transport:
        # All are marked before any is waited for: what one frees, another that is to go must not take.
        going = [
            (kind, name, done)
            for kind, name in wanted
            if (done := await _one(transport, kind, name, clock, options)) is not None
        ]
        for kind, name, done in going:
            if isinstance(done, deleting.Deleting) and options["wait"]:
                await _wait_gone(transport, done.obj, clock, timeout_s)
            is_going = isinstance(done, deleting.Deleting) and not options["wait"]
            click.echo(f"{kind.lower()}/{name} {'is being deleted' if is_going else 'deleted'}")


async def _one(
    transport: Transport, kind: str, name: str, clock: Clock, options: dict[str, Any]
) -> deleting.Deletion | None:
    """Delete one object, or begin to; None if it is not there and that is no fault."""
    try:
        return await deleting.delete(transport, kind, name, clock, cascade=options["cascade"])
    except NotFoundError as error:
        if options["ignore_not_found"]:
            return None
        raise FleetctlError(str(error)) from error
    except (InUseError, RefusedError) as error:
        raise FleetctlError(str(error)) from error


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
        await clock.sleep(_LOOK_S)


async def _is_there(transport: Transport, kind: Kind, marked: ApiObject) -> bool:
    """Return whether the very object is there; a replica's name may have been taken again."""
    there = await objects.get(transport, kind.type, marked.name)
    return there is not None and there.metadata.uid == marked.metadata.uid
