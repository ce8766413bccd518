"""The architectures whose GGUF files are read: config.json, and the name, shape and place in memory of each tensor."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from models.gguf.file_reader import GgufFile, GgufRefusedError, GgufTensor

_MAX_LAYERS: Final = 1000
# The numbers of Llama 3.1, 3.2 and 3.3 beside the factor, which is all that their files vary.
_LLAMA3_ROPE: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_BASE_REPO: Final = re.compile(r"https://huggingface\.co/([\w.-]{1,96}/[\w.-]{1,96})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    model_type: str
    """The module of mlx-lm."""
    dtype: str
    """The type of the result, unless all weights have 32 bits: bfloat16 where activations are too large for float16."""
    swaps_rope: bool = False
    """True if llama.cpp has the rows of queries and keys in its own order."""
    has_bias: bool = False
    has_head_norms: bool = False
    has_outer_norms: bool = False
    """True if attention and feed-forward have a norm behind them, too, and norms are stored with 1 added (Gemma)."""


_ARCHITECTURES: Final = {
    "llama": _Architecture(model_type="llama", dtype="F16", swaps_rope=True),
    "qwen2": _Architecture(model_type="qwen2", dtype="BF16", has_bias=True),
    "qwen3": _Architecture(model_type="qwen3", dtype="BF16", has_head_norms=True),
    "gemma3": _Architecture(
        model_type="gemma3_text", dtype="BF16", has_head_norms=True, has_outer_norms=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of the result, and what becomes of its numbers."""

    name: str
    source: GgufTensor
    swapped_heads: int = 0
    """Heads whose rows are in llama.cpp's order; 0 for a tensor in the usual one."""
    added: float = 0.0
    """The number that is added to each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The result of a conversion, before its first weight is read."""

    config: Mapping[str, Any]
    dtype: str
    tensors: tuple[OutputTensor, ...]


def plan_model(file: GgufFile) -> ModelPlan:
    """Return what a file becomes.

    Raises:
        GgufRefusedError: it is of another architecture, or lacks or has a tensor that its architecture does not say.

    """
    name = file.get("general.architecture", str)
    if file.integer("split.count", default=1) > 1:
        raise GgufRefusedError(
            f"{file.path} is one part of several: make one file of them with `llama-gguf-split --merge "
            f"FIRST-PART {file.path.parent / 'whole.gguf'}`"
        )
    if name not in _ARCHITECTURES or file.integer(f"{name}.expert_count", default=0):
        what = "mixture of experts of " if name in _ARCHITECTURES else ""
        raise GgufRefusedError(
            f"{file.path}: its architecture is the {what}{name[:40]!r}; of GGUF files {', '.join(_ARCHITECTURES)} are read. "
            f"{_advice(file)}"
        )
    architecture = _ARCHITECTURES[name]
    config = _config(file, name, architecture)
    tensors = tuple(_tensors(file, architecture, config))
    unused = (
        file.tensors.keys() - {tensor.source.name for tensor in tensors} - {"rope_freqs.weight"}
    )
    if unused:
        raise GgufRefusedError(
            f"{file.path} has {len(unused)} tensors that a model of {name} does not have, such as {min(unused)[:80]!r}. "
            f"{_advice(file)}"
        )
    packings = {tensor.source.packing.name for tensor in tensors}
    return ModelPlan(
        config=config,
        dtype="F32"
        if packings == {"F32"}
        else "BF16"
        if "BF16" in packings
        else architecture.dtype,
        tensors=tensors,
    )


def _advice(file: GgufFile) -> str:
    """Return what to do instead, with the model's origin where the file says it."""
    link = _BASE_REPO.fullmatch(str(file.metadata.get("general.base_model.0.repo_url", "")))
    repo = link[1] if link else "ORGANISATION/NAME"
    return (
        f"Fetch the model that it was made of with `fleetctl models pull {repo}`, and make it smaller with "
        f"`fleetctl models quantize {repo}`"
    )


def _tensors(
    file: GgufFile, architecture: _Architecture, config: Mapping[str, Any]
) -> Iterator[OutputTensor]:
    """Yield the tensors in the order of the layers. Raises GgufRefusedError: one is absent, or of another shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries, keys = heads * config["head_dim"], kv_heads * config["head_dim"]
    is_gemma = architecture.has_outer_norms
    norm = (hidden,)
    layer = {
        "attn_norm.weight": ("input_layernorm", norm),
        "attn_q.weight": ("self_attn.q_proj", (queries, hidden)),
        "attn_k.weight": ("self_attn.k_proj", (keys, hidden)),
        "attn_v.weight": ("self_attn.v_proj", (keys, hidden)),
        "attn_output.weight": ("self_attn.o_proj", (hidden, queries)),
        "ffn_norm.weight": (
            "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm",
            norm,
        ),
        "ffn_gate.weight": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up.weight": ("mlp.up_proj", (inner, hidden)),
        "ffn_down.weight": ("mlp.down_proj", (hidden, inner)),
    }
    if architecture.has_bias:
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            layer[f"attn_{part}.bias"] = (f"self_attn.{part}_proj", (rows,))
    if architecture.has_head_norms:
        for part in "qk":
            layer[f"attn_{part}_norm.weight"] = (f"self_attn.{part}_norm", (config["head_dim"],))
    if is_gemma:
        layer["post_attention_norm.weight"] = ("post_attention_layernorm", norm)
        layer["post_ffw_norm.weight"] = ("post_feedforward_layernorm", norm)
    outside = {
        "token_embd.weight": ("model.embed_tokens", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm", norm),
    }
    if "output.weight" in file.tensors:
        outside["output.weight"] = ("lm_head", (config["vocab_size"], hidden))
    names = {
        f"blk.{number}.{key}": (f"model.layers.{number}.{stem}", shape)
        for number in range(config["num_hidden_layers"])
        for key, (stem, shape) in layer.items()
    }
    swapped = {"attn_q": heads, "attn_k": kv_heads} if architecture.swaps_rope else {}
    for key, (stem, shape) in (names | outside).items():
        tensor = file.tensors.get(key)
        if tensor is None or tensor.shape != shape:
            what = "is absent" if tensor is None else f"has the shape {tensor.shape}"
            raise GgufRefusedError(
                f"{file.path}: its tensor {key} {what}; expected {shape}: it is damaged, or of another architecture than "
                "it says; download it again"
            )
        yield OutputTensor(
            name=f"{stem}.{key.rpartition('.')[2]}",
            source=tensor,
            swapped_heads=swapped.get(key.split(".")[-2], 0),
            added=-1.0 if is_gemma and len(shape) == 1 else 0.0,
        )


def _config(file: GgufFile, name: str, architecture: _Architecture) -> dict[str, Any]:
    """Return config.json without what the tokenizer says. Raises GgufRefusedError: its numbers do not match."""
    heads = file.integer(f"{name}.attention.head_count", most=1 << 12)
    hidden = file.integer(f"{name}.embedding_length")
    head = file.integer(
        f"{name}.attention.key_length", default=hidden // max(heads, 1), most=1 << 12
    )
    embedding = file.tensors.get("token_embd.weight")
    base = file.get(f"{name}.rope.freq_base", float, 10_000.0)
    if base <= 1:
        raise file.refused(f"{name}.rope.freq_base", "a number above 1")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": file.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{name}.block_count", most=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(
            f"{name}.attention.head_count_kv", default=heads, most=heads
        ),
        "head_dim": head,
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "max_position_embeddings": file.integer(f"{name}.context_length", most=1 << 30),
        # float32 in the file: 1e-05 is 9.99999974e-06 there.
        "rms_norm_eps": float(f"{file.get(f'{name}.attention.layer_norm_rms_epsilon', float):.6g}"),
        "rope_theta": base,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if zero := [key for key, value in config.items() if value == 0 and value is not False]:
        raise GgufRefusedError(f"{file.path}: the {zero[0]} of its model is 0: it is damaged")
    # mlx-lm's qwen2 has no head size of its own.
    is_odd = architecture.has_bias and heads * head != hidden
    if heads % config["num_key_value_heads"] or head % 2 or is_odd:
        raise GgufRefusedError(
            f"{file.path}: its {heads} heads of {head} numbers do not match {config['num_key_value_heads']} heads of keys "
            f"or the width {hidden}"
        )
    rope = file.integer(f"{name}.rope.dimension_count", default=head)
    value = file.integer(f"{name}.attention.value_length", default=head)
    if not rope == value == head:
        raise GgufRefusedError(
            f"{file.path}: its heads have {head} numbers in keys, {value} in values and {rope} with positions; "
            f"expected the same number. {_advice(file)}"
        )
    if scaling := _rope_scaling(file, name, head, base):
        config["rope_scaling"] = scaling
    if architecture.model_type == "gemma3_text":
        config["sliding_window"] = file.integer(f"{name}.attention.sliding_window")
        config["sliding_window_pattern"] = 6
        config["rope_local_base_freq"] = 10_000.0
        # Gemma 3 27B, which has 62 layers, is the exception in llama.cpp, too.
        scalar = hidden // heads if config["num_hidden_layers"] == 62 else head
        config["query_pre_attn_scalar"] = scalar
    return config


def _rope_scaling(file: GgufFile, name: str, head: int, base: float) -> dict[str, Any] | None:
    """Return the scaling of positions. Raises GgufRefusedError: mlx-lm could not compute the same."""
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise GgufRefusedError(
            f"{file.path}: its positions are scaled by {kind[:40]!r}; of GGUF files linear is read. {_advice(file)}"
        )
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        factor = file.get(f"{name}.rope.scaling.factor", float, 1.0)
        return {"rope_type": "linear", "factor": factor} if kind == "linear" else None
    # Llama 3.1 and later: the file has the factor of each frequency, which must be those that mlx-lm computes.
    with file.path.open("rb") as content:
        content.seek(tensor.start)
        raw = content.read(min(tensor.size, 1 << 16))
    factors = memoryview(raw).cast("f") if tensor.packing.name == "F32" else ()
    factor = max(factors, default=0.0)
    expected = [
        _llama3_factor(2 * math.pi * base ** (2 * at / head), factor) for at in range(head // 2)
    ]
    if len(factors) != len(expected) or any(
        not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)
    ):
        raise GgufRefusedError(
            f"{file.path}: its positions are scaled by other factors than those of Llama 3. {_advice(file)}"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _llama3_factor(wavelength: float, factor: float) -> float:
    """Return by what the frequency of a wavelength is divided (`_compute_llama3_parameters` of transformers)."""
    low, high, context = _LLAMA3_ROPE.values()
    if wavelength < context / high:
        return 1.0
    if wavelength > context / low:
        return factor
    smooth = (context / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / max(factor, 1e-9) + smooth)
