"""Shows a text that changes: drawn over itself at a terminal, one after the other elsewhere.

`fleetctl top`: what nodes and models use and do, once or live.
"""

import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import click
import orjson
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fleetctl.cli import terminal
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import selectors
from fleetctl.objects.kind_args import kind_of, parse_target
from fleetctl.objects.selectors import LabelRequirement
from fleetctl.top import collector, usage
from fleetctl.top.collector import FleetInventory, FleetSample
from fleetctl.verbs.wait import parse_duration
from machinery import environment
from machinery.clock import Clock, SystemClock
from manifests.suggestions import not_found_message
from store import object_trees
from store.errors import UnavailableError
from store.port import Transport


class Screen(Protocol):
    """Where the text is shown."""

    def show(self, text: str) -> None:
        """Show this text instead of the last one."""
        ...


class _LiveScreen:
    """A terminal that can draw over itself."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, text: str) -> None:
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


class _PlainScreen:
    """Anything else: tables with a blank line between them."""

    _is_first = True

    def show(self, text: str) -> None:
        click.echo(text if self._is_first else f"\n{text}")
        self._is_first = False


@contextmanager
def open_screen() -> Iterator[Screen]:
    """Yield the screen; what was shown last stays on it."""
    if not terminal.is_tty(sys.stdout) or not environment.has_capable_terminal():
        yield _PlainScreen()
        return
    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield _LiveScreen(live)


SamplePair: TypeAlias = tuple[FleetSample, FleetSample]

_MIN_INTERVAL_S = 0.1
_RETRY_S = 1.0
_HELP = """Show what nodes or models use and do just now: memory, requests, tokens a second.

\b
  fleetctl top nodes
  fleetctl top models -w --sort-by tokens
  fleetctl top model qwen -o json

It looks twice, --over apart, and asks agents, engines and gateways themselves. A `?` is what nobody told, `12+` what is
12 at least; the reasons stand below. Tokens and requests of a model that is split over several nodes count at its first rank's.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopQuery:
    """What is shown, and how."""

    is_nodes: bool
    names: tuple[str, ...]
    selector: tuple[LabelRequirement, ...]
    order: str
    over_s: float
    is_json: bool
    headers: bool

    @property
    def orders(self) -> Mapping[str, str]:
        return usage.NODE_ORDERS if self.is_nodes else usage.MODEL_ORDERS

    def rows(self, looks: SamplePair) -> str:
        """Return the rows of figures as they are printed."""
        if self.is_nodes:
            nodes = usage.sort_rows(usage.node_rows(*looks), self.orders, self.order)
            return self._text(nodes, usage.node_table)
        models = usage.sort_rows(usage.model_rows(*looks), self.orders, self.order)
        return self._text(models, usage.model_table)

    def _text(self, rows: Sequence[Any], tabulated: Callable[..., str]) -> str:
        if not self.is_json:
            return tabulated(rows, headers=self.headers)
        items = [usage.row_tree(row) for row in rows]
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
    wanted = _top_query(what, options)
    run(_print_live(wanted, options) if watch else _print_once(wanted, options))


def _top_query(what: tuple[str, ...], options: dict[str, Any]) -> TopQuery:
    """Return what the words and flags ask for.

    Raises:
        click.UsageError: they ask for what there is not.

    """
    first, slash, rest = what[0].partition("/")
    # People say model for what is declared as a ModelDeployment.
    word = "modeldeployments" if first.lower() in ("model", "models") else first
    target = parse_target((f"{word}{slash}{rest}", *what[1:]))
    if target.kind.name not in ("Node", "ModelDeployment"):
        raise click.UsageError(f"there are no figures of {target.kind.plural}; say nodes or models")
    over_s = parse_duration(options["over"])
    if over_s < _MIN_INTERVAL_S:
        raise click.UsageError(f"--over {options['over']}: at least {_MIN_INTERVAL_S:g} s")
    if target.names and options["selector"]:
        raise click.UsageError("name them, or select them with -l, not both")
    wanted = TopQuery(
        is_nodes=target.kind.name == "Node",
        names=target.names,
        selector=selectors.parse_labels(options["selector"]),
        order=options["sort_by"],
        over_s=over_s,
        is_json=options["output"] == "json",
        headers=not options["no_headers"],
    )
    if wanted.order not in ("name", *wanted.orders):
        known = ", ".join(("name", *wanted.orders))
        raise click.UsageError(f"--sort-by {wanted.order}: there are {known}")
    return wanted


async def _print_once(wanted: TopQuery, options: dict[str, Any]) -> None:
    async with (
        open_store(options) as transport,
        aclosing(sample_pairs(transport, SystemClock(), wanted)) as found,
    ):
        async for pair in found:
            _print_pair(wanted, pair)
            return


def _print_pair(wanted: TopQuery, pair: SamplePair) -> None:
    now = pair[1]
    if not (now.nodes if wanted.is_nodes else now.deployments):
        click.echo(f"no {'nodes' if wanted.is_nodes else 'models'} found", err=True)
        return
    click.echo(wanted.rows(pair))
    for reason in now.reasons:
        click.echo(f"warning: {reason}", err=True)


async def _print_live(wanted: TopQuery, options: dict[str, Any]) -> None:
    """Show it until Ctrl-C; a store that is away for a while is waited for."""
    clock = SystemClock()
    with open_screen() as screen:
        async with open_store(options) as transport:
            is_first = True
            while True:
                try:
                    async with aclosing(sample_pairs(transport, clock, wanted)) as found:
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
                    await clock.sleep(_RETRY_S)


async def sample_pairs(
    transport: Transport, clock: Clock, wanted: TopQuery
) -> AsyncGenerator[SamplePair]:
    """Yield each two looks that follow each other, for ever; each with what is wanted of the fleet then.

    Raises:
        FleetctlError: an object that was named is not there.
        StoreError: the store does not answer.

    """
    before: FleetSample | None = None
    while True:
        there = _narrow_inventory(await collector.read_inventory(transport), wanted)
        async with collector.open_collector(transport, clock, there) as asker:
            while not asker.is_stale:
                now = await asker.look(there)
                if before is not None:
                    yield before, now
                before = now
                await clock.sleep(wanted.over_s)
                there = _narrow_inventory(await collector.read_inventory(transport), wanted)


def _narrow_inventory(there: FleetInventory, wanted: TopQuery) -> FleetInventory:
    """Return the fleet with what is asked for: of models all nodes that have some of them.

    Raises:
        FleetctlError: an object that was named is not there.

    """
    kind = kind_of("node" if wanted.is_nodes else "md")
    trees = there.nodes if wanted.is_nodes else there.deployments
    known = {object_trees.name_of(tree): tree for tree in trees}
    missing = [name for name in wanted.names if name not in known]
    if missing:
        raise FleetctlError(not_found_message(kind, missing[0], known))
    chosen = [known[name] for name in wanted.names] or selectors.select(trees, wanted.selector)
    if wanted.is_nodes:
        return replace(there, nodes=chosen, gateways={})
    names = {object_trees.name_of(tree) for tree in chosen}
    places = {
        node for one in there.replicas.values() if one.deployment in names for node in one.nodes
    }
    nodes = [node for node in there.nodes if object_trees.name_of(node) in places]
    return replace(there, nodes=nodes, deployments=chosen)
