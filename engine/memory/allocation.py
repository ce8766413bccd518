"""What MLX is told of memory: its limits for all arrays, for unused buffers, and for what stays wired.

The only file of this folder that knows mlx. In the worker's thread alone; nothing may be computed meanwhile.

From a loaded model to the memory its requests may take. In the worker's thread, before the first of them.
"""

import logging
import platform
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache import layer_caches
from engine.cache.interface import KvOptions
from engine.config import EngineConfig
from engine.memory import budget
from engine.memory.budget import MemoryBudget, MemoryRequest, full_bytes
from engine.memory.guard import MemoryGuard
from machinery import linux_memory
from models import model_files
from models.footprint import KvFootprint, ServingLoad, activation_bytes
from models.model_files import ModelFacts, ModelUnusableError

# Unused buffers that are kept in any case: less would allocate anew in every step.
_MIN_BUFFER_BYTES = 64 << 20
# Metal wires memory on behalf of a process from this macOS on (mlx: set_wired_limit).
_WIRED_SINCE_MACOS = 15

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxLimits:
    """In bytes."""

    arrays: int
    buffers: int
    wired: int


def find_limits(budget: MemoryBudget) -> MlxLimits:
    """Return the limits for a budget.

    Wired is what the model needs and no more: wired memory is lost to everybody else, and a part of it may stay so
    when a process is killed (mlx#3910).
    """
    caches = min(full_bytes(budget.rule, budget.load), budget.kv_bytes) + budget.prefix_kept_bytes
    return MlxLimits(
        arrays=budget.limit_bytes,
        buffers=max(_MIN_BUFFER_BYTES, budget.activation_bytes),
        wired=min(budget.limit_bytes, budget.weights_bytes + budget.activation_bytes + caches),
    )


def machine_bytes() -> int:
    """Return what this machine recommends for models.

    Metal says it, `iogpu.wired_limit_mb` considered; on Linux it is the share of the memory, or of the tightest
    cgroup's, that the agent reports of such a machine.
    """
    recommended = _recommended_bytes()
    if recommended is not None:
        return recommended
    memory = linux_memory.memory_bytes()
    if memory is None:  # no /proc: MLX's own guess, which knows no cgroups
        return int(mx.get_memory_limit())
    return memory * linux_memory.MODEL_SHARE_PERCENT // 100


def apply_limits(limits: MlxLimits) -> None:
    """Set the limits."""
    mx.set_memory_limit(limits.arrays)
    mx.set_cache_limit(limits.buffers)
    wired = _set_wired_limit(limits.wired)
    sizes = {"arrays_bytes": limits.arrays, "buffers_bytes": limits.buffers, "wired_bytes": wired}
    log.info("memory limits set", extra=sizes)


def release_wired_memory() -> None:
    """Let go of what is wired, before the model is freed: what is wired at the end of a process may stay so."""
    _set_wired_limit(0)


def _set_wired_limit(wanted: int) -> int:
    """Set the wired limit; return what it is now, 0 where there is none."""
    recommended = _recommended_bytes()
    if (
        recommended is None
        or int(platform.mac_ver()[0].partition(".")[0] or 0) < _WIRED_SINCE_MACOS
    ):
        return 0
    limit = min(wanted, recommended)
    try:
        mx.set_wired_limit(limit)
    except ValueError as error:
        # The system's own limit is lower than what it recommends: slower, not wrong.
        log.warning(
            "cannot keep the model wired; it may be paged out",
            extra={"wired_bytes": limit, "reason": str(error)},
        )
        return 0
    return limit


def _recommended_bytes() -> int | None:
    if not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])


def allocate(
    models: list[tuple[Any, ModelFacts]], config: EngineConfig, *, ranks: int = 1
) -> MemoryGuard:
    """Measure the model's caches (a draft model's, too, if it is the second), share the memory out, tell MLX.

    All weights must be in memory already: what they take is measured.

    Raises:
        ModelUnusableError: the model cannot have such caches, or the memory is too little to serve anybody.

    """
    found = plan_budget(models, config, ranks=ranks)
    apply_limits(find_limits(found))
    return MemoryGuard(budget=found)


def plan_budget(
    models: list[tuple[Any, ModelFacts]], config: EngineConfig, *, ranks: int
) -> MemoryBudget:
    """Return how the memory is shared."""
    is_guessing = len(models) > 1
    load = ServingLoad(
        context_length=config.context_length,
        concurrency=config.concurrency,
        ranks=ranks,
        kv_bits=config.kv_bits,
        kv_window=config.kv_window,
        draft_tokens=config.draft_tokens if is_guessing else 0,
    )
    (model, facts), *drafts = models
    options = KvOptions(bits=config.kv_bits, window=config.kv_window)
    try:
        kinds = layer_caches.try_model(model, options)
    except ValueError as error:
        raise ModelUnusableError(str(error)) from error
    rule, activations = _measure_needs(model, facts, options, load)
    for draft, draft_facts in drafts:
        # Whole on every rank, and never quantised.
        alone = ServingLoad(
            context_length=load.context_length + load.draft_tokens, concurrency=load.concurrency
        )
        more = _measure_needs(draft, draft_facts, KvOptions(), alone)
        rule, activations = rule + more[0], activations + more[1]
    shared = budget.make_budget(
        rule,
        load,
        MemoryRequest(
            promised_bytes=config.memory_limit_bytes, prefix_bytes=config.prefix_cache_bytes
        ),
        machine_bytes=machine_bytes(),
        held=(mx.get_active_memory(), activations),
    )
    if shared.complaint:
        raise ModelUnusableError(shared.complaint)
    log.info(
        "memory shared out",
        extra={
            "caches": kinds,
            "bytes_a_token": rule.token_bytes,
            "kv_bytes": shared.kv_bytes,
            "activation_bytes": activations,
            "longest": shared.longest,
        },
    )
    return shared


def _measure_needs(
    model: Any, facts: ModelFacts, options: KvOptions, load: ServingLoad
) -> tuple[KvFootprint, int]:
    """Return the rule of a model's caches, and what is held for a moment while it works."""
    shape = model_files.model_geometry(facts, casts_to_float32=sys.platform == "linux")
    rule = layer_caches.measure_footprint(model, options)
    # Layers that rotate hold the piece of a prompt that is being read beside their window.
    return rule, activation_bytes(shape, load) + rule.reading_bytes(shape.prefill_step)
