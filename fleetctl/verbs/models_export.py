"""The verb `fleetctl models export`: a model of this machine's store becomes a plain folder or a tar file."""

from pathlib import Path

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from machinery.clock import SystemClock
from models.inspection import DEFAULT_MODELS_DIR
from models.model_store.export import ExportError, export_folder, export_tar
from models.model_store.store import ModelStore, StoredModel
from schemas import quantity

_HELP = """Export a model of this machine as a plain folder, or as a tar file if TARGET ends with .tar.

\b
  fleetctl models export mlx-community/Qwen3-8B-4bit /Volumes/Stick/Qwen3-8B-4bit
  fleetctl models export fleet--Qwen3-8B-1f2e3d4c5b6a-4bit-g64@9a8b7c6d5e4f qwen.tar

Every byte is compared with its digest while it is written. TARGET appears in one step, when it is whole. A folder that was
interrupted goes on with the files that are whole; a tar file starts again.
"""


def find_local_model(store: ModelStore, word: str) -> StoredModel:
    """Return the model of a folder name, or of a repository that has one commit here. Raises FleetctlError."""
    models = [model for model in store.models() if word in (model.name, model.repo)]
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(stored_model.name for stored_model in models)
        raise FleetctlError(f"{word} has {len(models)} commits here; name one: {names}")
    raise FleetctlError(
        f"no model {word} in {store.root}; `fleetctl models list` shows what is there"
    )


@click.command("export", help=_HELP)
@click.argument("name", metavar="NAME")
@click.argument("target", metavar="TARGET", type=click.Path(path_type=Path))
@click.option(
    "--models-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_MODELS_DIR,
    envvar="FLEET_MODELS_DIR",
    show_default=True,
    show_envvar=True,
    help="Folder with the models, as of the node agent.",
)
def export_model(name: str, target: Path, models_dir: Path) -> None:
    """Export a model of this machine as a plain folder, or as a tar file."""
    store = ModelStore(models_dir.expanduser(), SystemClock())
    model = find_local_model(store, name)
    target = target.expanduser().absolute()
    written = 0
    with ProgressLine() as progress:

        def report(count: int) -> None:
            nonlocal written
            written += count
            share = 100 * written // max(model.size_bytes, 1)
            progress.show(f"{model.name}: {share} % of {quantity.show(model.size_bytes)}")

        export = export_tar if target.suffix == ".tar" else export_folder
        try:
            export(store, model, target, report)
        except (ExportError, OSError) as error:
            raise FleetctlError(str(error)) from error
    click.echo(f"{model.name} exported to {target}, {quantity.show(model.size_bytes)}")
