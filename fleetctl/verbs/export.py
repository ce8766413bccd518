"""Which files the running fleet makes: one an object, in a folder for each kind. Pure.

Writing an export's files into a folder: all or nothing where one stands in the way, each whole or not at all.

`fleetctl export`: what the fleet declares, as manifests or as files of other tools.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias, cast

import click
from click.core import ParameterSource

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.convert import hostfile_groups
from fleetctl.convert.hostfile_groups import HostFileExport, HostFileExportError
from fleetctl.fabric import admission
from fleetctl.objects import reader, selectors
from fleetctl.objects.kind_args import WRITABLE, kind_of
from fleetctl.verbs.import_ import save
from manifests.declaration import clean_manifest, is_bare
from manifests.plan import ORDER
from manifests.yaml import parser
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import APPLY_SET, ApiObject
from store import objects


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """A file to write."""

    path: PurePosixPath
    """Below the folder, as `modeldeployments/qwen.yaml`."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestExport:
    """What an export writes, and what people should know of it."""

    files: tuple[ExportFile, ...]
    notes: tuple[str, ...]


def plan_files(objects: Iterable[ApiObject]) -> ManifestExport:
    """Return a file for every object that somebody declared."""
    files: list[ExportFile] = []
    notes: list[str] = []
    bare = 0
    for obj in sorted(objects, key=lambda obj: (ORDER.index(obj.kind), obj.name)):
        if obj.metadata.deletion_timestamp is not None:
            notes.append(f"left out: {_label(obj)}, which is being deleted")
            continue
        if obj.kind == "Node" and is_bare(obj):
            bare += 1
            continue
        source = obj.metadata.annotations.get(APPLY_SET)
        if source is not None:
            notes.append(
                f"{_label(obj)} belongs to {source}; apply it from there, or it is refused"
            )
        path = PurePosixPath(_kind_folder(obj), f"{obj.name}.yaml")
        files.append(ExportFile(path=path, text=parser.dump(clean_manifest(obj))))
    if bare:
        what = "node, which has" if bare == 1 else "nodes, which have"
        notes.append(f"left out: {bare} {what} no labels, taints or settings of their own")
    return ManifestExport(files=tuple(files), notes=tuple(notes))


def stale_files(
    folder: Iterable[PurePosixPath], files: Iterable[ExportFile]
) -> list[PurePosixPath]:
    """Return the manifests in the folder that an export of these files would not write again."""
    written = {file.path for file in files}
    ours = {kind.plural for kind in kinds.KINDS}
    return sorted(
        path
        for path in folder
        if path not in written
        and len(path.parts) == 2
        and path.parts[0] in ours
        and path.suffix == ".yaml"
    )


def _kind_folder(obj: ApiObject) -> str:
    kind = kinds.by_name(obj.kind)
    assert kind is not None
    return kind.plural


def _label(obj: ApiObject) -> str:
    return f"{obj.kind.lower()}/{obj.name}"


WriteResult: TypeAlias = Literal["written", "unchanged"]
_SHOWN = 5


def write_files(folder: Path, files: Sequence[ExportFile], *, force: bool) -> list[WriteResult]:
    """Write the files; return what became of each. One that is as it should be is not touched.

    Raises:
        FleetctlError: others are in the way, and nothing was written; or the disk refuses.

    """
    try:
        there = {file.path: _read_text(folder / file.path) for file in files}
        others = [f for f in files if there[f.path] not in (None, f.text)]
        if others and not force:
            raise FleetctlError(_conflict_text(folder, others))
        for file in files:
            if there[file.path] != file.text:
                _write_file(folder / file.path, file.text)
    except OSError as error:
        where = error.filename or folder
        raise FleetctlError(f"cannot write {where}: {error.strerror}") from error
    return ["unchanged" if there[file.path] == file.text else "written" for file in files]


def list_files(folder: Path) -> list[PurePosixPath]:
    """Return the files in the folder's folders, relative to it."""
    found = folder.glob("*/*") if folder.is_dir() else ()
    return [PurePosixPath(path.relative_to(folder).as_posix()) for path in found]


def _read_text(path: Path) -> str | None:
    """Return the file's text; None if it is not there, and something that no text equals if it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return "\0"


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that renaming it is one step: whoever reads at that moment gets the old one or the new one.
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _conflict_text(folder: Path, others: Sequence[ExportFile]) -> str:
    shown = ", ".join(str(folder / file.path) for file in others[:_SHOWN])
    rest = len(others) - _SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return (
        f"nothing was written: {shown}{more} {'is' if len(others) == 1 else 'are'} there already, and "
        "not as the fleet has them. --force writes over them (comments in them are lost); or name another folder"
    )


_ALL_HELP = """Write what the fleet declares as manifests: one file an object, in a folder for each kind.

\b
  fleetctl export -o fleet
  fleetctl export -o fleet --force && git -C fleet commit -am "as it runs"
  fleetctl export --kind modeldeployments -l team=a | less

They say what people decided and leave out defaults, statuses and what the fleet keeps; applied to an empty fleet they
make the same objects. API keys and passwords are no manifests, and are not in it (`fleetctl backup` has them). Files that
are there and say something else are left alone, and nothing is written, unless --force is given.
"""

_HOSTFILE_HELP = """Write the host file of a ShardGroup: the same Macs in the same order, for mlx.launch or LocalAI.

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
    chosen = _chosen_kinds(words)
    required = selectors.parse_labels(options["labels"])
    found = selectors.select(run(_read_objects(chosen, options)), required)
    made = plan_files(found)
    if not made.files:
        raise FleetctlError("there is nothing to export: no object of these kinds was declared")
    if folder is None:
        click.echo("---\n".join(file.text for file in made.files), nl=False)
    else:
        _write_folder(
            folder, made, force=options["force"], is_all=not words and not options["labels"]
        )
    for note in made.notes:
        click.echo(note, err=True)


def _chosen_kinds(words: Sequence[str]) -> list[Kind]:
    """Return the kinds that manifests have, or those of them that were asked for."""
    known = [kind for kind in kinds.KINDS if kind.written_by_users]
    chosen = [kind_of(word, WRITABLE) for word in words]
    for kind in chosen:
        if kind not in known:
            names = ", ".join(kind.plural for kind in known)
            raise FleetctlError(f"{kind.plural} are written by the fleet; export one of {names}")
    return chosen or known


async def _read_objects(chosen: Sequence[Kind], options: dict[str, Any]) -> list[ApiObject]:
    async with open_store(options) as transport:
        return [obj for kind in chosen for obj in await objects.list_all(transport, kind.type)]


def _write_folder(folder: Path, made: ManifestExport, *, force: bool, is_all: bool) -> None:
    """Write the files; say what became of them, and which others the fleet has no object for."""
    old = stale_files(list_files(folder), made.files) if is_all else []
    for file, result in zip(made.files, write_files(folder, made.files, force=force), strict=True):
        click.echo(f"{folder / file.path} {result}")
    for path in old:
        click.echo(
            f"{folder / path} is of no object in the fleet; remove it if it is old", err=True
        )


@exporting.command(help=_HOSTFILE_HELP)
@click.argument("group")
@click.option(
    "--as",
    "kind",
    type=click.Choice(hostfile_groups.HOSTFILE_KINDS),
    default="launch",
    show_default=True,
    help="Which form of file.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65000),
    default=hostfile_groups.FIRST_PORT,
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
    found = run(_render_group(group, cast(hostfile_groups.HostFileKind, kind), port, options))
    for what in found.left_out:
        click.echo(f"left out: {what}", err=True)
    save(found.text, output)


async def _render_group(
    name: str, kind: hostfile_groups.HostFileKind, port: int, options: dict[str, Any]
) -> HostFileExport:
    async with open_store(options) as transport:
        group = await admission.read_group(transport, name)
        seats = admission.declared_seats(group.spec)
        if seats is None:
            nodes, ready = (
                await admission.read_nodes(transport),
                await reader.ready_nodes(transport),
            )
            seats = admission.find_seats(group, nodes, ready)
    try:
        return hostfile_groups.render_hostfile(group, seats, kind, port)
    except HostFileExportError as error:
        raise FleetctlError(str(error)) from error
