"""Ollama's `options`: what each becomes, and which have no effect here. Pure; the engine judges the values."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.errors import invalid
from gateway.surfaces.asking import unknown_name

MAPPED: Mapping[str, str] = MappingProxyType(
    {
        "frequency_penalty": "frequency_penalty",
        "min_p": "min_p",
        "num_predict": "max_tokens",
        "presence_penalty": "presence_penalty",
        "repeat_penalty": "repetition_penalty",
        "seed": "seed",
        "stop": "stop",
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
    }
)
"""By Ollama's name, the engine's."""

MEANT: Mapping[str, str] = MappingProxyType(
    {"max_completion_tokens": "num_predict"}
    | {name: own for own, name in MAPPED.items() if name != own}
)
"""By other APIs' names, Ollama's."""

# What a deployment decides for all requests, what belongs to llama.cpp alone, and samplers that the
# engine does not have. Clients send these with their defaults, so refusing them would refuse clients.
NO_EFFECT = frozenset(
    {
        "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat", "mirostat_eta",
        "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_gqa", "num_keep", "num_thread", "numa",
        "penalize_newline", "repeat_last_n", "rope_frequency_base", "rope_frequency_scale", "tfs_z",
        "typical_p", "use_mlock", "use_mmap", "vocab_only",
    }
)  # fmt: skip

# Ollama's words for "as it comes": without a limit, with a seed of its own.
_AS_IT_COMES = frozenset({"num_predict", "seed"})


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's parameters.

    Raises:
        RefusedError: an option is none.

    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in NO_EFFECT or value is None:
            continue
        known = MAPPED.get(name)
        if known is None:
            message = unknown_name("option", name, MAPPED.keys() | NO_EFFECT, MEANT)
            raise invalid(message, param=f"options.{name[:100]}")
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if name in _AS_IT_COMES and isinstance(number, int) and number < (name == "num_predict"):
            continue
        if name != "stop" or value:
            found[known] = number
    return found
