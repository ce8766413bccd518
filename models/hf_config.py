"""The fields of a Hugging Face config.json that this project uses, as typed values. Reads no file.

Field names and meanings are those of mlx-lm 0.32.2. A field with an unexpected value becomes None ("not given"), except
for the fields without which no size can be computed: these are refused.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# 0 or less would prove that any model fits; a huge number would overflow later arithmetic.
_MAX_NUMBER = 2**40
_Count = Annotated[int, Field(ge=1, le=_MAX_NUMBER)]
# Rules build a list of the layers; the deepest model of mlx-lm has about two hundred.
_Layers = Annotated[int, Field(ge=1, le=10_000)]


def _parse_number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None


def _parse_words(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return None
    return tuple(value)


def _parse_numbers(value: object) -> tuple[int, ...] | None:
    found = [_parse_number(one) for one in value] if isinstance(value, list) else [None]
    return tuple(one for one in found if one is not None) if None not in found else None


def _parse_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


LooseNumber = Annotated[int | None, BeforeValidator(_parse_number)]
LooseNumbers = Annotated[tuple[int, ...] | None, BeforeValidator(_parse_numbers)]
LooseWords = Annotated[tuple[str, ...] | None, BeforeValidator(_parse_words)]
LooseText = Annotated[str | None, BeforeValidator(_parse_text)]
LooseFlag = Annotated[bool, BeforeValidator(lambda value: value is True)]


class LinearAttention(BaseModel):
    """The `linear_attn_config` of a Kimi Linear model."""

    model_config = ConfigDict(frozen=True)

    num_heads: LooseNumber = None
    head_dim: LooseNumber = None
    short_conv_kernel_size: LooseNumber = None
    kda_layers: LooseNumbers = None
    """Layers with a state, counted from 1."""


class TextConfig(BaseModel):
    """The numbers of a config, or of its `text_config` in a multimodal model."""

    model_config = ConfigDict(protected_namespaces=(), frozen=True)

    max_position_embeddings: _Count | None = None
    model_max_length: LooseNumber = None
    vocab_size: _Count | None = None
    num_hidden_layers: _Layers | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    hidden_size: _Count | None = None
    head_dim: _Count | None = None
    # The width of the feed-forward part.
    intermediate_size: LooseNumber = None
    moe_intermediate_size: LooseNumber = None
    # Routed experts, under the names of their families.
    num_experts: LooseNumber = None
    n_routed_experts: LooseNumber = None
    num_local_experts: LooseNumber = None
    moe_num_experts: LooseNumber = None
    num_experts_per_tok: LooseNumber = None
    num_experts_per_token: LooseNumber = None
    top_k_experts: LooseNumber = None
    moe_k: LooseNumber = None
    # How far each layer looks back.
    layer_types: LooseWords = None
    layers_block_type: LooseWords = None
    sliding_window: LooseNumber = None
    sliding_window_pattern: LooseNumber = None
    full_attention_interval: LooseNumber = None
    num_kv_shared_layers: LooseNumber = None
    global_head_dim: LooseNumber = None
    num_global_key_value_heads: LooseNumber = None
    attention_k_eq_v: LooseFlag = False
    # Latent attention.
    kv_lora_rank: LooseNumber = None
    qk_rope_head_dim: LooseNumber = None
    qk_nope_head_dim: LooseNumber = None
    v_head_dim: LooseNumber = None
    index_head_dim: LooseNumber = None
    # Linear attention.
    linear_num_value_heads: LooseNumber = None
    linear_num_key_heads: LooseNumber = None
    linear_key_head_dim: LooseNumber = None
    linear_value_head_dim: LooseNumber = None
    linear_conv_kernel_dim: LooseNumber = None
    linear_attn_config: Annotated[
        LinearAttention | None,
        BeforeValidator(lambda v: v if isinstance(v, (dict, LinearAttention)) else None),
    ] = None
    # State space models and convolutions, under the names of their families.
    state_size: LooseNumber = None
    ssm_state_size: LooseNumber = None
    conv_kernel: LooseNumber = None
    n_groups: LooseNumber = None
    num_heads: LooseNumber = None
    hybrid_override_pattern: LooseText = None
    mamba_num_heads: LooseNumber = None
    mamba_head_dim: LooseNumber = None
    mamba_n_heads: LooseNumber = None
    mamba_d_head: LooseNumber = None
    mamba_n_groups: LooseNumber = None
    mamba_d_state: LooseNumber = None
    mamba_d_conv: LooseNumber = None
    mamba_expand: LooseNumber = None
    attn_layer_period: LooseNumber = None
    attn_layer_offset: LooseNumber = None
    conv_L_cache: LooseNumber = None  # noqa: N815 - the config's own spelling
    full_attn_idxs: LooseNumbers = None
    # Speech models: whisper's sizes, under the names of Hugging Face and of mlx-audio's own conversions.
    d_model: LooseNumber = None
    decoder_layers: LooseNumber = None
    encoder_attention_heads: LooseNumber = None
    max_source_positions: LooseNumber = None
    max_target_positions: LooseNumber = None
    n_audio_ctx: LooseNumber = None
    n_audio_state: LooseNumber = None
    n_audio_head: LooseNumber = None
    n_text_ctx: LooseNumber = None
    n_text_layer: LooseNumber = None
    n_vocab: LooseNumber = None
    # Encoders; the short names are those of NomicBERT.
    pad_token_id: LooseNumber = None
    n_embd: LooseNumber = None
    n_inner: LooseNumber = None
    n_positions: LooseNumber = None
    max_trained_positions: LooseNumber = None

    @property
    def expert_count(self) -> int:
        """Return the number of routed experts of a layer; 0 for a model without."""
        names = (
            self.num_experts,
            self.n_routed_experts,
            self.num_local_experts,
            self.moe_num_experts,
        )
        return next(filter(None, names), 0)

    @property
    def experts_of_token(self) -> int:
        """Return the number of routed experts that a token passes in a layer; 0 if unknown."""
        by_tok, by_token = self.num_experts_per_tok, self.num_experts_per_token
        return next(filter(None, (by_tok, by_token, self.top_k_experts, self.moe_k)), 0)


class QuantizationConfig(BaseModel):
    """The quantization of the weights, as far as the number of parameters needs it."""

    group_size: LooseNumber = None


class VisionConfig(BaseModel):
    """The numbers of a vision tower, under the names of all families."""

    patch_size: LooseNumber = None
    embed_dim: LooseNumber = None
    hidden_size: LooseNumber = None
    intermediate_size: LooseNumber = None
    num_heads: LooseNumber = None
    num_attention_heads: LooseNumber = None
    image_size: LooseNumber = None
    deepstack_visual_indexes: LooseNumbers = None


class _InnerTextConfig(TextConfig):
    model_type: LooseText = None


class ModelConfig(TextConfig):
    """A config.json."""

    model_type: str
    architectures: LooseWords = None
    text_config: _InnerTextConfig = Field(default_factory=_InnerTextConfig)
    quantization: Annotated[
        QuantizationConfig | None, BeforeValidator(lambda v: v if isinstance(v, dict) else None)
    ] = None

    vision_config: Annotated[
        VisionConfig | None, BeforeValidator(lambda v: v if isinstance(v, dict) else None)
    ] = None

    @property
    def text(self) -> TextConfig:
        """The numbers of the language model: those of `text_config`, else those of the outer level.

        For `vocab_size` the outer level wins, as in mlx_lm/models/gemma3.py.
        """
        names = set(TextConfig.model_fields)
        outer = self.model_dump(include=names, exclude_none=True)
        inner = self.text_config.model_dump(include=names, exclude_none=True, exclude_unset=True)
        merged: dict[str, Any] = {**outer, **inner}
        # A dump makes a dictionary of it.
        merged["linear_attn_config"] = (
            self.text_config.linear_attn_config or self.linear_attn_config
        )
        if self.vocab_size is not None:
            merged["vocab_size"] = self.vocab_size
        return TextConfig.model_construct(**merged)
