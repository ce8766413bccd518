"""Measures a loaded model, divides the memory among its uses, and sets MLX's memory limits.

This is the only file of this folder that imports mlx. Worker thread only, while nothing is computed.
"""

import logging
import platform
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache import layer_caches
from engine.cache.interface import KvOptions
from engine.gauges import Gauges
from engine.memory import budget
from engine.memory.budget import MemoryBudget, MemoryRequest, full_bytes
from engine.memory.guard import MemoryGuard
from machinery import linux_memory
from models import model_files
from models.footprint import (
    BLOCK_TOKEN_BYTES,
    KvFootprint,
    ServingLoad,
    activation_bytes,
    mtp_bytes,
    vision_bytes,
)
from models.model_files import ModelFacts, ModelUnusableError
from schemas import quantity
from schemas.kv_cache import KvCache
from schemas.memory import Wired
from schemas.wire.engine_config import EngineConfig

# The least unused buffers to keep: with fewer, every step would allocate again.
_MIN_BUFFER_BYTES = 64 << 20
# A 16 GB Mac flickered, froze and restarted with its whole working set wired, 10.6 GB, and not with 8 GB left unwired
# (osaurus-ai/vmlx-swift#421). Larger Macs have more than that beyond the working set.
_SMALL_MAC_BYTES = 32 << 30
_UNWIRED_BYTES = 8 << 30
# The first macOS on which Metal wires memory for a process (mlx: set_wired_limit).
_WIRED_SINCE_MACOS = 15

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxLimits:
    """MLX's limits, in bytes."""

    arrays: int
    buffers: int
    wired: int | None
    """None: MLX's default stays, and nothing is wired."""


def find_limits(shared: MemoryBudget, wired: Wired = "Auto") -> MlxLimits:
    """Return the limits for a budget.

    The wired limit is exactly what the model needs: other processes cannot use wired memory, and a part of it may stay
    wired when the process is killed (mlx#3910).
    """
    full = full_bytes(shared.footprint, shared.load)
    caches = min(full, shared.kv_bytes) + shared.prefix_kept_bytes
    return MlxLimits(
        arrays=shared.limit_bytes,
        buffers=max(_MIN_BUFFER_BYTES, shared.activation_bytes),
        wired=None
        if wired == "Off"
        else min(shared.limit_bytes, shared.weights_bytes + shared.activation_bytes + caches),
    )


def machine_bytes() -> int:
    """Return the memory that this machine recommends for models.

    On macOS, Metal recommends it and respects `iogpu.wired_limit_mb`. On Linux it is a share of the memory, or of the
    smallest cgroup limit: the same share that the agent reports.
    """
    recommended = _recommended_bytes()
    if recommended is not None:
        return recommended
    memory = linux_memory.memory_bytes()
    if memory is None:  # no /proc: MLX's own estimate, which ignores cgroups
        return int(mx.get_memory_limit())
    return memory * linux_memory.MODEL_SHARE_PERCENT // 100


def apply_limits(limits: MlxLimits) -> None:
    """Set MLX's limits."""
    mx.set_memory_limit(limits.arrays)
    mx.set_cache_limit(limits.buffers)
    wired = 0 if limits.wired is None else _set_wired_limit(limits.wired)
    sizes = {"arrays_bytes": limits.arrays, "buffers_bytes": limits.buffers, "wired_bytes": wired}
    log.info("memory limits set", extra=sizes)


def clear_buffers() -> None:
    """Give unused buffers back to the system; nothing else may call `mx.clear_cache` (tests/lint/test_mlx_calls.py).

    A buffer that a command in flight still uses must not be freed: it is a trigger of the kernel panic "completeMemory()
    prepare count underflow" (mlx#3186, omlx PR 648). The worker computes on its default stream only.
    """
    mx.synchronize()
    mx.clear_cache()


def read_memory(gauges: Gauges) -> None:
    """Write what MLX holds into the gauges."""
    gauges.active_bytes = mx.get_active_memory()
    gauges.buffer_bytes = mx.get_cache_memory()
    gauges.peak_bytes = mx.get_peak_memory()


def release_wired_memory() -> None:
    """Unwire all memory, before the model is freed: memory that is wired when a process ends may stay wired."""
    _set_wired_limit(0)


def wirable_bytes(memory_bytes: int, recommended_bytes: int) -> int:
    """Return the most memory that a process may wire on a Mac of this size: the rest of a model can be paged out."""
    if memory_bytes > _SMALL_MAC_BYTES:
        return recommended_bytes
    return max(0, min(recommended_bytes, memory_bytes - _UNWIRED_BYTES))


def _set_wired_limit(wanted_bytes: int) -> int:
    """Set the wired limit; return the limit that was set, 0 if the system has none."""
    recommended = _recommended_bytes()
    if (
        recommended is None
        or int(platform.mac_ver()[0].partition(".")[0] or 0) < _WIRED_SINCE_MACOS
    ):
        return 0
    limit = min(wanted_bytes, wirable_bytes(int(mx.device_info()["memory_size"]), recommended))
    try:
        mx.set_wired_limit(limit)
    except ValueError as error:
        # The system's own limit is lower than its recommendation: slower, but not wrong.
        log.warning(
            "cannot keep the model wired; it may be paged out",
            extra={"wired_bytes": limit, "why": str(error)},
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
    """Measure the caches of the model (and of a draft model, the second one), divide the memory and set MLX's limits.

    All weights must be in memory already, because their size is measured.

    Raises:
        ModelUnusableError: the model cannot use such caches, or the memory is too small for any request.

    """
    memory_budget = plan_budget(models, config, ranks=ranks)
    apply_limits(find_limits(memory_budget, config.wired))
    return MemoryGuard(budget=memory_budget)


def divide_for_work(config: EngineConfig, work_bytes: int, gauges: Gauges) -> None:
    """Set MLX's limits for a model without caches: all memory beside its weights is for `work_bytes`.

    Raises:
        ModelUnusableError: the memory is too small.

    """
    shared = budget.make_budget(
        KvFootprint(),
        ServingLoad(context_length=config.context_length, concurrency=config.concurrency),
        MemoryRequest(promised_bytes=config.memory_limit_bytes, prefix_bytes=0),
        machine_bytes=machine_bytes(),
        held=(mx.get_active_memory(), work_bytes),
    )
    gauges.limit_bytes = shared.limit_bytes
    free = shared.limit_bytes - shared.weights_bytes
    if free < work_bytes:
        raise ModelUnusableError(
            f"the limit of {shared.limit_bytes >> 20} MiB leaves {max(0, free) >> 20} MiB beside the weights; "
            f"this model needs {work_bytes >> 20} MiB for its work: set spec.resources.memory higher"
        )
    apply_limits(find_limits(shared, config.wired))


def refuse_text_settings(config: EngineConfig, kind: str) -> None:
    """Refuse settings of models that generate text: they would have no effect on a model of this kind.

    Raises:
        ModelUnusableError: a setting is given.

    """
    given = {
        "a draft model": config.draft_model,
        "n-grams": config.ngram_tokens,
        "an MTP head": config.mtp_tokens,
        "adapters": config.adapter or config.adapters,
        "vision": config.vision,
        "pinned prefixes": config.prefixes,
        "a group of ranks": config.group,
        "kvCache": config.kv_cache != KvCache(),
    }
    named = [name for name, value in given.items() if value]
    if named:
        raise ModelUnusableError(
            f"{config.model_dir}: {kind} has no use for {' and '.join(named)}; remove it"
        )


def plan_budget(
    models: list[tuple[Any, ModelFacts]], config: EngineConfig, *, ranks: int
) -> MemoryBudget:
    """Return the memory budget; arguments and errors are those of `allocate`."""
    has_draft, cache = len(models) > 1, config.kv_cache
    load = ServingLoad(
        context_length=config.context_length,
        concurrency=config.concurrency,
        ranks=ranks,
        kv_tokens=cache.tokens,
        kv_bits=cache.bits,
        kv_window=cache.window,
        draft_tokens=config.draft_tokens if has_draft else config.ngram_tokens or config.mtp_tokens,
        has_mtp=bool(config.mtp_tokens),
        image_pixels=0 if config.vision is None else config.vision.max_pixels,
        images=0 if config.vision is None else config.vision.max_images,
    )
    (model, facts), *drafts = models
    options = KvOptions(bits=cache.bits, window=cache.window, keep=cache.keep or 0)
    try:
        kinds = layer_caches.try_model(model, options)
    except ValueError as error:
        raise ModelUnusableError(str(error)) from error
    footprint, activations = _measure_needs(model, facts, options, load)
    if load.draft_tokens:
        activations += footprint.kept_bytes(load.tokens, by_token=False)
    pinned_bytes = sum(
        footprint.sequence_bytes(prefix.tokens) + BLOCK_TOKEN_BYTES * prefix.tokens
        for prefix in config.prefixes
    )
    for draft, draft_facts in drafts:
        # Every rank has the whole draft model, and its caches are never quantized.
        alone = ServingLoad(
            context_length=load.context_length + load.draft_tokens, concurrency=load.concurrency
        )
        more = _measure_needs(draft, draft_facts, KvOptions(), alone)
        activations += more[1] + more[0].kept_bytes(alone.tokens, by_token=True)
        footprint += more[0]
    shared = budget.make_budget(
        footprint,
        load,
        MemoryRequest(
            promised_bytes=config.memory_limit_bytes,
            pinned_bytes=pinned_bytes,
            prefix_bytes=None if cache.prefix_bytes is None else quantity.parse(cache.prefix_bytes),
        ),
        machine_bytes=machine_bytes(),
        held=(mx.get_active_memory(), activations),
    )
    if shared.shortage:
        raise ModelUnusableError(shared.shortage)
    log.info(
        "memory budget computed",
        extra={
            "caches": kinds,
            "bytes_a_token": footprint.token_bytes,
            "kv_bytes": shared.kv_bytes,
            "activation_bytes": activations,
            "longest": shared.longest,
        },
    )
    return shared


def _measure_needs(
    model: Any, facts: ModelFacts, options: KvOptions, load: ServingLoad
) -> tuple[KvFootprint, int]:
    """Return the footprint of a model's caches, and the bytes of its activations."""
    shape = model_files.model_geometry(facts, casts_to_float32=sys.platform == "linux")
    footprint = layer_caches.measure_footprint(model, options)
    # Rotating layers hold the prompt piece in progress beside their window.
    temporary = activation_bytes(shape, load) + vision_bytes(shape, load) + mtp_bytes(shape, load)
    return footprint, temporary + footprint.reading_bytes(shape.prefill_step)
