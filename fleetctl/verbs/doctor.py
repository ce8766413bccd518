"""The verb `fleetctl doctor`: checks every part of the fleet, or one machine, and prints problems with their remedies."""

import asyncio
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
import orjson

from fleetctl.cli import errors
from fleetctl.cli.connect import etcd_address, open_store, process_options, run
from fleetctl.doctor import checks, findings, local, machines, observe, observe_machines
from fleetctl.doctor.findings import Finding
from fleetctl.fleets import process_client
from fleetctl.fleets.dialer import open_dialer
from machinery.clock import SystemClock
from store.errors import StoreError

_HELP = """Check every part of the fleet, and print problems with their remedies.

Checks: the store answers and accepts writes; a reconciler leads; versions are compatible; nodes renew their leases and
have disk space and memory; this machine reaches agents, gateways and engines; clocks agree; agents, gateways and the
reconciler read the store; endpoints are on the right nodes; etcd has room, and users if it is on a network; connections
between machines use TLS, and certificates are renewed; files with secrets are not open to other users; ShardGroups
have their cables and RDMA settings; deployments, routes, pools and GitSources are healthy. Each agent examines its own
machine: sleep, firewall, limits, services, ports, memory, GPU and more (docs/troubleshooting.md).

\b
  fleetctl doctor
  fleetctl doctor --node mac-2
  fleetctl doctor --local

Changes nothing. UNKNOWN: it could not be read, which is neither good nor bad. Exit code 1: a check FAILed.
"""


def _local_needs_no_fleet(command: Callable[..., Any]) -> Callable[..., Any]:
    """Examine this machine before a context, a certificate or a store is looked for."""

    @wraps(command)
    def with_local(
        *, is_local: bool, models_dir: Path | None, nodes: tuple[str, ...], **options: Any
    ) -> None:
        if is_local and nodes:
            raise click.UsageError("give --local for this machine, or --node for others, not both")
        if models_dir is not None and not is_local:
            raise click.UsageError("--models-dir needs --local: agents know their own folder")
        if not is_local:
            command(nodes=nodes, **options)
            return
        examination = local.examine_machine(
            SystemClock(), data_dir=options["data_dir"], models_dir=models_dir
        )
        _print(asyncio.run(examination), options["output"])

    return with_local


@click.command(help=_HELP)
@click.option(
    "--local",
    "is_local",
    is_flag=True,
    help="Check this machine only, without a fleet: before it joins, or while its agent does not run.",
)
@click.option(
    "--node",
    "nodes",
    metavar="NAME",
    multiple=True,
    help="Show all that the agent of this node finds on its machine; may be repeated.",
)
@click.option(
    "--models-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --local: folder of models (default: that of the installed agent, else ~/models).",
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@_local_needs_no_fleet
@process_options
def doctor(output: str, nodes: tuple[str, ...], **options: Any) -> None:
    """Check every part of the fleet, and print problems with their remedies."""
    _print(run(_examine_nodes(options, nodes) if nodes else examine(options)), output)


def _print(found: Sequence[Finding], output: str) -> None:
    """Print the findings. Raises Exit with code 1 if a check failed."""
    if output == "json":
        tree = findings.findings_tree(found)
        click.echo(orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode())
    else:
        click.echo(findings.format_findings(found))
    if findings.count_level(found, "FAIL"):
        raise click.exceptions.Exit(1)


async def examine(options: dict[str, Any]) -> list[Finding]:
    """Observe the fleet and return the findings."""
    address = etcd_address(options)
    folder: Path | None = None if options["etcd"] else options["data_dir"]
    try:
        async with open_store(options) as transport:
            dialer = await open_dialer(options, transport)
            observation = await observe.observe_fleet(
                transport, address, SystemClock(), folder, dialer=dialer
            )
    except StoreError as error:
        return checks.unreachable_findings(errors.from_store_error(error).message)
    return checks.run_checks(observation)


async def _examine_nodes(options: dict[str, Any], nodes: Sequence[str]) -> list[Finding]:
    """Return what the agents of nodes find on their machines.

    Raises:
        FleetctlError: a node does not exist.
        StoreError: the store does not answer.

    """
    async with open_store(options) as transport:
        dialer = await open_dialer(options, transport)
        names = list(dict.fromkeys(nodes))
        addresses = [await process_client.find_agent(transport, name, dialer) for name in names]
        reports = await observe_machines.examine_machines(transport, addresses)
    return [found for one in reports for found in machines.report_findings(one)]
