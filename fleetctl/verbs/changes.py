"""`fleetctl changes`: changes of objects with author, revisions, differences and reason."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import click

from fleetctl.cli.arguments import output_option, parse_duration
from fleetctl.cli.connect import with_store
from fleetctl.cli.documents import list_tree, print_tree, tree_text
from fleetctl.objects.kind_args import parse_one
from fleetctl.objects.waits import follow
from fleetctl.output import printers
from insight.changes import (
    ChangeFilter,
    RecordedChange,
    change_tree,
    list_changes,
    object_text,
    select_changes,
)
from machinery.clock import SystemClock
from schemas import quantity
from store import keys
from store.port import Transport

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
@with_store
async def changes(
    transport: Transport, about: str, since: str, user: str, output: str, **options: Any
) -> None:
    """Show changes of objects with their authors and reasons, the latest last."""
    kind, name = "", ""
    if about:
        found, name = parse_one((about,))
        kind = found.name
    clock, is_table = SystemClock(), output in ("table", "wide")
    since_s = clock.now().timestamp() - parse_duration(since) if since else 0.0
    wanted = ChangeFilter(
        kind=kind, name=name, user=user, since_s=since_s, has_requests=options["is_all"]
    )
    has_titles = not options["no_headers"]
    if not options["watch"]:
        recorded = await list_changes(transport, wanted)
        if recorded or not is_table:
            click.echo(changes_text(recorded, wanted, output, has_titles=has_titles), nl=False)
        else:
            click.echo("no changes found", err=True)
        return
    async with aclosing(follow(transport, clock, keys.CHANGE_PREFIX)) as batches:
        async for items in batches:
            recorded = select_changes(items, wanted)
            if recorded and is_table:
                click.echo(changes_text(recorded, wanted, output, has_titles=has_titles), nl=False)
                has_titles = False
                continue
            for change in recorded:
                print_tree(change_tree(change), output)


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
    return (
        f"{shown}; and {quantity.counted(rest, 'more object', 'more objects')}"
        if rest > 0
        else shown
    )
