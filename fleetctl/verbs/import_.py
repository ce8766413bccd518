"""The verb `fleetctl import`: converts configuration of other tools to manifests."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import click

from compat.importers import jaccl as jaccl_importer
from compat.importers import localai as localai_importer
from compat.importers import mesh as mesh_importer
from compat.importers import ring_env as ring_importer
from compat.importers import serving_cluster as serving_importer
from compat.importers.drafts import GroupMaker
from fleetctl.cli.connect import read_once, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.convert.hostfile_groups import GroupOptions, build_group, one_mac_pool
from fleetctl.convert.hostfile_reader import read_hostfile
from fleetctl.convert.node_names import NodeNames, reported_addresses
from fleetctl.output.text_file import save_text
from manifests import sources
from manifests.errors import ManifestError, ManifestErrors
from nodeagent.node.identity import dns_label
from schemas.meta import NAME_PATTERN
from schemas.node import Node
from schemas.shardgroup import Backend
from store import object_trees

_HELP = """Convert a host file to a ShardGroup for `fleetctl apply`.

FILE is a host file of mlx.launch or mlx.distributed_config, a list of ring addresses (MLX_HOSTFILE, or LocalAI's), or
a matrix of RDMA devices (MLX_IBV_DEVICES, or LocalAI's). "-" reads standard input. Settings that a ShardGroup does not
have become comments.

\b
  fleetctl import hostfile hosts.json
  fleetctl import hostfile ring.json --nodes studio-1,studio-2 | fleetctl apply -f -
  fleetctl import hostfile hosts.json --name studios -o studios.yaml
"""


_MODELS = click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATH",
    help="A model to deploy with the file's routing settings; repeatable.",
)


def _file_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and the options that every importer has."""
    nodes = click.option(
        "--nodes",
        default="",
        metavar="NODE,NODE,...",
        help="Node of each Mac, in the file's order (the rank order). Default: the nodes whose agents report the file's "
        "addresses, else the names in the file.",
    )
    output = click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File to write (default: standard output).",
    )
    return click.argument("file")(nodes(output(store_options(command))))


@click.group("import", cls=SuggestingGroup)
def importing() -> None:
    """Convert configuration files of other tools to manifests.

    Settings without a counterpart become comments that name the alternative. Nothing is written to the fleet; it is
    read to find the nodes of addresses.
    """


@importing.command(help=_HELP)
@click.option("--name", help="Name of the ShardGroup (default: the file's name).")
@click.option(
    "--backend",
    type=click.Choice(["ring", "jaccl", "jaccl-ring"]),
    help="Communication backend (default: the one that the file names or implies).",
)
@_file_options
def hostfile(
    file: str, name: str | None, nodes: str, backend: str | None, output: Path | None, **fleet: Any
) -> None:
    """Convert a host file to a ShardGroup."""
    group_options = GroupOptions(
        name=_object_name(file, name),
        nodes=_node_names(nodes, fleet),
        backend=cast(Backend | None, backend),
    )

    def convert(text: str, source: str) -> str:
        hosts = read_hostfile(text, source)
        if len(hosts.hosts) == 1 and backend is None:
            return one_mac_pool(hosts, group_options)
        return build_group(hosts, group_options).manifest()

    _convert(file, output, convert)


@importing.command()
@click.option("--name", help="Name of the NodePool (default: the file's name).")
@_MODELS
@_file_options
def mesh(file: str, name: str | None, nodes: str, output: Path | None, **options: Any) -> None:
    """Convert mlx-stack's mesh YAML to a NodePool, and a ModelDeployment per tier."""
    convert = partial(
        mesh_importer.convert,
        name=_object_name(file, name),
        nodes=_node_names(nodes, options),
        models=options["models"],
    )
    _convert(file, output, convert)


@importing.command()
@_MODELS
@_file_options
def serving(
    file: str, nodes: str, models: tuple[str, ...], output: Path | None, **fleet: Any
) -> None:
    """Convert mlx-serving's cluster.yaml to NodePools, Node labels, and a ModelDeployment per --model in its tier."""
    names = _node_names(nodes, fleet)
    _convert(file, output, partial(serving_importer.convert, nodes=names, models=models))


@importing.command()
@click.option("--name", help="Name of the ShardGroup (default: the file's name).")
@_file_options
def ring(file: str, name: str | None, nodes: str, output: Path | None, **fleet: Any) -> None:
    """Convert mlx_distributed_ring_inference's .env to a ShardGroup and its ModelDeployment."""
    group = _object_name(file, name, fallback="ring")
    names = _node_names(nodes, fleet)
    _convert(file, output, partial(ring_importer.convert, name=group, nodes=names))


@importing.command()
@click.option("--name", help="Name of the ShardGroup (default: the file's name).")
@click.option(
    "--hostfile",
    "host_file",
    help="Host file, if it is not at the path in HOSTFILE (relative to FILE).",
)
@click.option("--model", default="", metavar="PATH", help="The model, if MODEL_DIR is not set.")
@_file_options
def jaccl(file: str, name: str | None, nodes: str, output: Path | None, **options: Any) -> None:
    """Convert mlx-jaccl-cluster's variables (.env or Makefile) and host file to a ShardGroup and a ModelDeployment."""
    convert = partial(
        jaccl_importer.convert,
        make_group=_group_maker(file, options["host_file"], _node_names(nodes, options)),
        name=_object_name(file, name, fallback="jaccl"),
        model=options["model"],
    )
    _convert(file, output, convert)


@importing.command()
@click.option(
    "--hostfile",
    "host_file",
    help="Host file of the model's groups, if it is not at the path in the model YAML (relative to that file).",
)
@click.option(
    "--default-hostfile",
    default="",
    envvar="MLX_DISTRIBUTED_HOSTFILE",
    help="Host file of mlx-distributed models whose options name none, as LocalAI reads it from this variable.",
)
@click.option(
    "--default-backend",
    type=click.Choice(["ring", "jaccl"]),
    envvar="MLX_DISTRIBUTED_BACKEND",
    help="Backend of mlx-distributed models whose options name none.",
)
@_file_options
def localai(
    file: str, host_file: str | None, nodes: str, output: Path | None, **options: Any
) -> None:
    """Convert LocalAI's model YAML to ModelDeployments, and its host files to ShardGroups."""
    default = options["default_hostfile"]
    context = localai_importer.LocalAiContext(
        make_group=_group_maker(file, host_file, _node_names(nodes, options)),
        default_host_file=str(Path(default).absolute()) if default else "",
        default_backend=options["default_backend"] or "",
    )
    _convert(file, output, partial(localai_importer.convert, context=context))


def _group_maker(file: str, given: str | None, names: NodeNames) -> GroupMaker:
    """Return what converts a host file: the given one, else the one at a path relative to the file."""
    folder = Path(file).parent if file != sources.STDIN else Path()

    def make_group(
        host_file: str, *, group: str, pool: str, backend: Backend, fast_synch: str | None
    ) -> tuple[bool, str]:
        hosts = read_hostfile(*_read_text(given or str(folder / host_file)))
        if len(hosts.hosts) == 1:
            return False, one_mac_pool(hosts, GroupOptions(name=pool, nodes=names))
        group_options = GroupOptions(
            name=group, nodes=names, backend=backend, fast_synch=fast_synch
        )
        return True, build_group(hosts, group_options).manifest()

    return make_group


def _convert(file: str, output: Path | None, convert: Callable[[str, str], str]) -> None:
    """Read the file, and write the manifests that `convert` makes of its text and name."""
    try:
        manifests = convert(*_read_text(file))
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was imported:\n{error}") from error
    save_text(manifests, output)


def _node_names(nodes: str, options: dict[str, Any]) -> NodeNames:
    """Return what finds nodes: as --nodes gives them, else by what the agents of the fleet report, if there is one."""

    @cache
    def by_address() -> Mapping[str, str]:
        try:
            trees = read_once(options, lambda store: object_trees.list_all(store, Node.__name__))
        except (FleetctlError, click.UsageError):
            return {}
        return reported_addresses(trees)

    given = tuple(node.strip() for node in nodes.split(",")) if nodes else ()
    return NodeNames(given=given, by_address=by_address)


def _read_text(file: str) -> tuple[str, str]:
    """Return the file's text and its name. Raises ManifestErrors."""
    source, text = next(sources.read_all([file], recursive=False, stdin=sys.stdin.buffer))
    if isinstance(text, ManifestError):
        raise ManifestErrors([text])
    return text, source


def _object_name(file: str, given: str | None, fallback: str = "imported") -> str:
    """Return the name of the ShardGroup or NodePool: as given, else made from the file's name."""
    if given is None:
        stem = "" if file == sources.STDIN or Path(file).name == ".env" else Path(file).stem
        return dns_label(stem, fallback=fallback)
    if not re.fullmatch(NAME_PATTERN, given) or len(given) > 128:
        raise click.UsageError(
            f"--name {given}: not a valid name; use lower-case letters, digits, '-' and '.', as in studios-2"
        )
    return given
