"""The verb `fleetctl doctor`: checks every part of the fleet, and prints problems with their remedies."""

from pathlib import Path
from typing import Any

import click
import orjson

from fleetctl.cli import errors
from fleetctl.cli.connect import etcd_address, open_store, process_options, run
from fleetctl.doctor import checks, findings, observe
from fleetctl.doctor.findings import Finding
from fleetctl.fleets.dialer import open_dialer
from machinery.clock import SystemClock
from store.errors import StoreError

_HELP = """Check every part of the fleet, and print problems with their remedies.

Checks: the store answers and accepts writes; a reconciler leads; versions are compatible; nodes renew their leases and
have disk space and memory; this machine reaches agents, gateways and engines; clocks agree; agents, gateways and the
reconciler read the store; endpoints are on the right nodes; etcd has room, and users if it is on a network; connections
between machines use TLS, and certificates are renewed; files with secrets are not open to other users; ShardGroups
have their cables and RDMA settings; deployments, routes, pools and GitSources are healthy. Changes nothing. Exit code 1:
a check FAILed.
"""


@click.command(help=_HELP)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@process_options
def doctor(output: str, **options: Any) -> None:
    """Check every part of the fleet, and print problems with their remedies."""
    found = run(examine(options))
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
