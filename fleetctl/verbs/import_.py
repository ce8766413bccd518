"""`fleetctl import`: manifests from what other tools are told with."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.convert import localai_import as of_localai
from fleetctl.convert import mesh_import as of_mesh
from fleetctl.convert import ring_import as of_ring
from fleetctl.convert import serving_import as of_serving
from fleetctl.convert.hostfile_groups import GroupOptions, build_group
from fleetctl.convert.hostfile_reader import read_hostfile
from manifests import sources
from manifests.errors import ManifestError, ManifestErrors
from nodeagent.node.identity import dns_label
from schemas.meta import NAME_PATTERN
from schemas.shardgroup import Backend

_HELP = """Write a ShardGroup from a host file, for `fleetctl apply`.

FILE is what mlx.launch and mlx.distributed_config read and write, a ring's list of addresses (MLX_HOSTFILE, or
LocalAI's), or a matrix of RDMA devices (MLX_IBV_DEVICES, or LocalAI's); - is standard input. What a ShardGroup has no
word for becomes a comment.

\b
  fleetctl import hostfile hosts.json
  fleetctl import hostfile ring.json --nodes studio-1,studio-2 | fleetctl apply -f -
  fleetctl import hostfile hosts.json --name studios -o studios.yaml
"""


_NODES = click.option(
    "--nodes",
    default="",
    metavar="NODE,NODE,...",
    help="The Macs in the file's order, which is that of ranks (else the names that it has for them).",
)
_MODELS = click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATH",
    help="A model to deploy with what the file says of routing; may be repeated.",
)
_OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (else standard output).",
)


@click.group("import", cls=SuggestingGroup)
def importing() -> None:
    """Make manifests of other tools' files.

    What has no counterpart becomes a comment that says what is instead of it, and nothing is written to the fleet.
    """


@importing.command(help=_HELP)
@click.argument("file")
@click.option("--name", help="Name of the group (else the file's).")
@_NODES
@click.option(
    "--backend",
    type=click.Choice(["ring", "jaccl", "jaccl-ring"]),
    help="How the Macs talk (else what the file says or is).",
)
@_OUTPUT
def hostfile(
    file: str, name: str | None, nodes: str, backend: str | None, output: Path | None
) -> None:
    """Read the file, and write the group."""
    wanted = GroupOptions(
        name=_object_name(file, name),
        nodes=_parse_nodes(nodes),
        backend=cast(Backend | None, backend),
    )
    try:
        found = build_group(read_hostfile(*_read_text(file)), wanted)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was imported:\n{error}") from error
    save(found.manifest(), output)


@importing.command()
@click.argument("file")
@click.option("--name", help="Name of the pool (else the file's).")
@_NODES
@_MODELS
@_OUTPUT
def mesh(file: str, name: str | None, nodes: str, output: Path | None, **said: Any) -> None:
    """Make a NodePool, and a ModelDeployment for each tier, of mlx-stack's mesh YAML."""
    pool, macs = _object_name(file, name), _parse_nodes(nodes)
    _convert(
        file,
        output,
        lambda text, source: of_mesh.convert(
            text, source, name=pool, nodes=macs, models=said["models"]
        ),
    )


@importing.command()
@click.argument("file")
@_NODES
@_MODELS
@_OUTPUT
def serving(file: str, nodes: str, models: tuple[str, ...], output: Path | None) -> None:
    """Make NodePools, and labels of Nodes, of mlx-serving's cluster.yaml."""
    _convert(
        file,
        output,
        lambda text, source: of_serving.convert(
            text, source, nodes=_parse_nodes(nodes), models=models
        ),
    )


@importing.command()
@click.argument("file")
@click.option("--name", help="Name of the group (else the file's).")
@_NODES
@_OUTPUT
def ring(file: str, name: str | None, nodes: str, output: Path | None) -> None:
    """Make a ShardGroup with its ModelDeployment of mlx_distributed_ring_inference's .env."""
    group = _object_name(file, name, fallback="ring")
    _convert(
        file,
        output,
        lambda text, source: of_ring.convert(text, source, name=group, nodes=_parse_nodes(nodes)),
    )


@importing.command()
@click.argument("file")
@click.option(
    "--hostfile",
    "host_file",
    help="The host file of its groups, if it is not where the model YAML says (beside it, if relative).",
)
@_NODES
@_OUTPUT
def localai(file: str, host_file: str | None, nodes: str, output: Path | None) -> None:
    """Make ModelDeployments of LocalAI's model YAML, and ShardGroups of the host files it names."""

    def found(path: str) -> tuple[str, str]:
        beside = Path(file).parent if file != sources.STDIN else Path()
        return _read_text(host_file or str(beside / path))

    around = of_localai.LocalAiContext(host_file=found, nodes=_parse_nodes(nodes))
    _convert(file, output, lambda text, source: of_localai.convert(text, source, around))


def _convert(file: str, output: Path | None, make: Callable[[str, str], str]) -> None:
    """Read the file, and write what `make` makes of its text and name."""
    try:
        made = make(*_read_text(file))
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was imported:\n{error}") from error
    save(made, output)


def _parse_nodes(nodes: str) -> tuple[str, ...]:
    return tuple(node.strip() for node in nodes.split(",")) if nodes else ()


def _read_text(file: str) -> tuple[str, str]:
    """Return the file's text, and its name. Raises ManifestErrors."""
    source, text = next(sources.read_all([file], recursive=False, stdin=sys.stdin.buffer))
    if isinstance(text, ManifestError):
        raise ManifestErrors([text])
    return text, source


def save(text: str, output: Path | None) -> None:
    """Write the text to the file, or to standard output where there is none."""
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FleetctlError(f"cannot write {output}: {error.strerror}") from error


def _object_name(file: str, given: str | None, fallback: str = "imported") -> str:
    """Return the name of the group or pool."""
    if given is None:
        stem = "" if file == sources.STDIN or Path(file).name == ".env" else Path(file).stem
        return dns_label(stem, fallback=fallback)
    if not re.fullmatch(NAME_PATTERN, given) or len(given) > 128:
        raise click.UsageError(
            f"--name {given}: a name has lower-case letters, digits, - and . only, as in studios-2"
        )
    return given
