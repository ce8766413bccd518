"""Cache rules and weight sums of well-known models, with published figures, and unusual configs."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import cache_rules
from models.cache_rules import NotUnderstoodError
from models.hf_config import ModelConfig
from models.model_files import TensorHeader, total_weights
from schemas.node import LayerGroup


def groups(**config: Any) -> list[tuple[str, int, int]]:
    """Return kind, count and what one layer keeps: bytes of a token, or of a request for a state."""
    return [(group.kind, group.count, size(group)) for group in made(**config)]


def made(**config: Any) -> tuple[LayerGroup, ...]:
    model_config = ModelConfig.model_validate_json(json.dumps(config))
    return cache_rules.layer_groups(
        cache_rules.mlx_module(model_config), model_config.text, element_bytes=2
    )


def size(group: LayerGroup) -> int:
    per_token = group.latent_dim + group.kv_heads * (group.head_dim + group.value_dim)
    return group.state_bytes or per_token * 2


GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
}  # fmt: skip
# The numbers that the models' own config.json have (Hugging Face, as of 2026).
KNOWN = [
    pytest.param(GPT_OSS, [("Full", 18, 2048), ("Sliding", 18, 2048)], id="gpt-oss-120b"),
    pytest.param(
        {
            "model_type": "llama",
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "hidden_size": 8192,
        },
        [("Full", 80, 4096)],
        id="llama-3.3-70b",
    ),
    pytest.param(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        [("Latent", 61, 1152)],
        id="deepseek-v3",
    ),
    pytest.param(
        {
            "model_type": "kimi_k25",
            "text_config": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        },
        [("Latent", 61, 1152)],
        id="kimi-k2.5",
    ),
    pytest.param(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "hidden_size": 2560,
                "sliding_window": 1024,
            },
        },
        [("Sliding", 29, 4096), ("Full", 5, 4096)],
        id="gemma-3-4b-says-no-heads",
    ),
    pytest.param(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        [("State", 36, 3 * 8192 * 2 + 32 * 128 * 128 * 4), ("Full", 12, 2048)],
        id="qwen3-next-80b-a3b",
    ),
    pytest.param(
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
        },
        [("Full", 40, 4096)],
        id="mistral-small-3.2",
    ),
    pytest.param(
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral4",
                "num_hidden_layers": 2,
                "kv_lora_rank": 256,
                "qk_rope_head_dim": 64,
            },
        },
        [("Latent", 2, 640)],
        id="mistral-4",
    ),
    pytest.param(
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M-M*-",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
        },
        [("State", 2, 3 * (128 + 64) * 2 + 128 * 16 * 4), ("Full", 1, 128)],
        id="nemotron-h",
    ),
]


@pytest.mark.parametrize(("config", "wanted"), KNOWN)
def test_known_models(config: dict[str, Any], wanted: list[tuple[str, int, int]]) -> None:
    assert groups(**config) == wanted


def test_gpt_oss_120b_if_all_its_layers_attended_to_everything() -> None:
    """73,728 bytes a token: the check value of spec/facts.md, 4.4."""
    assert sum(count * one for _, count, one in groups(**GPT_OSS)) == 73_728


def test_some_models_ignore_head_dim() -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 32}
    assert groups(model_type="phi3", **shape) == [("Full", 1, 4 * 2 * 16 * 2)]
    assert groups(model_type="qwen3", **shape) == [("Full", 1, 4 * 2 * 32 * 2)]


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "qwen3"}, "config.json lacks num_hidden_layers"),
    ({"model_type": "qwen3", "num_hidden_layers": 2}, "config.json lacks head_dim"),
    ({"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 4}, "config.json lacks num_key_value_heads"),
    ({**GPT_OSS, "model_type": "olmo3", "sliding_window": None}, "config.json lacks sliding_window"),
    ({"model_type": "nemotron_h"}, "config.json lacks hybrid_override_pattern"),
    ({"model_type": "lfm2", "num_hidden_layers": 2}, "lacks hidden_size, conv_L_cache"),
    ({"model_type": "rwkv7"}, "no rule says how large the cache of a rwkv7 model is"),
])  # fmt: skip
def test_what_is_not_understood(config: dict[str, Any], words: str) -> None:
    with pytest.raises(NotUnderstoodError, match=words):
        made(**config)


anything = st.none() | st.booleans() | st.integers(-1, 2**41) | st.text(max_size=3)
configs = st.fixed_dictionaries(
    {"model_type": st.sampled_from(sorted(cache_rules.RULES))},
    optional={
        name: anything | st.lists(anything, max_size=3) | st.integers(0, 9)
        for name in ModelConfig.model_fields
        if name not in ("model_type", "text_config", "quantization")
    },
)


@given(configs)
def test_any_config_is_understood_or_refused(config: dict[str, Any]) -> None:
    try:
        layer_groups = made(**config)
    except (NotUnderstoodError, ValueError):
        return
    assert all(group.count > 0 and size(group) >= 0 for group in layer_groups)


def tensor(dtype: str, *shape: int, bits: int) -> TensorHeader:
    number = 1
    for one in shape:
        number *= one
    return TensorHeader(dtype=dtype, shape=shape, data_offsets=(0, number * bits // 8))


def test_quantized_weights_count_as_unpacked_numbers() -> None:
    tensors = {
        "model.embed_tokens.weight": tensor("U32", 512, 8, bits=32),  # 64 wide in 4 bits
        "model.embed_tokens.scales": tensor("BF16", 512, 1, bits=16),
        "model.embed_tokens.biases": tensor("BF16", 512, 1, bits=16),
        "model.layers.0.mlp.up_proj.weight": tensor("U32", 128, 16, bits=32),  # 64 wide in 8 bits
        "model.layers.0.mlp.up_proj.scales": tensor("BF16", 128, 1, bits=16),
        "model.layers.0.mlp.up_proj.biases": tensor("BF16", 128, 1, bits=16),
        "model.layers.0.mlp.gate.weight": tensor("F32", 4, 64, bits=32),
        "model.norm.weight": tensor("BF16", 64, bits=16),
    }
    totals = total_weights(tensors, group_size=64)
    assert totals.parameters == 512 * 64 + 128 * 64 + 4 * 64 + 64
    assert totals.total_bytes == sum(header.size for header in tensors.values())
    up = sum(one.size for name, one in tensors.items() if "up_proj" in name)
    assert totals.replicated_bytes == totals.total_bytes - up
    assert totals.half_bytes == 2 * (1024 + 256) + 128
    assert totals.replicated_half_bytes == 2 * 1024 + 128


@pytest.mark.parametrize(
    "expert",
    [
        "mlp.switch_mlp.up_proj",
        "mlp.experts.7.up_proj",
        "mlp.experts.gate_up_proj",
        "block_sparse_moe.experts.0.w1",
    ],
)
def test_routed_experts_and_tables_are_told_from_what_each_token_reads(expert: str) -> None:
    tensors = {
        "model.embed_tokens.weight": tensor("BF16", 512, 64, bits=16),
        "lm_head.weight": tensor("BF16", 512, 64, bits=16),
        f"model.layers.0.{expert}.weight": tensor("F32", 8, 32, 64, bits=32),
        "model.layers.0.mlp.shared_experts.up_proj.weight": tensor("BF16", 32, 64, bits=16),
        "model.layers.0.mlp.gate.weight": tensor("F32", 8, 64, bits=32),
    }
    totals = total_weights(tensors, group_size=64)
    assert totals.experts == (8 * 32 * 64 * 4, 0)
    assert totals.looked_up == (512 * 64 * 2, 512 * 64 * 2)
    # Without a head of its own, the embedding is read whole for each token.
    del tensors["lm_head.weight"]
    assert total_weights(tensors, group_size=64).looked_up == (0, 0)


def test_headers_without_shapes_count_no_parameters() -> None:
    assert total_weights({"a": tensor("F32", bits=32)}, group_size=None).parameters == 1
    odd = TensorHeader(dtype="F32", data_offsets=(0, 400))
    assert total_weights({"a": odd}, group_size=None).parameters == 0
