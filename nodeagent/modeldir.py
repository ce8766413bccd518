"""Is this folder a model that can be served, and what will it need? Must not import mlx.

Reads small JSON files and safetensors headers only, so the agent can look at every model it is
asked about, and the engine can refuse a bad one before seconds of imports.
"""

import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from schemas.node import ModelGeometry

# The format's own limit; a larger number is not a header but some other file's first bytes.
_MAX_HEADER_BYTES = 100_000_000
_HALF = ("F16", "BF16")

# Nothing or less would prove that any model fits; a wild number ends in arithmetic somewhere else.
_Count = Annotated[int, Field(ge=1, le=2**40)]
_M = TypeVar("_M", bound=BaseModel)


class ModelUnusableError(Exception):
    """The folder cannot be served; `reason` is one CamelCase word, the message says what to mend."""

    def __init__(self, message: str, *, reason: str = "ModelUnusable") -> None:
        super().__init__(message)
        self.reason = reason


class _Section(BaseModel):
    """What of a config.json matters here; multimodal models keep it in `text_config`."""

    model_config = ConfigDict(protected_namespaces=())

    max_position_embeddings: _Count | None = None
    vocab_size: _Count | None = None
    num_hidden_layers: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    hidden_size: _Count | None = None
    head_dim: _Count | None = None


class _Config(_Section):
    model_type: str
    text_config: _Section = Field(default_factory=_Section)

    def number(self, name: str) -> int | None:
        """Return a number from the outer level, or else from `text_config`."""
        outer: int | None = getattr(self, name)
        inner: int | None = getattr(self.text_config, name)
        return inner if outer is None else outer


class _Index(BaseModel):
    weight_map: dict[str, str]


class _Tensor(BaseModel):
    dtype: str
    data_offsets: tuple[int, int]

    @field_validator("data_offsets")
    @classmethod
    def _ordered(cls, offsets: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= offsets[0] <= offsets[1]:
            raise ValueError("offsets must go up")
        return offsets

    @property
    def size(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


_HEADER = TypeAdapter(dict[str, _Tensor | dict[str, str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the folder says of itself; None where it does not say."""

    model_type: str
    weight_bytes: int
    """Bytes of all tensors on disk."""
    half_bytes: int
    """How many of them are float16 or bfloat16."""
    vocab_size: int | None
    max_context: int | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None


def inspect(folder: Path) -> ModelFacts:
    """Read what the folder says of itself.

    Raises:
        ModelUnusableError: something is missing, cut short or not what it should be.

    """
    try:
        return _inspect(folder)
    except OSError as error:  # a name that is too long, a folder above that we may not enter
        raise ModelUnusableError(
            f"cannot look into {folder}: {error.strerror}", reason="ModelNotFound"
        ) from error


def _inspect(folder: Path) -> ModelFacts:
    if not folder.is_dir():
        raise ModelUnusableError(f"{folder} is not a directory", reason="ModelNotFound")
    if not (folder / "config.json").is_file():
        raise ModelUnusableError(f"{folder} has no config.json: not a model directory")
    config = _parse(_Config, folder / "config.json")
    sizes: Counter[str] = Counter()
    for path in _weight_files(folder):
        sizes.update(_sizes_by_dtype(path))
    heads = config.number("num_attention_heads")
    hidden = config.number("hidden_size")
    derived_dim = hidden // heads if hidden and heads else None
    return ModelFacts(
        model_type=config.model_type,
        weight_bytes=sizes.total(),
        half_bytes=sum(sizes[dtype] for dtype in _HALF),
        vocab_size=config.number("vocab_size"),
        max_context=config.number("max_position_embeddings"),
        layers=config.number("num_hidden_layers"),
        kv_heads=config.number("num_key_value_heads") or heads,
        head_dim=config.number("head_dim") or derived_dim,
    )


def geometry(facts: ModelFacts, *, casts_to_float32: bool) -> ModelGeometry:
    """Return what the memory proof needs.

    `casts_to_float32` says that the engine widens 16-bit weights, as it does on Linux.

    Raises:
        ModelUnusableError: config.json does not say enough to prove that the model fits.

    """
    needed = {
        "num_hidden_layers": facts.layers,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_context,
    }
    lacking = [name for name, value in needed.items() if value is None]
    if lacking:
        raise ModelUnusableError(
            f"config.json lacks {', '.join(lacking)}, without which nobody can say what it needs",
            reason="ModelSizeUnknown",
        )
    is_half = facts.half_bytes > 0
    widened = casts_to_float32 or not is_half
    return ModelGeometry(
        model_type=facts.model_type,
        weights_bytes=facts.weight_bytes + (facts.half_bytes if casts_to_float32 else 0),
        layers=facts.layers or 0,
        kv_heads=facts.kv_heads or 0,
        head_dim=facts.head_dim or 0,
        kv_element_bytes=4 if widened else 2,
        vocab_size=facts.vocab_size or 0,
        max_context=facts.max_context or 0,
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


def _weight_files(folder: Path) -> list[Path]:
    # mlx-lm reads files of this name and no others.
    present = {path.name: path for path in sorted(folder.glob("model*.safetensors"))}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = set(_parse(_Index, index).weight_map.values())
        absent = sorted(wanted - present.keys())
        if absent:
            raise ModelUnusableError(
                f"{folder} lacks {len(absent)} of {len(wanted)} weight files, first {absent[0]}"
            )
    if not present:
        raise ModelUnusableError(f"{folder} has no model*.safetensors: no weights")
    return list(present.values())


def _parse(model: type[_M], path: Path) -> _M:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelUnusableError(f"{path}: {where or 'content'}: {first['msg']}") from error


def _sizes_by_dtype(path: Path) -> Counter[str]:
    """Return the bytes of a file's tensors by type, having checked that all of them are there."""
    if not path.is_file():  # opening a pipe would wait for ever for somebody to write
        raise ModelUnusableError(f"{path} is not a file, or a link to none")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _header(file.read(8), path, size)
            entries = _HEADER.validate_json(file.read(header))
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ModelUnusableError(f"{path} has a broken safetensors header") from error
    tensors = [entry for entry in entries.values() if isinstance(entry, _Tensor)]
    expected = 8 + header + max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if size != expected:
        raise ModelUnusableError(f"{path} was cut short: {size} bytes, its header says {expected}")
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.size
    return sizes


def _header(lead: bytes, path: Path, size: int) -> int:
    length = int(struct.unpack("<Q", lead)[0]) if len(lead) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise ModelUnusableError(f"{path} is not a safetensors file, or was cut short")
    return length
