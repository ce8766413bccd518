"""What every rank shows of its batch: memory, sequences, and what is cached. The worker's thread alone."""

import mlx.core as mx

from nodeagent.engine.batch.executor import Executor
from nodeagent.engine.state import Gauges

# What a gateway is told of the prefix cache: the blocks used last, of 64 tokens each.
_SUMMARY_BLOCKS = 1024


def measure(gauges: Gauges, executor: Executor) -> None:
    """Write it into the gauges, after a step."""
    prefix = executor.prefix.stats
    gauges.active_bytes = mx.get_active_memory()
    gauges.buffer_bytes = mx.get_cache_memory()
    gauges.peak_bytes = mx.get_peak_memory()
    gauges.running = len(executor.decoding.rows)
    gauges.prefilling = len(executor.jobs) - gauges.running
    if gauges.prefix_bytes != prefix.nbytes:
        gauges.prefix_bytes = prefix.nbytes
        gauges.prefix_blocks = tuple(executor.prefix.summary(_SUMMARY_BLOCKS))
    gauges.prefix_lookups = prefix.lookups
    gauges.prefix_query_tokens = prefix.asked_tokens
    gauges.prefix_hit_tokens = prefix.hit_tokens
    gauges.prefix_evictions = prefix.evictions
