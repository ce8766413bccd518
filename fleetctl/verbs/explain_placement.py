"""`fleetctl explain placement`: which nodes fit one more replica, with scores and refusals."""

from typing import Any

import click

from fleetctl.cli.connect import open_store
from fleetctl.cli.documents import tree_text
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.kind_args import kind_of
from insight.placement import explain_placement, placement_tree, report_text
from machinery.clock import SystemClock
from manifests.suggestions import not_found_message
from reconciler.deployments import snapshot


async def placement_report(name: str, output: str, options: dict[str, Any]) -> str:
    """Return the report about a deployment in the format of -o."""
    async with open_store(options) as transport:
        fleet_snapshot = await snapshot.take(transport, SystemClock())
    report = explain_placement(fleet_snapshot, name)
    if report is None:
        known = [deployment.name for deployment in fleet_snapshot.deployments()]
        raise FleetctlError(not_found_message(kind_of("md"), name, known))
    for key in fleet_snapshot.unreadable():
        click.echo(f"warning: {key} cannot be read and is ignored", err=True)
    return report_text(report) if output == "table" else tree_text(placement_tree(report), output)
