"""`fleetctl events`: prints the events of the last hour; with -w as they arrive."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click

from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.documents import list_tree, tree_text
from fleetctl.objects.kind_args import parse_one
from fleetctl.objects.table_context import TableContext
from fleetctl.objects.waits import follow
from fleetctl.output import printers
from fleetctl.output.printers import TableOptions
from machinery.clock import SystemClock
from store import keys, object_trees
from store.object_trees import Tree
from store.port import KeyValue, Transport

_EVENT_TYPES = ("Normal", "Warning")
_HELP = """Show events of objects, the latest last. Events are kept for one hour.

\b
  fleetctl events -w
  fleetctl events --for md/qwen --types Warning
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """The requested events; an empty field means all."""

    kind: str = ""
    name: str = ""
    types: tuple[str, ...] = ()

    def has(self, event: Tree) -> bool:
        """Return whether the event is requested."""
        spec = event["spec"]
        about = spec.get("about", {})
        is_about = (about.get("kind"), about.get("name")) == (self.kind, self.name)
        return (is_about or not self.kind) and (not self.types or spec.get("type") in self.types)

    @property
    def text(self) -> str:
        """Return the note for an empty result."""
        types = f"{' or '.join(self.types)} " if self.types else ""
        return f"no {types}events found" + (
            f" for {self.kind.lower()}/{self.name}" if self.kind else ""
        )


@dataclass(slots=True, kw_only=True)
class EventPrinter:
    """Prints events; keeps the column widths while more arrive."""

    output: str
    headers: bool
    widths: tuple[int, ...] = ()
    texts: int = 0

    def text(self, events: Sequence[Tree], context: TableContext, *, is_stream: bool) -> str:
        """Return the next events as text."""
        match self.output:
            case "name":
                return "".join(f"event/{object_trees.name_of(event)}\n" for event in events)
            case "json" | "yaml":
                return self._documents(
                    [object_trees.without_managed_fields(event) for event in events], is_stream
                )
            case _:
                table_options = TableOptions(is_wide=self.output == "wide")
                rows = printers.rows(events, context, table_options)
                titles = printers.titles("Event", table_options)
                self.widths = printers.widths(rows, titles if self.headers else (), self.widths)
                shown = printers.align_columns(
                    rows, titles if self.headers else (), least=self.widths
                )
                self.headers = False
                return f"{shown}\n"

    def _documents(self, events: Sequence[Tree], is_stream: bool) -> str:
        texts = []
        for tree in events if is_stream else [list_tree(events)]:
            is_next_document = self.output == "yaml" and self.texts
            texts.append(("---\n" if is_next_document else "") + tree_text(tree, self.output))
            self.texts += 1
        return "".join(texts)


@click.command(help=_HELP)
@click.option("--for", "about", default="", metavar="KIND/NAME", help="Only events of this object.")
@click.option("--types", default="", metavar="TYPE,...", help="Only these types: Normal, Warning.")
@click.option("-w", "--watch", is_flag=True, help="Print the events, then new ones.")
@output_option("table", "wide", "yaml", "json", "name")
@click.option("--no-headers", is_flag=True, help="Do not print column titles.")
@with_store
async def events(
    transport: Transport, about: str, types: str, watch: bool, output: str, **options: Any
) -> None:
    """Show events of objects, the latest last."""
    requested, clock = _parse_filter(about, types), SystemClock()
    printed = EventPrinter(output=output, headers=not options["no_headers"])
    if not watch:
        events = await object_trees.list_all(transport, "Event")
        chosen = [event for event in events if requested.has(event)]
        if not chosen and output in ("table", "wide"):
            click.echo(requested.text, err=True)
            return
        context = TableContext(now=clock.now())
        click.echo(printed.text(chosen, context, is_stream=False), nl=False)
        return
    async with aclosing(follow(transport, clock, keys.EVENT_PREFIX)) as batches:
        async for items in batches:
            chosen = [event for event in _trees(items) if requested.has(event)]
            if chosen:
                context = TableContext(now=clock.now())
                click.echo(printed.text(chosen, context, is_stream=True), nl=False)


def _parse_filter(about: str, types: str) -> EventFilter:
    """Return the filter of the flags.

    Raises:
        click.UsageError: a type does not exist.

    """
    chosen = tuple(word.strip().capitalize() for word in types.split(",") if word.strip())
    wrong = [word for word in chosen if word not in _EVENT_TYPES]
    if wrong:
        raise click.UsageError(f"--types {types}: use Normal or Warning")
    if not about:
        return EventFilter(types=chosen)
    kind, name = parse_one((about,))
    return EventFilter(kind=kind.name, name=name, types=chosen)


def _trees(items: Sequence[KeyValue]) -> list[Tree]:
    """Return events in their order in time."""
    events = [object_trees.of_item(item, "Event") for item in items]
    return sorted(events, key=_last_seen)


def _last_seen(event: Tree) -> datetime:
    time = object_trees.parse_time(event.get("spec", {}).get("lastSeen"))
    return time or datetime.min.replace(tzinfo=UTC)
