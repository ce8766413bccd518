"""The rules against what mlx-lm really does: tiny models of random weights, their caches and their peak.

One model of every family of rules. The default tier keeps one with a plain and one with a sliding cache: the others can
break when mlx-lm is raised to another version, and CI runs them.
"""

import importlib
import importlib.util
import sys
from typing import Any

import pytest

from engine.batch import step_plan
from engine.cache.interface import KvOptions
from models import cache_rules, footprint, model_files
from models.footprint import ServingLoad
from reconciler.placement import filters
from reconciler.placement.inputs import NodeView, PlacementRequest
from schemas.deployment import ModelDeploymentSpec, ModelSource
from schemas.kv_cache import KvCache
from schemas.node import ModelGeometry, ModelReport
from tests.support.model_geometries import BASE, FAMILIES, build, geometry, module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


CASES = [(family, 300) for family in FAMILIES]
CASES += [(family, 700) for family in ("llama", "gpt_oss", "gemma3_text", "deepseek_v3")]
QUICK = {("llama", 300), ("gpt_oss", 700)}


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        pytest.param(
            *case, marks=() if case in QUICK else pytest.mark.ci, id="-".join(map(str, case))
        )
        for case in CASES
    ],
)
def test_caches_are_as_large_as_the_rules_say(family: str, tokens: int) -> None:
    mx = module("mlx.core")
    config = {**BASE, "model_type": family, **FAMILIES[family]}
    if "text_config" in config:
        config = {"model_type": family, "vocab_size": 64, "text_config": config["text_config"]}
    model = build(config)
    caches = module("mlx_lm.models.cache").make_prompt_cache(model)
    for number in (tokens - 2, 1, 1):  # the last ones alone: a window shrinks to its size then
        model(mx.zeros((1, number), dtype=mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    real = sum(cache.nbytes for cache in caches)
    # Nobody reads a prompt here, so no window holds a step more than its tokens.
    shape = geometry(config).model_copy(update={"prefill_step": 0})
    assert footprint.cache_bytes(shape, ServingLoad(context_length=tokens, concurrency=1)) == real


def at_64(family: str, **changes: Any) -> dict[str, Any]:
    """Return a config whose heads are large enough to be packed."""
    config = {**BASE, "model_type": family, **FAMILIES[family], **changes}
    return config | {"hidden_size": 256, "head_dim": 64}


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4}, {"window": 128}, {"window": 290}])
def test_caches_with_options_are_as_large_as_proof(family: str, options: dict[str, int]) -> None:
    mx, made = module("mlx.core"), module("engine.cache.layer_caches")
    config = at_64(family)
    model = build(config)
    if family == "gpt_oss" and "bits" in options:
        # Attention sinks have no quantized kernel.
        with pytest.raises(ValueError, match=r"this model cannot use kvCache\.bits"):
            made.try_model(model, KvOptions(**options))
        return
    caches = made.make_caches(model, KvOptions(**options))
    for number in (498, 1, 1):
        model(mx.zeros((1, number), dtype=mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    shape = geometry(config).model_copy(update={"prefill_step": 0})
    use = ServingLoad(
        context_length=500,
        concurrency=1,
        kv_bits=options.get("bits"),
        kv_window=options.get("window"),
    )
    assert footprint.cache_bytes(shape, use) == sum(cache.nbytes for cache in caches)


# What placement cannot see from a config; the engine refuses these itself, in a sentence.
LEFT_TO_THE_ENGINE = {("gpt_oss", "bits"), ("gemma4_text", "bits")}


@pytest.mark.ci
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("cohere2", "gemma3")])
@pytest.mark.parametrize("name", ["bits", "window"])
def test_placement_accepts_what_the_engine_accepts(family: str, name: str) -> None:
    config = {**BASE, "model_type": family, "head_dim": 32, **FAMILIES[family]}
    cache = KvCache(bits=8) if name == "bits" else KvCache(window=64)
    there = NodeView(
        name="a", is_ready=True, models={"m": ModelReport(path="m", geometry=geometry(config))}
    )
    spec = ModelDeploymentSpec(model=ModelSource(path="m"), kv_cache=cache)
    refused = filters.supports_kv_cache(PlacementRequest(name="m", spec=spec), there)
    making = module("engine.cache.layer_caches")
    options = KvOptions(bits=cache.bits, window=cache.window)
    if refused is None and (family, name) not in LEFT_TO_THE_ENGINE:
        making.try_model(build(config), options)
    elif refused is None or name == "bits":
        with pytest.raises(ValueError, match=r"leave|cannot use"):
            making.try_model(build(config), options)


def peak(config: dict[str, Any], use: ServingLoad, shape: ModelGeometry) -> int:
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
        ended += sum(response.finish_reason is not None for response in responses)
    found = int(mx.get_peak_memory()) - int(weights)
    generator.close()
    return found


# Small, because MLX's own BLAS is slow; wide enough for activations to outweigh everything else.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}


@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 1024}, {"vocab_size": 5000}])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_proof_covers_the_engines_peak(changes: dict[str, Any], concurrency: int) -> None:
    config = {**BASE, "model_type": "llama", **WIDE, **changes}
    shape = geometry(config)
    use = ServingLoad(context_length=512, concurrency=concurrency)
    proved = footprint.cache_bytes(shape, use) + footprint.activation_bytes(shape, use)
    real = peak(config, use, shape)
    assert 0.4 * proved <= real <= proved


def test_the_agent_knows_how_its_engine_prefills() -> None:
    ours = model_files._PREFILL_LINUX if sys.platform == "linux" else model_files._PREFILL_MAC
    assert ours == step_plan.LARGEST_CHUNK


def test_aliases_are_those_of_mlx_lm() -> None:
    assert module("mlx_lm.utils").MODEL_REMAPPING == cache_rules.ALIASES


def test_every_rule_is_for_a_module_of_mlx_lm() -> None:
    specs = [importlib.util.find_spec(f"mlx_lm.models.{name}") for name in cache_rules.RULES]
    assert all(spec is not None for spec in specs)
