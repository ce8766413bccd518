"""`fleetctl get`: prints objects as tables, YAML, JSON, names or through a template; with -w as they change."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from fleetctl.cli.connect import open_store, process_options, read_once, run
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import query
from fleetctl.objects.kind_args import API_KEYS
from fleetctl.objects.query import ObjectQuery
from fleetctl.output import formats
from fleetctl.output.render import ObjectRenderer
from machinery.clock import Clock, SystemClock
from machinery.gc_pause import pause_collection
from store import keys
from store.errors import CompactedError, UnavailableError

if TYPE_CHECKING:  # its import takes 8 ms, and only -w needs it
    from store.port import Transport

# Spec and status of one change arrive separately; one line for both is enough.
_SETTLE_S = 0.05
# Prefixes of the other keys that objects of a kind are made of.
_EXTRA_PREFIXES = {
    "Endpoint": (keys.ENDPOINT_PREFIX,),
    "Event": (keys.EVENT_PREFIX,),
    "FabricTest": (keys.FABRIC_TEST_PREFIX,),
    "Node": (keys.NODE_LEASE_PREFIX, keys.NODE_LIFE_PREFIX, keys.spec_prefix("NodePool")),
}

# The last is shown first.
_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option("--ignore-not-found", is_flag=True, help="Ignore objects that do not exist."),
    click.option(
        "--show-managed-fields",
        is_flag=True,
        help="With -o yaml or json: include the owners of fields (managedFields).",
    ),
    click.option("--no-headers", is_flag=True, help="Do not print column titles."),
    click.option(
        *("-L", "--label-columns"),
        multiple=True,
        metavar="KEY,...",
        help="Add a column for each of these labels.",
    ),
    click.option("--show-labels", is_flag=True, help="Add a column with all labels."),
    click.option("-w", "--watch", is_flag=True, help="Print the objects, then their changes."),
    click.option(
        "--sort-by",
        default="",
        metavar="PATH",
        help="Sort by a field (JSONPath): .metadata.creationTimestamp.",
    ),
    click.option(
        *("-l", "--selector"),
        default="",
        help="Select objects by label: k=v,k!=v,k in (a,b),k,!k.",
    ),
    click.option(*("-R", "--recursive"), is_flag=True, help="With -f: include subfolders."),
    click.option(
        *("-f", "--filename", "files"),
        multiple=True,
        help="Select the objects named in these manifests.",
    ),
    click.option("-o", "--output", default="table", metavar="FORMAT", help=f"Print {formats.HELP}"),
)


def _get_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in _OPTIONS:
        command = option(command)
    return command


_JOIN_REQUESTS = ("joinrequests", "joinrequest", "jr")
_HELP = """Show objects.

\b
  fleetctl get nodes
  fleetctl get md,rep -o wide
  fleetctl get md/qwen node/mac-1 -o yaml
  fleetctl get -f manifests/ -o wide
  fleetctl get replicas -w
  fleetctl get nodes -o jsonpath='{range .items[*]}{.metadata.name}{"\\n"}{end}'
  fleetctl get md -o custom-columns=NAME:.metadata.name,MODEL:.spec.model.path

KIND can be singular, plural or short: md, np, sg, mr, gs, no, rep, ep, rev, ev, ft; API keys: apikeys. `all` means
all kinds except revisions, events, fabric tests and API keys. Machines that wait for `fleetctl approve`: joinrequests.
"""


@click.command(help=_HELP)
@click.argument("what", nargs=-1, metavar="[KIND[,KIND...] [NAME...] | KIND/NAME...]")
@_get_options
@process_options
def get(what: tuple[str, ...], **options: Any) -> None:
    """Show objects."""
    if what and what[0].lower() in _JOIN_REQUESTS:
        from fleetctl.verbs import join_requests  # noqa: PLC0415 - loads certificates

        join_requests.show(what[1:], options)
        return
    object_query = query.parse(what, options)
    renderer = ObjectRenderer(object_query, options)
    if options["watch"]:
        if object_query.has_several_kinds:
            raise click.UsageError("-w watches one kind at a time; name one kind, or remove -w")
        if any(target.kind is API_KEYS for target in object_query.targets):
            raise click.UsageError("API keys cannot be watched; remove -w")
        run(_watch(object_query, renderer, SystemClock(), options))
        return
    with pause_collection():  # tens of thousands of objects live until the command ends
        _print_once(object_query, renderer, options)


def _print_once(
    object_query: ObjectQuery, renderer: ObjectRenderer, options: dict[str, Any]
) -> None:
    """Print the objects as they are now.

    Raises:
        FleetctlError: an object does not exist, or the store does not answer.

    """
    clock, rows_of = SystemClock(), renderer.rows_of
    if rows_of is not None and object_query.is_by_page:
        rows = read_once(
            options, partial(query.fetch_rows, clock=clock, query=object_query, rows_of=rows_of)
        )
        if rows:
            click.echo(renderer.table(rows), nl=False)
        else:
            click.echo(renderer.empty_note(), err=True)
        return
    result = read_once(options, partial(query.fetch, clock=clock, query=object_query))
    if object_query.has_all_nodes:
        from fleetctl.fleets import known_nodes  # noqa: PLC0415 - other kinds need no file

        known_nodes.remember_trees(options, (t for t in result.trees if t["kind"] == "Node"))
    if result.trees or not (result.missing or renderer.empty_note()):
        click.echo(renderer.text(result), nl=False)
    elif not result.missing:
        click.echo(renderer.empty_note(), err=True)
    if any(target.kind is API_KEYS for target in object_query.targets) and result.trees:
        from fleetctl.fleets import api_keys  # noqa: PLC0415 - other kinds need no keys

        if note := read_once(options, api_keys.unrequired_note):
            click.echo(f"note: {note}", err=True)
    if result.missing and not options["ignore_not_found"]:
        raise FleetctlError("\nerror: ".join(result.missing))


async def _watch(
    object_query: ObjectQuery, renderer: ObjectRenderer, clock: Clock, options: dict[str, Any]
) -> None:
    """Print the objects and then their changes until Ctrl-C; outages of the store are waited through.

    Raises:
        FleetctlError: a named object does not exist; StoreError: the store does not answer at the start.

    """
    async with open_store(options) as transport:
        revision = (await transport.status()).revision
        result = await query.fetch(transport, clock, object_query)
        if result.missing:
            raise FleetctlError(result.missing[0])
        click.echo(renderer.changes(result), nl=False)
        async for _ in _changes(transport, clock, _prefixes(object_query), revision):
            try:
                result = await query.fetch(transport, clock, object_query)
            except UnavailableError:
                continue  # the watch breaks, too, and comes back
            click.echo(renderer.changes(result), nl=False)


def _prefixes(object_query: ObjectQuery) -> tuple[str, ...]:
    """Return the prefixes of the keys that the objects are made of."""
    kind = object_query.targets[0].kind.name
    return keys.spec_prefix(kind), keys.status_prefix(kind), *_EXTRA_PREFIXES.get(kind, ())


async def _changes(
    transport: "Transport", clock: Clock, prefixes: tuple[str, ...], revision: int
) -> AsyncIterator[None]:
    """Yield whenever a key below the prefixes may have changed after the revision."""
    from machinery.backoff import Backoff, Retries  # noqa: PLC0415 - only `-w` waits

    retries = Retries(Backoff(first_s=0.2, limit_s=4.0), clock)
    while True:
        try:
            async with aclosing(transport.watch(f"{keys.ROOT}/", after_revision=revision)) as watch:
                async for batch in watch:
                    retries.reset()
                    revision = batch.revision
                    if any(change.key.startswith(prefixes) for change in batch.changes):
                        await clock.sleep(_SETTLE_S)
                        yield
        except CompactedError:
            revision = (await transport.status()).revision
            yield
        except UnavailableError:
            await retries.wait()
