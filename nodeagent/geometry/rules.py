"""Which rule sizes which architecture. Pure.

Each row was checked against the caches that mlx-lm 0.32.2 really makes (tests/nodeagent/test_geometry_mlx.py). An
architecture without a row is not guessed at: a cache that is sized wrong ends in a kernel panic (mlx#3186),
so the proof then asks a person.
"""

from typing import Final

from nodeagent.geometry import attention, states
from nodeagent.geometry.config import Config, Section
from nodeagent.geometry.layers import Groups, NotUnderstoodError, Rule, counted, divided

# mlx_lm.utils.MODEL_REMAPPING: other names for the same module.
ALIASES: Final = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}

# Every layer keeps the key and the value of every token.
_FULL: Final = (
    "dots1", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "hunyuan_v1_dense",
    "minimax", "nemotron", "olmo2", "olmoe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss",
    "smollm3", "solar_open", "telechat3",
)  # fmt: skip
# The same; mlx-lm divides hidden_size by the heads, whatever head_dim the config has.
_DIVIDED: Final = (
    "Klear", "apertus", "bailing_moe", "cohere", "deepseek", "gpt_neox", "granite", "granitemoe", "helium",
    "internlm2", "internlm3", "mimo", "minicpm", "mixtral", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen2_vl", "stablelm", "starcoder2",
)  # fmt: skip

RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(_FULL, attention.full),
    **dict.fromkeys(_DIVIDED, divided(attention.full)),
    "llama": attention.by_types(lambda _: False),
    "ministral3": attention.by_types(lambda _: False),
    "gpt_oss": attention.by_types(lambda at: at % 2 == 0, window=128),
    "olmo3": attention.by_types(lambda at: (at + 1) % 4 != 0),
    "cohere2": attention.patterned(window=4096, pattern=4),
    "gemma3_text": attention.with_heads(
        attention.patterned(window=512, pattern=6), heads=4, kv_heads=1, size=256
    ),
    "gemma3": attention.with_heads(
        attention.patterned(window=512, pattern=6), heads=8, kv_heads=4, size=256
    ),
    "gemma3n": attention.gemma3n,
    "gemma4": attention.gemma4,
    "gemma4_text": attention.gemma4,
    "deepseek_v2": attention.unpacked,
    "youtu_llm": attention.unpacked,
    "deepseek_v3": attention.latent,
    "glm4_moe_lite": attention.latent,
    "kimi_k25": attention.latent,
    "kimi_vl": attention.latent,
    "mistral4": attention.latent,
    "deepseek_v32": attention.indexed,
    "glm_moe_dsa": attention.indexed,
    "qwen3_next": states.delta,
    "qwen3_5": states.delta,
    "qwen3_5_moe": states.delta,
    "mamba": states.mamba,
    "mamba2": states.mamba2,
    "nemotron_h": states.nemotron_h,
    "granitemoehybrid": divided(states.granite_hybrid),
    "falcon_h1": states.falcon_h1,
    "jamba": divided(states.jamba),
    "lfm2": divided(states.lfm2),
    "lfm2_moe": divided(states.lfm2),
}


def module_of(config: Config) -> str:
    """Return the module of mlx-lm that builds the model."""
    found = ALIASES.get(config.model_type, config.model_type)
    if found == "mistral3":  # around one of three language models
        inner = config.text_config.model_type
        return inner if inner in ("ministral3", "mistral4") else "llama"
    return found


def layer_groups(module: str, config: Section, *, element_bytes: int) -> Groups:
    """Return the layers of the model by what they keep.

    Raises:
        NotUnderstoodError: nobody can say from the config what the model will need.

    """
    rule = RULES.get(module)
    if rule is None:
        raise NotUnderstoodError(f"no rule says what the cache of a {module} model needs")
    return counted(rule(config, element_bytes))


def layer_order(module: str, config: Section, *, element_bytes: int) -> tuple[int, ...]:
    """Return for each layer which of `layer_groups` it is of, from 0; () if they are not told one by one.

    Raises:
        NotUnderstoodError: as layer_groups.

    """
    groups = layer_groups(module, config, element_bytes=element_bytes)
    one_each = [group.model_copy(update={"count": 1}) for group in groups]
    listed = [
        layer for told in RULES[module](config, element_bytes) for layer in [told] * told.count
    ]
    order = tuple(one_each.index(layer.model_copy(update={"count": 1})) for layer in listed)
    # Layers that keep nothing, or two things, cannot be told from those of the config's number.
    return order if len(order) == config.num_hidden_layers else ()
