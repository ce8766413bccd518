"""The verb `fleetctl top`: shows resource usage and load of nodes or models, once or continuously."""

import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fleetctl.cli import terminal
from fleetctl.cli.arguments import output_option, parse_duration
from fleetctl.cli.connect import open_store, process_options, run
from fleetctl.cli.documents import tree_text
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.spellings import KIND_SYNONYMS
from fleetctl.fleets.dialer import open_dialer
from fleetctl.objects import selectors
from fleetctl.objects.kind_args import kind_of, parse_target
from fleetctl.objects.selectors import LabelRequirement
from fleetctl.output import usage_tables
from identity.dialer import Dialer
from insight import usage, usage_samples
from insight.usage_samples import FleetInventory, FleetSample, SamplePair
from machinery import environment
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock, SystemClock
from machinery.control_characters import make_printable
from manifests.suggestions import not_found_message
from store import object_trees
from store.errors import UnavailableError
from store.port import Transport


@contextmanager
def open_screen() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the text of the terminal; elsewhere it prints one text after the other."""
    if not terminal.is_tty(sys.stdout) or not environment.has_capable_terminal():
        numbers = count()
        yield lambda text: click.echo(f"\n{text}" if next(numbers) else text)
        return
    console = Console(
        file=terminal.unfiltered(sys.stdout), highlight=False, markup=False, emoji=False
    )

    def show(text: str) -> None:
        line = Text(make_printable(text), no_wrap=True, overflow="ellipsis")
        live.update(line, refresh=True)

    # The last text stays visible.
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield show


_MIN_INTERVAL_S = 0.1
_MEASURED = (kind_of("nodes"), kind_of("modeldeployments"))
_BACKOFF = Backoff(first_s=0.5, limit_s=4.0)
_HELP = """Show current usage of nodes or models: memory, requests, tokens per second.

\b
  fleetctl top nodes
  fleetctl top models -w --sort-by tokens
  fleetctl top model qwen -o json

The command samples agents, engines and gateways twice, --over apart. `?` marks a value that no process reported, `12+` a
value of at least 12; warnings below the table give the reasons. Tokens and requests of a model that spans several nodes
are counted at its first rank.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopQuery:
    """Arguments of the command."""

    is_nodes: bool
    names: tuple[str, ...]
    selector: tuple[LabelRequirement, ...]
    order: str
    over_s: float
    is_json: bool
    headers: bool
    dialer: Dialer | None = None
    """Decides how to dial agents and gateways."""

    @property
    def orders(self) -> Mapping[str, str]:
        """Return the values of --sort-by, with the field that each one sorts by."""
        return usage.NODE_ORDERS if self.is_nodes else usage.MODEL_ORDERS

    def rows(self, pair: SamplePair) -> str:
        """Return the output for a pair of samples."""
        if self.is_nodes:
            nodes = usage.sort_rows(usage.node_rows(*pair), self.orders, self.order)
            return self._text(nodes, usage_tables.node_table)
        models = usage.sort_rows(usage.model_rows(*pair), self.orders, self.order)
        return self._text(models, usage_tables.model_table)

    def reasons(self, now: FleetSample) -> tuple[str, ...]:
        """Return why values of these rows are unknown."""
        return usage.node_reasons(now) if self.is_nodes else usage.model_reasons(now)

    def _text(self, rows: Sequence[Any], table: Callable[..., str]) -> str:
        if not self.is_json:
            return table(rows, headers=self.headers)
        return tree_text({"items": [usage.row_tree(row) for row in rows]}, "json").rstrip("\n")


@click.command(help=_HELP, short_help="Show memory, requests and tokens of nodes or models.")
@click.argument("what", nargs=-1, required=True, metavar="nodes|models [NAME...]")
@click.option("-l", "--selector", default="", help="Show only objects with these labels.")
@click.option(
    "--sort-by",
    default="name",
    show_default=True,
    help="name, memory, in-flight, queue or tokens; also models (for nodes) or requests (for models).",
)
@click.option(
    "--over",
    default="1s",
    show_default=True,
    help="Interval between samples; with -w, the refresh interval.",
)
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@output_option("table", "json")
@click.option("--no-headers", is_flag=True, help="Omit the header line.")
@process_options
def top(what: tuple[str, ...], watch: bool, **options: Any) -> None:
    """Show current usage of nodes or models: memory, requests, tokens per second."""
    # Raises: click.UsageError: the arguments are invalid.
    first, slash, rest = what[0].partition("/")
    # `models` means the kind ModelDeployment; `pods` is refused as what it means here.
    word = KIND_SYNONYMS.get(first.lower(), first)
    target = parse_target((f"{word}{slash}{rest}", *what[1:]), _MEASURED)
    if target.kind not in _MEASURED:
        raise click.UsageError(
            f"there are no usage data for {target.kind.plural}; use nodes or models"
        )
    over_s = parse_duration(options["over"])
    if over_s < _MIN_INTERVAL_S:
        raise click.UsageError(f"--over {options['over']}: must be at least {_MIN_INTERVAL_S:g} s")
    if target.names and options["selector"]:
        raise click.UsageError("give names or a selector (-l), not both")
    query = TopQuery(
        is_nodes=target.kind.name == "Node",
        names=target.names,
        selector=selectors.parse_labels(options["selector"]),
        order=options["sort_by"],
        over_s=over_s,
        is_json=options["output"] == "json",
        headers=not options["no_headers"],
    )
    if query.order not in ("name", *query.orders):
        known = ", ".join(("name", *query.orders))
        raise click.UsageError(f"--sort-by {query.order}: choose one of {known}")
    run(_print_live(query, options) if watch else _print_once(query, options))


async def _print_once(query: TopQuery, options: dict[str, Any]) -> None:
    async with (
        open_store(options) as transport,
        aclosing(_dialed_pairs(transport, SystemClock(), query, options)) as pairs,
    ):
        async for pair in pairs:
            _print_pair(query, pair)
            return


def _print_pair(query: TopQuery, pair: SamplePair) -> None:
    now = pair[1]
    if not (now.nodes if query.is_nodes else now.deployments):
        click.echo(f"no {'nodes' if query.is_nodes else 'models'} found", err=True)
        return
    click.echo(query.rows(pair))
    for reason in query.reasons(now):
        click.echo(f"warning: {reason}", err=True)


async def _print_live(query: TopQuery, options: dict[str, Any]) -> None:
    """Refresh the output until Ctrl-C, and wait while the store is unavailable."""
    clock = SystemClock()
    with open_screen() as show:
        async with open_store(options) as transport:
            is_first, retries = True, Retries(_BACKOFF, clock)
            while True:
                try:
                    async with aclosing(_dialed_pairs(transport, clock, query, options)) as pairs:
                        async for pair in pairs:
                            is_first = False
                            retries.reset()
                            # With -o json, print objects only.
                            shown = () if query.is_json else query.reasons(pair[1])
                            reasons = (f"! {reason}" for reason in shown)
                            show("\n".join((query.rows(pair), *reasons)))
                except UnavailableError as error:
                    if is_first:
                        raise
                    show(f"the store does not answer: {error}")
                    await retries.wait()


async def _dialed_pairs(
    transport: Transport, clock: Clock, query: TopQuery, options: dict[str, Any]
) -> AsyncGenerator[SamplePair]:
    """Yield `sample_pairs` with the fleet's trust as of now. Raises as it does."""
    query = replace(query, dialer=await open_dialer(options, transport))
    async with aclosing(sample_pairs(transport, clock, query)) as pairs:
        async for pair in pairs:
            yield pair


async def sample_pairs(
    transport: Transport, clock: Clock, query: TopQuery
) -> AsyncGenerator[SamplePair]:
    """Yield pairs of consecutive samples without end; each sample covers the objects that match at its time.

    Raises:
        FleetctlError: a named object does not exist.
        StoreError: the store is unavailable.

    """
    before: FleetSample | None = None
    while True:
        whole = await usage_samples.read_inventory(transport, query.dialer)
        inventory = _narrow_inventory(whole, query)
        async with usage_samples.open_collector(transport, clock, inventory) as sampler:
            while not sampler.is_stale:
                now = await sampler.sample(inventory)
                if before is not None:
                    yield before, now
                before = now
                await clock.sleep(query.over_s)
                whole = await usage_samples.read_inventory(transport, query.dialer)
        inventory = _narrow_inventory(whole, query)


def _narrow_inventory(inventory: FleetInventory, query: TopQuery) -> FleetInventory:
    """Return the part of the inventory that the query covers; for models, with all nodes that run them.

    Raises:
        FleetctlError: a named object does not exist.

    """
    kind = kind_of("node" if query.is_nodes else "md")
    trees = inventory.nodes if query.is_nodes else inventory.deployments
    known = {object_trees.name_of(tree): tree for tree in trees}
    missing = [name for name in query.names if name not in known]
    if missing:
        raise FleetctlError(not_found_message(kind, missing[0], known))
    chosen = [known[name] for name in query.names] or selectors.select(trees, query.selector)
    if query.is_nodes:
        return replace(inventory, nodes=chosen, gateways={})
    names = {object_trees.name_of(tree) for tree in chosen}
    places = {
        node
        for replica in inventory.replicas.values()
        if replica.deployment in names
        for node in replica.nodes
    }
    nodes = [node for node in inventory.nodes if object_trees.name_of(node) in places]
    return replace(inventory, nodes=nodes, deployments=chosen)
