"""Is this folder a LoRA adapter that mlx-lm can apply, and how large is it? Must not import mlx.

Reads a small JSON file and a safetensors header only. Whether it fits the model is seen when the engine applies it
(engine/model/loader.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from models import model_files
from models.model_files import ModelUnusableError, WeightTotals, total_weights

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapters.safetensors"
# What a layer with an adapter learned: two thin matrices, and with DoRA a magnitude.
_TENSOR_NAMES = ("lora_a", "lora_b", "m")


class _LoraParameters(BaseModel):
    """What mlx_lm.tuner.utils.linear_to_lora_layers takes from the config; it has no defaults for them."""

    rank: Annotated[int, Field(ge=1, le=65_536)]
    scale: float
    dropout: Annotated[float, Field(ge=0, lt=1)]
    keys: tuple[str, ...] | None = None


class _AdapterConfig(BaseModel):
    """The part of adapter_config.json that says how to apply the weights."""

    fine_tune_type: str = "lora"
    num_layers: int
    lora_parameters: _LoraParameters


class _AdapterFormat(BaseModel):
    """What tells other formats of adapters from mlx-lm's."""

    fine_tune_type: str = "lora"
    peft_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What the folder says of itself."""

    rank: int
    weights: WeightTotals

    def bytes_in_memory(self, *, casts_to_float32: bool) -> int:
        """Return what its weights take; `casts_to_float32` says that the engine widens them, as it does on Linux."""
        return self.weights.total_bytes + (self.weights.half_bytes if casts_to_float32 else 0)


def inspect_adapter(folder: Path) -> AdapterFacts:
    """Read what the folder says of itself.

    Raises:
        ModelUnusableError: AdapterNotFound or AdapterUnusable; the message says what to mend.

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
        raise ModelUnusableError(f"{folder} has no {_CONFIG_FILE}: not an adapter's folder")
    kind = model_files.parse_json_file(_AdapterFormat, folder / _CONFIG_FILE)
    is_peft = kind.peft_type is not None or (folder / "adapter_model.safetensors").is_file()
    if is_peft and not (folder / _WEIGHTS_FILE).is_file():
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
    if not (folder / _WEIGHTS_FILE).is_file():
        raise ModelUnusableError(f"{folder} has no {_WEIGHTS_FILE}: no weights")
    tensors = model_files.read_tensors(folder / _WEIGHTS_FILE)
    strangers = sorted(name for name in tensors if name.rpartition(".")[2] not in _TENSOR_NAMES)
    if strangers:
        raise ModelUnusableError(
            f"{folder / _WEIGHTS_FILE} has {len(strangers)} tensors that belong to no adapter, first {strangers[0]}"
        )
    if not tensors:
        raise ModelUnusableError(f"{folder / _WEIGHTS_FILE} has no tensors")
    return AdapterFacts(
        rank=config.lora_parameters.rank, weights=total_weights(tensors, group_size=None)
    )
