"""The multi-token prediction (MTP) head of a checkpoint, which mlx-lm drops (models/mtp_layout.py). Worker thread only."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_config
from typing_extensions import override

from engine.gauges import Gauges
from engine.model.draft_model import check_guesses
from engine.model.loader import LoadedModel, materialize, raise_unusable
from models.model_files import ModelFacts, ModelUnusableError
from models.mtp_layout import LAYOUTS, MtpLayout
from schemas.wire.engine_config import EngineConfig

Array: TypeAlias = Any  # mlx ships no types

# The head's layer, as the only one of a model.
_ONLY: Final = "model.layers.0."
# Wrappers of models that also see have it before all names of the language model.
_WRAPPER: Final = "language_model."
_FIELD: Final = "spec.model.mtp"

log = logging.getLogger(__name__)


class MtpHead(Module):
    """A layer of the model that reads a token together with the hidden state of the one before it."""

    def __init__(
        self, layer: Module, width: int, eps: float, *, puts_embedding_first: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # mlx ships few types
        self.embedding_norm = RMSNorm(width, eps=eps)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.projection = Linear(2 * width, width, bias=False)
        self.layer = layer
        self.final_norm = RMSNorm(width, eps=eps)
        self._puts_embedding_first = puts_embedding_first

    @override
    def __call__(self, hidden: Array, embedded: Array, cache: KVCache) -> Array:
        """Return the hidden states from which the tokens after the embedded ones are guessed.

        Args:
            hidden: states of the tokens before them, as the output head reads them; shape (1, tokens, width).
            embedded: the embeddings of the tokens; same shape.
            cache: keys and values of the tokens that were read before.

        """
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        if not self._puts_embedding_first:
            parts.reverse()
        found = self.projection(mx.concatenate(parts, axis=-1))
        mask = create_attention_mask(found, cache, return_array=True)
        return self.final_norm(self.layer(found, mask, cache))


def add_head(
    loaded: LoadedModel,
    facts: ModelFacts,
    config: EngineConfig,
    gauges: Gauges,
    *,
    is_stopping: Callable[[], bool],
) -> LoadedModel:
    """Return the loaded model with its MTP head; unchanged if the config does not use it.

    Raises:
        ModelUnusableError: the checkpoint has no head that can be used.
        StoppedError: `is_stopping` became true.

    """
    if not config.mtp_tokens:
        return loaded
    folder = config.model_dir
    check_guesses(loaded, _FIELD)
    layout = LAYOUTS.get(facts.module)
    if layout is None:
        raise ModelUnusableError(
            f"{_FIELD}: heads of {facts.model_type} cannot be used, only those of {', '.join(LAYOUTS)}; leave it out, or "
            "use spec.model.ngram"
        )
    with raise_unusable(f"{folder}: the multi-token prediction head"):
        text_model: Any = getattr(loaded.model, "language_model", loaded.model)
        args = text_model.args
        prefix = layout.prefix_of(args.num_hidden_layers)
        shell = _one_layer(loaded.model)
        tensors = _read(folder, prefix, layout)
        if not any(name.startswith(f"{_ONLY}{layout.projection}.") for name in tensors):
            raise ModelUnusableError(
                f"{folder} has no multi-token prediction head (no {prefix}{layout.projection}.weight): converters often drop "
                f"it; use a checkpoint with a head, leave {_FIELD} out, or use spec.model.ngram"
            )
        weights = {
            _own_name(name, layout): array
            for name, array in _stack_experts(shell.sanitize(tensors)).items()
        }
        if layout.may_lack_one:
            _complete_norms(weights)
        head = MtpHead(
            shell.model.layers[0],
            args.hidden_size,
            args.rms_norm_eps,
            puts_embedding_first=layout.puts_embedding_first,
        )
        _quantize(head, weights, load_config(folder).get("quantization"), prefix + layout.layer)
        head.load_weights(list(weights.items()), strict=True)
        head.eval()
        materialize(head, gauges, is_stopping=is_stopping)
    log.info("MTP head loaded", extra={"bytes": gauges.loaded_bytes})
    return replace(loaded, mtp_head=head)


def _one_layer(model: Any) -> Any:
    """Return a model like this one with a single layer, of the kind of its head's, of which nothing is computed.

    mlx-lm knows how to name, stack and unpack the tensors of a layer. The first layers of these models may be dense or
    recurrent, and a head's layer is as the last.
    """
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "full_attention_interval": 1}
    args = model.args
    if hasattr(args, "text_config"):
        return type(model)(dataclasses.replace(args, text_config=args.text_config | changes))
    known = {name: value for name, value in changes.items() if hasattr(args, name)}
    return type(model)(dataclasses.replace(args, **known))


def _read(folder: Path, prefix: str, layout: MtpLayout) -> dict[str, Array]:
    """Return the head's tensors, unread, with the names of a model's only layer."""
    arrays: dict[str, Array] = {}
    for path in folder.glob("model*.safetensors"):
        tensors: Any = mx.load(str(path))
        for name, array in tensors.items():
            whole = name.removeprefix(_WRAPPER)
            rest = whole.removeprefix(prefix)
            if rest != whole and not rest.startswith(layout.copies):
                arrays[_ONLY + rest.removeprefix(layout.layer)] = array
    return arrays


def _stack_experts(weights: dict[str, Array]) -> dict[str, Array]:
    """Return the tensors with those of single experts stacked, which mlx-lm's `qwen3_5_moe` leaves as they are."""
    experts: dict[str, dict[int, Array]] = {}
    for name in list(weights):
        before, found, after = name.partition(".mlp.experts.")
        number, _, rest = after.partition(".")
        if found and number.isdigit():
            experts.setdefault(f"{before}.mlp.switch_mlp.{rest}", {})[int(number)] = weights.pop(
                name
            )
    return weights | {
        name: mx.stack([arrays[at] for at in sorted(arrays)]) for name, arrays in experts.items()
    }


def _complete_norms(weights: dict[str, Array]) -> None:
    """Add 1 to the weights of norms that are stored as differences from 1, as Qwen's authors do.

    Checkpoints mix both forms, so each tensor is judged alone. Weights of published layers are near 1, so that a
    difference averages below 0.5. Those of the norms before the projection are about 0.3 and 0.5: a difference is
    negative there (omlx#3750, omlx#1507, MTPLX#511).
    """
    for name, array in weights.items():
        if array.ndim == 1 and name.endswith("norm.weight"):
            is_before = name.startswith(("embedding_norm", "hidden_norm"))
            if array.astype(mx.float32).mean().item() <= (0.0 if is_before else 0.5):
                weights[name] = array + 1.0


def _own_name(name: str, layout: MtpLayout) -> str:
    """Return the name in MtpHead of a tensor of the only layer."""
    rest = name.removeprefix(_WRAPPER).removeprefix(_ONLY)
    stem, _, last = rest.rpartition(".")
    own = {
        layout.embedding_norm: "embedding_norm",
        layout.hidden_norm: "hidden_norm",
        layout.projection: "projection",
        layout.final_norm: "final_norm",
    }
    return f"{own[stem]}.{last}" if stem in own else f"layer.{rest}"


def _quantize(
    head: MtpHead, weights: dict[str, Array], settings: dict[str, Any] | None, prefix: str
) -> None:
    """Make the head's layers quantized whose weights are, with the model's settings, as mlx-lm does."""
    if settings is None:
        return

    def chosen(path: str, module: Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        published = prefix + path.removeprefix("layer.")
        own: bool | dict[str, Any] = settings.get(
            published, settings.get(_WRAPPER + published, True)
        )
        return own

    quantize(
        head,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=chosen,
    )
