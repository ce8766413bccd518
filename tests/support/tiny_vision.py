"""A tiny Qwen2-VL or Qwen2.5-VL with random weights, made in a second; nothing is downloaded. Needs mlx-vlm.

python -m tests.support.tiny_vision OUT [--arch qwen2_vl|qwen2_5_vl]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import AddedToken, Tokenizer

from engine.vision.vision_model import model_classes
from tests.support import tiny_model

_MARKERS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
}


def make(out: Path, arch: str = "qwen2_vl") -> Path:
    """Write a model directory."""
    tiny_model.make(out, arch="qwen2", has_markers=False, is_endless=True)
    for old in out.glob("model*"):
        old.unlink()
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(marker, normalized=False, special=True) for marker in _MARKERS]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE}))
    config = json.loads((out / "config.json").read_text())
    config.pop("head_dim")
    ids = [tokenizer.token_to_id(marker) for marker in _MARKERS]
    config |= {
        "model_type": arch,
        "vocab_size": tokenizer.get_vocab_size(),
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_start_token_id": ids[0],
        "vision_end_token_id": ids[1],
        "image_token_id": ids[2],
        "video_token_id": ids[3],
        "vision_config": {
            "model_type": arch,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **_TOWERS[arch],
        },
    }
    (out / "config.json").write_text(json.dumps(config))
    (out / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "patch_size": 14,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "min_pixels": 3136,
                "max_pixels": 1_003_520,
                "image_mean": [0.48145466, 0.4578275, 0.40821073],
                "image_std": [0.26862954, 0.26130258, 0.27577711],
            }
        )
    )
    mx.save_safetensors(
        str(out / "model.safetensors"), _weights(config), metadata={"format": "mlx"}
    )
    return out


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    kind, arguments = model_classes(config)
    model = kind(arguments.from_dict(config))
    key = mx.random.key(3)
    found = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, array in sorted(parameters):
        key, own = mx.random.split(key)
        if array.ndim == 1:
            found[name] = mx.ones(array.shape) if name.endswith("weight") else mx.zeros(array.shape)
            continue
        fan_in = array.size // array.shape[0]
        scale = 1.0 if "embed_tokens" in name else 2.0 / fan_in**0.5
        found[name] = mx.random.normal(array.shape, key=own) * scale
    found["language_model.lm_head.weight"][2] = 0.0
    model.update(tree_unflatten(list(found.items())))
    return dict(tree_flatten(model.parameters()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="qwen2_vl")
    given = parser.parse_args()
    make(given.out, given.arch)
