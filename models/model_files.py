"""What the weights of a model are, from the headers of its safetensors files. Pure: gets headers, not files.

Is this folder a model that can be served, and what will it need? Must not import mlx.

Reads small JSON files and safetensors headers only, so the agent can look at every model it is
asked about, and the engine can refuse a bad one before seconds of imports.
"""

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from models import cache_rules
from models.cache_rules import NotUnderstoodError
from models.hf_config import ModelConfig, TextConfig
from schemas.node import ModelGeometry

_HALF_PRECISION: Final = ("F16", "BF16")
# What every rank of a sharded model keeps whole: `shard()` and PipelineMixin leave these alone (mlx-lm 0.32.2).
_REPLICATED_NAMES: Final = re.compile(
    r"embed|wte\b|lm_head|norm|router|\.gate\.|e_score_correction|\bln_"
)
_DEFAULT_GROUP_SIZE: Final = 64  # mlx's own default for quantized weights


class TensorHeader(BaseModel):
    """One entry of a header."""

    dtype: str
    shape: tuple[int, ...] | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTotals:
    """What the tensors add up to."""

    total_bytes: int
    half_bytes: int
    """How many of them are float16 or bfloat16."""
    replicated_bytes: int
    replicated_half_bytes: int
    parameters: int
    """0 if a header does not say shapes."""


def total_weights(tensors: Mapping[str, TensorHeader], *, group_size: int | None) -> WeightTotals:
    """Add up the tensors of a model; `group_size` is that of quantized ones."""
    kept = [tensor for name, tensor in tensors.items() if _REPLICATED_NAMES.search(name)]
    return WeightTotals(
        total_bytes=sum(tensor.size for tensor in tensors.values()),
        half_bytes=_half_precision_bytes(tensors.values()),
        replicated_bytes=sum(tensor.size for tensor in kept),
        replicated_half_bytes=_half_precision_bytes(kept),
        parameters=_count_parameters(tensors, group_size or _DEFAULT_GROUP_SIZE),
    )


def _half_precision_bytes(tensors: Iterable[TensorHeader]) -> int:
    return sum(tensor.size for tensor in tensors if tensor.dtype in _HALF_PRECISION)


def _count_parameters(tensors: Mapping[str, TensorHeader], group_size: int) -> int:
    found = 0
    for name, tensor in tensors.items():
        if tensor.shape is None:
            return 0
        stem, _, last = name.rpartition(".")
        packed = tensors.get(f"{stem}.weight")
        if last in ("scales", "biases") and packed is not None and packed.dtype == "U32":
            continue
        scales = tensors.get(f"{stem}.scales")
        if last == "weight" and tensor.dtype == "U32" and scales is not None and scales.shape:
            # One scale for each group of a row: so many numbers were packed, with however few bits.
            found += math.prod(scales.shape) * group_size
        else:
            found += math.prod(tensor.shape)
    return found


# The format's own limit; a larger number is not a header but some other file's first bytes.
_MAX_HEADER_BYTES = 100_000_000

# Tokens of prompts that the engine reads at once (LARGEST_CHUNK in engine/batch/step_plan.py), on Linux and on a Mac.
_PREFILL_LINUX, _PREFILL_MAC = 512, 2048
# Head sizes for which Metal has a fused kernel for prompts (mlx 0.32: sdpa_full).
_FUSED_HEAD_SIZES = (64, 80, 128)

_M = TypeVar("_M", bound=BaseModel)


class ModelUnusableError(Exception):
    """The folder cannot be served; `reason` is one CamelCase word, the message says what to mend."""

    def __init__(self, message: str, *, reason: str = "ModelUnusable") -> None:
        super().__init__(message)
        self.reason = reason


class _WeightIndex(BaseModel):
    weight_map: dict[str, str]


# Without metadata mlx writes "__metadata__": null.
_HEADER_ADAPTER = TypeAdapter(dict[str, TensorHeader | dict[str, str] | None])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the folder says of itself."""

    model_type: str
    module: str
    """The module of mlx-lm that builds it."""
    config: TextConfig
    weights: WeightTotals

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all tensors on disk."""
        return self.weights.total_bytes

    @property
    def vocab_size(self) -> int | None:
        return self.config.vocab_size

    @property
    def max_context(self) -> int | None:
        return self.config.max_position_embeddings


def inspect_model(folder: Path) -> ModelFacts:
    """Read what the folder says of itself.

    Raises:
        ModelUnusableError: something is missing, cut short or not what it should be.

    """
    try:
        return _inspect_folder(folder)
    except OSError as error:  # a name that is too long, a folder above that we may not enter
        raise ModelUnusableError(
            f"cannot look into {folder}: {error.strerror}", reason="ModelNotFound"
        ) from error


def _inspect_folder(folder: Path) -> ModelFacts:
    if not folder.is_dir():
        raise ModelUnusableError(f"{folder} is not a directory", reason="ModelNotFound")
    if not (folder / "config.json").is_file():
        raise ModelUnusableError(f"{folder} has no config.json: not a model directory")
    config = parse_json_file(ModelConfig, folder / "config.json")
    tensors: dict[str, TensorHeader] = {}
    for path in _weight_files(folder):
        tensors.update(read_tensors(path))
    packing = config.quantization
    return ModelFacts(
        model_type=config.model_type,
        module=cache_rules.mlx_module(config),
        config=config.text,
        weights=total_weights(tensors, group_size=packing.group_size if packing else None),
    )


def model_geometry(facts: ModelFacts, *, casts_to_float32: bool) -> ModelGeometry:
    """Return what the memory proof needs; `unknown` says what could not be understood.

    `casts_to_float32` says that the engine widens 16-bit weights, as it does on Linux.
    """
    config, weights = facts.config, facts.weights
    is_half = weights.half_bytes > 0
    element_bytes = 4 if casts_to_float32 or not is_half else 2
    unknown = "" if config.vocab_size is not None else "config.json lacks vocab_size"
    try:
        groups = cache_rules.layer_groups(facts.module, config, element_bytes=element_bytes)
    except NotUnderstoodError as error:
        groups, unknown = (), str(error)
    attends = next((group for group in groups if group.kind in ("Full", "Sliding")), None)
    active = (config.moe_intermediate_size or 0) * (config.num_experts_per_tok or 0)
    widened = weights.half_bytes if casts_to_float32 else 0
    sizes = {group.head_dim for group in groups if group.kind != "State"}
    return ModelGeometry(
        model_type=facts.model_type,
        weights_bytes=weights.total_bytes + widened,
        replicated_bytes=weights.replicated_bytes
        + (weights.replicated_half_bytes if casts_to_float32 else 0),
        parameters=weights.parameters,
        layers=config.num_hidden_layers or 0,
        kv_heads=attends.kv_heads if attends is not None else 0,
        head_dim=attends.head_dim if attends is not None else 0,
        kv_element_bytes=element_bytes,
        vocab_size=config.vocab_size or 0,
        max_context=config.max_position_embeddings,
        groups=groups,
        hidden_size=config.hidden_size or 0,
        ffn_size=max(config.intermediate_size or 0, active),
        heads=config.num_attention_heads or 0,
        prefill_batch=1,
        prefill_step=_PREFILL_LINUX if casts_to_float32 else _PREFILL_MAC,
        is_attention_fused=not casts_to_float32 and sizes <= set(_FUSED_HEAD_SIZES),
        unknown=unknown,
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
        wanted = set(parse_json_file(_WeightIndex, index).weight_map.values())
        absent = sorted(wanted - present.keys())
        if absent:
            raise ModelUnusableError(
                f"{folder} lacks {len(absent)} of {len(wanted)} weight files, first {absent[0]}"
            )
    if not present:
        raise ModelUnusableError(f"{folder} has no model*.safetensors: no weights")
    return list(present.values())


def parse_json_file(model: type[_M], path: Path) -> _M:
    """Return a small JSON file as the model.

    Raises:
        ModelUnusableError: it cannot be read, or is not what it should be.

    """
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelUnusableError(f"{path}: {where or 'content'}: {first['msg']}") from error


def read_tensors(path: Path) -> dict[str, TensorHeader]:
    """Return a safetensors file's tensors by name.

    Raises:
        ModelUnusableError: the file does not hold all that its header says.

    """
    if not path.is_file():  # opening a pipe would wait for ever for somebody to write
        raise ModelUnusableError(f"{path} is not a file, or a link to none")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _header_length(file.read(8), path, size)
            entries = _HEADER_ADAPTER.validate_json(file.read(header))
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ModelUnusableError(f"{path} has a broken safetensors header") from error
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorHeader)}
    ends = (tensor.data_offsets[1] for tensor in tensors.values())
    expected = 8 + header + max(ends, default=0)
    if size != expected:
        raise ModelUnusableError(f"{path} was cut short: {size} bytes, its header says {expected}")
    return tensors


def _header_length(lead: bytes, path: Path, size: int) -> int:
    length = int(struct.unpack("<Q", lead)[0]) if len(lead) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise ModelUnusableError(f"{path} is not a safetensors file, or was cut short")
    return length
