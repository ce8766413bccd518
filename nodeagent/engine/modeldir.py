"""Is this folder a model that can be served? Reads small JSON and headers only; must not import mlx.

mlx-lm finds most of these faults as well, but late, after seconds of imports, and in the words of
whichever library tripped first.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nodeagent.engine.errors import ModelUnusableError

# The format's own limit; a larger number is not a header but some other file's first bytes.
_MAX_HEADER_BYTES = 100_000_000

_M = TypeVar("_M", bound=BaseModel)


class _TextConfig(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    max_position_embeddings: int | None = None
    vocab_size: int | None = None


class _Config(_TextConfig):
    model_type: str
    text_config: _TextConfig = Field(default_factory=_TextConfig)


class _Index(BaseModel):
    weight_map: dict[str, str]


class _Tensor(BaseModel):
    data_offsets: tuple[int, int]


_HEADER = TypeAdapter(dict[str, _Tensor | dict[str, str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the folder says of itself."""

    weight_bytes: int
    vocab_size: int | None
    max_context: int | None


def inspect(folder: Path) -> ModelFacts:
    """Read what the folder says of itself.

    Raises:
        ModelUnusableError: something is missing, cut short or not what it should be.

    """
    config_path = folder / "config.json"
    if not folder.is_dir():
        raise ModelUnusableError(f"{folder} is not a directory")
    if not config_path.is_file():
        raise ModelUnusableError(f"{folder} has no config.json: not a model directory")
    config = _parse(_Config, config_path)
    # mlx-lm reads files of this name and no others.
    found = [path for path in sorted(folder.glob("model*.safetensors")) if path.is_file()]
    present = {path.name: path for path in found}
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        wanted = set(_parse(_Index, index_path).weight_map.values())
        absent = sorted(wanted - present.keys())
        if absent:
            raise ModelUnusableError(
                f"{folder} lacks {len(absent)} of {len(wanted)} weight files, first {absent[0]}"
            )
    if not present:
        raise ModelUnusableError(f"{folder} has no model*.safetensors: no weights")
    return ModelFacts(
        weight_bytes=sum(_weight_bytes(path) for path in present.values()),
        vocab_size=config.vocab_size or config.text_config.vocab_size,
        max_context=config.max_position_embeddings or config.text_config.max_position_embeddings,
    )


def check_context(facts: ModelFacts, context_length: int) -> None:
    """Refuse a context longer than the model was made for.

    Raises:
        ModelUnusableError: it is longer; the model's answers would be nonsense.

    """
    if facts.max_context is not None and context_length > facts.max_context:
        raise ModelUnusableError(
            f"context length {context_length} is more than the model's "
            f"max_position_embeddings, {facts.max_context}"
        )


def _parse(model: type[_M], path: Path) -> _M:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelUnusableError(f"{path}: {where or 'content'}: {first['msg']}") from error


def _weight_bytes(path: Path) -> int:
    """Return the bytes of tensors in one file, having checked that all of them are there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        lead = file.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelUnusableError(f"{path} is not a safetensors file, or was cut short")
        header = file.read(length)
    try:
        entries = _HEADER.validate_json(header)
    except ValidationError as error:
        raise ModelUnusableError(f"{path} has a broken safetensors header") from error
    ends = [entry.data_offsets[1] for entry in entries.values() if isinstance(entry, _Tensor)]
    payload = max(ends, default=0)
    if size != 8 + length + payload:
        raise ModelUnusableError(
            f"{path} was cut short: {size} bytes, its header says {8 + length + payload}"
        )
    return payload
