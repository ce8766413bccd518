"""Configs of tiny models of every family that mlx-lm builds, and their geometries."""

import contextlib
import importlib
import importlib.util
import json
import resource
from typing import Any

from models import cache_rules, model_files
from models.hf_config import ModelConfig
from models.model_files import WeightTotals
from schemas.node import ModelGeometry

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


MLA = {
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}


YARN = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}


DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.5,
}


SSM = {"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4}


SLIDING = {"sliding_window": 100, "layer_norm_eps": 1e-5, "layer_norm_bias": False}


GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 100}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "phi3": {"head_dim": 32, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "gpt_oss": {**MOE, "sliding_window": 100},
    "olmo3": {"sliding_window": 100},
    "cohere2": {**SLIDING, "logit_scale": 1.0},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": 3},
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "hidden_size": 64,
            "intermediate_size": 96,
            **GEMMA,
        }
    },
    "gemma4_text": {
        "sliding_window": 100,
        "sliding_window_pattern": 2,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 64,
        "rope_traditional": False,
    },
    "deepseek_v2": {**MOE, **MLA, "rope_scaling": YARN, "topk_method": "greedy"},
    "deepseek_v3": {**MOE, **MLA},
    "deepseek_v32": {**MOE, **MLA, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 64},
    "qwen3_next": {**MOE, **DELTA},
    "kimi_linear": {
        **MOE,
        **MLA,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 7],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 4096,
        "num_experts_per_token": 2,
    },
    "mamba": {**SSM, "state_size": 16},
    "mamba2": {
        **SSM,
        "state_size": 16,
        "num_heads": 8,
        "n_groups": 2,
        "intermediate_size": 128,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False,
        "rms_norm": True,
        "time_step_limit": [0.0, 1e9],
        "chunk_size": 32,
    },
    "nemotron_h": {
        **SSM,
        "hybrid_override_pattern": "M*-M*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "mlp_bias": False,
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "time_step_limit": [0.0, 1e9],
    },
    "jamba": {
        **MOE,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "lfm2": {
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 4],
    },
}
SERVED_FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "gpt_oss",
    "olmo3",
    "cohere2",
    "gemma3_text",
    "gemma4_text",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "mamba2",
    "nemotron_h",
    "jamba",
    "lfm2",
)
"""Families of text models that `tests/engine/test_families.py` asks in a real engine."""
VISION_FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("gemma3", "gemma4", "mistral3", "glm4v", "glm4v_moe"),
)
"""Families of models that see images, which `tests/engine/test_vision.py` holds against mlx-vlm."""


def module(name: str) -> Any:
    """Import late: mlx_lm takes seconds, which those who run other tests should not wait for."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = importlib.import_module(name)
    # mlx_lm lowers it at import, for this process and for all that other tests start from it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return found


def build(config: dict[str, Any]) -> Any:
    made = module(f"mlx_lm.models.{config['model_type']}")
    return made.Model(made.ModelArgs.from_dict(json.loads(json.dumps(config))))


def geometry(config: dict[str, Any]) -> ModelGeometry:
    """Return what the agent would report of such a model in float32, on Linux."""
    read = ModelConfig.model_validate_json(json.dumps(config))
    facts = model_files.ModelFacts(
        model_type=read.model_type,
        module=cache_rules.mlx_module(read),
        config=read.text,
        weights=WeightTotals(
            total_bytes=0, half_bytes=0, replicated_bytes=0, replicated_half_bytes=0, parameters=0
        ),
    )
    model_geometry = model_files.model_geometry(facts, casts_to_float32=True)
    assert model_geometry.unknown == ""
    return model_geometry
