"""What of a model's config.json matters to us, as typed values. Reads no file, decides nothing.

Field names are those of Hugging Face's configs, as mlx-lm 0.32.2 reads them. A field whose value is not what
we expect is None ("not said"), except for those without which nothing can be sized: these are refused.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# Nothing or less would prove that any model fits; a wild number ends in arithmetic somewhere else.
_MOST = 2**40
_Count = Annotated[int, Field(ge=1, le=_MOST)]
# Layers are looked at one by one; the deepest model that mlx-lm knows has some two hundred.
_Layers = Annotated[int, Field(ge=1, le=10_000)]


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST else None


def _words(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return None
    return tuple(value)


def _numbers(value: object) -> tuple[int, ...] | None:
    found = [_number(one) for one in value] if isinstance(value, list) else [None]
    return tuple(one for one in found if one is not None) if None not in found else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


Number = Annotated[int | None, BeforeValidator(_number)]
Numbers = Annotated[tuple[int, ...] | None, BeforeValidator(_numbers)]
Words = Annotated[tuple[str, ...] | None, BeforeValidator(_words)]
Text = Annotated[str | None, BeforeValidator(_text)]
Flag = Annotated[bool, BeforeValidator(lambda value: value is True)]


class Section(BaseModel):
    """The numbers of a config, or of its `text_config`, where multimodal models keep theirs."""

    model_config = ConfigDict(protected_namespaces=(), frozen=True)

    max_position_embeddings: _Count | None = None
    vocab_size: _Count | None = None
    num_hidden_layers: _Layers | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    hidden_size: _Count | None = None
    head_dim: _Count | None = None
    # The width of a token on its way through the feed-forward part.
    intermediate_size: Number = None
    moe_intermediate_size: Number = None
    num_experts_per_tok: Number = None
    # Which layers look back how far.
    layer_types: Words = None
    layers_block_type: Words = None
    sliding_window: Number = None
    sliding_window_pattern: Number = None
    full_attention_interval: Number = None
    num_kv_shared_layers: Number = None
    global_head_dim: Number = None
    num_global_key_value_heads: Number = None
    attention_k_eq_v: Flag = False
    # Latent attention.
    kv_lora_rank: Number = None
    qk_rope_head_dim: Number = None
    qk_nope_head_dim: Number = None
    v_head_dim: Number = None
    index_head_dim: Number = None
    # Linear attention.
    linear_num_value_heads: Number = None
    linear_num_key_heads: Number = None
    linear_key_head_dim: Number = None
    linear_value_head_dim: Number = None
    linear_conv_kernel_dim: Number = None
    # State spaces and convolutions, under the names of their families.
    state_size: Number = None
    ssm_state_size: Number = None
    conv_kernel: Number = None
    n_groups: Number = None
    num_heads: Number = None
    hybrid_override_pattern: Text = None
    mamba_num_heads: Number = None
    mamba_head_dim: Number = None
    mamba_n_heads: Number = None
    mamba_d_head: Number = None
    mamba_n_groups: Number = None
    mamba_d_state: Number = None
    mamba_d_conv: Number = None
    mamba_expand: Number = None
    attn_layer_period: Number = None
    attn_layer_offset: Number = None
    conv_L_cache: Number = None  # noqa: N815 - the config's own spelling
    full_attn_idxs: Numbers = None


class Quantization(BaseModel):
    """How the weights are packed; only what the number of parameters needs."""

    group_size: Number = None


class _Inner(Section):
    model_type: Text = None


class Config(Section):
    """A config.json."""

    model_type: str
    text_config: _Inner = Field(default_factory=_Inner)
    quantization: Annotated[
        Quantization | None, BeforeValidator(lambda v: v if isinstance(v, dict) else None)
    ] = None

    @property
    def text(self) -> Section:
        """Return the numbers of the language model: those of `text_config`, else the outer level's.

        The vocabulary is the other way round, as in mlx_lm/models/gemma3.py.
        """
        names = set(Section.model_fields)
        outer = self.model_dump(include=names, exclude_none=True)
        inner = self.text_config.model_dump(include=names, exclude_none=True, exclude_unset=True)
        merged: dict[str, Any] = {**outer, **inner}
        if self.vocab_size is not None:
            merged["vocab_size"] = self.vocab_size
        return Section.model_construct(**merged)
