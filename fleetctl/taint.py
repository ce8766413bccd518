"""`fleetctl taint`: what keeps replicas away from nodes, unless their deployment tolerates it."""

from itertools import takewhile
from typing import Any

import click

from fleetctl import tainting, targets
from fleetctl.connect import opened, run, store_options
from fleetctl.kinds import kind_of
from fleetctl.results import Results, result_options
from fleetctl.tainting import Wish
from fleetctl.targets import Choice
from machinery.clock import SystemClock
from schemas import kinds
from schemas.node import Node

_HELP = """Keep replicas away from nodes, but for those whose deployment tolerates it.

\b
EFFECT is one of
  NoSchedule         nothing new comes to the node
  PreferNoSchedule   something new comes only if no other node fits
  NoExecute          what runs there is moved away as well
A minus takes a taint away.
\b
  fleetctl taint mac-1 owner=anna:NoSchedule
  fleetctl taint mac-1 owner:NoSchedule-
  fleetctl taint --all maintenance-

A deployment tolerates taints with spec.placement.tolerations.
"""


@click.command(help=_HELP)
@click.argument("words", nargs=-1, required=True, metavar="NODE... KEY[=VALUE]:EFFECT...")
@click.option("--overwrite", is_flag=True, help="Replace the value of a taint that is there.")
@targets.selector_option
@targets.all_option
@result_options
@store_options
def taint(words: tuple[str, ...], overwrite: bool, **options: Any) -> None:
    """Keep replicas away from nodes, but for those whose deployment tolerates it."""
    names = list(takewhile(lambda word: not tainting.is_taint(word), words))
    wanted = words[len(names) :]
    # kubectl's own form names the kind: `taint nodes mac-1 key=value:Effect`.
    if names and (found := kinds.by_alias(names[0])) and found.name == "Node":
        names = names[1:]
    if not wanted:
        raise click.UsageError(
            "say which taint: KEY=VALUE:EFFECT, or KEY:EFFECT- and KEY- to take one away"
        )
    chosen = targets.choice(
        kind_of("nodes"),
        targets.node_names(names),
        labels=options["selector"],
        is_all=options["is_all"],
    )
    run(_taint(chosen, tainting.parse(wanted), options, overwrite=overwrite))


async def _taint(chosen: Choice, wish: Wish, options: dict[str, Any], *, overwrite: bool) -> None:
    clock, results = SystemClock(), Results.of(options)

    def edit(node: Node) -> Node | None:
        taints = tainting.changed(node.name, node.spec.taints, wish, overwrite=overwrite)
        return targets.with_spec(node, taints=taints)

    async with opened(options) as transport:
        nodes = await targets.nodes_of(transport, chosen)
        for node in nodes:
            edit(node)  # all are asked before one is written
        for node in nodes:
            written = await targets.write(
                transport, clock, node, edit, manager="fleetctl-taint", is_dry=results.is_dry
            )
            results.say(written.obj, wish.done if written.is_news else "unchanged")
