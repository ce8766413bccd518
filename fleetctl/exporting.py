"""`fleetctl export`: what the fleet declares, as manifests or as files of other tools."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from fleetctl import groups, reader, selector
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.exports import files as making
from fleetctl.exports import writing as putting
from fleetctl.hostfiles import writing
from fleetctl.hostfiles.writing import Exported, UnwritableError
from fleetctl.importing import save
from fleetctl.kinds import WRITABLE, kind_of
from fleetctl.lazy import SuggestingGroup
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import ApiObject
from store import objects

_ALL_HELP = """Write what the fleet declares as manifests: one file an object, in a folder for each kind.

\b
  fleetctl export -o fleet
  fleetctl export -o fleet --force && git -C fleet commit -am "as it runs"
  fleetctl export --kind modeldeployments -l team=a | less

They say what people decided and leave out defaults, statuses and what the fleet keeps; applied to an empty fleet they
make the same objects. API keys and passwords are no manifests, and are not in it (`fleetctl backup` has them). Files that
are there and say something else are left alone, and nothing is written, unless --force is given.
"""

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


@click.group("export", cls=SuggestingGroup, help=_ALL_HELP, invoke_without_command=True)
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write into (else standard output).",
)
@click.option(
    "--kind", "words", multiple=True, help="Objects of this kind only, such as md; may be repeated."
)
@click.option("-l", "--selector", "labels", default="", help="Objects with these labels: k=v,!k.")
@click.option("--force", is_flag=True, help="Write over files that say something else.")
@store_options
@click.pass_context
def exporting(
    context: click.Context, /, folder: Path | None, words: tuple[str, ...], **options: Any
) -> None:
    """Write the fleet as manifests, unless another form is asked for."""
    if context.invoked_subcommand is not None:
        said = (context.get_parameter_source(name) for name in context.params)
        if ParameterSource.COMMANDLINE in said:
            raise click.UsageError(
                f"flags of `export {context.invoked_subcommand}` go behind {context.invoked_subcommand}"
            )
        return
    chosen = _kinds(words)
    required = selector.parse(options["labels"])
    found = selector.select(run(_read(chosen, options)), required)
    made = making.exported(found)
    if not made.files:
        raise FleetctlError("there is nothing to export: no object of these kinds was declared")
    if folder is None:
        click.echo("---\n".join(file.text for file in made.files), nl=False)
    else:
        _put(folder, made, force=options["force"], is_all=not words and not options["labels"])
    for note in made.notes:
        click.echo(note, err=True)


def _kinds(words: Sequence[str]) -> list[Kind]:
    """Return the kinds that manifests have, or those of them that were asked for."""
    known = [kind for kind in kinds.KINDS if kind.written_by_users]
    chosen = [kind_of(word, WRITABLE) for word in words]
    for kind in chosen:
        if kind not in known:
            names = ", ".join(kind.plural for kind in known)
            raise FleetctlError(f"{kind.plural} are written by the fleet; export one of {names}")
    return chosen or known


async def _read(chosen: Sequence[Kind], options: dict[str, Any]) -> list[ApiObject]:
    async with opened(options) as transport:
        return [obj for kind in chosen for obj in await objects.list_all(transport, kind.type)]


def _put(folder: Path, made: making.Exported, *, force: bool, is_all: bool) -> None:
    """Write the files; say what became of them, and which others the fleet has no object for."""
    old = making.stale(putting.present(folder), made.files) if is_all else []
    for file, result in zip(
        made.files, putting.write(folder, made.files, force=force), strict=True
    ):
        click.echo(f"{folder / file.path} {result}")
    for path in old:
        click.echo(
            f"{folder / path} is of no object in the fleet; remove it if it is old", err=True
        )


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
