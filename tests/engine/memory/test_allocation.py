"""Memory allocation with real models and real MLX limits."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.memory.budget import PROCESS_BYTES, full_bytes
from models import model_files
from models.model_files import ModelUnusableError
from reconciler.placement import memory_proof
from reconciler.placement.memory_proof import ProofExtras
from schemas import quantity
from schemas.kv_cache import KvCache
from tests.support import tiny_model
from tests.support.engine_batches import CONFIG as BASE
from tests.support.mlx_models import Late

pytestmark = pytest.mark.mlx

mx: Any = Late("mlx.core")
allocation: Any = Late("engine.memory.allocation")
mlx_lm_utils: Any = Late("mlx_lm.utils")

CONFIG = BASE.model_copy(update={"context_length": 1000, "concurrency": 4})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 64, which can be quantised.
    path = tmp_path_factory.mktemp("models") / "tiny"
    return tiny_model.make(path, hidden=128, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return mlx_lm_utils.load_model(folder)[0]


@pytest.fixture(autouse=True)
def limits_as_before() -> Iterator[None]:
    before = mx.get_memory_limit()
    buffers = mx.set_cache_limit(before)
    mx.set_cache_limit(buffers)
    yield
    mx.set_memory_limit(before)
    mx.set_cache_limit(buffers)


@pytest.mark.skipif(sys.platform != "linux", reason="geometry of a widened model")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache": KvCache(bits=8)},
        {"kv_cache": KvCache(window=300)},
        {"kv_cache": KvCache(window=300, keep=4)},
        {"prefix_cache_bytes": 3 << 20},
        {"draft_model": Path("draft")},
        {"mtp_tokens": 3},
        {"concurrency": 1, "context_length": 300},
        {"concurrency": 16, "kv_cache": KvCache(tokens=5_000, prefix_bytes="1Mi")},
    ],
    ids=str,
)
def test_the_promised_memory_is_enough_for_full_contexts(
    model: Any, folder: Path, changes: dict[str, Any]
) -> None:
    config = CONFIG.model_copy(update=changes)
    facts = model_files.inspect_model(folder)
    shape = model_files.model_geometry(facts, casts_to_float32=True)
    cache, prefix_bytes = config.kv_cache, quantity.parse(config.kv_cache.prefix_bytes or "0")
    drafts = [(model, facts)] if config.draft_model is not None else []
    proved = memory_proof.prove(
        shape,
        context_length=config.context_length,
        concurrency=config.concurrency,
        extras=ProofExtras(
            kv_tokens=cache.tokens,
            kv_bits=cache.bits,
            kv_window=cache.window,
            prefix_cache_bytes=prefix_bytes,
            draft=shape if drafts else None,
            draft_tokens=config.draft_tokens if drafts else config.mtp_tokens,
            has_mtp=bool(config.mtp_tokens),
        ),
    )
    config = config.model_copy(update={"memory_limit_bytes": proved.total_bytes})
    memory = allocation.allocate([(model, facts), *drafts], config)
    shared = memory.budget
    assert shared.kv_bytes >= full_bytes(shared.footprint, shared.load)
    assert shared.longest == config.context_length
    assert shared.prefix_kept_bytes == prefix_bytes
    # The rest of the proof's memory for the process covers the rounding of allocations.
    assert shared.limit_bytes == proved.total_bytes - PROCESS_BYTES
    assert mx.get_memory_limit() == shared.limit_bytes


def test_without_a_promise_the_machine_recommends_the_memory(model: Any, folder: Path) -> None:
    memory = allocation.allocate([(model, model_files.inspect_model(folder))], CONFIG)
    shared = memory.budget
    assert shared.limit_bytes == allocation.machine_bytes() - PROCESS_BYTES
    assert 0.5 * shared.limit_bytes < shared.kv_bytes < shared.limit_bytes
    assert shared.prefix_most_bytes == shared.limit_bytes // 4


def test_too_little_memory_is_refused_at_the_start(model: Any, folder: Path) -> None:
    config = CONFIG.model_copy(update={"memory_limit_bytes": PROCESS_BYTES + 1})
    with pytest.raises(ModelUnusableError, match="the memory limit leaves 0 B for requests"):
        allocation.allocate([(model, model_files.inspect_model(folder))], config)


def test_caches_that_the_model_cannot_use_are_refused(tiny: Path) -> None:
    found = mlx_lm_utils.load_model(tiny)[0]
    config = CONFIG.model_copy(update={"kv_cache": KvCache(bits=4)})
    with pytest.raises(ModelUnusableError, match="a multiple of 32"):
        allocation.allocate([(found, model_files.inspect_model(tiny))], config)


@pytest.mark.skipif(sys.platform != "linux", reason="the agent's own estimate")
def test_the_engine_and_the_agent_agree_on_the_machine() -> None:
    linux = Late("nodeagent.hardware.linux")
    assert allocation.machine_bytes() == linux.read_facts().gpu_memory_limit_bytes


def test_the_wired_limit_is_the_need_of_the_model(model: Any, folder: Path) -> None:
    shared = allocation.plan_budget([(model, model_files.inspect_model(folder))], CONFIG, ranks=1)
    limits = allocation.find_limits(shared)
    needed = (
        shared.weights_bytes + shared.activation_bytes + full_bytes(shared.footprint, shared.load)
    )
    assert limits.wired == needed < shared.limit_bytes == limits.arrays
    assert limits.buffers >= shared.activation_bytes
    allocation.apply_limits(limits)
    allocation.release_wired_memory()  # twice is once
    allocation.release_wired_memory()
    unwired = allocation.find_limits(shared, "Off")
    assert (unwired.wired, unwired.arrays) == (None, limits.arrays)


@pytest.mark.parametrize(("memory_gib", "recommended_gib", "wirable_gib"), [
    (8, 5, 0), (16, 11, 8), (24, 17, 16), (32, 24, 24), (36, 28, 28), (128, 107, 107),
])  # fmt: skip
def test_small_macs_wire_less_than_metal_recommends(
    memory_gib: int, recommended_gib: int, wirable_gib: int
) -> None:
    wirable = allocation.wirable_bytes(memory_gib << 30, recommended_gib << 30)
    assert wirable == wirable_gib << 30


def test_buffers_are_cleared_when_nothing_computes_any_more() -> None:
    product = mx.random.normal((512, 512)) @ mx.random.normal((512, 512))
    mx.async_eval(product)
    del product
    allocation.clear_buffers()
    assert mx.get_cache_memory() == 0
