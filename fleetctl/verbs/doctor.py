"""The verb `fleetctl doctor`: checks every part of the fleet, or one machine, and prints problems with their remedies."""

import asyncio
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from fleetctl.cli import errors
from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import etcd_address, open_store, process_options, run
from fleetctl.cli.documents import print_tree
from fleetctl.doctor import fixes, local, observe, report
from fleetctl.doctor.fixes import Fix, FixContext, FixResult
from fleetctl.fleets.dialer import open_dialer
from insight import process_client
from insight.doctor import checks, findings, machines
from insight.doctor.findings import Finding
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

Changes nothing, unless --fix asks for what is safe: it lists what it would do, asks, does it, and checks again. It never
ends a process, deletes an object or undoes what a person decided. UNKNOWN: it could not be read, which is neither good
nor bad. Exit code 1: a check FAILed, or a fix failed.
"""


def _local_needs_no_fleet(command: Callable[..., Any]) -> Callable[..., Any]:
    """Examine this machine before a context, a certificate or a store is looked for."""

    @wraps(command)
    def with_local(
        *, is_local: bool, models_dir: Path | None, nodes: tuple[str, ...], **options: Any
    ) -> None:
        if is_local and nodes:
            raise click.UsageError("give --local for this machine, or --node for others, not both")
        if options["is_fix"] and (is_local or nodes):
            raise click.UsageError("--fix examines the whole fleet: leave --local and --node out")
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


@click.command(help=_HELP, short_help="Check every part of the fleet, and print remedies.")
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
@output_option("table", "json")
@click.option("--fix", "is_fix", is_flag=True, help="Carry out safe remedies, after a question.")
@click.option("--yes", "is_yes", is_flag=True, help="With --fix: do not ask.")
@_local_needs_no_fleet
@process_options
def doctor(
    *, output: str, nodes: tuple[str, ...], is_fix: bool, is_yes: bool, **options: Any
) -> None:
    """Check every part of the fleet, and print problems with their remedies."""
    if is_yes and not is_fix:
        raise click.UsageError("--yes needs --fix: nothing else is asked")
    if is_fix and output == "json" and not is_yes:
        raise click.UsageError("-o json cannot ask: give --yes, or leave -o json out")
    found = run(_examine_nodes(options, nodes) if nodes else examine(options))
    results: list[FixResult] | None = None
    if is_fix:
        results = []
        if planned := fixes.plan_fixes(found):
            results = _fix(found, planned, options, is_asked=not is_yes)
            found = run(examine(options)) if results else found
        elif output == "table":
            click.echo("Nothing here can be fixed automatically.\n")
    _print(found, output, results)


def _print(
    found: Sequence[Finding], output: str, results: Sequence[FixResult] | None = None
) -> None:
    """Print the findings, and the results of --fix. Raises Exit with code 1 if a check or a fix failed."""
    if output == "json":
        tree = findings.findings_tree(found)
        if results is not None:
            tree["fixes"] = [
                {"fix": result.name, "isDone": result.is_done, "message": result.message}
                for result in results
            ]
        print_tree(tree, "json")
    else:
        click.echo(report.format_findings(found))
    if findings.count_level(found, "FAIL") or not all(result.is_done for result in results or ()):
        raise click.exceptions.Exit(1)


def _fix(
    found: Sequence[Finding],
    planned: Sequence[Fix],
    options: dict[str, Any],
    *,
    is_asked: bool,
) -> list[FixResult]:
    """Carry the remedies out; return nothing if the person says no. Progress goes to standard error."""
    for fix in planned:
        click.echo(f"{fix.name}: {fix.title}", err=True)
        for finding in found:
            if finding.fix == fix.name and not finding.node:
                click.echo(f"  for: {finding.message}", err=True)
    if is_asked and not click.confirm("Do this now?", err=True):
        return []
    context = FixContext(
        address=etcd_address(options), data_dir=_data_dir(options), clock=SystemClock()
    )
    results = []
    for fix in planned:
        result = run(fixes.run_fix(fix, context))
        click.echo(f"{fix.name}: {'' if result.is_done else 'failed: '}{result.message}", err=True)
        results.append(result)
    return results


def _data_dir(options: dict[str, Any]) -> Path | None:
    """Return the folder of the fleet on this machine; None where the store is named by its address."""
    return None if options["etcd"] else options["data_dir"]


async def examine(options: dict[str, Any]) -> list[Finding]:
    """Observe the fleet and return the findings."""
    address = etcd_address(options)
    try:
        async with open_store(options) as transport:
            dialer = await open_dialer(options, transport)
            observation = await observe.observe_fleet(
                transport, address, SystemClock(), _data_dir(options), dialer=dialer
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
        reports = await observe.examine_machines(transport, addresses)
    return [
        finding
        for machine_report in reports
        for finding in machines.report_findings(machine_report)
    ]
