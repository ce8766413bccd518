"""`fleetctl describe`: everything about objects, with what belongs to them and what happened to them."""

from collections.abc import Sequence
from typing import Any

import click

from fleetctl import apikeys, infiles, targets
from fleetctl.connect import opened, run, store_options
from fleetctl.describing import related, sections
from fleetctl.kinds import WITH_API_KEYS
from fleetctl.targets import Choice
from machinery.clock import SystemClock
from manifests.tree import tree_of
from schemas.meta import ApiObject
from store.port import Transport

_HELP = """Show everything about objects: spec, status, who says which fields, what belongs to them, what happened.

\b
  fleetctl describe md/qwen
  fleetctl describe node mac-1 mac-2
  fleetctl describe replicas -l team=a
  fleetctl describe -f qwen.yaml
"""


@click.command(help=_HELP)
@click.argument("what", nargs=-1, metavar="[KIND [NAME...] | KIND/NAME...]")
@targets.files_option
@targets.recursive_option
@targets.selector_option
@store_options
def describe(what: tuple[str, ...], **options: Any) -> None:
    """Show everything about objects: spec, status, what belongs to them, and what happened."""
    names = None if options["files"] else apikeys.names_of(what)
    if names is not None:
        run(apikeys.describe(names, options))
        return
    run(_describe(_chosen(what, options), options))


def _chosen(what: tuple[str, ...], options: dict[str, Any]) -> list[Choice]:
    if options["files"]:
        if what or options["selector"]:
            raise click.UsageError("name objects, or the files that hold them with -f, not both")
        found = infiles.targets_of(options["files"], recursive=options["recursive"])
        return [targets.choice(target.kind, target.names) for target in found]
    is_all = len(what) == 1 and "/" not in what[0] and not options["selector"]
    return targets.choices(
        what, options, verb="described", is_all=is_all, is_read=True, among=WITH_API_KEYS
    )


async def _describe(chosen: Sequence[Choice], options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        found = await targets.all_chosen(transport, chosen)
        for number, obj in enumerate(found):
            click.echo(("\n\n" if number else "") + await _text(transport, obj))


async def _text(transport: Transport, obj: ApiObject) -> str:
    now = SystemClock().now()
    parts = [
        sections.head(obj, now),
        sections.document("Spec", tree_of(obj).get("spec")),
        sections.conditions(obj, now),
        *await related.of(transport, obj, now),
        sections.owners(obj, now),
        await related.events(transport, obj, now),
    ]
    return "\n".join(part for part in parts if part)
