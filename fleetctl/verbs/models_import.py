"""The verb `fleetctl models import`: the models that other programs keep on this machine, listed and taken over."""

from collections.abc import Sequence
from pathlib import Path

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.output import printers
from machinery.clock import SystemClock
from machinery.environment import model_folders
from models.inspection import DEFAULT_MODELS_DIR
from models.model_store.cache_import import ImportRefusedError
from models.model_store.import_places import FoundModel, find_models, models_in
from models.model_store.store import ModelStore
from schemas import quantity

_HELP = """Import models that huggingface_hub, LM Studio or Ollama keeps on this machine.

\b
  fleetctl models import
  fleetctl models import mlx-community/Qwen3-8B-4bit qwen3:8b-mlx
  fleetctl models import --all
  fleetctl models import /Volumes/Disk/lmstudio --repo mlx-community/Qwen3-8B-4bit
  fleetctl models import ./Qwen3-8B-Q8_0.gguf

Without a name it lists what it finds, with sizes and what can be imported. A word that begins with /, ./, ../ or ~ is a
folder of one of these programs, of which all models are imported, or those of --repo; or it is a GGUF file.

Every file is hashed, because huggingface_hub does not verify what it downloads, and then shared by a clone or a hard link:
it takes no room on the same disk. Ollama's tensors are copied, because they get other names. The other program's files stay
as they are.

A GGUF file of llama, qwen2, qwen3 or gemma3 is converted: its weights get 16 bits, which `fleetctl models quantize` makes
smaller. The result is fleet/NAME, and pinned. Exit code 1: a model was refused.
"""


@click.command("import", help=_HELP)
@click.argument("words", nargs=-1, metavar="[NAME|FOLDER|FILE.gguf]...")
@click.option("--all", "is_all", is_flag=True, help="Import all that can be imported.")
@click.option(
    "--repo",
    "repos",
    multiple=True,
    help="Import this repository of a FOLDER only; repeatable.",
)
@click.option(
    "--models-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_MODELS_DIR,
    envvar="FLEET_MODELS_DIR",
    show_default=True,
    show_envvar=True,
    help="Folder with the models, as of the node agent.",
)
def import_models(
    words: tuple[str, ...], is_all: bool, repos: tuple[str, ...], models_dir: Path
) -> None:
    """Import models that huggingface_hub, LM Studio or Ollama keeps on this machine."""
    if is_all and words:
        raise click.UsageError("give names or --all, not both")
    folders = [Path(word).expanduser() for word in words if _is_folder(word)]
    names = [word for word in words if not _is_folder(word)]
    if repos and not folders:
        raise click.UsageError("--repo needs a FOLDER; without one, write the name alone")
    models = find_models(Path.home(), model_folders()) if names or not folders else ()
    if not words and not is_all:
        _list(models)
        return
    chosen = [model for model in models if is_all and not model.problem]
    chosen += _named(models, names)
    for folder in folders:
        chosen += _in_folder(folder, repos)
    store = ModelStore(models_dir.expanduser(), SystemClock())
    results = [_import(store, model) for model in chosen]
    if not all(results):
        raise click.exceptions.Exit(1)


def _is_folder(word: str) -> bool:
    is_path = word.startswith(("/", "./", "../", "~")) or word in (".", "..")
    return is_path or (word.endswith(".gguf") and Path(word).is_file())


def _list(found: Sequence[FoundModel]) -> None:
    if not found:
        click.echo(
            "no models of huggingface_hub, LM Studio or Ollama in their usual folders; name a folder to look into",
            err=True,
        )
        return
    titles = ["PROGRAM", "NAME", "SIZE", "IMPORT"]
    rows = [
        [
            model.program,
            model.name,
            quantity.show(model.size_bytes) if model.size_bytes else "-",
            model.problem or "yes",
        ]
        for model in found
    ]
    click.echo(printers.align_columns(rows, titles))


def _named(found: Sequence[FoundModel], names: Sequence[str]) -> list[FoundModel]:
    """Return the models with these names, of the first program that has one that can be imported."""
    chosen: list[FoundModel] = []
    for name in names:
        of_name = [model for model in found if model.name in (name, f"{name}:latest")]
        if not of_name:
            raise FleetctlError(
                f"no program here has {name}; `fleetctl models import` lists what it finds, and a folder begins with "
                "/, ./ or ~"
            )
        best = [model for model in of_name if not model.problem] or of_name
        chosen += [model for model in best if model.program == best[0].program]
    return chosen


def _in_folder(folder: Path, repos: tuple[str, ...]) -> list[FoundModel]:
    chosen = [model for model in models_in(folder) if not repos or model.name in repos]
    absent = set(repos) - {model.name for model in chosen}
    if absent or not chosen:
        what = ", ".join(sorted(absent)) or "models--*/snapshots, ORGANISATION/NAME or manifests"
        raise FleetctlError(
            f"{folder} has no {what}; expected a GGUF file, a cache of huggingface_hub, or a models "
            "folder of LM Studio or Ollama"
        )
    return chosen


def _import(store: ModelStore, found: FoundModel) -> bool:
    with ProgressLine() as progress:
        progress.show(f"reading {found.name}")
        try:
            model = found.import_into(store)
        except (ImportRefusedError, OSError) as error:
            progress.say(f"{found.name} refused: {error}")
            return False
        progress.clear()
        click.echo(f"{model.name} imported, {quantity.show(model.size_bytes)}")
    return True
