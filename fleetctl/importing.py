"""`fleetctl import`: manifests from what other tools are told with."""

import re
import sys
from pathlib import Path
from typing import cast

import click

from fleetctl.errors import FleetctlError
from fleetctl.hostfiles.grouping import Wanted, grouped
from fleetctl.hostfiles.reading import read
from manifests import sources
from manifests.errors import ManifestError, ManifestErrors
from nodeagent.identity import label
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


@click.group("import")
def importing() -> None:
    """Make manifests of other tools' files."""


@importing.command(help=_HELP)
@click.argument("file")
@click.option("--name", help="Name of the group (else the file's).")
@click.option(
    "--nodes",
    default="",
    metavar="NODE,NODE,...",
    help="The Macs in rank order (else the names that ssh knows them by).",
)
@click.option(
    "--backend",
    type=click.Choice(["ring", "jaccl", "jaccl-ring"]),
    help="How the Macs talk (else what the file says or is).",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (else standard output).",
)
def hostfile(
    file: str, name: str | None, nodes: str, backend: str | None, output: Path | None
) -> None:
    """Read the file, and write the group."""
    wanted = Wanted(
        name=_name(file, name),
        nodes=tuple(node.strip() for node in nodes.split(",")) if nodes else (),
        backend=cast(Backend | None, backend),
    )
    try:
        found = grouped(read(*_text(file)), wanted)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was imported:\n{error}") from error
    save(found.manifest(), output)


def _text(file: str) -> tuple[str, str]:
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


def _name(file: str, given: str | None) -> str:
    """Return the group's name."""
    if given is None:
        return label(Path(file).stem, fallback="imported") if file != sources.STDIN else "imported"
    if not re.fullmatch(NAME_PATTERN, given) or len(given) > 128:
        raise click.UsageError(
            f"--name {given}: a name has lower-case letters, digits, - and . only, as in studios-2"
        )
    return given
