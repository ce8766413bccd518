"""Looking at deployed models on this node's disk. Reads; decides nothing."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from nodeagent import adapterdir, architectures, modeldir
from nodeagent.geometry import division
from nodeagent.geometry.splitting import Splitter
from schemas.node import AdapterReport, ModelReport


def resolve(path: str, models_dir: Path) -> Path:
    """Return the folder that a deployment's path means on this node."""
    return Path(path) if path.startswith("/") else models_dir / path


def report(
    path: str, models_dir: Path, *, casts_to_float32: bool, splitter: Splitter | None = None
) -> ModelReport:
    """Return what this node says of a model: its geometry, or why it cannot be used.

    With a `splitter`, also over how many Macs it can be split, once that is known.
    """
    folder = resolve(path, models_dir)
    try:
        facts = modeldir.inspect(folder)
        complaint = architectures.complaint(facts.module)
        if complaint:
            return ModelReport(path=path, reason="ArchitectureUnsupported", message=complaint)
        geometry = modeldir.geometry(facts, casts_to_float32=casts_to_float32)
    except modeldir.ModelUnusableError as error:
        return ModelReport(path=path, reason=error.reason, message=_words(error))
    if splitter is not None:
        found = splitter.ask(folder, facts)
        splitting = division.report(facts, geometry, found, casts_to_float32=casts_to_float32)
        geometry = geometry.model_copy(update={"splitting": splitting})
    return ModelReport(path=path, geometry=geometry)


def report_adapter(path: str, models_dir: Path, *, casts_to_float32: bool) -> AdapterReport:
    """Return what this node says of an adapter: its size, or why it cannot be used."""
    try:
        facts = adapterdir.inspect(resolve(path, models_dir))
    except modeldir.ModelUnusableError as error:
        return AdapterReport(path=path, reason=error.reason, message=_words(error))
    size = facts.bytes_in_memory(casts_to_float32=casts_to_float32)
    return AdapterReport(path=path, weights_bytes=size)


def _words(error: modeldir.ModelUnusableError) -> str:
    # A file's name may hold bytes that are no text, and the store takes text only.
    return str(error).encode(errors="replace").decode()


def report_all(
    paths: Iterable[str],
    models_dir: Path,
    *,
    casts_to_float32: bool,
    splitter: Splitter | None = None,
    split: AbstractSet[str] = frozenset(),
) -> tuple[ModelReport, ...]:
    """Return the reports of all paths, in order of the paths; of those in `split` also how they can be split."""
    return tuple(
        report(
            path,
            models_dir,
            casts_to_float32=casts_to_float32,
            splitter=splitter if path in split else None,
        )
        for path in sorted(set(paths))
    )


def report_all_adapters(
    paths: Iterable[str], models_dir: Path, *, casts_to_float32: bool
) -> tuple[AdapterReport, ...]:
    """Return the same for adapters."""
    return tuple(
        report_adapter(path, models_dir, casts_to_float32=casts_to_float32)
        for path in sorted(set(paths))
    )
