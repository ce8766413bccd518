"""A tiny model with random weights which mlx-lm loads, made in well under 2 s; nothing is downloaded.

    python -m tests.support.tiny_model OUT [--arch qwen3|qwen2|llama] [--layers 2] ...

Float32 by default. A byte-level BPE tokenizer is trained on the spot on a text below, so any UTF-8
text survives encoding and decoding. Same arguments, same bytes. Imports mlx: run it in a process
of its own where BLAS matters.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Arch: TypeAlias = Literal["qwen3", "qwen2", "llama"]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
Shape: TypeAlias = tuple[int, ...]

_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# What mlx-lm looks for in a vocabulary to switch its reasoning and tool-call parsers on.
_MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Given twice to the trainer: a pair of bytes is merged only if it was seen more than once.
_CORPUS = """
We hold these truths to be self-evident, that all men are created equal, that they are endowed by
their Creator with certain unalienable Rights, that among these are Life, Liberty and the pursuit
of Happiness. That to secure these rights, Governments are instituted among Men, deriving their
just powers from the consent of the governed. That whenever any Form of Government becomes
destructive of these ends, it is the Right of the People to alter or to abolish it, and to
institute new Government, laying its foundation on such principles and organizing its powers in
such form, as to them shall seem most likely to effect their Safety and Happiness. Prudence,
indeed, will dictate that Governments long established should not be changed for light and
transient causes; and accordingly all experience hath shewn, that mankind are more disposed to
suffer, while evils are sufferable, than to right themselves by abolishing the forms to which they
are accustomed. system user assistant hello world one two three 1 2 3 {"name": "value"}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The size of the model; tests share the defaults."""

    arch: Arch = "qwen3"
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 4
    layers: int = 2
    vocab: int = 512
    context: int = 4096
    seed: int = 0
    dtype: Dtype = "float32"
    has_markers: bool = True
    # With True the end token is never the likeliest, so that greedy runs last as long as wanted.
    is_endless: bool = False
    files: int = 1
    """Weight files: the tensors outside of layers are in the last, and a layer may lie in two."""


def make(out: Path, shapes: Shapes | None = None, **changes: Any) -> Path:
    """Write a model directory; `changes` are fields of Shapes, such as `arch="qwen2"`."""
    shapes = replace(shapes or Shapes(), **changes)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(shapes)
    config = _config(shapes, vocab=max(shapes.vocab, tokenizer.get_vocab_size()))
    weights = _weights(shapes, config["vocab_size"])
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in weights.values())},
        "weight_map": _save(out, weights, shapes.files),
    }
    tokenizer.save(str(out / "tokenizer.json"))
    _write(out / "config.json", config)
    _write(out / "model.safetensors.index.json", index)
    _write(out / "tokenizer_config.json", _tokenizer_config(shapes))
    return out


def _save(out: Path, weights: Mapping[str, Any], files: int) -> dict[str, str]:
    """Write the weights in this many files; return the file of each tensor."""
    # Layers in order, as converters write them; then what is outside of layers.
    names = sorted(weights, key=lambda name: (not name.startswith("model.layers."), name))
    inside = sum(name.startswith("model.layers.") for name in names)
    weight_map = {}
    for number, name in enumerate(names):
        part = min(files, 1 + number * files // inside)
        one = "model.safetensors" if files == 1 else f"model-{part:05d}-of-{files:05d}.safetensors"
        weight_map[name] = one
    for one in set(weight_map.values()):
        held = {name: weights[name] for name in names if weight_map[name] == one}
        mx.save_safetensors(str(out / one), held, metadata={"format": "mlx"})
    return weight_map


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer(shapes: Shapes) -> Any:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shapes.vocab - (len(_MARKERS) if shapes.has_markers else 0),
        special_tokens=_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_CORPUS * 2).splitlines(), trainer)
    if shapes.has_markers:
        markers = [AddedToken(mark, normalized=False, special=False) for mark in _MARKERS]
        tokenizer.add_tokens(markers)
    return tokenizer


def _config(shapes: Shapes, *, vocab: int) -> dict[str, Any]:
    return {
        "model_type": shapes.arch,
        "architectures": [f"{shapes.arch.capitalize()}ForCausalLM"],
        "hidden_size": shapes.hidden,
        "intermediate_size": 2 * shapes.hidden,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.hidden // shapes.heads,
        "max_position_embeddings": shapes.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": shapes.dtype,
    }


def _tokenizer_config(shapes: Shapes) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[1],
        "eos_token": _SPECIALS[2],
        "pad_token": _SPECIALS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shapes.context,
        "chat_template": _TEMPLATE,
    }


def _layer(shapes: Shapes, at: int) -> dict[str, Shape]:
    width, wide = shapes.hidden, 2 * shapes.hidden
    head = width // shapes.heads
    query, key = shapes.heads * head, shapes.kv_heads * head
    parts: dict[str, Shape] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "mlp.gate_proj.weight": (wide, width),
        "mlp.up_proj.weight": (wide, width),
        "mlp.down_proj.weight": (width, wide),
    }
    if shapes.arch == "qwen2":
        parts |= {"self_attn.q_proj.bias": (query,)}
        parts |= {f"self_attn.{name}_proj.bias": (key,) for name in "kv"}
    if shapes.arch == "qwen3":
        parts |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    return {f"model.layers.{at}.{name}": shape for name, shape in parts.items()}


def _weights(shapes: Shapes, vocab: int) -> dict[str, Any]:
    wanted: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, shapes.hidden),
        "model.norm.weight": (shapes.hidden,),
        "lm_head.weight": (vocab, shapes.hidden),
    }
    for at in range(shapes.layers):
        wanted |= _layer(shapes, at)
    key = mx.random.key(shapes.seed)
    weights: dict[str, Any] = {}
    for name, shape in sorted(wanted.items()):
        if len(shape) == 1:
            weights[name] = mx.ones(shape)
            continue
        key, own = mx.random.split(key)
        # 2, not 1: sharper logits, so that greedy choices do not hang on rounding.
        scale = 1.0 if "embed" in name else 2.0 / math.sqrt(shape[-1])
        weights[name] = mx.random.normal(shape, key=own) * scale
    if shapes.is_endless:
        weights["lm_head.weight"][2] = 0.0
    kind = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[shapes.dtype]
    return {name: array.astype(kind) for name, array in weights.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a model directory as told on the command line."""
    parser = argparse.ArgumentParser(description="Make a tiny random model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="qwen3", choices=["qwen3", "qwen2", "llama"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--no-markers", dest="has_markers", action="store_false")
    parser.add_argument("--endless", dest="is_endless", action="store_true")
    defaults = Shapes()
    for name in ("files", "hidden", "heads", "kv_heads", "layers", "vocab", "context", "seed"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(defaults, name))
    flags = vars(parser.parse_args(arguments))
    print(make(flags.pop("out"), **flags))


if __name__ == "__main__":
    main()
