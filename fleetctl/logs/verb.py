"""`fleetctl logs`: flags and what they mean."""

from typing import Any

import click

from fleetctl.connect import opened, run, store_options
from fleetctl.elsewhere import taught
from fleetctl.logs import show, sources
from fleetctl.logs.show import Look
from fleetctl.logs.sources import Wanted
from schemas import duration

_HELP = """Show the log of a replica's engine, an agent or a gateway.

\b
  fleetctl logs qwen-0                      the engine of replica qwen-0 (its rank 0)
  fleetctl logs qwen-0 -f --tail 20         its last 20 lines, and what comes
  fleetctl logs qwen-0 --previous           of the run before, such as one that crashed
  fleetctl logs sharded-0 --all-ranks       every Mac of a group
  fleetctl logs deploy/qwen                 one of its replicas; --all-replicas: all
  fleetctl logs -l app=chat --since 5m      replicas with a label
  fleetctl logs node/mac-1                  the agent of a Mac
  fleetctl logs gateway/9f3a                a gateway (without an id: the only one)

The agent of the Mac sends it over HTTP: the Mac's address must be reachable from here. An agent and a gateway keep the
last MiB of their own log in memory, since their start; what engines log is on the Mac's disk.
"""


def _since(_: click.Context, __: click.Parameter, value: str) -> str:
    """Check a duration."""
    try:
        if value:
            duration.parse_fine(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.command(help=_HELP)
@click.argument("what", required=False, metavar="REPLICA | deploy/NAME | node/NAME | gateway[/ID]")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is logged from now on.")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Which rank of a sharded replica (else 0)."
)
@click.option("--all-ranks", is_flag=True, help="All ranks; implies --prefix.")
@click.option("--all-replicas", is_flag=True, help="All replicas of deploy/NAME; implies --prefix.")
@click.option(
    "--tail",
    type=click.IntRange(min=-1),
    help="How many lines from the end; -1 is all, which is the default, but 10 with -l.",
)
@click.option("--since", callback=_since, default="", help="Only the last so long: 90s, 5m, 1h30m.")
@click.option("-p", "--previous", is_flag=True, help="The engine's run before the last.")
@click.option("--timestamps", is_flag=True, help="Begin each line with its time.")
@click.option("--prefix", is_flag=True, help="Begin each line with where it is from.")
@click.option("-l", "--selector", default="", help="Replicas with these labels: k=v,k!=v,k,!k.")
@click.option(
    "--max-log-requests",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How many logs may be followed at once.",
)
@taught(
    "a replica has one program on each Mac; --rank N says which Mac",
    "-c",
    "--container",
    takes_value=True,
)
@store_options
def logs(what: str | None, **options: Any) -> None:
    """Show the log of a replica's engine, an agent or a gateway."""
    wanted = _wanted(what, options)
    is_many = wanted.all_ranks or wanted.all_replicas
    tail = options["tail"]
    if tail is None and options["selector"]:
        tail = 10
    look = Look(
        params={
            **({} if tail in (None, -1) else {"tail": str(tail)}),
            **({"since": options["since"]} if options["since"] else {}),
            **({"follow": "true"} if options["follow"] else {}),
        },
        has_prefix=options["prefix"] or is_many,
        has_times=options["timestamps"],
        most=options["max_log_requests"] if options["follow"] else None,
    )
    run(_logs(wanted, look, options))


def _wanted(what: str | None, options: dict[str, Any]) -> Wanted:
    """Return whose logs are meant.

    Raises:
        click.UsageError: flags that say nothing, or two things.

    """
    if bool(what) == bool(options["selector"]):
        raise click.UsageError(
            "whose log? Name a replica, deploy/NAME, node/NAME or gateway/ID, or choose replicas with -l: one of these"
        )
    if options["rank"] is not None and options["all_ranks"]:
        raise click.UsageError("give --rank or --all-ranks: one of them")
    if options["previous"] and options["follow"]:
        raise click.UsageError("the previous run is over: give --previous or --follow")
    return sources.parse(
        what or "",
        Wanted(
            selector=options["selector"],
            rank=options["rank"],
            all_ranks=options["all_ranks"],
            all_replicas=options["all_replicas"],
            is_previous=options["previous"],
        ),
    )


async def _logs(wanted: Wanted, look: Look, options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        found = await sources.find(transport, wanted)
        await show.show(transport, found, look)
