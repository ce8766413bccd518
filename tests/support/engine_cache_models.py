"""Tiny models with every kind of cache that mlx-lm has, run one sequence at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.cache.interface import KvOptions
from tests.support.mlx_models import BASE, GEMMA, MAMBA, Late, build

mx: Any = Late("mlx.core")
layer_caches: Any = Late("engine.cache.layer_caches")
prefix_cache: Any = Late("engine.cache.prefix_cache")

WINDOW = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": {**BASE, "model_type": "qwen2"},
    "qwen3": {**BASE, "model_type": "qwen3"},
    "quantized": BASE,
    "rotating": BASE,
    "keeping": BASE,
    "gemma3": {**GEMMA, "sliding_window": WINDOW},
    "mla": {
        **BASE,
        "model_type": "minicpm3",
        "dim_model_base": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "scale_depth": 1.4,
        "scale_emb": 1.0,
        "rope_scaling": {
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
        },
    },
    "mamba": MAMBA,
    "lfm2": {
        **BASE,
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "falcon_h1": {
        **BASE,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
    },
}
OPTIONS = {
    "quantized": KvOptions(bits=8),
    "rotating": KvOptions(window=WINDOW),
    "keeping": KvOptions(window=WINDOW, keep=4),
}
KINDS = ["llama", "quantized", "gemma3", "lfm2"]  # one for each kind of cache
RECURRENT = ("mamba", "lfm2", "falcon_h1", "keeping")


class Tiny:
    """A model and the prefix cache of its sequences."""

    def __init__(self, name: str) -> None:
        mx.random.seed(7)
        self.model = build(CONFIGS[name])
        mx.eval(self.model.parameters())
        self.make: Callable[[], list[Any]] = lambda: layer_caches.make_caches(
            self.model, OPTIONS.get(name, KvOptions())
        )

    def cache(self, limit_bytes: int = 1 << 30) -> Any:
        return prefix_cache.BlockPrefixCache(self.make, limit_bytes=limit_bytes)

    def read(self, caches: list[Any], tokens: Sequence[int]) -> Any:
        """Return the logits after the last of these tokens."""
        logits = self.model(mx.array([list(tokens)]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        return logits

    def read_and_store(self, cache: Any, tokens: Sequence[int], pieces: Sequence[int]) -> list[Any]:
        """Read tokens in pieces with the given ends, and store after each one; return the caches."""
        caches, start = self.make(), 0
        for end in pieces:
            self.read(caches, tokens[start:end])
            cache.store(tokens[:end], caches)
            start = end
        return caches

    def say(self, caches: list[Any], rest: Sequence[int], answer: Sequence[int] = ()) -> list[Any]:
        """Read the rest of a prompt, then an answer's tokens one by one; return all logits."""
        return [self.read(caches, rest), *(self.read(caches, [token]) for token in answer)]
