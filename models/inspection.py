"""Inspection of the models and adapters on this machine's disk: what a node reports of each."""

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from models import inspection_process, model_files, split_options
from models.hub.remote_inspection import snapshot_facts
from models.model_files import PARTIAL_MARK, ModelFacts, ModelUnusableError
from models.split_options import SplitFailure, SplitInspector, SplitShapes
from schemas.deployment import ModelDeployment
from schemas.model_snapshot import ModelSnapshot
from schemas.model_use import ModelUse
from schemas.node import AdapterReport, ModelReport
from schemas.shardgroup import ShardGroup

_NO_HEADERS: Final = "the headers of its weight files are too long to be stored; fetch it with `fleetctl models pull` on the group's Macs"


def model_use(deployment: ModelDeployment, groups: Iterable[ShardGroup]) -> ModelUse:
    """Return what agents must know of a deployment; `groups` are those of the fleet."""
    spec, source = deployment.spec, deployment.spec.model
    is_split = spec.sharding != "Never"
    fallbacks = {
        fallback.model
        for group in groups
        if spec.sharding in ("Auto", group.name)
        for fallback in group.spec.fallbacks
        if fallback.model is not None
    }
    own = {source.folder} if source.folder else set()
    drafts = {source.draft.path} if source.draft else set()
    return ModelUse(
        deployment=deployment.name,
        models=tuple(sorted(own | drafts | fallbacks)),
        split_models=tuple(sorted((own if is_split else set()) | fallbacks)),
        is_split=is_split,
        adapters=source.adapter_paths,
        priority=spec.priority,
        keeps_prompts=spec.kv_cache is not None and spec.kv_cache.disk_bytes is not None,
    )


def named_models(uses: Iterable[ModelUse]) -> set[str]:
    """Return the paths of all models that deployments may use."""
    return {path for use in uses for path in use.models}


def named_adapters(uses: Iterable[ModelUse]) -> set[str]:
    """Return the paths of the adapters of deployments."""
    return {path for use in uses for path in use.adapters}


def split_models(uses: Iterable[ModelUse], snapshots: Iterable[ModelSnapshot] = ()) -> set[str]:
    """Return the paths of the models that may be split over a group; `snapshots` are the commits of hub models."""
    uses = tuple(uses)
    split = {use.deployment for use in uses if use.is_split}
    commits = {snapshot.folder for snapshot in snapshots if snapshot.deployment in split}
    return ({path for use in uses for path in use.split_models} | commits) - {""}


DEFAULT_MODELS_DIR = Path("~/models")
"""Folder for relative model paths, of agents and of `fleetctl up`."""


def resolve_path(path: str, models_dir: Path) -> Path:
    """Return the folder of a deployment's path on this machine; a relative path is below `models_dir`."""
    return Path(path) if path.startswith("/") else models_dir / path


def unsupported_reason(facts: ModelFacts) -> str:
    """Return why the installed mlx-lm, or mlx-audio, cannot build this model; "" if it can. Imports neither."""
    if facts.speech is not None:
        return _unspoken_reason(facts.speech.family.package)
    if facts.encoder is not None:
        return ""
    module = facts.module
    spec = importlib.util.find_spec("mlx_lm")  # finds it without an import
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


def _unspoken_reason(package: str) -> str:
    spec = importlib.util.find_spec("mlx_audio")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return "speech needs mlx-audio on this node: pip install 'mlx-fleet[audio]'"
    if any((Path(folder) / package).is_dir() for folder in folders):
        return ""
    version = importlib.metadata.version("mlx-audio")
    return (
        f"mlx-audio {version} on this node has no {package}; mlx-fleet[audio] installs one that has"
    )


def report_model(
    path: str,
    models_dir: Path,
    *,
    casts_to_float32: bool,
    splits: SplitInspector | None = None,
    snapshot: ModelSnapshot | None = None,
) -> ModelReport:
    """Return a model's geometry, or why it cannot be used.

    With `splits`, the geometry also says over how many Macs the model can be split, once that is known. `snapshot` is
    what the reconciler knows of a model that may not be fetched yet.
    """
    folder, missing_bytes = resolve_path(path, models_dir), 0
    try:
        if snapshot is not None and not _is_fetched(folder):
            facts, missing_bytes = snapshot_facts(snapshot), snapshot.size_bytes
        else:
            facts = inspection_process.inspect_model(folder)
        unsupported = unsupported_reason(facts)
        if unsupported:
            return ModelReport(path=path, reason="ArchitectureUnsupported", message=unsupported)
        geometry = model_files.model_geometry(facts, casts_to_float32=casts_to_float32)
    except ModelUnusableError as error:
        return ModelReport(path=path, reason=error.reason, message=_error_text(error))
    if splits is not None:
        split_shapes: SplitShapes | SplitFailure | None
        if snapshot is None or _is_fetched(folder):
            split_shapes = splits.inspect(folder, facts)
        elif snapshot.headers:
            split_shapes = splits.inspect(folder, facts, snapshot.headers)
        else:
            split_shapes = SplitFailure(why=_NO_HEADERS)
        splitting = split_options.splitting_report(
            facts, geometry, split_shapes, casts_to_float32=casts_to_float32
        )
        geometry = geometry.model_copy(update={"splitting": splitting})
    return ModelReport(path=path, geometry=geometry, missing_bytes=missing_bytes)


def _is_fetched(folder: Path) -> bool:
    """Return whether a hub model is here with all its files."""
    return folder.is_dir() and not (folder / PARTIAL_MARK).exists()


def report_adapter(path: str, models_dir: Path, *, casts_to_float32: bool) -> AdapterReport:
    """Return an adapter's size, or why it cannot be used."""
    try:
        facts = inspection_process.inspect_adapter(resolve_path(path, models_dir))
    except ModelUnusableError as error:
        return AdapterReport(path=path, reason=error.reason, message=_error_text(error))
    size = facts.bytes_in_memory(casts_to_float32=casts_to_float32)
    return AdapterReport(path=path, weights_bytes=size)


def _error_text(error: ModelUnusableError) -> str:
    # A file name may hold bytes that are not text, and the store accepts text only.
    return str(error).encode(errors="replace").decode()


def report_models(
    paths: Iterable[str],
    models_dir: Path,
    *,
    casts_to_float32: bool,
    splits: SplitInspector | None = None,
    split: AbstractSet[str] = frozenset(),
    snapshots: Mapping[str, ModelSnapshot] | None = None,
) -> tuple[ModelReport, ...]:
    """Return the reports of all paths and snapshots, sorted by path.

    Those in `split` also say how the model can be split. `snapshots` are those of hub models, by folder.
    """
    known = snapshots or {}
    return tuple(
        report_model(
            path,
            models_dir,
            casts_to_float32=casts_to_float32,
            splits=splits if path in split else None,
            snapshot=known.get(path),
        )
        for path in sorted({*paths, *known})
    )


def report_adapters(
    paths: Iterable[str], models_dir: Path, *, casts_to_float32: bool
) -> tuple[AdapterReport, ...]:
    """Return the reports of all adapters, sorted by path."""
    return tuple(
        report_adapter(path, models_dir, casts_to_float32=casts_to_float32)
        for path in sorted(set(paths))
    )
