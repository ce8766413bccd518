"""Folders of tiny models of each family, with random weights and a tokenizer. mlx_lm is imported late.

python -m tests.support.model_families OUT FAMILY
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.support.mlx_models import Late
from tests.support.model_geometries import BASE, FAMILIES, build

mx: Any = Late("mlx.core")
mlx_utils: Any = Late("mlx.utils")
tiny_model: Any = Late("tests.support.tiny_model")

VOCABULARY = 512


def config_of(name: str, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    if name == "qwen3_5":
        text = {**BASE, **FAMILIES["qwen3_next"], "model_type": "qwen3_5_text"}
        text["vocab_size"] = vocabulary
        return {"model_type": name, "text_config": text, "vocab_size": vocabulary}
    config = {**BASE, **FAMILIES[name], "model_type": name, "vocab_size": vocabulary}
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = vocabulary
    return config


def save(folder: Path, name: str, vocabulary: int = VOCABULARY, **changes: Any) -> None:
    """Write a folder of a model with random weights, and a tokenizer; `changes` are those of its config.

    The tokenizer has at most 512 tokens; a larger `vocabulary` has room for tokens that the caller adds.
    """
    tiny_model.make(folder, vocab=VOCABULARY)
    config = config_of(name, vocabulary)
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


if __name__ == "__main__":
    save(Path(sys.argv[1]), sys.argv[2])
