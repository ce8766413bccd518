"""The rules against what mlx-lm really does: tiny models of random weights, their caches and their peak.

One model of every family of rules; run anew whenever mlx-lm is raised to another version.
"""

import contextlib
import importlib
import importlib.util
import json
import resource
import sys
from typing import Any

import pytest

from engine.batch import step_plan
from engine.cache.interface import KvOptions
from models import cache_rules, footprint, model_files
from models.footprint import EngineLoad
from models.hf_config import ModelConfig
from models.model_files import WeightTotals
from reconciler.placement import filters
from reconciler.placement.inputs import PlacementRequest
from reconciler.views import NodeView
from schemas.deployment import KvCache, ModelDeploymentSpec, ModelSource
from schemas.node import ModelGeometry, ModelReport

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

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
    found = model_files.model_geometry(facts, casts_to_float32=True)
    assert found.unknown == ""
    return found


CASES = [(family, 300) for family in FAMILIES]
CASES += [(family, 700) for family in ("llama", "gpt_oss", "gemma3_text", "deepseek_v3")]


@pytest.mark.parametrize(("family", "tokens"), CASES)
def test_caches_are_as_large_as_the_rules_say(family: str, tokens: int) -> None:
    mx = module("mlx.core")
    config = {**BASE, "model_type": family, **FAMILIES[family]}
    if "text_config" in config:
        config = {"model_type": family, "vocab_size": 64, "text_config": config["text_config"]}
    model = build(config)
    caches = module("mlx_lm.models.cache").make_prompt_cache(model)
    for number in (tokens - 2, 1, 1):  # the last ones alone: a window shrinks to its size then
        model(mx.zeros((1, number), dtype=mx.int32), cache=caches)
        mx.eval([one.state for one in caches])
    real = sum(one.nbytes for one in caches)
    # Nobody reads a prompt here, so no window holds a step more than its tokens.
    shape = geometry(config).model_copy(update={"prefill_step": 0})
    assert footprint.cache_bytes(shape, EngineLoad(context_length=tokens, concurrency=1)) == real


def at_64(family: str, **changes: Any) -> dict[str, Any]:
    """Return a config whose heads are large enough to be packed."""
    config = {**BASE, "model_type": family, **FAMILIES[family], **changes}
    return config | {"hidden_size": 256, "head_dim": 64}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4}, {"window": 128}, {"window": 290}])
def test_caches_that_are_told_are_as_large_as_the_proof_says(
    family: str, options: dict[str, int]
) -> None:
    mx, made = module("mlx.core"), module("engine.cache.layer_caches")
    config = at_64(family)
    model = build(config)
    if family == "gpt_oss" and "bits" in options:
        # Attention sinks have no quantized kernel.
        with pytest.raises(ValueError, match=r"this model cannot use kvCache\.bits"):
            made.check(model, KvOptions(**options))
        return
    caches = made.make_caches(model, KvOptions(**options))
    for number in (498, 1, 1):
        model(mx.zeros((1, number), dtype=mx.int32), cache=caches)
        mx.eval([one.state for one in caches])
    shape = geometry(config).model_copy(update={"prefill_step": 0})
    use = EngineLoad(
        context_length=500,
        concurrency=1,
        kv_bits=options.get("bits"),
        kv_window=options.get("window"),
    )
    assert footprint.cache_bytes(shape, use) == sum(one.nbytes for one in caches)


# What placement cannot see from a config; the engine refuses these itself, in a sentence.
LEFT_TO_THE_ENGINE = {("gpt_oss", "bits"), ("gemma4_text", "bits")}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("cohere2", "gemma3")])
@pytest.mark.parametrize("name", ["bits", "window"])
def test_placement_lets_through_what_the_engine_takes(family: str, name: str) -> None:
    config = {**BASE, "model_type": family, "head_dim": 32, **FAMILIES[family]}
    kept = KvCache(bits=8) if name == "bits" else KvCache(window=64)
    there = NodeView(
        name="a", is_ready=True, models={"m": ModelReport(path="m", geometry=geometry(config))}
    )
    spec = ModelDeploymentSpec(model=ModelSource(path="m"), kv_cache=kept)
    refused = filters.keeps_as_told(PlacementRequest(name="m", spec=spec), there)
    making = module("engine.cache.layer_caches")
    options = KvOptions(bits=kept.bits, window=kept.window)
    if refused is None and (family, name) not in LEFT_TO_THE_ENGINE:
        making.check(build(config), options)
    elif refused is None or name == "bits":
        with pytest.raises(ValueError, match=r"leave|cannot use"):
            making.check(build(config), options)


def peak(config: dict[str, Any], use: EngineLoad, shape: ModelGeometry) -> int:
    """Return what the engine's generator takes beside the weights, at worst, for full contexts."""
    mx = module("mlx.core")
    model = build(config)
    mx.eval(model.parameters())
    mx.clear_cache()
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    generator = module("mlx_lm.generate").BatchGenerator(
        model,
        stop_tokens=[],
        completion_batch_size=use.concurrency,
        prefill_batch_size=1,
        prefill_step_size=shape.prefill_step,
    )
    prompt = [1] * (use.context_length - 4)
    generator.insert([prompt for _ in range(use.concurrency)], [4] * use.concurrency)
    ended = 0
    while ended < use.concurrency:
        _, responses = generator.next()
        ended += sum(one.finish_reason is not None for one in responses)
    found = int(mx.get_peak_memory()) - int(weights)
    generator.close()
    return found


# Small, because MLX's own BLAS is slow; wide enough for activations to outweigh everything else.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 1024}, {"vocab_size": 5000}])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_proof_covers_the_engines_peak(changes: dict[str, Any], concurrency: int) -> None:
    config = {**BASE, "model_type": "llama", **WIDE, **changes}
    shape = geometry(config)
    use = EngineLoad(context_length=512, concurrency=concurrency)
    proved = footprint.cache_bytes(shape, use) + footprint.activation_bytes_from_cache(shape, use)
    real = peak(config, use, shape)
    assert 0.4 * proved <= real <= proved


def test_the_agent_knows_how_its_engine_prefills() -> None:
    ours = model_files._PREFILL_LINUX if sys.platform == "linux" else model_files._PREFILL_MAC
    assert ours == step_plan.LARGEST_CHUNK


def test_aliases_are_those_of_mlx_lm() -> None:
    assert module("mlx_lm.utils").MODEL_REMAPPING == cache_rules.ALIASES


def test_every_rule_is_for_a_module_that_is_there() -> None:
    found = [importlib.util.find_spec(f"mlx_lm.models.{name}") for name in cache_rules.RULES]
    assert all(spec is not None for spec in found)
