"""Models of random weights, built from mlx-lm's classes, and late imports of mlx.

mlx_lm takes seconds to import, and lowers the limit of open files for this process and all processes that tests start.
"""

import contextlib
import importlib
import resource
from typing import Any

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
GEMMA = {**BASE, "model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}
MAMBA = {
    **BASE,
    "model_type": "mamba",
    "conv_kernel": 4,
    "state_size": 16,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}


def module(name: str) -> Any:
    """Import a module by name: late, untyped, and without its effect on the file limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = importlib.import_module(name)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return found


class Late:
    """A module that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_mock") or name in ("__wrapped__", "__test__", "pytestmark"):
            raise AttributeError(name)  # pytest looks for these names on every global
        return getattr(module(self._name), name)


def build(config: dict[str, Any]) -> Any:
    """Return a model of random weights."""
    found = module(f"mlx_lm.models.{config['model_type']}")
    return found.Model(found.ModelArgs.from_dict(config))
