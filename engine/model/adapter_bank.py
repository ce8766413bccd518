"""Several LoRA adapters of one model in one batch: each row uses its own, or none. Worker thread only; imports mlx.

The matrices of the adapters that a batch uses are concatenated along their rank, and each row keeps the part of its
own adapter. This takes two multiplications for any mixture of adapters and ranks, and no padding.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten
from typing_extensions import override

from engine.model.adapters import AdaptedLayer, find_layers
from models import adapter_files
from models.model_files import ModelUnusableError

Array: TypeAlias = Any  # mlx ships no types
Model: TypeAlias = Any
_Parts: TypeAlias = tuple[tuple[str, int, float], ...]  # name, rank and scale of adapters

# Two rows of three tokens, to see how the model shapes the inputs of its layers.
_TRIAL = (2, 3)


class AdapterBank:
    """The choice of an adapter for each row of the model's next pass."""

    def __init__(self) -> None:
        self.rows: tuple[str, ...] = ()
        """The adapter of each row; "" for none."""
        self.used: tuple[str, ...] = ()
        """The adapters in use, each once."""
        self._masks: dict[_Parts, Array] = {}

    def select(self, rows: Sequence[str]) -> None:
        """Set the adapters of the rows of the following passes."""
        chosen = tuple(rows)
        if chosen == self.rows:
            return
        self.rows = chosen
        self.used = tuple(name for name in dict.fromkeys(chosen) if name)
        self._masks = {}

    def mask(self, parts: _Parts) -> Array:
        """Return the scale of each rank for each row, of shape (rows, ranks): 0 for those of other adapters."""
        array = self._masks.get(parts)
        if array is None:
            columns = [
                np.outer([row == name for row in self.rows], np.full(rank, scale))
                for name, rank, scale in parts
            ]
            array = self._masks[parts] = mx.array(np.concatenate(columns, axis=1, dtype=np.float32))
        return array


class AdaptedLinear(Module):
    """A linear layer, and the matrices of its adapters."""

    def __init__(self, linear: Any, bank: AdapterBank) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # mlx ships few types
        self.linear = linear
        # By name with a letter before it: digits would become list indices.
        self.lora_a: dict[str, Array] = {}
        self.lora_b: dict[str, Array] = {}
        self._bank = bank
        self._parts: dict[str, tuple[str, int, float]] = {}

    def add(self, name: str, found: AdaptedLayer) -> None:
        """Add the matrices of an adapter."""
        self.lora_a["n" + name], self.lora_b["n" + name] = found.a, found.b
        self._parts[name] = (name, found.layer.rank, found.layer.scale)

    @override
    def __call__(self, x: Array) -> Array:
        """Return the layer's output, changed in rows with an adapter."""
        y = self.linear(x)
        bank = self._bank
        if not bank.used:
            return y
        parts = tuple(self._parts[name] for name in bank.used if name in self._parts)
        if not parts:
            return y
        if len(set(bank.rows)) == 1:
            name, _, scale = parts[0]
            z = (x @ self.lora_a["n" + name]) @ self.lora_b["n" + name]
            return y + (scale * z).astype(x.dtype)
        if x.ndim < 3 or x.shape[0] != len(bank.rows):
            raise ValueError(f"a layer has inputs of shape {x.shape} for {len(bank.rows)} rows")
        a = mx.concatenate([self.lora_a["n" + name] for name, _, _ in parts], axis=1)
        b = mx.concatenate([self.lora_b["n" + name] for name, _, _ in parts], axis=0)
        middle = x @ a
        mask = bank.mask(parts).reshape(len(bank.rows), *([1] * (x.ndim - 2)), -1)
        return y + ((middle * mask.astype(middle.dtype)) @ b).astype(x.dtype)


def add_adapters(
    model: Model, folders: Mapping[str, Path], *, make_caches: Callable[[], Any]
) -> AdapterBank:
    """Wrap the layers that any of the adapters changes; weights are read with the model's, when they are evaluated.

    Raises:
        ModelUnusableError: an adapter is invalid, belongs to another model, or cannot be used beside others.

    """
    bank = AdapterBank()
    layers: dict[str, AdaptedLinear] = {}
    for name, folder in folders.items():
        facts = adapter_files.inspect_adapter(folder)
        if facts.is_dora:
            raise _unusable(
                folder, "DoRA cannot be chosen by request", "deploy it by spec.model.adapter"
            )
        for adapted_layer in find_layers(model, folder, facts):
            layer = layers.setdefault(adapted_layer.name, AdaptedLinear(adapted_layer.linear, bank))
            layer.add(name, adapted_layer)
    model.update_modules(tree_unflatten(list(layers.items())))
    model.eval()
    names = tuple(folders)
    bank.select([names[0], ""])
    try:
        model(
            mx.zeros(_TRIAL, dtype=mx.uint32), cache=make_caches()
        )  # shapes only: nothing is evaluated
    except ValueError as error:
        why = f"this model's layers do not keep requests apart ({error})"
        raise _unusable(folders[names[0]], why, "deploy it by spec.model.adapter") from error
    bank.select([])
    return bank


def _unusable(folder: Path, why: str, advice: str) -> ModelUnusableError:
    return ModelUnusableError(f"adapter: {folder}: {why}; {advice}", reason="AdapterUnusable")
