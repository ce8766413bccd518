"""The memory proof: how many bytes one rank of a model needs. Pure.

Figures and formulas: docs/architecture.md, section 5, with their sources.
"""

from schemas.node import ModelGeometry
from schemas.replica import MemoryProof

# mlx-lm grows KV caches in steps of 256 tokens (mlx_lm/models/cache.py).
_KV_STEP = 256
# The engine prefills at most this many tokens of a prompt at once (nodeagent/engine).
_PREFILL_STEP = 512
# Python, MLX and buffers of one engine process; measured 0.5 to 0.8 GiB with an idle model.
_PROCESS_BYTES = 768 * 2**20
_LOGIT_BYTES = 4


def prove(geometry: ModelGeometry, *, context_length: int, concurrency: int) -> MemoryProof:
    """Return what one engine needs for `concurrency` requests of `context_length` tokens each."""
    tokens = -(-context_length // _KV_STEP) * _KV_STEP
    per_token = (
        2 * geometry.layers * geometry.kv_heads * geometry.head_dim * geometry.kv_element_bytes
    )
    return MemoryProof(
        weights_bytes=geometry.weights_bytes,
        kv_cache_bytes=per_token * tokens * concurrency,
        # At worst the logits of a whole prefill step are held.
        activation_bytes=min(_PREFILL_STEP, tokens) * geometry.vocab_size * _LOGIT_BYTES,
        overhead_bytes=_PROCESS_BYTES,
    )
