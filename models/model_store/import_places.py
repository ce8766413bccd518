"""Models that other programs keep on this machine: huggingface_hub, LM Studio and Ollama, where their settings say."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.model_store.cache_import import (
    CachedSnapshot,
    find_snapshots,
    import_snapshot,
    snapshot_problem,
    snapshot_size,
)
from models.model_store.gguf_import import import_gguf, repo_of
from models.model_store.ollama_models import OllamaModel, find_ollama_models, import_ollama_model
from models.model_store.store import ModelStore, StoredModel

_MAX_SETTINGS_BYTES: Final = 1 << 20
_MAX_POINTER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model of another program."""

    program: str
    """The program, such as "LM Studio"."""
    name: str
    """The name by which a person chooses it."""
    folder: Path
    size_bytes: int
    problem: str
    """The reason against an import, as far as it is known before its files are read; "" if there is none."""
    content: CachedSnapshot | OllamaModel | Path
    """A path is that of a GGUF file."""

    def import_into(self, store: ModelStore) -> StoredModel:
        """Import the model; `import_snapshot`, `import_ollama_model` and `import_gguf` have the errors."""
        if isinstance(self.content, Path):
            return import_gguf(store, self.content, repo_of(self.content))
        if isinstance(self.content, OllamaModel):
            return import_ollama_model(store, self.content)
        return import_snapshot(store, self.content)


def find_models(home: Path, environment: Mapping[str, str]) -> tuple[FoundModel, ...]:
    """Return the models of all known programs of a user, without reading their weights."""
    found_models: list[FoundModel] = []
    for folder in dict.fromkeys(_hub_caches(home, environment)):
        found_models += _found_snapshots("Hugging Face", folder, find_snapshots(folder))
    for folder in dict.fromkeys(_lm_studio_folders(home)):
        found_models += _found_snapshots("LM Studio", folder, find_snapshots(folder))
    for folder in dict.fromkeys(_ollama_stores(home, environment)):
        found_models += _found_ollama(folder)
    return tuple(found_models)


def models_in(folder: Path) -> tuple[FoundModel, ...]:
    """Return the models in a folder of any of the programs, or in one with GGUF files; `folder` may be such a file."""
    if folder.is_file():
        return tuple(_found_gguf("", "", folder.parent, [folder]))
    models = _found_snapshots("", folder, find_snapshots(folder))
    files = _found_gguf("", "", folder, sorted(folder.glob("*.gguf")))
    return (*models, *_found_ollama(folder), *files)


def _found_snapshots(
    program: str, folder: Path, snapshots: tuple[CachedSnapshot, ...]
) -> list[FoundModel]:
    found_models = []
    for snapshot in snapshots:
        problem = snapshot_problem(snapshot)
        if problem and (files := sorted(snapshot.folder.glob("*.gguf"))):
            found_models += _found_gguf(program, snapshot.repo, folder, files)
            continue
        size = 0
        with suppress(OSError):
            size = 0 if problem else snapshot_size(snapshot)
        found_models.append(
            FoundModel(
                program=program,
                name=snapshot.repo,
                folder=folder,
                size_bytes=size,
                problem=problem,
                content=snapshot,
            )
        )
    return found_models


def _found_gguf(program: str, repo: str, folder: Path, files: Sequence[Path]) -> list[FoundModel]:
    """Return the models in GGUF files; those for images (mmproj) belong to another one."""
    return [
        FoundModel(
            program=program,
            name=f"{repo}/{path.name}" if repo else path.name,
            folder=folder,
            size_bytes=path.stat().st_size if path.is_file() else 0,
            problem="" if path.is_file() else f"{path} is a link to nothing: download it again",
            content=path,
        )
        for path in files
        if not path.name.startswith("mmproj")
    ]


def _found_ollama(folder: Path) -> list[FoundModel]:
    return [
        FoundModel(
            program="Ollama",
            name=model.name,
            folder=folder,
            size_bytes=model.size_bytes,
            problem=model.problem,
            content=model,
        )
        for model in find_ollama_models(folder)
    ]


def _hub_caches(home: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    if named := environment.get("HF_HUB_CACHE"):
        yield Path(named).expanduser()
    elif named := environment.get("HF_HOME"):
        yield Path(named).expanduser() / "hub"
    else:
        yield home / ".cache/huggingface/hub"


def _lm_studio_folders(home: Path) -> Iterator[Path]:
    """Yield the folder of LM Studio's settings, and the usual ones of its versions."""
    roots = [home / ".lmstudio", home / ".cache/lm-studio"]
    if pointer := _read(home / ".lmstudio-home-pointer", _MAX_POINTER_BYTES).strip():
        roots.insert(0, Path(pointer).expanduser())
    for root in roots:
        with suppress(ValueError, AttributeError, TypeError):
            settings = json.loads(_read(root / "settings.json", _MAX_SETTINGS_BYTES) or "{}")
            yield Path(settings.get("downloadsFolder")).expanduser()
        yield root / "models"


def _ollama_stores(home: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    yield Path(environment.get("OLLAMA_MODELS") or home / ".ollama/models").expanduser()


def _read(path: Path, limit: int) -> str:
    try:
        if path.stat().st_size > limit:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""
