"""Does the installed mlx-lm know this architecture? Looks at its files; must not import it.

Looking at deployed models on this node's disk. Reads; decides nothing.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from models import adapter_files, model_files, split_options
from models.split_options import SplitInspector
from schemas.node import AdapterReport, ModelReport


def unsupported_reason(module: str) -> str:
    """Return why the engine could not build a model of this architecture; "" if it can."""
    spec = importlib.util.find_spec("mlx_lm")  # finds, does not import
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return "mlx-lm is not installed on this node"
    is_name = "/" not in module and len(module) < 100
    if is_name and any((Path(f) / "models" / f"{module}.py").is_file() for f in folders):
        return ""
    version = importlib.metadata.version("mlx-lm")
    return (
        f"mlx-lm {version} on this node has no architecture {module}; a newer version may have it"
    )


def resolve_path(path: str, models_dir: Path) -> Path:
    """Return the folder that a deployment's path means on this node."""
    return Path(path) if path.startswith("/") else models_dir / path


def report_model(
    path: str, models_dir: Path, *, casts_to_float32: bool, splitter: SplitInspector | None = None
) -> ModelReport:
    """Return what this node says of a model: its geometry, or why it cannot be used.

    With a `splitter`, also over how many Macs it can be split, once that is known.
    """
    folder = resolve_path(path, models_dir)
    try:
        facts = model_files.inspect_model(folder)
        complaint = unsupported_reason(facts.module)
        if complaint:
            return ModelReport(path=path, reason="ArchitectureUnsupported", message=complaint)
        geometry = model_files.model_geometry(facts, casts_to_float32=casts_to_float32)
    except model_files.ModelUnusableError as error:
        return ModelReport(path=path, reason=error.reason, message=_error_text(error))
    if splitter is not None:
        found = splitter.ask(folder, facts)
        splitting = split_options.splitting_report(
            facts, geometry, found, casts_to_float32=casts_to_float32
        )
        geometry = geometry.model_copy(update={"splitting": splitting})
    return ModelReport(path=path, geometry=geometry)


def report_adapter(path: str, models_dir: Path, *, casts_to_float32: bool) -> AdapterReport:
    """Return what this node says of an adapter: its size, or why it cannot be used."""
    try:
        facts = adapter_files.inspect_adapter(resolve_path(path, models_dir))
    except model_files.ModelUnusableError as error:
        return AdapterReport(path=path, reason=error.reason, message=_error_text(error))
    size = facts.bytes_in_memory(casts_to_float32=casts_to_float32)
    return AdapterReport(path=path, weights_bytes=size)


def _error_text(error: model_files.ModelUnusableError) -> str:
    # A file's name may hold bytes that are no text, and the store takes text only.
    return str(error).encode(errors="replace").decode()


def report_models(
    paths: Iterable[str],
    models_dir: Path,
    *,
    casts_to_float32: bool,
    splitter: SplitInspector | None = None,
    split: AbstractSet[str] = frozenset(),
) -> tuple[ModelReport, ...]:
    """Return the reports of all paths, in order of the paths; of those in `split` also how they can be split."""
    return tuple(
        report_model(
            path,
            models_dir,
            casts_to_float32=casts_to_float32,
            splitter=splitter if path in split else None,
        )
        for path in sorted(set(paths))
    )


def report_adapters(
    paths: Iterable[str], models_dir: Path, *, casts_to_float32: bool
) -> tuple[AdapterReport, ...]:
    """Return the same for adapters."""
    return tuple(
        report_adapter(path, models_dir, casts_to_float32=casts_to_float32)
        for path in sorted(set(paths))
    )
