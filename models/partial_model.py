"""A model folder that has only the weight files of some layers: its mark, and what is known of the files it lacks.

A rank of a Pipeline reads such a folder as if it were whole. Everything else refuses it by its mark.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from machinery import files as disk
from models import model_files, weight_headers
from models.hf_config import ModelConfig
from models.layer_files import rank_files
from models.model_files import PARTIAL_MARK, ModelFacts, ModelUnusableError, TensorHeader
from models.weight_headers import TensorShape, WeightHeaders

_MAX_MARK_BYTES: Final = 8 << 20
_STORED_CONTENT: Final = re.compile(r"blobs/sha256/([0-9a-f]{64})$")


class AbsentFile(BaseModel):
    """A weight file that the repository has and the folder has not."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    size: int = Field(ge=0)
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PartialMark(BaseModel):
    """The content of the mark."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    absent: dict[str, AbsentFile]
    """The weight files that are not here, by path."""
    headers: str
    """config.json and the headers of all weight files, packed (models/weight_headers.py)."""

    def read_headers(self) -> WeightHeaders:
        """Return the headers of all weight files. Raises ValueError: they cannot be read."""
        return weight_headers.unpack(self.headers)


def read_mark(folder: Path) -> PartialMark | None:
    """Return the mark of a folder; None for a whole model.

    Raises:
        ModelUnusableError: the mark cannot be read.

    """
    path = folder / PARTIAL_MARK
    if not path.exists():
        return None
    return model_files.parse_json_file(PartialMark, path, limit_bytes=_MAX_MARK_BYTES)


def write_mark(folder: Path, mark: PartialMark) -> None:
    """Mark the folder. Raises OSError."""
    disk.write_atomically(folder / PARTIAL_MARK, mark.model_dump_json(), mode=0o644)


def inspect_rank_model(folder: Path, layers: tuple[int, ...], rank: int) -> ModelFacts:
    """Return the facts of the whole model for a rank of a Pipeline, whose weight files must be in the folder.

    Args:
        folder: the model's folder, whole or marked.
        layers: the number of layers of each rank; () if they are not known, which needs the whole model.
        rank: the rank.

    Raises:
        ModelUnusableError: a file of the rank is missing, or the model is broken.

    """
    mark = read_mark(folder)
    if mark is None or not layers:
        return model_files.inspect_model(folder)
    try:
        headers = mark.read_headers()
        config = ModelConfig.model_validate_json(headers.config)
    except (ValueError, ValidationError) as error:
        raise ModelUnusableError(
            f"{folder / PARTIAL_MARK}: {str(error).splitlines()[0]}"
        ) from error
    for path in sorted(rank_files(headers.weight_map, layers, rank)):
        if not (folder / path).is_file():
            raise ModelUnusableError(
                f"{folder} lacks {path}, which has layers of rank {rank}: fetch the model again"
            )
        model_files.read_tensors(folder / path)
    packing = config.quantization
    tensors = _tensor_headers(headers)
    totals = model_files.total_weights(tensors, group_size=packing.group_size if packing else None)
    return model_files.model_facts(config, totals)


def _tensor_headers(headers: WeightHeaders) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(dtype=one.dtype, shape=one.shape, data_offsets=(0, one.size))
        for tensors in headers.files.values()
        for name, one in tensors.items()
    }


def absent_tensors(mark: PartialMark) -> dict[str, TensorShape]:
    """Return the tensors of the files that are not in the folder. Raises ValueError: the mark is broken."""
    headers = mark.read_headers()
    return {
        name: one
        for path, tensors in headers.files.items()
        if path in mark.absent
        for name, one in tensors.items()
    }


def content_digests(folder: Path, paths: Iterable[Path]) -> Mapping[str, str]:
    """Return the SHA-256 of the files that the store names by it, and of those that a mark names, by file name."""
    found: dict[str, str] = {}
    for path in paths:
        if path.is_symlink() and (stored := _STORED_CONTENT.search(str(path.readlink()))):
            found[path.name] = stored[1]
    try:
        mark = read_mark(folder)
    except ModelUnusableError:
        mark = None
    absent = {} if mark is None else mark.absent
    return found | {path: one.sha256 for path, one in absent.items()}
