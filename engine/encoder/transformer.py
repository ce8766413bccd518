"""The transformer of BERT, RoBERTa, XLM-R, ModernBERT and NomicBERT: one forward pass with options. Imports mlx.

Names and formulas are those of transformers 5.23 (models/bert, xlm_roberta, modernbert, nomic_bert). Weights get the names
of `_RENAMED`, and the projections of queries, keys and values become one matrix.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu
from mlx.nn.layers.base import Module
from pydantic import AliasChoices, BaseModel, Field
from typing_extensions import override

from models.encoder_shape import SCORE_BYTES

Array: TypeAlias = Any  # mlx ships no types

_RENAMED: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(?:bert|roberta|model)\.", ""),
        (r"^encoder\.layers?\.", "layers."),
        (r"\.(?:attn|attention\.self|self_attn)\.(?:Wqkv|qkv_proj)\.", ".qkv."),
        (r"\.(?:attention\.self|self_attn)\.(q|k|v)(?:uery|ey|alue|_proj)\.", r".\1."),
        (r"\.(?:attn\.Wo|attn\.out_proj|self_attn\.o_proj|attention\.output\.dense)\.", ".o."),
        (r"\.(?:attention\.output\.LayerNorm|norm1|post_attention_layernorm)\.", ".attn_norm."),
        (r"\.(?:mlp\.fc12|mlp\.gate_proj)\.", ".gate."),
        (r"\.(?:mlp\.Wi|mlp\.fc11|mlp\.up_proj|intermediate\.dense)\.", ".up."),
        (r"\.(?:mlp\.Wo|mlp\.fc2|mlp\.down_proj|output\.dense)\.", ".down."),
        (r"\.(?:output\.LayerNorm|norm2|post_mlp_layernorm)\.", ".mlp_norm."),
        (r"^embeddings\.(?:word|tok)_embeddings\.", "word."),
        (r"^embeddings\.position_embeddings\.", "position."),
        (r"^embeddings\.token_type_embeddings\.", "type."),
        (r"^(?:embeddings\.(?:LayerNorm|norm)|emb_ln)\.", "embed_norm."),
        (r"^(?:classifier\.dense|head\.dense)\.", "pooler.dense."),
        (r"^head\.norm\.", "pooler.norm."),
        (r"^classifier\.(?:out_proj\.)?", "score."),
        # The names of BERT's first checkpoints.
        (r"gamma$", "weight"),
        (r"beta$", "bias"),
    )
)
# Heads of other tasks, which such models were trained with, and constants.
_IGNORED: Final = re.compile(
    r"^(?:cls|lm_head|decoder|predictions)\.|position_ids$|^pooler\.|^score\."
)
_ACTIVATIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "gelu": gelu,
    "gelu_new": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "relu": relu,
    "silu": silu,
    "swiglu": silu,
}
# Head sizes with a fused kernel on Metal (models/model_files.py).
_FUSED_HEAD_SIZES: Final = (64, 80, 128)
_LOCAL_QUERIES: Final = 512


class _Rope(BaseModel):
    rope_theta: float | None = None


class _Quantization(BaseModel):
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"


class EncoderConfig(BaseModel):
    """The fields of a config.json that decide what an encoder computes."""

    model_type: str
    hidden_size: Annotated[int, Field(ge=1, validation_alias=AliasChoices("hidden_size", "n_embd"))]
    num_attention_heads: Annotated[
        int, Field(ge=1, validation_alias=AliasChoices("num_attention_heads", "n_head"))
    ]
    num_hidden_layers: Annotated[
        int,
        Field(ge=1, le=1000, validation_alias=AliasChoices("num_hidden_layers", "n_layer")),
    ]
    activation: Annotated[
        str,
        Field(
            validation_alias=AliasChoices("hidden_act", "hidden_activation", "activation_function")
        ),
    ] = "gelu"
    norm_eps: Annotated[
        float | None,
        Field(validation_alias=AliasChoices("layer_norm_eps", "norm_eps", "layer_norm_epsilon")),
    ] = None
    position_embedding_type: str = "absolute"
    # ModernBERT: layers that see a window, and the bases of their rotations.
    local_attention: Annotated[int, Field(ge=2)] = 128
    layer_types: list[str] | None = None
    global_attn_every_n_layers: Annotated[int, Field(ge=1)] = 3
    rope_parameters: dict[str, Any] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: str = "gelu"
    # NomicBERT.
    rotary_emb_base: float = 1000.0
    rotary_emb_fraction: float = 1.0
    rotary_emb_interleaved: bool = False
    prenorm: bool = False
    quantization: _Quantization | None = None

    @property
    def is_modern(self) -> bool:
        """True for ModernBERT: it normalizes before each part of a layer, and most layers see a window."""
        return self.model_type == "modernbert"

    @property
    def epsilon(self) -> float:
        """Return what normalization adds to a variance; the defaults are those of transformers."""
        return (1e-5 if self.is_modern else 1e-12) if self.norm_eps is None else self.norm_eps

    def unsupported(self) -> str:
        """Return what this model needs and nothing here computes; "" if that is nothing."""
        names = {self.activation, *([self.classifier_activation] if self.is_modern else [])}
        checks = {
            f"the activation {' or '.join(sorted(names - _ACTIVATIONS.keys()))}": names
            <= _ACTIVATIONS.keys(),
            f"position_embedding_type {self.position_embedding_type}": self.position_embedding_type
            in ("absolute", "rotary", "rope"),
            "rotary_emb_fraction below 1": self.rotary_emb_fraction == 1,
            "rotary_emb_interleaved": not self.rotary_emb_interleaved,
            "prenorm": not self.prenorm,
            f"{self.hidden_size} numbers in {self.num_attention_heads} heads": self.hidden_size
            % self.num_attention_heads
            == 0,
        }
        return " and ".join(name for name, holds in checks.items() if not holds)

    def is_local(self, layer: int) -> bool:
        """Return whether a layer sees only a window around each token."""
        if not self.is_modern:
            return False
        if self.layer_types is not None:
            return self.layer_types[layer] == "sliding_attention"
        return layer % self.global_attn_every_n_layers != 0

    def rope_base(self, layer: int) -> float | None:
        """Return the base of the rotations of a layer; None for a model with a table of positions."""
        if not self.is_modern and self.model_type != "nomic_bert":
            return None
        kind = "sliding_attention" if self.is_local(layer) else "full_attention"
        nested = self.rope_parameters or {}
        theta = _Rope.model_validate(
            nested.get(kind, nested) if self.is_modern else nested
        ).rope_theta
        if not self.is_modern:
            return theta or self.rotary_emb_base
        return theta or (self.local_rope_theta if self.is_local(layer) else self.global_rope_theta)


@dataclass(frozen=True, slots=True)
class _Batch:
    size: int
    length: int
    valid: Array | None
    """Shape (texts, 1, 1, length), True for tokens; None without padding."""


class Encoder(Module):
    """An encoder; `weights` are the arrays of `canonical_weights`, read by `materialize` (engine/model/loader.py)."""

    def __init__(
        self, config: EncoderConfig, weights: Mapping[str, Array], *, position_offset: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # mlx ships few types
        self.weights = dict(weights)
        self._config = config
        self._offset = position_offset
        self._heads = config.num_attention_heads
        self._size = config.hidden_size // config.num_attention_heads
        self._is_fused = mx.metal.is_available() and self._size in _FUSED_HEAD_SIZES

    @override
    def __call__(self, tokens: Array, lengths: Sequence[int], seconds: Sequence[int]) -> Array:
        """Return the last hidden states, shape (texts, length, width), of texts that are padded on the right.

        `seconds` has the index of the first token of each text's second part; 0 if there is none.
        """
        size, length = tokens.shape
        columns = mx.arange(length)
        hidden = self._rows("word", tokens)
        if "position/weight" in self.weights:
            hidden = hidden + self._rows("position", columns + self._offset)
        if "type/weight" in self.weights:
            starts = mx.array([start or length for start in seconds])[:, None]
            rows = self.weights["type/weight"].shape[0]
            hidden = hidden + self._rows("type", mx.minimum(columns >= starts, rows - 1))
        hidden = self._norm(hidden, "embed_norm")
        valid = None
        if min(lengths) < length:
            valid = (columns[None] < mx.array(list(lengths))[:, None])[:, None, None, :]
        batch = _Batch(size, length, valid)
        for layer in range(self._config.num_hidden_layers):
            hidden = self._layer(hidden, f"layers/{layer}/", layer, batch)
        return self._norm(hidden, "final_norm") if self._config.is_modern else hidden

    def score(self, pooled: Array) -> Array:
        """Return the logits of pooled hidden states, shape (texts, 1)."""
        if "pooler/dense/weight" in self.weights:
            pooled = self._linear(pooled, "pooler/dense")
            if self._config.is_modern:
                pooled = _ACTIVATIONS[self._config.classifier_activation](pooled)
                pooled = self._norm(pooled, "pooler/norm")
            else:
                pooled = mx.tanh(pooled)
        return self._linear(pooled, "score")

    def _layer(self, hidden: Array, name: str, layer: int, batch: _Batch) -> Array:
        if self._config.is_modern:
            # The first layer has no norm of its own: that of the embedding stands for it.
            has_norm = f"{name}attn_norm/weight" in self.weights
            rows = self._norm(hidden, f"{name}attn_norm") if has_norm else hidden
            hidden = hidden + self._attention(rows, name, layer, batch)
            return hidden + self._feed_forward(self._norm(hidden, f"{name}mlp_norm"), name)
        attended = self._attention(hidden, name, layer, batch)
        hidden = self._norm(hidden + attended, f"{name}attn_norm")
        return self._norm(hidden + self._feed_forward(hidden, name), f"{name}mlp_norm")

    def _feed_forward(self, rows: Array, name: str) -> Array:
        act = _ACTIVATIONS[self._config.activation]
        wide = self._linear(rows, f"{name}up")
        if f"{name}gate/weight" in self.weights:
            wide = act(self._linear(rows, f"{name}gate")) * wide
        elif self._config.is_modern:
            first, second = mx.split(wide, 2, axis=-1)
            wide = act(first) * second
        else:
            wide = act(wide)
        return self._linear(wide, f"{name}down")

    def _attention(self, rows: Array, name: str, layer: int, batch: _Batch) -> Array:
        shape = (batch.size, batch.length, 3, self._heads, self._size)
        queries, keys, values = (
            self._linear(rows, f"{name}qkv").reshape(shape).transpose(2, 0, 3, 1, 4)
        )
        base = self._config.rope_base(layer)
        if base is not None:
            queries, keys = (
                mx.fast.rope(part, self._size, traditional=False, base=base, scale=1.0, offset=0)
                for part in (queries, keys)
            )
        window = self._config.local_attention // 2 if self._config.is_local(layer) else None
        parts = [
            self._attend(queries, keys, values, slice(start, start + count), window, batch)
            for start, count in self._query_parts(batch, window)
        ]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return self._linear(joined.transpose(0, 2, 1, 3).reshape(rows.shape), f"{name}o")

    def _query_parts(self, batch: _Batch, window: int | None) -> list[tuple[int, int]]:
        """Return the start and the number of the queries of each part, so that scores take at most SCORE_BYTES."""
        most = batch.length
        if not self._is_fused:
            most = max(1, SCORE_BYTES // (4 * batch.size * self._heads * batch.length))
        if window is not None:
            most = min(most, _LOCAL_QUERIES)
        return [(start, min(most, batch.length - start)) for start in range(0, batch.length, most)]

    def _attend(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        part: slice,
        window: int | None,
        batch: _Batch,
    ) -> Array:
        keys_part, mask = slice(0, batch.length), batch.valid
        if window is not None:
            keys_part = slice(max(0, part.start - window), min(batch.length, part.stop + window))
            near = (
                mx.abs(
                    mx.arange(part.start, part.stop)[:, None]
                    - mx.arange(keys_part.start, keys_part.stop)
                )
                <= window
            )
            mask = near if mask is None else near & mask[..., keys_part]
        attended = mx.fast.scaled_dot_product_attention(
            queries[:, :, part],
            keys[:, :, keys_part],
            values[:, :, keys_part],
            scale=1 / math.sqrt(self._size),
            mask=mask,
        )
        if part.stop - part.start < batch.length:
            mx.eval(attended)  # else the scores of all parts might be alive at once
        return attended

    def _norm(self, rows: Array, name: str) -> Array:
        bias = self.weights.get(f"{name}/bias")
        return mx.fast.layer_norm(rows, self.weights[f"{name}/weight"], bias, self._config.epsilon)

    def _rows(self, name: str, indices: Array) -> Array:
        table, scales = self.weights[f"{name}/weight"], self.weights.get(f"{name}/scales")
        if scales is None:
            return table[indices]
        biases = self.weights.get(f"{name}/biases")
        return mx.dequantize(
            table[indices],
            scales[indices],
            None if biases is None else biases[indices],
            **self._packing(),
        )

    def _linear(self, rows: Array, name: str) -> Array:
        matrix, bias = self.weights[f"{name}/weight"], self.weights.get(f"{name}/bias")
        scales = self.weights.get(f"{name}/scales")
        if scales is not None:
            product = mx.quantized_matmul(
                rows, matrix, scales, self.weights.get(f"{name}/biases"), **self._packing()
            )
            return product if bias is None else product + bias
        return rows @ matrix.T if bias is None else mx.addmm(bias, rows, matrix.T)

    def _packing(self) -> dict[str, Any]:
        packing = self._config.quantization or _Quantization()
        return {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}


def canonical_weights(
    tensors: Mapping[str, Array], config: EncoderConfig, *, is_classifier: bool
) -> dict[str, Array]:
    """Return the arrays by the names that `Encoder` uses, with `/` between parts.

    Raises:
        ValueError: a tensor is missing, or no part of such a model.

    """
    renamed: dict[str, Array] = {}
    for name, tensor in tensors.items():
        for pattern, new in _RENAMED:
            name = pattern.sub(new, name)  # noqa: PLW2901 - one rename after the other
        renamed[name] = tensor
    for layer in range(config.num_hidden_layers):
        for kind in ("weight", "scales", "biases", "bias"):
            parts = [renamed.pop(f"layers.{layer}.{part}.{kind}", None) for part in "qkv"]
            if all(part is not None for part in parts):
                renamed[f"layers.{layer}.qkv.{kind}"] = mx.concatenate(parts)
    wanted = ["word", "embed_norm"]
    for layer in range(config.num_hidden_layers):
        wanted += [f"layers.{layer}.{part}" for part in ("qkv", "o", "up", "down", "mlp_norm")]
        if layer or not config.is_modern:
            wanted.append(f"layers.{layer}.attn_norm")
    wanted += ["final_norm"] if config.is_modern else []
    wanted += [] if config.rope_base(0) is not None else ["position"]
    # BERT has a pooler, RoBERTa and ModernBERT a layer before the score.
    wanted += ["pooler.dense", "score"] if is_classifier else []
    missing = [name for name in wanted if f"{name}.weight" not in renamed]
    if missing:
        raise ValueError(
            f"the weights lack {missing[0]} and {len(missing) - 1} more of {len(wanted)}"
        )
    known = {*wanted, "type"} | {f"layers.{at}.gate" for at in range(config.num_hidden_layers)}
    known |= {"pooler.norm"} if is_classifier else set()
    result: dict[str, Array] = {}
    for name, tensor in renamed.items():
        stem = name.rpartition(".")[0]
        if stem in known:
            result[name.replace(".", "/")] = tensor
        elif not _IGNORED.search(name):
            raise ValueError(f"the weights have {name}, which is no part of {config.model_type}")
    return result
