"""Applies a LoRA adapter to a model, in mlx-lm's format or PEFT's. Worker thread only; imports mlx."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import load_adapters

from models import adapter_files, model_files
from models.adapter_files import AdapterFacts, LowRankLayer
from models.model_files import ModelUnusableError

Array: TypeAlias = Any  # mlx ships no types
Model: TypeAlias = Any

# Multimodal models hold the text model below this name; PEFT's names may have either form.
_TEXT_MODEL = "language_model."


def apply_adapter(model: Model, folder: Path) -> None:
    """Wrap the layers that a LoRA adapter changes; its weights are read with the model's, when they are evaluated.

    Raises:
        ModelUnusableError: the folder is no valid adapter, or it belongs to another model.

    """
    facts = adapter_files.inspect_adapter(folder)
    if facts.format == "PEFT":
        # Wrap the layers of an adapter as mlx-lm does.
        wrapped = []
        for layer in find_layers(model, folder, facts):
            made: Any = LoRALinear.from_base(
                layer.linear, r=layer.layer.rank, scale=layer.layer.scale
            )
            made.lora_a, made.lora_b = layer.a, layer.b
            wrapped.append((layer.name, made))
        model.update_modules(tree_unflatten(wrapped))
    else:
        try:
            load_adapters(model, str(folder))
        except (ValueError, AttributeError, TypeError) as error:
            # The folder is valid, so the model differs: other names, other widths, or other kinds of layers.
            raise _other_model(folder, facts, _summarize_error(error)) from error
        # Refuse an adapter whose file lacks matrices that its config declares. mlx-lm would fill
        # them with random numbers, of any rank: memory that no proof has counted.
        held = model_files.read_tensors(facts.file)
        names: list[str] = [pair[0] for pair in tree_flatten(model.parameters())]
        missing = sorted(
            name for name in names if name.endswith((".lora_a", ".lora_b")) and name not in held
        )
        if missing:
            raise ModelUnusableError(
                f"adapter: {folder} declares {len(missing)} matrices that its weights do not have, first {missing[0]}; "
                "copy both files of one training run",
                reason="AdapterUnusable",
            )
    # New layers start in training mode, with dropout.
    model.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """A layer of an adapter, and the linear layer of the model that it belongs to."""

    name: str
    """Path of the linear layer in the model."""
    layer: LowRankLayer
    linear: Any
    a: Array
    """Shape (in, rank); read when it is evaluated."""
    b: Array
    """Shape (rank, out)."""


def find_layers(model: Model, folder: Path, facts: AdapterFacts) -> list[AdaptedLayer]:
    """Return the adapted layers of an adapter.

    Raises:
        ModelUnusableError: the model has no such linear layers, or they have another width.

    """
    modules: dict[str, Any] = dict(model.named_modules())
    weights = cast("dict[str, Any]", mx.load(str(facts.file)))
    adapted_layers: list[AdaptedLayer] = []
    problems: list[str] = []
    for layer in facts.layers:
        a, b = weights[layer.a], weights[layer.b]
        if facts.format == "PEFT":
            a, b = a.T, b.T
        name = next((one for one in _names_in_model(layer.name) if one in modules), layer.name)
        linear = modules.get(name)
        problem = _misfit(linear, layer, a, b)
        if problem is None:
            adapted_layers.append(AdaptedLayer(name=name, layer=layer, linear=linear, a=a, b=b))
        else:
            problems.append(f"{layer.name} {problem}")
    if problems:
        why = f"{len(problems)} of its layers do not fit, first {min(problems)}"
        raise _other_model(folder, facts, why)
    return adapted_layers


def _names_in_model(name: str) -> tuple[str, ...]:
    return name, _TEXT_MODEL + name, name.removeprefix("model.")


def _misfit(linear: Any, layer: LowRankLayer, a: Array, b: Array) -> str | None:
    """Return why the matrices do not belong to a layer of the model; None if they do."""
    if linear is None:
        return "is not in the model"
    if not isinstance(linear, Linear | QuantizedLinear):
        return f"is a {type(linear).__name__} in the model, and only linear layers can be adapted"
    inputs, outputs = _widths(linear)
    if (tuple(a.shape), tuple(b.shape)) == ((inputs, layer.rank), (layer.rank, outputs)):
        return None
    return f"has matrices of shapes {tuple(a.shape)} and {tuple(b.shape)}; the model's layer turns {inputs} into {outputs} numbers"


def _widths(linear: Any) -> tuple[int, int]:
    """Return the widths of a linear layer's input and output."""
    outputs, inputs = linear.weight.shape
    if isinstance(linear, QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return int(inputs), int(outputs)


def _other_model(folder: Path, facts: AdapterFacts, why: str) -> ModelUnusableError:
    return ModelUnusableError(
        f"adapter: {folder} (rank {facts.rank}) is not for this model: {why}",
        reason="AdapterUnusable",
    )


def _summarize_error(error: Exception) -> str:
    """Return mlx-lm's message with only the first tensor of its list."""
    head, _, rest = str(error).partition("\n")
    tensors = sorted(line.strip() for line in rest.splitlines())
    if not tensors:
        return head
    return f"{len(tensors)} of its tensors do not fit, first {tensors[0]}"
