"""Embedding models for tests: folders as sentence-transformers saves them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from engine.model import pooler


def write_json(folder: Path, name: str, tree: Any) -> None:
    """Write a JSON file below a folder."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(tree))


def make_embedder(
    tiny: Path, out: Path, *, mode: str = "lasttoken", normalize: bool = True
) -> Path:
    """Copy a text model and add the files of sentence-transformers."""
    folder = shutil.copytree(tiny, out)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listing = [
        {
            "idx": at,
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    write_json(folder, "modules.json", listing)
    write_json(folder, "1_Pooling/config.json", {"pooling_mode": mode, "include_prompt": True})
    return folder


def pooling(mode: str, *, normalize: bool = False) -> pooler.PoolerConfig:
    """Return the pooling of the tiny model, whose vectors have 64 numbers."""
    return pooler.PoolerConfig(mode=mode, width=64, is_normalized=normalize)  # type: ignore[arg-type]


def make_cross_encoder(
    tiny: Path,
    out: Path,
    *,
    labels: int = 1,
    activation: str = "",
    weights_only_inner: bool = False,
) -> Path:
    """Copy a text model without its head, and add a layer with random weights for a score."""
    folder = shutil.copytree(tiny, out)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    config["id2label"] = {str(at): f"LABEL_{at}" for at in range(labels)}
    if activation:
        config["sentence_transformers"] = {"activation_fn": activation}
    write_json(folder, "config.json", config)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: one for name, one in tensors.items() if not name.startswith("lm_head.")}
    if weights_only_inner:
        tensors = {name.removeprefix("model."): one for name, one in tensors.items()}
    width = config["hidden_size"]
    noise = np.random.default_rng(7).normal(0, 1 / np.sqrt(width), (labels, width))
    tensors["score.weight"] = noise.astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder


def reference_logit(folder: Path, tokens: list[int]) -> float:
    """Return the score of tokens before its activation: Qwen3's formula in numpy, in float64, without MLX."""
    config = json.loads((folder / "config.json").read_text())
    raw = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): one.astype(np.float64) for name, one in raw.items()}
    heads, size = config["num_attention_heads"], config["head_dim"]
    group = heads // config["num_key_value_heads"]
    count, epsilon = len(tokens), config["rms_norm_eps"]
    angles = np.outer(np.arange(count), config["rope_theta"] ** (-np.arange(0, size, 2) / size))[
        :, None, :
    ]

    def norm(rows: Any, name: str) -> Any:
        scale = np.sqrt((rows**2).mean(-1, keepdims=True) + epsilon)
        return rows / scale * tensors[f"{name}.weight"]

    def turned(rows: Any) -> Any:
        one, two = rows[..., : size // 2], rows[..., size // 2 :]
        cosine, sine = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cosine - two * sine, two * cosine + one * sine], -1)

    hidden = tensors["embed_tokens.weight"][tokens]
    hides = np.triu(np.full((count, count), -np.inf), 1)
    for at in range(config["num_hidden_layers"]):
        layer = f"layers.{at}"

        def project(rows: Any, part: str, layer: str = layer) -> Any:
            return rows @ tensors[f"{layer}.{part}.weight"].T

        rows = norm(hidden, f"{layer}.input_layernorm")
        query, key, value = (
            project(rows, f"self_attn.{part}_proj").reshape(count, -1, size) for part in "qkv"
        )
        query = turned(norm(query, f"{layer}.self_attn.q_norm"))
        key = turned(norm(key, f"{layer}.self_attn.k_norm"))
        key, value = (np.repeat(one, group, axis=1) for one in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(size) + hides
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        seen = np.einsum("hqk,khd->qhd", shares, value).reshape(count, -1)
        hidden = hidden + project(seen, "self_attn.o_proj")
        rows = norm(hidden, f"{layer}.post_attention_layernorm")
        gate = project(rows, "mlp.gate_proj")
        hidden = hidden + project(
            gate / (1 + np.exp(-gate)) * project(rows, "mlp.up_proj"), "mlp.down_proj"
        )
    return float((norm(hidden, "norm")[-1:] @ tensors["score.weight"].T)[0, 0])
