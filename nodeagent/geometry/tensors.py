"""What the weights of a model are, from the headers of its safetensors files. Pure: gets headers, not files."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, field_validator

_HALF: Final = ("F16", "BF16")
# What every rank of a sharded model keeps whole: `shard()` and PipelineMixin leave these alone (mlx-lm 0.32.2).
_REPLICATED: Final = re.compile(
    r"embed|wte\b|lm_head|norm|router|\.gate\.|e_score_correction|\bln_"
)
_GROUP_SIZE: Final = 64  # mlx's own default for quantized weights


class Tensor(BaseModel):
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
class Weights:
    """What the tensors add up to."""

    total_bytes: int
    half_bytes: int
    """How many of them are float16 or bfloat16."""
    replicated_bytes: int
    replicated_half_bytes: int
    parameters: int
    """0 if a header does not say shapes."""


def tally(tensors: Mapping[str, Tensor], *, group_size: int | None) -> Weights:
    """Add up the tensors of a model; `group_size` is that of quantized ones."""
    kept = [tensor for name, tensor in tensors.items() if _REPLICATED.search(name)]
    return Weights(
        total_bytes=sum(tensor.size for tensor in tensors.values()),
        half_bytes=_half(tensors.values()),
        replicated_bytes=sum(tensor.size for tensor in kept),
        replicated_half_bytes=_half(kept),
        parameters=_parameters(tensors, group_size or _GROUP_SIZE),
    )


def _half(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors if tensor.dtype in _HALF)


def _parameters(tensors: Mapping[str, Tensor], group_size: int) -> int:
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
