"""Inspection of a LoRA adapter folder as mlx-lm writes it: config and safetensors header. Must not import mlx.

Whether the adapter fits the model is known only when the engine applies it (engine/model/loader.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from models import model_files
from models.model_files import ModelUnusableError, WeightTotals, total_weights

_CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapters.safetensors"
# The tensors of an adapted layer: two thin matrices, and with DoRA a magnitude.
_TENSOR_NAMES = ("lora_a", "lora_b", "m")


class _LoraParameters(BaseModel):
    """The fields that mlx_lm.tuner.utils.linear_to_lora_layers needs; it has no defaults for them."""

    rank: Annotated[int, Field(ge=1, le=65_536)]
    scale: float
    dropout: Annotated[float, Field(ge=0, lt=1)]
    keys: tuple[str, ...] | None = None


class _AdapterConfig(BaseModel):
    """The part of adapter_config.json that is needed to apply the weights."""

    fine_tune_type: str = "lora"
    num_layers: int
    lora_parameters: _LoraParameters


class _AdapterFormat(BaseModel):
    """The fields that distinguish other adapter formats from mlx-lm's."""

    fine_tune_type: str = "lora"
    peft_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """The facts in an adapter folder."""

    rank: int
    weights: WeightTotals

    def bytes_in_memory(self, *, casts_to_float32: bool) -> int:
        """Return the bytes of the weights in an engine; `casts_to_float32` as in `model_files.model_geometry`."""
        return self.weights.total_bytes + (self.weights.half_bytes if casts_to_float32 else 0)


def inspect_adapter(folder: Path) -> AdapterFacts:
    """Return the facts in an adapter folder.

    Raises:
        ModelUnusableError: AdapterNotFound or AdapterUnusable; the message says what to correct.

    """
    try:
        found = _inspect(folder) if folder.is_dir() else None
    except OSError as error:
        message = f"adapter: cannot look into {folder}: {error.strerror}"
        raise ModelUnusableError(message, reason="AdapterNotFound") from error
    except ModelUnusableError as error:
        raise ModelUnusableError(f"adapter: {error}", reason="AdapterUnusable") from error
    if found is None:
        message = f"adapter: {folder} is not a directory"
        raise ModelUnusableError(message, reason="AdapterNotFound")
    return found


def _inspect(folder: Path) -> AdapterFacts:
    if not (folder / _CONFIG_FILE).is_file():
        raise ModelUnusableError(f"{folder} has no {_CONFIG_FILE}: not an adapter folder")
    kind = model_files.parse_json_file(_AdapterFormat, folder / _CONFIG_FILE)
    is_peft = kind.peft_type is not None or (folder / "adapter_model.safetensors").is_file()
    if is_peft and not (folder / WEIGHTS_FILE).is_file():
        raise ModelUnusableError(
            f"{folder} is in PEFT's format, which mlx-lm does not read; merge it into the model and "
            "convert that, or train the adapter with mlx_lm.lora"
        )
    if kind.fine_tune_type not in ("lora", "dora"):
        raise ModelUnusableError(
            f"{folder} is a fine-tune of type {kind.fine_tune_type!r}, and only lora and dora are adapters; "
            "fuse it with mlx_lm.fuse and deploy the result as a model"
        )
    config = model_files.parse_json_file(_AdapterConfig, folder / _CONFIG_FILE)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelUnusableError(f"{folder} has no {WEIGHTS_FILE}: no weights")
    tensors = model_files.read_tensors(folder / WEIGHTS_FILE)
    unexpected = sorted(name for name in tensors if name.rpartition(".")[2] not in _TENSOR_NAMES)
    if unexpected:
        raise ModelUnusableError(
            f"{folder / WEIGHTS_FILE} has {len(unexpected)} tensors that are not part of an adapter, first {unexpected[0]}"
        )
    if not tensors:
        raise ModelUnusableError(f"{folder / WEIGHTS_FILE} has no tensors")
    return AdapterFacts(
        rank=config.lora_parameters.rank, weights=total_weights(tensors, group_size=None)
    )
