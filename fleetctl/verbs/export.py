"""The verb `fleetctl export`: writes the fleet's objects as manifests, or a ShardGroup as a host file."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeAlias

import click
from click.core import ParameterSource
from typing_extensions import override

from fleetctl.cli.connect import open_store, run, store_options, with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.convert import hostfile_groups
from fleetctl.convert.hostfile_groups import HostFileExportError, HostFileKind
from fleetctl.fabric import admission
from fleetctl.objects import reader, selectors
from fleetctl.objects.kind_args import WRITABLE, kind_of
from fleetctl.objects.targets import object_ref
from fleetctl.output.text_file import save_text
from fleetctl.verbs import export_metrics
from manifests.declaration import clean_manifest, is_bare
from manifests.plan import ORDER
from manifests.yaml import comments, nodes, parser
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import APPLY_SET, ApiObject
from store import objects
from store.port import Transport


class ExportFile(NamedTuple):
    """A manifest file to write."""

    path: PurePosixPath
    """Path below the export folder, such as `modeldeployments/qwen.yaml`."""
    text: str


def plan_files(objects: Iterable[ApiObject]) -> tuple[list[ExportFile], list[str]]:
    """Return a file for every object that a user declared, and notes about the others."""
    files: list[ExportFile] = []
    notes: list[str] = []
    bare = 0
    for obj in sorted(objects, key=lambda obj: (ORDER.index(obj.kind), obj.name)):
        if obj.metadata.deletion_timestamp is not None:
            notes.append(f"left out: {object_ref(obj)}, which is being deleted")
            continue
        if obj.kind == "Node" and is_bare(obj):
            bare += 1
            continue
        source = obj.metadata.annotations.get(APPLY_SET)
        if source is not None:
            notes.append(
                f"{object_ref(obj)} belongs to {source}; apply it from there, or the change is refused"
            )
        path = PurePosixPath(kind_of(obj.kind).plural, f"{obj.name}.yaml")
        files.append(ExportFile(path, parser.dump(clean_manifest(obj))))
    if bare:
        what = "node, which has" if bare == 1 else "nodes, which have"
        notes.append(f"left out: {bare} {what} no labels, taints or settings of their own")
    return files, notes


def stale_files(
    folder: Iterable[PurePosixPath], files: Iterable[ExportFile]
) -> list[PurePosixPath]:
    """Return manifests in the folder that an export of these files would not write."""
    written = {file.path for file in files}
    kind_folders = {kind.plural for kind in kinds.KINDS}
    return sorted(
        path
        for path in folder
        if path not in written
        and len(path.parts) == 2
        and path.parts[0] in kind_folders
        and path.suffix == ".yaml"
    )


WriteResult: TypeAlias = Literal["written", "unchanged"]
_MAX_LISTED = 5


def write_files(
    folder: Path, files: Sequence[ExportFile], *, force: bool, say: Callable[[str], None]
) -> list[WriteResult]:
    """Write the files; return for each whether it was written or unchanged.

    A file with the same values stays as it is. Another one keeps the comments of the fields that it still has, and
    `say` is told those that it loses.

    Raises:
        FleetctlError: an existing file differs and `force` is off (nothing is written), or a write fails.

    """
    try:
        existing = {file.path: _read_text(folder / file.path) for file in files}
        changed = {file.path for file in files if not _says_the_same(existing[file.path], file)}
        conflicts = [f for f in files if f.path in changed and existing[f.path] is not None]
        if conflicts and not force:
            raise FleetctlError(_conflict_text(folder, conflicts))
        for file in files:
            if file.path in changed:
                text, gone = comments.keep_comments(existing[file.path] or "", file.text)
                path = folder / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                # Write to a temporary file and rename it: a reader sees the old file or the new one, never half of one.
                temporary = path.with_name(f".{path.name}.part")
                try:
                    temporary.write_text(text, encoding="utf-8")
                    temporary.replace(path)
                finally:
                    temporary.unlink(missing_ok=True)
                for comment in gone:
                    say(f"{folder / file.path}: comment of a field that is gone: #{comment}")
    except OSError as error:
        where = error.filename or folder
        raise FleetctlError(f"cannot write {where}: {error.strerror}") from error
    return ["written" if file.path in changed else "unchanged" for file in files]


def _says_the_same(text: str | None, file: ExportFile) -> bool:
    """Return whether an existing file has the values of the export, in whatever form and with whatever comments."""
    if text is None or text == file.text:
        return text is not None
    parsed_file = parser.parse(text, "")
    values = [nodes.plain_value(root) for root in parsed_file.documents]
    fresh = [nodes.plain_value(root) for root in parser.parse(file.text, "").documents]
    return not parsed_file.problems and values == fresh


def list_files(folder: Path) -> list[PurePosixPath]:
    """Return the files one level below the folder, relative to it."""
    found = folder.glob("*/*") if folder.is_dir() else ()
    return [PurePosixPath(path.relative_to(folder).as_posix()) for path in found]


def _read_text(path: Path) -> str | None:
    """Return the file's text; None if it does not exist, and a text that equals no manifest if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return "\0"


def _conflict_text(folder: Path, conflicts: Sequence[ExportFile]) -> str:
    shown = ", ".join(str(folder / file.path) for file in conflicts[:_MAX_LISTED])
    rest = len(conflicts) - _MAX_LISTED
    more = f" and {rest} more" if rest > 0 else ""
    verb = "exists and differs" if len(conflicts) == 1 else "exist and differ"
    return (
        f"nothing was written: {shown}{more} {verb} from the fleet. "
        "Use --force to overwrite (comments of fields that remain are kept), or choose another folder"
    )


_ALL_HELP = """Write the fleet's objects as manifests: one file per object, in one folder per kind.

\b
  fleetctl export -o fleet
  fleetctl export -o fleet --force && git -C fleet commit -am "as it runs"
  fleetctl export --kind modeldeployments -l team=a | less

The manifests contain declared settings only: no defaults, status, or fields that the fleet manages. Applied to an empty
fleet, they create the same objects. API keys and passwords are not exported (`fleetctl backup` includes them). If an
existing file differs, nothing is written unless --force is given. Comments of fields that remain are kept.
"""

_HOSTFILE_HELP = """Write the host file of a ShardGroup: the same Macs in rank order, for mlx.launch or LocalAI.

\b
  launch        for mlx.launch --hostfile
  ring          MLX_HOSTFILE: the addresses that each rank listens on
  localai-ring  the same with one address per rank, for LocalAI
  devices       MLX_IBV_DEVICES and LocalAI's matrix: the RDMA devices between Macs

\b
  fleetctl export hostfile studios -o hosts.json
  mlx.launch --hostfile hosts.json -- python script.py

mlx.launch connects with ssh to the node's name. Settings that the file cannot express are listed on standard error.
"""


class _FolderPath(click.Path):
    """A folder to write into; formats, which -o names in other commands, are refused."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("yaml", "json", "name", "wide"):
            self.fail(
                f"-o is the folder to write into, not a format: manifests are YAML, and are printed without -o. For a "
                f"folder of this name write -o ./{value}",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


@click.group(
    "export",
    cls=SuggestingGroup,
    help=_ALL_HELP,
    invoke_without_command=True,
    short_help="Write the fleet's objects as manifests.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=_FolderPath(file_okay=False, path_type=Path),
    help="Folder to write into (default: standard output).",
)
@click.option(
    "--kind", "words", multiple=True, help="Export only this kind, such as md; repeatable."
)
@click.option(
    "-l", "--selector", "labels", default="", help="Export objects with these labels: k=v,!k."
)
@click.option("--force", is_flag=True, help="Overwrite files that differ from the fleet.")
@store_options
@click.pass_context
def exporting(
    context: click.Context, /, folder: Path | None, words: tuple[str, ...], **options: Any
) -> None:
    """Write the fleet's objects as manifests; subcommands write other formats."""
    if context.invoked_subcommand is not None:
        flag_sources = (context.get_parameter_source(name) for name in context.params)
        if ParameterSource.COMMANDLINE in flag_sources:
            raise click.UsageError(
                f"put the flags of `export {context.invoked_subcommand}` after {context.invoked_subcommand}"
            )
        return
    chosen = _chosen_kinds(words)
    label_selector = selectors.parse_labels(options["labels"])
    api_objects = selectors.select(run(_read_objects(chosen, options)), label_selector)
    exported, notes = plan_files(api_objects)
    if not exported:
        raise FleetctlError("there is nothing to export: no object of these kinds is declared")
    if folder is None:
        click.echo("---\n".join(file.text for file in exported), nl=False)
    else:
        _write_folder(
            folder, exported, force=options["force"], is_all=not words and not options["labels"]
        )
    for note in notes:
        click.echo(note, err=True)


def _chosen_kinds(words: Sequence[str]) -> list[Kind]:
    """Return the kinds to export: those of the words, else all that users declare."""
    chosen = [kind_of(word, WRITABLE) for word in words]
    for kind in chosen:
        if not kind.written_by_users:
            names = ", ".join(kind.plural for kind in WRITABLE)
            raise FleetctlError(f"the fleet writes {kind.plural} itself; export one of {names}")
    return chosen or [*WRITABLE]


async def _read_objects(chosen: Sequence[Kind], options: dict[str, Any]) -> list[ApiObject]:
    async with open_store(options) as transport:
        return [obj for kind in chosen for obj in await objects.list_all(transport, kind.type)]


def _write_folder(
    folder: Path, exported: Sequence[ExportFile], *, force: bool, is_all: bool
) -> None:
    """Write the files and report each; list files in the folder without an object in the fleet."""
    stale = stale_files(list_files(folder), exported) if is_all else []
    results = write_files(
        folder, exported, force=force, say=lambda line: click.echo(line, err=True)
    )
    for file, result in zip(exported, results, strict=True):
        click.echo(f"{folder / file.path} {result}")
    for path in stale:
        click.echo(
            f"{folder / path} belongs to no object in the fleet; delete it if it is obsolete",
            err=True,
        )


for _command in (export_metrics.prometheus, export_metrics.alerts, export_metrics.grafana):
    exporting.add_command(_command)


@exporting.command(help=_HOSTFILE_HELP)
@click.argument("group")
@click.option(
    "--as",
    "kind",
    type=click.Choice(hostfile_groups.HOSTFILE_KINDS),
    default="launch",
    show_default=True,
    help="Format of the host file.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65000),
    default=hostfile_groups.FIRST_PORT,
    show_default=True,
    help="First port that ranks of a ring listen on.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (default: standard output).",
)
@with_store
async def hostfile(
    transport: Transport, group: str, kind: HostFileKind, port: int, output: Path | None, **_: Any
) -> None:
    """Write the host file of a ShardGroup."""
    shard_group = await admission.read_group(transport, group)
    seats = admission.declared_seats(shard_group.spec)
    if seats is None:
        nodes, ready = await admission.read_nodes(transport), await reader.ready_nodes(transport)
        seats = admission.find_seats(shard_group, nodes, ready)
    try:
        export = hostfile_groups.render_hostfile(shard_group, seats, kind, port)
    except HostFileExportError as error:
        raise FleetctlError(str(error)) from error
    for what in export.left_out:
        click.echo(f"left out: {what}", err=True)
    save_text(export.text, output)
