"""The verb `fleetctl stop`: ends all engines of this Mac, or of all Macs, now; also while etcd or the agent is down."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from fleetctl.cli import terminal
from fleetctl.cli.arguments import parse_duration
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import stop_orders
from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.dialer import offline_dialer, open_dialer
from fleetctl.fleets.known_nodes import known_nodes
from fleetctl.fleets.stop_orders import StopResult, Verb
from fleetctl.output.printers import align_columns
from insight.process_client import agent_address
from machinery.clock import SystemClock
from nodeagent.engines.stop_order import StopOrder
from store.errors import StoreError
from store.port import Transport

# An emergency stop must not wait for a store that hangs.
_STORE_S: Final = 3.0
_MAX_GRACE_S: Final = 600.0
_MAX_NAMES: Final = 5

_HELP = """End all engines of this Mac (--local) or of all Macs (--all) now, and start none until --undo.

It needs no etcd. With --local it needs no agent either: it writes stopped.json into the agent's state folder, and ends the
processes. With --all it asks every agent to do the same, at once; each proves its name, and you prove the role admin
(--identity-dir). Addresses come from etcd; while it is away, from the last time that `fleetctl get nodes`,
`version --nodes`, `cluster-info` or `stop --all` saw them, or from --nodes. A fleet without certificates needs etcd, or --local on each Mac.

Requests get --grace-period to finish. Replicas of a stopped Mac are CannotStart meanwhile, and are not moved: use
`fleetctl drain` if there is time and etcd.

\b
  fleetctl stop --local --state-dir ~/.mlx-fleet/agent
  fleetctl stop --all
  fleetctl stop --all --yes --nodes mac-1.local:4001,mac-2=10.0.0.2:4001
  fleetctl stop --all --undo

Without --state-dir, --local stops the nodes that `fleetctl up` runs from --data-dir.
"""
_OTHER = (
    "`fleetctl scale md/NAME --replicas=0` unloads a model; `fleetctl down` stops the fleet on this machine; "
    "`fleetctl stop --local` ends all engines of this Mac, `fleetctl stop --all` those of all Macs"
)


@click.command(help=_HELP, short_help="End all engines of this Mac or of all Macs now.")
@click.argument("models", nargs=-1, metavar="")
@click.option("--local", is_flag=True, help="Stop the engines of this Mac.")
@click.option("--all", "is_all", is_flag=True, help="Stop the engines of all Macs.")
@click.option(
    "--nodes",
    default="",
    metavar="[NAME=]HOST:PORT,...",
    help="With --all: the agents to ask, in place of those that etcd or the last look knows.",
)
@click.option("-y", "--yes", is_flag=True, help="With --all: do not ask for confirmation.")
@click.option("--undo", is_flag=True, help="Let engines start again, within five minutes.")
@click.option(
    "--state-dir",
    "state_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="FLEET_STATE_DIR",
    help="With --local: state folder of an agent of this Mac; may be repeated.",
)
@click.option(
    "--grace-period",
    default="10s",
    show_default=True,
    help="Time for requests to finish before an engine is killed.",
)
@store_options
def stop(models: tuple[str, ...], grace_period: str, **options: Any) -> None:
    """End all engines of this Mac, or of all Macs, now, and start none until --undo."""
    is_all = options["is_all"]
    if models or is_all == options["local"]:
        raise click.UsageError(f"give --local or --all: {_OTHER}")
    if (options["nodes"] or options["yes"]) and not is_all:
        raise click.UsageError("--nodes and --yes belong to --all")
    grace_s = parse_duration(grace_period)
    if grace_s > _MAX_GRACE_S:
        raise click.UsageError("--grace-period: expected at most 10m")
    if is_all:
        run(_stop_all(options, grace_s))
    else:
        data_dir: Path = options["data_dir"]
        folders = [path.expanduser().resolve() for path in options["state_dirs"]]
        folders = folders or DataDir(data_dir).nodes()
        if not folders:
            raise FleetctlError(
                f"no agent has its state in {DataDir(data_dir).path}. Name the folder with --state-dir, as for fleet-nodeagent"
            )
        for folder in folders:
            order = StopOrder(folder)
            try:
                if options["undo"]:
                    was_given = order.take_back()
                    click.echo(
                        f"{folder}: {'engines may start again' if was_given else 'not stopped'}"
                    )
                    continue
                count = asyncio.run(order.execute(SystemClock(), grace_s=grace_s))
            except OSError as error:
                raise FleetctlError(f"cannot write to {folder}: {error.strerror}") from error
            click.echo(f"{folder}: {_ended(count)}, none starts until --undo")


def _ended(count: int) -> str:
    return f"{count} engine{'s' if count != 1 else ''} ended"


async def _stop_all(options: dict[str, Any], grace_s: float) -> None:
    known, dial_options = known_nodes(options), stop_orders.options_without_gateway(options)
    store: Transport | None = None
    async with open_store(options) as transport:
        try:
            async with asyncio.timeout(_STORE_S):
                dialer = await open_dialer(dial_options, transport)
                urls = await stop_orders.read_addresses(transport, dialer)
            known.remember(urls)
            store = transport
        except (StoreError, TimeoutError) as error:
            why = str(error) or f"no answer within {_STORE_S:g} s"
            click.echo(f"warning: etcd is away ({why}); using the addresses seen last", err=True)
            dialer = offline_dialer(dial_options)
            urls = stop_orders.without_store(known.read(), dialer)
        if options["nodes"]:
            urls = stop_orders.parse_nodes(options["nodes"], urls, is_https=dialer.has_identity)
        if not urls:
            raise FleetctlError(_nobody(has_store=store is not None))
        verb: Verb = "DELETE" if options["undo"] else "PUT"
        if verb == "PUT":
            nodes = sorted(urls)
            count = "1 Mac" if len(nodes) == 1 else f"{len(nodes)} Macs"
            shown = ", ".join(nodes[:_MAX_NAMES]) + (", ..." if len(nodes) > _MAX_NAMES else "")
            terminal.confirm(
                f"End all engines of {count} ({shown}) now? Requests get {grace_s:g} s to finish, and no engine starts until --undo.",
                is_confirmed=options["yes"],
            )
        addresses = [agent_address(dialer, name, urls[name]) for name in sorted(urls)]
        async with stop_orders.tickets_if_any(store, addresses) as bearers:
            results = await stop_orders.send_all(addresses, bearers, verb=verb, grace_s=grace_s)
    _report(results, verb)


def _nobody(*, has_store: bool) -> str:
    if has_store:
        return "no agent of this fleet has reported its address: run `fleetctl stop --local` on each Mac"
    return (
        "no agent of this fleet was seen before from here. Give their addresses with --nodes HOST:PORT,..., or run "
        "`fleetctl stop --local` on each Mac"
    )


def _report(found: Sequence[StopResult], verb: Verb) -> None:
    """Print what happened on each Mac. Raises FleetctlError if one did not do it."""
    rows = [(result.node, _result_cell(result, verb)) for result in found]
    click.echo(align_columns(rows, ("NODE", "RESULT")))
    failed = [result for result in found if result.problem]
    if not failed:
        return
    lines = [f"  {result.problem}" for result in failed]
    count = f"{len(failed)} of {len(found)} {'Mac' if len(found) == 1 else 'Macs'}"
    rest = (
        "Engines may still be stopped there; run it again, or `fleetctl stop --local --undo` on that Mac"
        if verb == "DELETE"
        else "Engines may run there: run it again, or `fleetctl stop --local` on that Mac, or switch it off"
    )
    raise FleetctlError("\n".join([f"{count} did not do it", *lines, rest]))


def _result_cell(one: StopResult, verb: Verb) -> str:
    if one.problem:
        return "refused" if one.is_refused else "no answer"
    if verb == "PUT":
        return f"{_ended(one.ended)}, none starts until --undo"
    return "engines may start again" if one.was_stopped else "was not stopped"
