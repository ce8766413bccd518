"""Folders of tiny models of each family, with random weights and a tokenizer. mlx_lm is imported late."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.mlx_models import Late
from tests.support.model_geometries import BASE, FAMILIES, build

mx: Any = Late("mlx.core")
mlx_utils: Any = Late("mlx.utils")
tiny_model: Any = Late("tests.support.tiny_model")

VOCABULARY = 512
DELTA = {**BASE, **FAMILIES["qwen3_next"], "vocab_size": VOCABULARY}


def config_of(name: str) -> dict[str, Any]:
    if name == "qwen3_5":
        text = {**DELTA, "model_type": "qwen3_5_text"}
        return {"model_type": name, "text_config": text, "vocab_size": VOCABULARY}
    config = {**BASE, **FAMILIES[name], "model_type": name, "vocab_size": VOCABULARY}
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = VOCABULARY
    return config


def save(folder: Path, name: str, **changes: Any) -> None:
    """Write a folder of a model with random weights, and a tokenizer; `changes` are those of its config."""
    tiny_model.make(folder, vocab=VOCABULARY)
    config = config_of(name)
    config.get("text_config", config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    mx.random.seed(3)
    weights = dict(mlx_utils.tree_flatten(build(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def save_draft(folder: Path, model: Path) -> None:
    """Write a copy of a model whose weights differ a little, so that it often guesses right."""
    shutil.copytree(model, folder)
    path = str(folder / "model.safetensors")
    weights = {
        name: array + 0.005 * mx.abs(array).mean() * mx.random.normal(array.shape)
        for name, array in mx.load(path).items()
    }
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})
