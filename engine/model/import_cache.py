"""Makes the first `import transformers` take half its time: what it reads in its own files is kept between starts.

transformers 5 reads each of its 3,300 source files when it is imported, to learn which names they export: 1 s of
the 2 s that mlx-lm's import takes (measured, 2 cores of 2.5 GHz). What it finds depends on the files alone. Must be called
before anything imports transformers, and never fails: a start without it is slower, not wrong.
"""

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import orjson
from typing_extensions import override

from machinery import files

_MODULE = "transformers.utils.import_utils"
# Of that module: takes the path of a package or its __init__.py; the one for `models` takes the second.
_FUNCTION = "create_import_structure_from_path"

# Folders to what is in them, and sets of needed packages to modules to sets of names: the function's docstring.
_Structure: TypeAlias = dict[Any, Any]

log = logging.getLogger(__name__)


def install(cache: Path) -> None:
    """Have transformers look into `cache` first; the folder is this user's alone, for its content is believed."""
    if _MODULE in sys.modules:
        return
    try:
        version = importlib.metadata.version("transformers")
        files.make_private_folder(cache)
    except (importlib.metadata.PackageNotFoundError, OSError) as error:
        log.warning("imports are not kept between starts", extra={"reason": str(error)})
        return
    sys.meta_path.insert(0, _Finder(cache, version))


@dataclass(frozen=True, slots=True)
class _Finder:
    cache: Path
    version: str

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


@dataclass(frozen=True, slots=True)
class _Loader(Loader):
    inner: Loader
    finder: _Finder

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        read = getattr(module, _FUNCTION, None)
        if read is not None:
            setattr(module, _FUNCTION, _CachedFunction(read, self.finder))


@dataclass(frozen=True, slots=True)
class _CachedFunction:
    """Stands for the function; asks it only for what is not kept."""

    read: Callable[[Any], _Structure]
    finder: _Finder

    def __call__(self, module_path: Any) -> _Structure:
        path = Path(module_path)
        folder = path.parent if path.name == "__init__.py" else path
        if folder.name != "models":
            return self.read(module_path)  # one model's files, at once
        file = self._file(folder)
        found = _load_cached(file)
        if found is None:
            found = self.read(module_path)
            _save(file, found)
        return found

    def _file(self, folder: Path) -> Path:
        # Another version, another Python or a model more is another file.
        marks = (self.finder.version, sys.implementation.cache_tag, folder.stat().st_mtime_ns)
        return self.finder.cache / f"transformers-{'-'.join(map(str, marks))}.imports"


def _load_cached(file: Path) -> _Structure | None:
    try:
        return _from_json(orjson.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("kept imports cannot be read", extra={"reason": str(error)})
        return None


def _save(file: Path, found: _Structure) -> None:
    try:
        with files.open_replacement(file) as written:
            written.write(orjson.dumps(_to_json(found)))
    except (OSError, TypeError) as error:
        log.warning("imports are not kept between starts", extra={"reason": str(error)})


def _to_json(found: _Structure) -> dict[str, Any]:
    """Return it as JSON has it: a set is a list, and what has sets for keys a list of pairs."""
    pairs = [
        (
            sorted(key) if isinstance(key, frozenset) else key,
            _to_json(value) if isinstance(value, dict) else sorted(value),
        )
        for key, value in found.items()
    ]
    return {"pairs": pairs}


def _from_json(written: dict[str, Any]) -> _Structure:
    return {
        frozenset(key) if isinstance(key, list) else key: (
            _from_json(value) if isinstance(value, dict) else set(value)
        )
        for key, value in written["pairs"]
    }
