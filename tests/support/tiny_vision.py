"""Tiny models that see images, one of each family, with random weights, made in a second; nothing is downloaded. Needs mlx-vlm.

python -m tests.support.tiny_vision OUT [--arch qwen2_vl|...]
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer

from engine.vision.vision_model import model_classes
from tests.support import tiny_model

_TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m['role'] }}\n"
    "{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}{%% for part in m['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s"
    "{%% elif part['type'] == 'video' %%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%% elif part['type'] == 'audio' %%}<|audio|>"
    "{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN_MARKERS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_QWEN2_TOWER = {
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "depth": 2,
    "num_heads": 2,
}
_QWEN2_FILES = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 3136,
    "max_pixels": 1_003_520,
    **_CLIP,
}
_QWEN3_TOWER = {
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "depth": 3,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
_QWEN3_FILES = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 1_048_576},
    **_HALF,
}
_INTERLEAVED = {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LINEAR = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}
_SIGLIP = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class _Family:
    markers: Mapping[str, str]
    """The fields of the config for tokens, and their text; the template writes `written`."""
    written: str
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    files: Mapping[str, Any]
    """The fields of preprocessor_config.json."""
    outer: Mapping[str, Any]


def _qwen(text: Mapping[str, Any], tower: Mapping[str, Any], files: Mapping[str, Any]) -> _Family:
    return _Family(
        markers=_QWEN_MARKERS,
        written="<|vision_start|><|image_pad|><|vision_end|>",
        text=text,
        tower=tower,
        files=files,
        outer={},
    )


def _glm(text: Mapping[str, Any]) -> _Family:
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 1, 1] if "head_dim" not in text else [4, 2, 2],
    }
    return _Family(
        markers={
            "vision_start_token_id": "<|begin_of_image|>",
            "vision_end_token_id": "<|end_of_image|>",
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
        },
        written="<|begin_of_image|><|image|><|end_of_image|>",
        text={
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rope_scaling": rope,
            "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5, **rope},
            **text,
        },
        tower=_QWEN2_TOWER
        | {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "image_size": 112},
        files=_QWEN2_FILES,
        outer={},
    )


_DEEP = _QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]}
_FAMILIES = {
    "qwen2_vl": _qwen(
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        _QWEN2_TOWER | {"embed_dim": 32, "hidden_size": 64},
        _QWEN2_FILES,
    ),
    "qwen2_5_vl": _qwen(
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        _QWEN2_TOWER
        | {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        _QWEN2_FILES,
    ),
    "qwen3_vl": _qwen({"rope_scaling": _INTERLEAVED}, _DEEP, _QWEN3_FILES),
    "qwen3_vl_moe": _qwen({"rope_scaling": _INTERLEAVED, **_EXPERTS}, _DEEP, _QWEN3_FILES),
    "qwen3_5": _qwen(_LINEAR, _QWEN3_TOWER, _QWEN3_FILES),
    "qwen3_5_moe": _qwen(
        _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 32}, _QWEN3_TOWER, _QWEN3_FILES
    ),
    "gemma3": _Family(
        markers={
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        written="<start_of_image>",
        text={
            "sliding_window": 96,
            "sliding_window_pattern": 2,
            "num_hidden_layers": 4,
            "rope_theta": 1_000_000.0,
            "query_pre_attn_scalar": 16,
            "mm_tokens_per_image": 16,
        },
        tower={"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 112, **_SIGLIP},
        files={"size": {"height": 112, "width": 112}, **_HALF},
        outer={"mm_tokens_per_image": 16},
    ),
    "gemma4": _Family(
        markers={
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "image_token_id": "<|image|>",
            "boa_token_id": "<|audio>",
            "eoa_token_id": "<audio|>",
            "audio_token_id": "<|audio|>",
            "video_token_id": "<|video|>",
        },
        written="<|image|>",
        text={
            "model_type": "gemma4_text",
            "sliding_window": 96,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 2,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
            },
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
        },
        tower={
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 128,
            "default_output_length": 40,
            **_SIGLIP,
        },
        files={"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 40},
        outer={
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 4],
                "output_proj_dims": 48,
            }
        },
    ),
    "glm4v": _glm({"model_type": "glm4v_text"}),
    "glm4v_moe": _glm(
        {
            "model_type": "glm4v_moe_text",
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        }
    ),
    "mistral3": _Family(
        markers={"image_token_index": "[IMG]", "": "[IMG_BREAK]", " ": "[IMG_END]"},
        written="[IMG]",
        text={
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_theta": 10_000.0,
                "rope_type": "default",
                "type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
        },
        tower={
            "model_type": "pixtral",
            "patch_size": 14,
            "image_size": 560,
            "head_dim": 16,
            "rope_theta": 10_000.0,
            "num_channels": 3,
            **_SIGLIP,
        },
        files={"size": {"longest_edge": 560}, **_CLIP},
        outer={"spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
}


def make(out: Path, arch: str = "qwen2_vl") -> Path:
    """Write a model directory."""
    family = _FAMILIES[arch]
    tiny_model.make(out, arch="qwen2", has_markers=False, is_endless=True)
    for old in out.glob("model*"):
        old.unlink()
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=True) for text in family.markers.values()]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    path = out / "tokenizer_config.json"
    template = _TEMPLATE % family.written
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    text = json.loads((out / "config.json").read_text())
    text |= {"model_type": arch, "vocab_size": tokenizer.get_vocab_size(), **family.text}
    ids = {
        name: tokenizer.token_to_id(text) for name, text in family.markers.items() if name.strip()
    }
    config = {
        "model_type": arch,
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "eos_token_id": 2,
        "text_config": text,
        "vision_config": {"model_type": arch, **family.tower},
        **family.outer,
        **ids,
    }
    if arch.startswith("qwen2"):
        config = text | config  # as these are published
        config.pop("text_config")
        config.pop("head_dim")
    (out / "config.json").write_text(json.dumps(config))
    (out / "preprocessor_config.json").write_text(json.dumps(family.files))
    mx.save_safetensors(
        str(out / "model.safetensors"), _weights(config), metadata={"format": "mlx"}
    )
    return out


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    kind, arguments = model_classes(config)
    model = kind(arguments.from_dict(config))
    key = mx.random.key(3)
    weights = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, array in sorted(parameters):
        key, own = mx.random.split(key)
        if array.ndim == 0:  # a bound of what a layer takes
            weights[name] = array
            continue
        if array.ndim == 1:
            is_from_one = config["model_type"] == "gemma3" and name.startswith("language_model")
            is_one = name.endswith("weight") and not is_from_one
            weights[name] = mx.ones(array.shape) if is_one else mx.zeros(array.shape)
            if name.endswith(("A_log", "dt_bias", "layer_scalar")):
                weights[name] = mx.ones(array.shape)
            continue
        fan_in = array.size // array.shape[0]
        scale = 2.0 / fan_in**0.5
        if "embed_tokens" in name:  # Gemma multiplies them by eight
            scale = 0.125 if config["model_type"].startswith("gemma") else 1.0
        weights[name] = mx.random.normal(array.shape, key=own) * scale
    head = "language_model.lm_head.weight"
    if config["model_type"] == "gemma3":
        weights.pop(head)  # it is tied to the embeddings in all that are published
    weights[head if head in weights else "language_model.model.embed_tokens.weight"][2] = 0.0
    return weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="qwen2_vl", choices=list(_FAMILIES))
    given = parser.parse_args()
    make(given.out, given.arch)
