"""An import cache that halves the time of the first `import transformers`.

transformers 5 reads all of its 3,300 source files on import, to learn the names that they export. This takes 1 s of the
2 s of mlx-lm's import (measured on 2 cores of 2.5 GHz), and the result depends only on the files. `install` must run
before anything imports transformers. It never fails: a start without the cache is slower, but not wrong.
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
# The function's argument is the path of a package or of its __init__.py; for `models` it is the latter.
_FUNCTION = "create_import_structure_from_path"

# Maps folders to their contents, and sets of required packages to modules to sets of names (see the function's docstring).
_Structure: TypeAlias = dict[Any, Any]

log = logging.getLogger(__name__)


def install(cache: Path) -> None:
    """Make transformers read its export lists from `cache`. Only this user may write there: the content is trusted."""
    if _MODULE in sys.modules:
        return
    try:
        version = importlib.metadata.version("transformers")
        files.make_private_folder(cache)
    except (importlib.metadata.PackageNotFoundError, OSError) as error:
        log.warning("import cache is not available", extra={"why": str(error)})
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
    """Replaces the function; calls the original only for lists that are not cached."""

    read: Callable[[Any], _Structure]
    finder: _Finder

    def __call__(self, module_path: Any) -> _Structure:
        path = Path(module_path)
        folder = path.parent if path.name == "__init__.py" else path
        if folder.name != "models":
            return self.read(module_path)  # the files of a single model take no time
        file = self._file(folder)
        cached = _load_cached(file)
        if cached is None:
            cached = self.read(module_path)
            try:
                with files.open_replacement(file) as written:
                    written.write(orjson.dumps(_to_json(cached)))
            except (OSError, TypeError) as error:
                log.warning("cannot write the import cache", extra={"why": str(error)})
        return cached

    def _file(self, folder: Path) -> Path:
        # A new version, another Python or an added model gets a file of its own.
        marks = (self.finder.version, sys.implementation.cache_tag, folder.stat().st_mtime_ns)
        return self.finder.cache / f"transformers-{'-'.join(map(str, marks))}.imports"


def _load_cached(file: Path) -> _Structure | None:
    try:
        return _from_json(orjson.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("cannot read the import cache", extra={"why": str(error)})
        return None


def _to_json(found: _Structure) -> dict[str, Any]:
    """Convert to JSON types: a set becomes a list, and a dict with sets as keys a list of pairs."""
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
