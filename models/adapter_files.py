"""Inspection of a LoRA adapter folder: config and safetensors header, in mlx-lm's or PEFT's format. Must not import mlx.

Both formats become one form, `LowRankLayer`. Whether the adapter fits the model is known only when the engine applies
it (engine/model/adapters.py).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from models import model_files
from models.model_files import ModelUnusableError, TensorHeader, WeightTotals, total_weights

_CONFIG_FILE: Final = "adapter_config.json"
_MLX_FILE, _PEFT_FILE, _PICKLE_FILE = (
    *("adapters.safetensors", "adapter_model.safetensors"),
    "adapter_model.bin",
)
# The tensors of an adapted layer in mlx-lm's format: two thin matrices, and with DoRA a magnitude.
_MLX_NAMES: Final = ("lora_a", "lora_b", "m")
# PEFT wraps the model twice before it names a layer.
_PEFT_NAME: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_PEFT_EMBEDDING: Final = re.compile(r"\.lora_embedding_[AB]$")
# Initializations that change the base model's weights, too.
_CHANGES_BASE: Final = re.compile(r"pissa|olora|loftq|corda")
_PLAIN_NAME: Final = re.compile(r"[\w.]+")
_MAX_PATTERNS: Final = 4_096

_Rank = Annotated[int, Field(ge=1, le=65_536)]
_Alpha = Annotated[float, Field(allow_inf_nan=False)]


class _LoraParameters(BaseModel):
    """The fields that mlx_lm.tuner.utils.linear_to_lora_layers needs; it has no defaults for them."""

    rank: _Rank
    scale: float
    dropout: Annotated[float, Field(ge=0, lt=1)]
    keys: tuple[str, ...] | None = None


class _AdapterConfig(BaseModel):
    """The part of mlx-lm's adapter_config.json that is needed to apply the weights."""

    fine_tune_type: str = "lora"
    num_layers: int
    lora_parameters: _LoraParameters


class _PeftConfig(BaseModel):
    """The part of PEFT's adapter_config.json that changes how the weights are applied."""

    peft_type: str = "LORA"
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool = False
    rank_pattern: Annotated[dict[str, _Rank], Field(max_length=_MAX_PATTERNS)] | None = None
    alpha_pattern: Annotated[dict[str, _Alpha], Field(max_length=_MAX_PATTERNS)] | None = None
    use_dora: bool = False
    use_qalora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: Any = None
    layer_replication: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: Any = None
    init_lora_weights: bool | str | None = True

    def unsupported(self) -> tuple[str, str] | None:
        """Return the setting that the engine cannot apply, and what it means; None if there is none."""
        if self.bias != "none":
            return f"bias: {self.bias!r}", "biases are trained, too"
        if isinstance(start := self.init_lora_weights, str) and _CHANGES_BASE.match(start.lower()):
            return f"init_lora_weights: {start!r}", "the base model's weights are changed, too"
        meanings = {
            "use_dora": "DoRA has a magnitude beside the two matrices",
            "use_qalora": "QALoRA pools the input first",
            "lora_bias": "biases are trained, too",
            "modules_to_save": "whole layers are trained, too",
            "layer_replication": "the base model has other layers",
            "target_parameters": "single parameters, such as stacked experts, are adapted",
            "trainable_token_indices": "rows of the embedding are trained, too",
            "alora_invocation_tokens": "the adapter applies to part of the tokens only",
        }
        return next(((name, meanings[name]) for name in meanings if getattr(self, name)), None)

    def alpha(self, layer: str) -> float:
        """Return the alpha of a layer: that of the first pattern that names it, as in PEFT."""
        for pattern, value in (self.alpha_pattern or {}).items():
            if layer == pattern or layer.endswith("." + pattern):
                return value
        return self.lora_alpha


class _AdapterFormat(BaseModel):
    """The fields that distinguish the formats and kinds of adapters."""

    fine_tune_type: str = "lora"
    peft_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankLayer:
    """One adapted layer. Its output becomes y + scale * (x A) B, with A of shape (in, rank) and B of (rank, out)."""

    name: str
    """Path of the layer in the model, such as `model.layers.0.self_attn.q_proj`."""
    rank: int
    scale: float
    a: str
    """The tensor of A in the file."""
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """The facts in an adapter folder."""

    rank: int
    """The largest of its layers."""
    weights: WeightTotals
    file: Path
    """The weights."""
    format: Literal["mlx-lm", "PEFT"] = "mlx-lm"
    """PEFT stores both matrices transposed."""
    is_dora: bool = False
    layers: tuple[LowRankLayer, ...] = ()

    def bytes_in_memory(self, *, casts_to_float32: bool) -> int:
        """Return the bytes of the weights in an engine; `casts_to_float32` as in `model_files.model_geometry`."""
        return self.weights.total_bytes + (self.weights.half_bytes if casts_to_float32 else 0)


def inspect_adapter(folder: Path) -> AdapterFacts:
    """Return the facts in an adapter folder.

    Raises:
        ModelUnusableError: AdapterNotFound or AdapterUnusable; the message says what to correct.

    """
    try:
        adapter_facts = _inspect(folder) if folder.is_dir() else None
    except OSError as error:
        message = f"adapter: cannot look into {folder}: {error.strerror}"
        raise ModelUnusableError(message, reason="AdapterNotFound") from error
    except ModelUnusableError as error:
        raise ModelUnusableError(f"adapter: {error}", reason="AdapterUnusable") from error
    if adapter_facts is None:
        message = f"adapter: {folder} is not a directory"
        raise ModelUnusableError(message, reason="AdapterNotFound")
    return adapter_facts


def _inspect(folder: Path) -> AdapterFacts:
    if not (folder / _CONFIG_FILE).is_file():
        raise ModelUnusableError(f"{folder} has no {_CONFIG_FILE}: not an adapter folder")
    kind = model_files.parse_json_file(_AdapterFormat, folder / _CONFIG_FILE)
    if (folder / _MLX_FILE).is_file():
        return _inspect_mlx(folder, kind.fine_tune_type)
    if (folder / _PEFT_FILE).is_file():
        return _inspect_peft(folder)
    if (folder / _PICKLE_FILE).is_file():
        raise ModelUnusableError(
            f"{folder / _PICKLE_FILE} is a pickle, which can run code; save the adapter as {_PEFT_FILE}"
        )
    wanted = _MLX_FILE if kind.peft_type is None else _PEFT_FILE
    raise ModelUnusableError(f"{folder} has no {wanted}: no weights")


def _inspect_mlx(folder: Path, kind: str) -> AdapterFacts:
    if kind not in ("lora", "dora"):
        raise ModelUnusableError(
            f"{folder} is a fine-tune of type {kind!r}, and only lora and dora are adapters; "
            "fuse it with mlx_lm.fuse and deploy the result as a model"
        )
    parameters = model_files.parse_json_file(_AdapterConfig, folder / _CONFIG_FILE).lora_parameters
    tensors = _read_tensors(folder / _MLX_FILE)
    _refuse_unexpected(
        folder / _MLX_FILE,
        (name for name in tensors if name.rpartition(".")[2] not in _MLX_NAMES),
    )
    names = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    layers = tuple(
        LowRankLayer(
            name=name,
            rank=parameters.rank,
            scale=parameters.scale,
            a=f"{name}.lora_a",
            b=f"{name}.lora_b",
        )
        for name in sorted(names)
        if f"{name}.lora_b" in tensors
    )
    return AdapterFacts(
        rank=parameters.rank,
        weights=total_weights(tensors, group_size=None),
        file=folder / _MLX_FILE,
        is_dora=kind == "dora",
        layers=layers,
    )


def _inspect_peft(folder: Path) -> AdapterFacts:
    kind = model_files.parse_json_file(_AdapterFormat, folder / _CONFIG_FILE)
    if (kind.peft_type or "LORA").upper() != "LORA":
        raise ModelUnusableError(
            f"{folder} is a PEFT adapter of type {kind.peft_type}, and only LORA is supported; "
            "merge it into the model, and deploy the result"
        )
    config = model_files.parse_json_file(_PeftConfig, folder / _CONFIG_FILE)
    if (found := config.unsupported()) is not None:
        raise ModelUnusableError(
            f"{folder / _CONFIG_FILE} has {found[0]} ({found[1]}), which is not supported; "
            "merge the adapter into the model with PEFT's merge_and_unload, and deploy the result"
        )
    regular = [one for one in config.alpha_pattern or {} if not _PLAIN_NAME.fullmatch(one)]
    if regular:
        raise ModelUnusableError(
            f"{folder / _CONFIG_FILE}: alpha_pattern has the regular expression {regular[0][:80]!r}; "
            "write the names of the layers"
        )
    tensors = _read_tensors(folder / _PEFT_FILE)
    path = folder / _PEFT_FILE
    if any(_PEFT_EMBEDDING.search(name) for name in tensors):
        raise ModelUnusableError(
            f"{path} adapts the embedding, which is not supported; "
            "train the adapter without it, or merge it into the model"
        )
    matches = {name: _PEFT_NAME.fullmatch(name) for name in tensors}
    _refuse_unexpected(path, (name for name, match in matches.items() if match is None))
    names = sorted({match[1] for match in matches.values() if match is not None})
    layers = tuple(_peft_layer(path, tensors, config, name) for name in names)
    return AdapterFacts(
        rank=max(layer.rank for layer in layers),
        weights=total_weights(tensors, group_size=None),
        file=folder / _PEFT_FILE,
        format="PEFT",
        layers=layers,
    )


def _peft_layer(
    path: Path, tensors: Mapping[str, TensorHeader], config: _PeftConfig, name: str
) -> LowRankLayer:
    a, b = (f"base_model.model.{name}.lora_{letter}.weight" for letter in "AB")
    for tensor in (a, b):
        if tensor not in tensors:
            raise ModelUnusableError(f"{path} has no {tensor}; copy the whole file")
    shapes = [tensors[tensor].shape or () for tensor in (a, b)]
    if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
        raise ModelUnusableError(
            f"{path}: {name} has matrices of the shapes {shapes[0]} and {shapes[1]}; "
            "they must be (rank, in) and (out, rank)"
        )
    rank = shapes[0][0]
    if rank < 1 or (rank != config.r and not config.rank_pattern):
        raise ModelUnusableError(
            f"{path}: {name} has rank {rank}, and the config says r: {config.r}; "
            "copy both files of one training run"
        )
    scale = config.alpha(name) / (math.sqrt(rank) if config.use_rslora else rank)
    return LowRankLayer(name=name, rank=rank, scale=scale, a=a, b=b)


def _read_tensors(path: Path) -> dict[str, TensorHeader]:
    tensors = model_files.read_tensors(path)
    if not tensors:
        raise ModelUnusableError(f"{path} has no tensors")
    return tensors


def _refuse_unexpected(path: Path, names: Iterable[str]) -> None:
    unexpected = sorted(names)
    if unexpected:
        raise ModelUnusableError(
            f"{path} has {len(unexpected)} tensors that are not part of an adapter, first {unexpected[0]}"
        )
