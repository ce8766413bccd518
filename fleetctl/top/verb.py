"""`fleetctl top`: what nodes and models use and do, once or live."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import click
import orjson

from fleetctl import documents, selector
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.kinds import kind_of, target_of
from fleetctl.selector import Requirement
from fleetctl.top import asking, figures, live, table
from fleetctl.top.asking import Fleet
from fleetctl.top.seen import Look
from fleetctl.wait import parse_duration
from machinery.clock import Clock, SystemClock
from manifests.missing import not_found
from store.errors import UnavailableError
from store.port import Transport

Looks: TypeAlias = tuple[Look, Look]

_LEAST_S = 0.1
_AGAIN_S = 1.0
_HELP = """Show what nodes or models use and do just now: memory, requests, tokens a second.

\b
  fleetctl top nodes
  fleetctl top models -w --sort-by tokens
  fleetctl top model qwen -o json

It looks twice, --over apart, and asks agents, engines and gateways themselves. A `?` is what nobody told, `12+` what is
12 at least; the reasons stand below. Tokens and requests of a model that is split over several nodes count at its first rank's.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is shown, and how."""

    is_nodes: bool
    names: tuple[str, ...]
    selector: tuple[Requirement, ...]
    order: str
    over_s: float
    is_json: bool
    headers: bool

    @property
    def orders(self) -> Mapping[str, str]:
        return table.NODE_ORDERS if self.is_nodes else table.MODEL_ORDERS

    def rows(self, looks: Looks) -> str:
        """Return the rows of figures as they are printed."""
        if self.is_nodes:
            nodes = table.ordered(figures.nodes(*looks), self.orders, self.order)
            return self._text(nodes, table.nodes)
        models = table.ordered(figures.models(*looks), self.orders, self.order)
        return self._text(models, table.models)

    def _text(self, rows: Sequence[Any], tabulated: Callable[..., str]) -> str:
        if not self.is_json:
            return tabulated(rows, headers=self.headers)
        items = [table.tree(row) for row in rows]
        return orjson.dumps({"items": items}, option=orjson.OPT_INDENT_2).decode()


@click.command(help=_HELP)
@click.argument("what", nargs=-1, required=True, metavar="nodes|models [NAME...]")
@click.option("-l", "--selector", default="", help="Only those with these labels.")
@click.option(
    "--sort-by",
    default="name",
    show_default=True,
    help="name, memory, in-flight, queue, tokens; of nodes also models, of models also requests.",
)
@click.option(
    "--over",
    default="1s",
    show_default=True,
    help="How long speeds are measured; with -w, how often.",
)
@click.option("-w", "--watch", is_flag=True, help="Go on, and show it as it changes.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@click.option("--no-headers", is_flag=True, help="Leave out the line of titles.")
@store_options
def top(what: tuple[str, ...], watch: bool, **options: Any) -> None:
    """Show what nodes or models use and do just now: memory, requests, tokens a second."""
    wanted = _wanted(what, options)
    run(_live(wanted, options) if watch else _once(wanted, options))


def _wanted(what: tuple[str, ...], options: dict[str, Any]) -> Wanted:
    """Return what the words and flags ask for.

    Raises:
        click.UsageError: they ask for what there is not.

    """
    first, slash, rest = what[0].partition("/")
    # People say model for what is declared as a ModelDeployment.
    word = "modeldeployments" if first.lower() in ("model", "models") else first
    target = target_of((f"{word}{slash}{rest}", *what[1:]))
    if target.kind.name not in ("Node", "ModelDeployment"):
        raise click.UsageError(f"there are no figures of {target.kind.plural}; say nodes or models")
    over_s = parse_duration(options["over"])
    if over_s < _LEAST_S:
        raise click.UsageError(f"--over {options['over']}: at least {_LEAST_S:g} s")
    if target.names and options["selector"]:
        raise click.UsageError("name them, or select them with -l, not both")
    wanted = Wanted(
        is_nodes=target.kind.name == "Node",
        names=target.names,
        selector=selector.parse(options["selector"]),
        order=options["sort_by"],
        over_s=over_s,
        is_json=options["output"] == "json",
        headers=not options["no_headers"],
    )
    if wanted.order not in ("name", *wanted.orders):
        known = ", ".join(("name", *wanted.orders))
        raise click.UsageError(f"--sort-by {wanted.order}: there are {known}")
    return wanted


async def _once(wanted: Wanted, options: dict[str, Any]) -> None:
    async with (
        opened(options) as transport,
        aclosing(looks(transport, SystemClock(), wanted)) as found,
    ):
        async for pair in found:
            _show(wanted, pair)
            return


def _show(wanted: Wanted, pair: Looks) -> None:
    now = pair[1]
    if not (now.nodes if wanted.is_nodes else now.deployments):
        click.echo(f"no {'nodes' if wanted.is_nodes else 'models'} found", err=True)
        return
    click.echo(wanted.rows(pair))
    for reason in now.reasons:
        click.echo(f"warning: {reason}", err=True)


async def _live(wanted: Wanted, options: dict[str, Any]) -> None:
    """Show it until Ctrl-C; a store that is away for a while is waited for."""
    clock = SystemClock()
    with live.screen() as screen:
        async with opened(options) as transport:
            is_first = True
            while True:
                try:
                    async with aclosing(looks(transport, clock, wanted)) as found:
                        async for pair in found:
                            is_first = False
                            # Programs read objects and nothing else.
                            told = () if wanted.is_json else pair[1].reasons
                            reasons = (f"! {reason}" for reason in told)
                            screen.show("\n".join((wanted.rows(pair), *reasons)))
                except UnavailableError as error:
                    if is_first:
                        raise
                    screen.show(f"the store does not answer: {error}")
                    await clock.sleep(_AGAIN_S)


async def looks(transport: Transport, clock: Clock, wanted: Wanted) -> AsyncGenerator[Looks]:
    """Yield each two looks that follow each other, for ever; each with what is wanted of the fleet then.

    Raises:
        FleetctlError: an object that was named is not there.
        StoreError: the store does not answer.

    """
    before: Look | None = None
    while True:
        there = _narrowed(await asking.fleet(transport), wanted)
        async with asking.asking(transport, clock, there) as asker:
            while not asker.is_stale:
                now = await asker.look(there)
                if before is not None:
                    yield before, now
                before = now
                await clock.sleep(wanted.over_s)
                there = _narrowed(await asking.fleet(transport), wanted)


def _narrowed(there: Fleet, wanted: Wanted) -> Fleet:
    """Return the fleet with what is asked for: of models all nodes that have some of them.

    Raises:
        FleetctlError: an object that was named is not there.

    """
    kind = kind_of("node" if wanted.is_nodes else "md")
    trees = there.nodes if wanted.is_nodes else there.deployments
    known = {documents.name_of(tree): tree for tree in trees}
    missing = [name for name in wanted.names if name not in known]
    if missing:
        raise FleetctlError(not_found(kind, missing[0], known))
    chosen = [known[name] for name in wanted.names] or selector.select(trees, wanted.selector)
    if wanted.is_nodes:
        return replace(there, nodes=chosen, gateways={})
    names = {documents.name_of(tree) for tree in chosen}
    places = {
        node for one in there.replicas.values() if one.deployment in names for node in one.nodes
    }
    nodes = [node for node in there.nodes if documents.name_of(node) in places]
    return replace(there, nodes=nodes, deployments=chosen)
