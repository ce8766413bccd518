"""A model of mlx-lm as Ollama's MLX engine stores it, and the comparison of what is computed with an import of it.

    python -m tests.support.ollama_mlx write MODEL_FOLDER STORE EXPECTED
    python -m tests.support.ollama_mlx compare MODEL_FOLDER EXPECTED

Imports mlx: run it in a process of its own.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils as mlx_lm

from tests.support.ollama_store import TENSOR, add_blob, add_jsons, add_manifest

# Kinds of quantization that one model mixes: of the attention, and of everything else.
_ATTENTION, _REST = ("int8", 64, 8), ("int4", 32, 4)


def _load(model: Path) -> Any:
    return mlx_lm.load_model(model)[0]


def write(model: Path, store: Path, expected: Path) -> None:
    """Write a model of mlx-lm into a store of Ollama, and save the logits of what mlx quantizes itself."""
    loaded = _load(model)
    layers = []
    weights: Any = mx.load(str(model / "model.safetensors"))
    for name, value in weights.items():
        one = store / "one.safetensors"
        store.mkdir(parents=True, exist_ok=True)
        if value.ndim == 2 and name.endswith(".weight"):
            kind, group_size, bits = _ATTENTION if "self_attn" in name else _REST
            packed, scale, bias = mx.quantize(value, group_size=group_size, bits=bits)
            tensors = {name: packed, f"{name}.scale": scale, f"{name}.bias": bias}
            metadata = {"quant_type": kind, "group_size": str(group_size)}
        else:
            tensors, metadata = {name: value}, {}
        mx.save_safetensors(str(one), tensors, metadata)
        layers.append(add_blob(store, TENSOR, name, one.read_bytes()))
        one.unlink()
    jsons = {path.name: path.read_bytes() for path in model.glob("*.json")}
    add_manifest(store, "library/tiny/4b-mlx", layers + add_jsons(store, jsons))

    def choose(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        _, group_size, bits = _ATTENTION if "self_attn" in path else _REST
        return {"group_size": group_size, "bits": bits}

    quantize: Any = importlib.import_module("mlx.nn").quantize
    quantize(loaded, group_size=_REST[1], bits=_REST[2], class_predicate=choose)
    mx.save_safetensors(
        str(expected), {"logits": loaded(mx.array([[1, 2, 3, 4, 5]])).astype(mx.float32)}
    )


def compare(model: Path, expected: Path) -> None:
    """Compare the logits of a model with those that `write` left."""
    loaded = _load(model)
    found = loaded(mx.array([[1, 2, 3, 4, 5]])).astype(mx.float32)
    saved: Any = mx.load(str(expected))
    wanted = saved["logits"]
    assert mx.array_equal(found, wanted), mx.abs(found - wanted).max()


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    paths = [Path(word) for word in words]
    if verb == "write":
        write(*paths)
    else:
        compare(*paths)
