"""The verb `fleetctl models`: the models on the Macs of a fleet, or in a folder of this machine."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click
from click.core import ParameterSource

from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import process_options, run
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.hub_options import hub_options, hub_reference, pinned_hub, read_token
from fleetctl.cli.program import SuggestingGroup
from fleetctl.cli.terminal import ProgressLine, paint
from fleetctl.output import printers
from fleetctl.output.columns import age
from fleetctl.verbs import models_fleet
from fleetctl.verbs.models_export import export_model, find_local_model
from fleetctl.verbs.models_fit import fit
from fleetctl.verbs.models_import import import_models
from fleetctl.verbs.models_quantize import quantize
from fleetctl.verbs.models_search import search_models
from fleetctl.verbs.models_update_catalogue import update_catalogue
from machinery.clock import SystemClock
from models.hub.errors import ModelFetchError
from models.hub.fetcher import FetchLimits, FetchRequest, ModelFetcher
from models.hub.file_selection import DEFAULT_PATTERNS
from models.hub.progress import FetchMonitor, FetchProgress
from models.inspection import DEFAULT_MODELS_DIR
from models.model_store.integrity import FileDefect, check_model, discard_defects
from models.model_store.store import ModelStore, StoredModel
from schemas import duration, quantity

C = TypeVar("C", bound=Callable[..., Any])

_PROGRESS_S: Final = 0.25

_GROUP_HELP = """Fetch, list, check and remove models on the Macs of a fleet, or in a folder of this machine.

\b
  fleetctl models list
  fleetctl models pull mlx-community/Qwen3-8B-4bit --all
  fleetctl models check --hash
  fleetctl models list --local

With --local or --models-dir a command works on a folder of this machine, and needs no fleet. Files are kept once, by their SHA-256, below blobs; a model is a folder of links, ORGANISATION--NAME@COMMIT, that
spec.model.path can name. docs/operations/model-store.md describes the store.
"""


@click.group(
    cls=SuggestingGroup,
    help=_GROUP_HELP,
    short_help="Fetch, search, list, check and remove models.",
)
def models() -> None:
    """Fetch, list, check and remove models on the Macs of a fleet, or in a folder of this machine."""


models.add_command(export_model)
models.add_command(fit)
models.add_command(import_models)
models.add_command(quantize)
models.add_command(search_models)
models.add_command(update_catalogue)


def _models_dir_option(command: C) -> C:
    return click.option(
        "--models-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_MODELS_DIR,
        envvar="FLEET_MODELS_DIR",
        show_default=True,
        show_envvar=True,
        help="Folder with the models, as of the node agent.",
    )(command)


def _or_local(local: Callable[..., None]) -> Callable[[C], C]:
    """Add --local and --models-dir to a command of the fleet: with one of them `local` runs, and needs no fleet."""

    def decorate(command: C) -> C:
        @wraps(command)
        def choose(*, is_local: bool, models_dir: Path, **options: Any) -> None:
            source = click.get_current_context().get_parameter_source("models_dir")
            is_local = is_local or options.pop("target", None) == "local"
            if is_local or source is ParameterSource.COMMANDLINE:
                local(models_dir=models_dir, **options)
            else:
                command(**options)

        flag = click.option(
            "--local", "is_local", is_flag=True, help="Work on the folder of this machine."
        )
        return cast("C", flag(_models_dir_option(choose)))

    return decorate


def _nodes_option(command: C) -> C:
    return click.option(
        "--nodes", default="", metavar="NAME,...", help="Macs to ask (default: all that are known)."
    )(command)


def _target_options(command: C) -> C:
    every = click.option("--all", "is_all", is_flag=True, help="Every Mac of the fleet.")
    return click.option("--nodes", default="", metavar="NAME,...", help="Macs that do it.")(
        every(command)
    )


def _open_store(models_dir: Path) -> ModelStore:
    return ModelStore(models_dir.expanduser(), SystemClock())


@contextmanager
def _errors_translated() -> Iterator[None]:
    try:
        yield
    except ModelFetchError as error:
        raise FleetctlError(f"{error.reason}: {error}") from error
    except (OSError, ValueError) as error:
        raise FleetctlError(str(error)) from error


def _list_local(
    *, words: tuple[str, ...], output: str, models_dir: Path, **fleet_options: Any
) -> None:
    if words or output in ("yaml", "wide"):
        raise click.UsageError("names, -o yaml and -o wide are for the models of a fleet")
    del fleet_options
    store = _open_store(models_dir)
    with _errors_translated():
        stored_models = store.models()
    if output == "json":
        trees = {"models": [_model_tree(model) for model in stored_models]}
        print_tree(trees, "json")
        return
    if not stored_models:
        click.echo(f"no models fetched into {store.root}", err=True)
        return
    titles = ["NAME", "SIZE", "FILES", "FETCHED", "LOADED", "PINNED"]
    click.echo(
        printers.align_columns([_model_row(store, model) for model in stored_models], titles)
    )


def _model_tree(model: StoredModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "repo": model.repo,
        "commit": model.commit,
        "bytes": model.size_bytes,
        "absentBytes": model.absent_bytes,
        "files": [{"path": f.path, "bytes": f.size, "sha256": f.sha256} for f in model.files],
        "fetchedAt": model.fetched_at,
        "loadedAt": model.loaded_at,
        "isPinned": model.is_pinned,
    }


def _model_row(store: ModelStore, model: StoredModel) -> list[str]:
    now = store.clock.now()
    loaded = model.loaded_at
    return [
        model.name,
        models_fleet.show_size(model.size_bytes, model.absent_bytes),
        str(len(model.files)),
        age(model.fetched_at, now),
        "-" if loaded is None else age(loaded, now),
        "yes" if model.is_pinned else "-",
    ]


_LIST_HELP = """List the models on every Mac, with their sizes, loads, pins and users.

\b
  fleetctl models list
  fleetctl models list 'mlx-community/Qwen*' --nodes mac-1,mac-2 -o wide
  fleetctl models list --unused

Folders that no hub filled follow, as the Macs report them: present, or why a deployment that names one cannot use it.
A Mac that does not answer is told, and hides no other. Exit code 1: a Mac did not answer.
"""


@models.command("list", help=_LIST_HELP)
@click.argument("words", nargs=-1, metavar="[NAME...]")
@output_option("table", "wide", "json", "yaml")
@click.option("--unused", is_flag=True, help="Only models that nothing uses.")
@click.option("--pinned", is_flag=True, help="Only pinned models.")
@_nodes_option
@_or_local(_list_local)
@process_options
def list_models(words: tuple[str, ...], **options: Any) -> None:
    """List the models on every Mac, with their sizes, loads, pins and users."""
    models_fleet.list_fleet(words, options)


_CHECK_HELP = """Check that models are whole: links and sizes, and with --hash every byte.

\b
  fleetctl models check
  fleetctl models check --hash --nodes mac-1
  fleetctl models check mlx-community/Qwen3-8B-4bit --local --hash --discard

Names are folders or repositories. Without a name: every model of a hub that a replica needs, on each node that needs it,
and every folder that a deployment names, as each node reports it (without digests to compare with); with --local every
model of the folder. Exit code 1: a model is damaged, or absent where it is needed.
"""


def _check_local(
    *,
    words: tuple[str, ...],
    hashes: bool,
    discard: bool,
    models_dir: Path,
    **fleet_options: Any,
) -> None:
    del fleet_options
    store = _open_store(models_dir)
    recorded = store.manifest_names()
    wanted = [_recorded_name(store, word, recorded) for word in words] or list(recorded)
    if not wanted:
        click.echo(f"no models fetched into {store.root}; nothing is checked", err=True)
    with _errors_translated(), ProgressLine() as progress:
        file_defects: list[FileDefect] = []
        for name in wanted:
            progress.show(f"checking {name}")
            file_defects += check_model(store, name, hashes=hashes)
        damaged = {defect.model for defect in file_defects}
        for name in wanted:
            if name not in damaged:
                stored = store.find_by_name(name)
                absent = 0 if stored is None else len(stored.absent)
                click.echo(f"{name}: {models_fleet.check_result(absent)}")
        for defect in file_defects:
            where = f"{defect.model}/{defect.path}".rstrip("/")
            click.echo(f"{where}: {paint(defect.defect, 'bad')}: {defect.message}")
        if file_defects and discard:
            for name in discard_defects(store, tuple(file_defects)):
                click.echo(f"{name} removed; fetch it again: only what was damaged will be fetched")
    if file_defects:
        raise click.exceptions.Exit(1)


@models.command("check", help=_CHECK_HELP)
@click.argument("words", nargs=-1, metavar="[NAME...]")
@click.option("--hash", "hashes", is_flag=True, help="Read and hash every byte.")
@click.option(
    "--discard",
    is_flag=True,
    help="With --local: remove damaged contents and the models that have them, so that the next fetch brings them again.",
)
@_nodes_option
@_or_local(_check_local)
@process_options
def check_models(words: tuple[str, ...], discard: bool, **options: Any) -> None:
    """Check that models are whole: links and sizes, and with --hash every byte."""
    if discard:
        raise click.UsageError("--discard needs --local: run it on the Mac with the damage")
    models_fleet.check_fleet(words, options)


def _recorded_name(store: ModelStore, word: str, recorded: tuple[str, ...]) -> str:
    """Return the name of a model, a damaged one included."""
    return word if word in recorded else find_local_model(store, word).name


def _remove_local(*, words: tuple[str, ...], models_dir: Path, **fleet_options: Any) -> None:
    del fleet_options
    store = _open_store(models_dir)
    stored_models = [find_local_model(store, word) for word in words]
    for model in stored_models:
        if model.is_pinned:
            raise FleetctlError(
                f"{model.name} is pinned; run `fleetctl models unpin {model.name}` first"
            )
    with _errors_translated():
        for model in stored_models:
            freed = store.remove(model.name)
            click.echo(f"{model.name} removed, {quantity.show(freed)} freed")


_REMOVE_HELP = """Remove models; files that other models have stay.

\b
  fleetctl models rm mlx-community/Qwen3-8B-4bit --nodes mac-1
  fleetctl models rm mlx-community--Qwen3-8B-4bit@1f2e3d4c5b6a --all --dry-run

On a fleet it shows what would go, asks, and refuses a model that something uses or that is pinned. With --local an engine
that runs the model goes on until it ends.
"""


@models.command("rm", help=_REMOVE_HELP)
@click.argument("words", nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Only show what would be removed.")
@_target_options
@_or_local(_remove_local)
@process_options
def remove_models(words: tuple[str, ...], **options: Any) -> None:
    """Remove models; files that other models have stay."""
    if options["yes"] and options["is_dry_run"]:
        raise click.UsageError("give --yes or --dry-run, not both")
    models_fleet.change_fleet(words, options, verb="rm")


def _pin_local(*, words: tuple[str, ...], models_dir: Path, **fleet_options: Any) -> None:
    del fleet_options
    store = _open_store(models_dir)
    for model in [find_local_model(store, word) for word in words]:
        with _errors_translated():
            store.pin(model.name)
        click.echo(f"{model.name} pinned")


@models.command("pin")
@click.argument("words", nargs=-1, required=True, metavar="NAME...")
@_target_options
@_or_local(_pin_local)
@process_options
def pin_models(words: tuple[str, ...], **options: Any) -> None:
    """Protect models from collection, which removes unused models of a full disk."""
    models_fleet.change_fleet(words, options, verb="pin")


def _unpin_local(*, words: tuple[str, ...], models_dir: Path, **fleet_options: Any) -> None:
    del fleet_options
    store = _open_store(models_dir)
    for model in [find_local_model(store, word) for word in words]:
        with _errors_translated():
            was_pinned = store.unpin(model.name)
        click.echo(f"{model.name} {'unpinned' if was_pinned else 'was not pinned'}")


@models.command("unpin")
@click.argument("words", nargs=-1, required=True, metavar="NAME...")
@_target_options
@_or_local(_unpin_local)
@process_options
def unpin_models(words: tuple[str, ...], **options: Any) -> None:
    """Allow the collection of models again."""
    models_fleet.change_fleet(words, options, verb="unpin")


def _pull_local(*, repo: str, **options: Any) -> None:
    with _errors_translated():
        model = run(_pull(repo, options))
    click.echo(f"{model.folder}: {len(model.files)} files, {quantity.show(model.size_bytes)}")


_PULL_HELP = """Fetch a model from a hub onto Macs of the fleet, or into the store of this machine.

\b
  fleetctl models pull mlx-community/Qwen3-8B-4bit --all
  fleetctl models pull mlx-community/Qwen3-8B-4bit --nodes mac-1,mac-2
  fleetctl models pull mlx-community/Qwen3-8B-4bit --to local
  fleetctl models pull mlx-community/Qwen3-8B-4bit --to local --revision v1 --hub-token-file token.txt
  fleetctl models pull Qwen/Qwen3-8B-MLX-4bit --source modelscope --all

Every file is compared with the hub's SHA-256. A pull that was interrupted goes on where it was when it is started again.
Python code is never fetched. A gated repository takes the token of --hub-token-file, or that of
`fleetctl create hubtoken`, which a Mac gets while it fetches.
"""


@models.command("pull", help=_PULL_HELP)
@click.argument("repo", metavar="ORGANISATION/NAME")
@click.option(
    "--to",
    "target",
    type=click.Choice(["local"]),
    help="local: the folder of this machine, as --local.",
)
@click.option(
    "--files",
    "patterns",
    multiple=True,
    help=f"Pattern of files to fetch; repeatable (default: {', '.join(DEFAULT_PATTERNS)}).",
)
@hub_options
@_target_options
@_or_local(_pull_local)
@process_options
def pull_model(repo: str, **options: Any) -> None:
    """Fetch a model from a hub onto Macs of the fleet, or into the store of this machine."""
    with _errors_translated():
        models_fleet.pull_fleet(repo, options)


async def _pull(repo: str, options: dict[str, Any]) -> StoredModel:
    store = _open_store(options["models_dir"])
    source = hub_reference(repo, options, options["patterns"])
    clock = store.clock
    monitor = FetchMonitor(clock)
    with ProgressLine() as progress:
        async with pinned_hub(source, options, read_token(options)) as (hub, pinned):
            request = FetchRequest(
                repo=repo, commit=pinned.revision, patterns=pinned.files or DEFAULT_PATTERNS
            )

            async def draw() -> None:
                while progress.is_shown:
                    progress.show(progress_text(monitor.snapshot()))
                    await clock.sleep(_PROGRESS_S)

            async with asyncio.TaskGroup() as group:
                drawing = group.create_task(draw())
                try:
                    return await ModelFetcher(store, clock, limits=FetchLimits()).fetch(
                        hub, request, monitor=monitor
                    )
                except (ModelFetchError, OSError, ValueError) as error:
                    failure = error
                finally:
                    drawing.cancel()
    raise failure


def progress_text(progress: FetchProgress) -> str:
    """Return one line about a fetch."""
    if progress.waiting:
        return progress.waiting
    if not progress.total_bytes:
        return f"{progress.phase.lower()} {progress.source}"
    eta = "" if progress.eta_s is None else f", {duration.show(progress.eta_s)} left"
    return (
        f"{progress.percent} % of {quantity.show(progress.total_bytes)}, "
        f"{quantity.show(int(progress.bytes_per_s))}/s from {progress.source}{eta}"
    )
