"""`fleetctl export`: what the fleet declares, as files of other tools."""

from pathlib import Path
from typing import Any, cast

import click

from fleetctl import groups, reader
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.hostfiles import writing
from fleetctl.hostfiles.writing import Exported, UnwritableError
from fleetctl.importing import save

_HELP = """Write the host file of a ShardGroup: the same Macs in the same order, for mlx.launch or LocalAI.

\b
  launch        what mlx.launch --hostfile reads
  ring          MLX_HOSTFILE: the addresses that each rank listens on
  localai-ring  the same with one address a rank, as LocalAI wants it
  devices       MLX_IBV_DEVICES, and LocalAI's matrix: the RDMA devices between Macs

\b
  fleetctl export hostfile studios -o hosts.json
  mlx.launch --hostfile hosts.json -- python script.py

mlx.launch logs in over ssh by the node's name. What the file cannot say is told on standard error.
"""


@click.group("export")
def exporting() -> None:
    """Write files for other tools."""


@exporting.command(help=_HELP)
@click.argument("group")
@click.option(
    "--as",
    "kind",
    type=click.Choice(writing.KINDS),
    default="launch",
    show_default=True,
    help="Which form of file.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65000),
    default=writing.FIRST_PORT,
    show_default=True,
    help="The first port that ranks of a ring listen on.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (else standard output).",
)
@store_options
def hostfile(group: str, kind: str, port: int, output: Path | None, **options: Any) -> None:
    """Read the group, and write the file."""
    found = run(_export(group, cast(writing.Kind, kind), port, options))
    for what in found.left_out:
        click.echo(f"left out: {what}", err=True)
    save(found.text, output)


async def _export(name: str, kind: writing.Kind, port: int, options: dict[str, Any]) -> Exported:
    async with opened(options) as transport:
        group = await groups.read_group(transport, name)
        seats = groups.declared(group.spec)
        if seats is None:
            nodes, ready = await groups.read_nodes(transport), await reader.ready_nodes(transport)
            seats = groups.seated(group, nodes, ready)
    try:
        return writing.written(group, seats, kind, port)
    except UnwritableError as error:
        raise FleetctlError(str(error)) from error
