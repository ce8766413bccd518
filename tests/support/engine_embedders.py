"""Embedding models for tests: folders as sentence-transformers saves them."""

import json
import shutil
from pathlib import Path
from typing import Any

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
