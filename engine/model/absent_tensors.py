"""Stand-ins for the tensors whose files a rank does not have: their shapes, and an error for whatever reads them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

import mlx.core as mx

from engine.vision import glm_language
from models import partial_model, weight_headers
from models.model_files import PARTIAL_MARK, ModelUnusableError

# The words of mlx for a file that ends too early (mlx 0.32).
_READ_ERROR: Final = "Unable to read from file"

ModelClasses: TypeAlias = Callable[[dict[str, Any]], tuple[Any, Any]]


def model_classes(folder: Path) -> ModelClasses:
    """Return mlx-lm's classes for a folder, so that it builds a marked one as if all weight files were there.

    mlx-lm then names, renames and quantizes the same tensors as with the whole model. The layers of other ranks are
    dropped before anything is read; a tensor that is absent and needed fails, and is never a zero.

    Raises:
        ModelUnusableError: the mark is broken.

    """
    mark = partial_model.read_mark(folder)
    get_classes: ModelClasses = glm_language.language_classes
    if mark is None:
        return get_classes
    try:
        absent = _load(partial_model.absent_tensors(mark))
    except ValueError as error:
        raise ModelUnusableError(f"{folder / PARTIAL_MARK}: {error}") from error

    def classes_with_absent(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, args_class = get_classes(config)

        def sanitize(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
            weights = {**absent, **weights}
            if not hasattr(model_class, "sanitize"):
                return weights
            found: dict[str, Any] = model_class.sanitize(model, weights)
            return found

        return type(model_class.__name__, (model_class,), {"sanitize": sanitize}), args_class

    return classes_with_absent


@contextmanager
def reads_explained(folder: Path) -> Iterator[None]:
    """Name the cause of a read that fails because a tensor is absent.

    Raises:
        ModelUnusableError: the rank needs a tensor of a file that it does not have.

    """
    try:
        yield
    except RuntimeError as error:
        if not (folder / PARTIAL_MARK).exists() or _READ_ERROR not in str(error):
            raise
        raise ModelUnusableError(
            f"{folder} lacks a weight file that this rank reads: fetch the whole model with `fleetctl models pull`"
        ) from error


def _load(tensors: dict[str, weight_headers.TensorShape]) -> dict[str, Any]:
    """Return lazy arrays that cannot be evaluated."""
    with TemporaryDirectory(prefix="fleet-absent-") as folder:
        path = Path(folder) / "absent.safetensors"
        weight_headers.write_skeleton(path, tensors)
        arrays: Any = mx.load(str(path))
        with path.open("r+b") as file:
            weight_headers.cut_skeleton(file)
    return dict(arrays)
