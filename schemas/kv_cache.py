"""KvCache: how a deployment's engines keep keys and values."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.meta import ApiModel
from schemas.quantity import PositiveQuantity, Quantity


class KvCache(ApiModel):
    """The cache of keys and values of earlier tokens."""

    tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Tokens of all requests together for which memory is proven, at least contextLength. Requests that would need more
    wait, or give up their memory and continue later. Default: concurrency x contextLength."""
    bits: Literal[4, 8] | None = None
    """Bits of a number in the cache. Default: as the model computes them (16 bits on a Mac)."""
    window: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """Tokens that the model attends to at most; older ones are dropped. Default: all."""
    keep: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Tokens at the beginning of a request that the window keeps; they count towards it. Needs window. Default: none."""
    prefix_bytes: Quantity | None = None
    """Memory for cached prompts, such as "4Gi", on top of what requests need; "0" caches none.
    Default: prompts are cached in the part of the KV cache that running requests do not use."""
    disk_bytes: PositiveQuantity | None = None
    """Disk of each Mac for cached prompts, such as "20Gi": they outlive the engines, so that a restart or a rollout
    starts warm. Default: none."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.bits is not None and self.window is not None:
            raise ValueError(
                "has bits and window, and a sliding cache cannot be quantized; remove one of them"
            )
        if self.keep is not None and (self.window is None or 2 * self.keep > self.window):
            raise ValueError(
                f"has keep: {self.keep}, the first tokens that a window keeps, which must be at most half of window; "
                + ("add window" if self.window is None else f"window is {self.window}")
            )
        return self
