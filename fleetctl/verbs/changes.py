"""`fleetctl changes`: changes of objects with author, revisions, differences and reason."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import click

from fleetctl.cli.arguments import output_option, parse_duration
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.objects.kind_args import parse_one
from fleetctl.objects.results import list_tree, print_tree, tree_text
from fleetctl.output import printers
from insight.changes import (
    ChangeFilter,
    RecordedChange,
    change_tree,
    list_changes,
    object_text,
    select_changes,
)
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock, SystemClock
from store import keys
from store.errors import CompactedError, UnavailableError
from store.port import Transport

_BACKOFF = Backoff(first_s=0.2, limit_s=4.0)
_TITLES = ("AGE", "USER", "CHANGE", "REASON")
_WIDE = ("TIME", "USER", "ACCOUNT", "COMMAND", "FROM", "TO", "CHANGE", "REASON")
_SHOWN = 3
_HELP = """Show who changed which objects, and why.

The latest change is last. Changes are kept for 30 days.

\b
  fleetctl changes
  fleetctl changes --for md/qwen --since 24h -o wide
  fleetctl changes --user anna -o json
  fleetctl changes -w

Every write of fleetctl, of the dashboard and of GitSources is recorded in the transaction of the write. Values of
secrets are not. Give the reason with --reason; for a GitSource it is the commit.
"""


@click.command(help=_HELP)
@click.option(
    "--for", "about", default="", metavar="KIND/NAME", help="Only changes of this object."
)
@click.option(
    "--since", default="", metavar="DURATION", help="Only changes of this time, such as 24h."
)
@click.option("--user", default="", help="Only changes by users with this in their name.")
@click.option("--all", "is_all", is_flag=True, help="Show requests for a sync or a diff as well.")
@click.option("-w", "--watch", is_flag=True, help="Print the changes, then new ones.")
@output_option("table", "wide", "yaml", "json")
@click.option("--no-headers", is_flag=True, help="Do not print column titles.")
@store_options
def changes(about: str, since: str, user: str, output: str, **options: Any) -> None:
    """Show changes of objects with their authors and reasons, the latest last."""
    kind, name = "", ""
    if about:
        found, name = parse_one((about,))
        kind = found.name
    since_s = SystemClock().now().timestamp() - parse_duration(since) if since else 0.0
    wanted = ChangeFilter(
        kind=kind, name=name, user=user, since_s=since_s, has_requests=options["is_all"]
    )
    has_titles = not options["no_headers"]
    if options["watch"]:
        run(_follow(wanted, output, options, has_titles=has_titles))
        return
    run(_list(wanted, output, options, has_titles=has_titles))


async def _list(
    wanted: ChangeFilter, output: str, options: dict[str, Any], *, has_titles: bool
) -> None:
    async with open_store(options) as transport:
        recorded_changes = await list_changes(transport, wanted)
    if not recorded_changes and output in ("table", "wide"):
        click.echo("no changes found", err=True)
        return
    click.echo(changes_text(recorded_changes, wanted, output, has_titles=has_titles), nl=False)


async def _follow(
    wanted: ChangeFilter, output: str, options: dict[str, Any], *, has_titles: bool
) -> None:
    async with open_store(options) as transport:
        stream = follow_changes(transport, SystemClock(), wanted)
        async with aclosing(stream) as generator:
            async for some in generator:
                if output in ("table", "wide"):
                    click.echo(changes_text(some, wanted, output, has_titles=has_titles), nl=False)
                    has_titles = False
                    continue
                for change in some:
                    print_tree(change_tree(change), output)


async def follow_changes(
    transport: Transport, clock: Clock, wanted: ChangeFilter
) -> AsyncGenerator[list[RecordedChange]]:
    """Yield the wanted changes, then each new one, without end; outages of the store are waited through.

    Raises:
        UnavailableError: the store did not answer the first time.

    """
    revision = 0
    seen = 0
    retries = Retries(_BACKOFF, clock)
    while True:
        try:
            if not revision:
                listing = await transport.list(keys.CHANGE_PREFIX)
                missed = [item for item in listing.items if item.mod_revision > seen]
                revision = listing.revision
                if recorded_changes := select_changes(missed, wanted):
                    yield recorded_changes
                seen = revision
            watch = transport.watch(keys.CHANGE_PREFIX, after_revision=revision)
            async with aclosing(watch) as batches:
                async for batch in batches:
                    retries.reset()
                    items = [change.now for change in batch.changes if change.now is not None]
                    if recorded_changes := select_changes(items, wanted):
                        yield recorded_changes
                    revision = seen = batch.revision
        except CompactedError:
            revision = 0
        except UnavailableError:
            if not seen:
                raise
            await retries.wait()


def changes_text(
    found: Sequence[RecordedChange], wanted: ChangeFilter, output: str, *, has_titles: bool
) -> str:
    """Return changes in the format of -o. Pure but for the age."""
    if output in ("json", "yaml"):
        return tree_text(list_tree(list(map(change_tree, found))), output)
    titles = (_WIDE if output == "wide" else _TITLES) if has_titles else ()
    rows = [
        _wide_row(change, wanted) if output == "wide" else _row(change, wanted) for change in found
    ]
    return f"{printers.align_columns(rows, titles)}\n"


def _row(one: RecordedChange, wanted: ChangeFilter) -> tuple[str, ...]:
    record = one.record
    age = printers.age(record.time, SystemClock().now())
    return (age, record.user, _objects_text(one, wanted), record.reason or "-")


def _wide_row(one: RecordedChange, wanted: ChangeFilter) -> tuple[str, ...]:
    record = one.record
    bases = {str(about.from_revision or "-") for about in record.objects if wanted.concerns(about)}
    return (
        record.time.isoformat(timespec="seconds"),
        record.user,
        record.account or "-",
        record.command or record.manager,
        bases.pop() if len(bases) == 1 else "several",
        str(one.revision),
        _objects_text(one, wanted),
        record.reason or "-",
    )


def _objects_text(one: RecordedChange, wanted: ChangeFilter) -> str:
    concerned = [about for about in one.record.objects if wanted.concerns(about)]
    shown = "; ".join(object_text(about) for about in concerned[:_SHOWN])
    rest = len(concerned) - _SHOWN
    return f"{shown}; and {rest} more objects" if rest > 0 else shown
