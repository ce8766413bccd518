"""From a model in memory to what its requests may take, and what MLX is told: real models, real limits."""

import dataclasses
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
from tests.engine.batch.batches import CONFIG as BASE
from tests.engine.mlx_models import Late
from tests.support import tiny_model

pytestmark = pytest.mark.mlx

mx: Any = Late("mlx.core")
beginning: Any = Late("engine.memory.allocation")
limits: Any = Late("engine.memory.allocation")
loading: Any = Late("mlx_lm.utils")

CONFIG = dataclasses.replace(BASE, context_length=1000, concurrency=4, queue_limit=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 64, which can be quantised.
    found = tmp_path_factory.mktemp("models") / "tiny"
    return tiny_model.make(found, hidden=128, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return loading.load_model(folder)[0]


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
        {"kv_bits": 8},
        {"kv_window": 300},
        {"prefix_cache_bytes": 3 << 20},
        {"draft_model": Path("draft")},
        {"concurrency": 1, "context_length": 300},
    ],
    ids=str,
)
def test_what_the_proof_promised_is_enough_for_full_contexts(
    model: Any, folder: Path, changes: dict[str, Any]
) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    facts = model_files.inspect_model(folder)
    shape = model_files.model_geometry(facts, casts_to_float32=True)
    drafts = [(model, facts)] if config.draft_model is not None else []
    proved = memory_proof.prove(
        shape,
        context_length=config.context_length,
        concurrency=config.concurrency,
        extras=ProofExtras(
            kv_bits=config.kv_bits,
            kv_window=config.kv_window,
            prefix_cache_bytes=config.prefix_cache_bytes or 0,
            draft=shape if drafts else None,
            draft_tokens=config.draft_tokens if drafts else 0,
        ),
    )
    config = dataclasses.replace(config, memory_limit_bytes=proved.total_bytes)
    memory = beginning.begin([(model, facts), *drafts], config)
    shared = memory.budget
    assert shared.kv_bytes >= full_bytes(shared.rule, shared.load)
    assert shared.longest == config.context_length
    assert shared.prefix_kept_bytes == (config.prefix_cache_bytes or 0)
    # The rest of what was proved for the process is kept for what allocations are rounded up by.
    assert shared.limit_bytes == proved.total_bytes - PROCESS_BYTES
    assert mx.get_memory_limit() == shared.limit_bytes


def test_without_a_promise_the_machine_says_what_there_is(model: Any, folder: Path) -> None:
    memory = beginning.begin([(model, model_files.inspect_model(folder))], CONFIG)
    shared = memory.budget
    assert shared.limit_bytes == limits.machine_bytes() - PROCESS_BYTES
    assert 0.5 * shared.limit_bytes < shared.kv_bytes < shared.limit_bytes
    assert shared.prefix_most_bytes == shared.limit_bytes // 4


def test_too_little_memory_is_said_before_anybody_comes(model: Any, folder: Path) -> None:
    config = dataclasses.replace(CONFIG, memory_limit_bytes=PROCESS_BYTES + 1)
    with pytest.raises(ModelUnusableError, match="the memory limit leaves 0 B for requests"):
        beginning.begin([(model, model_files.inspect_model(folder))], config)


def test_caches_the_model_cannot_have_are_its_own_fault(tiny: Path) -> None:
    found = loading.load_model(tiny)[0]
    config = dataclasses.replace(CONFIG, kv_bits=4)
    with pytest.raises(ModelUnusableError, match="a multiple of 32"):
        beginning.begin([(found, model_files.inspect_model(tiny))], config)


@pytest.mark.skipif(sys.platform != "linux", reason="the agent's own estimate")
def test_the_engine_and_the_agent_agree_on_the_machine() -> None:
    linux = Late("nodeagent.hardware.linux")
    assert limits.machine_bytes() == linux.read().gpu_memory_limit_bytes


def test_what_is_wired_is_what_the_model_needs(model: Any, folder: Path) -> None:
    shared = beginning.share_out([(model, model_files.inspect_model(folder))], CONFIG, ranks=1)
    found = limits.limits_of(shared)
    needed = shared.weights_bytes + shared.activation_bytes + full_bytes(shared.rule, shared.load)
    assert found.wired == needed < shared.limit_bytes == found.arrays
    assert found.buffers >= shared.activation_bytes
    limits.apply(found)
    limits.release()  # twice is once
    limits.release()
