"""Counts the parameters of a model from its config.json, as mlx-lm builds it, for models/catalogue/catalogue.json.

`python -m engine.catalogue_weights FILE` writes the counts of every model of a catalogue anew. No weights are allocated.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from models import encoder_shape, model_files, speech_shape
from models.catalogue.catalogue import GROUP_SIZE


def main(path: Path) -> int:
    """Write the counts of every model of a catalogue that mlx-lm builds into its file."""
    tree = json.loads(path.read_text())
    for entry in tree["models"].values():
        if entry["config"]["model_type"] not in (*speech_shape.FAMILIES, *encoder_shape.FAMILIES):
            entry["weights"] = count_weights(entry["config"])
    models = ",\n".join(f"  {json.dumps(n)}: {json.dumps(m)}" for n, m in tree["models"].items())
    path.write_text(
        f' "models": {{\n{models}\n }}\n'.join((f'{{\n "date": "{tree["date"]}",\n', "}\n"))
    )
    return 0


def count_weights(config: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of parameters that models/catalogue/catalogue.py calls `WeightCounts`.

    MLX computes nothing before it must, so a model of a trillion parameters takes a tenth of a second.
    """
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    packable = {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if hasattr(layer, "to_quantized")
        and "weight" in layer
        and layer.weight.shape[-1] % GROUP_SIZE == 0
    }
    counts = dict.fromkeys(
        ("packed", "plain", "packedReplicated", "plainReplicated", "experts", "lookedUp"), 0
    )
    # Gemma 3 is built with a head that it gives up when its files have none.
    is_tied = config.get("tie_word_embeddings") is True
    parameters: dict[str, mx.array] = {
        name: array
        for name, array in dict(tree_flatten(model.parameters())).items()
        if not (is_tied and "lm_head" in name)
    }
    has_head = any("lm_head" in name for name in parameters)
    for name, array in parameters.items():
        kind = "packed" if name in packable else "plain"
        counts[kind] += array.size
        if model_files.is_replicated(name):
            counts[f"{kind}Replicated"] += array.size
        if model_files.is_expert(name):
            counts["experts"] += array.size
        if model_files.is_looked_up(name, has_head=has_head):
            counts["lookedUp"] += array.size
    return counts


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main(Path(sys.argv[1])))
