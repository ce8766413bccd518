"""`fleetctl doctor`: look at every part of the fleet, and say what is wrong and what to do."""

from pathlib import Path
from typing import Any

import click
import orjson

from fleetctl.cli import errors
from fleetctl.cli.connect import etcd_address, open_store, run, store_options
from fleetctl.doctor import checks, observe
from fleetctl.doctor.checks import Finding
from machinery.clock import SystemClock
from store.errors import StoreError

_HELP = """Look at every part of the fleet, and say what is wrong and what to do.

The store answers and takes writes; a reconciler leads; versions get along; nodes renew their leases and have disk and
memory; agents, gateways and engines answer this machine; clocks agree; ShardGroups have their cables and RDMA settings;
deployments, routes, pools and GitSources are well. Changes nothing. Exit code 1: something FAILs.
"""


@click.command(help=_HELP)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def doctor(output: str, **options: Any) -> None:
    """Look at every part of the fleet, and say what is wrong and what to do."""
    found = run(examine(options))
    if output == "json":
        tree = checks.findings_tree(found)
        click.echo(orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode())
    else:
        click.echo(checks.format_findings(found))
    if checks.count_level(found, "FAIL"):
        raise click.exceptions.Exit(1)


async def examine(options: dict[str, Any]) -> list[Finding]:
    """Return what is to be said of the fleet."""
    address = etcd_address(options)
    folder: Path | None = None if options["etcd"] else options["data_dir"]
    try:
        async with open_store(options) as transport:
            seen = await observe.observe_fleet(transport, str(address), SystemClock(), folder)
    except StoreError as error:
        return checks.unreachable_findings(errors.from_store_error(error).message)
    return checks.run_checks(seen)
