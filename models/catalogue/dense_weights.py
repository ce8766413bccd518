"""The tensors of a dense transformer that mlx-lm quantized: names and sizes, computed from its config. Pure.

Families: llama, qwen2, qwen3 (mlx_lm/models). tests/models/catalogue compares with the models that mlx-lm builds.
"""

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from models.model_files import TensorHeader

GROUP_SIZE: Final = 64
"""Weights that share a scale and a bias: mlx-lm's default, with which these repositories were made."""
Family: TypeAlias = Literal["llama", "qwen2", "qwen3"]


class DenseConfig(BaseModel):
    """The fields of a config.json that determine all tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_type: Family
    hidden_size: int = Field(ge=GROUP_SIZE)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate_size: int = Field(ge=GROUP_SIZE)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    tie_word_embeddings: bool


def quantized_tensors(config: DenseConfig, bits: int) -> dict[str, TensorHeader]:
    """Return the tensors of the model in this many bits, as the headers of its weight files have them."""
    tensor_headers: dict[str, TensorHeader] = {}
    for name, rows, columns in _matrices(config):
        tensor_headers[f"{name}.weight"] = _tensor("U32", 4, rows, columns * bits // 32)
        for part in ("scales", "biases"):
            tensor_headers[f"{name}.{part}"] = _tensor("BF16", 2, rows, columns // GROUP_SIZE)
    for name, size in _vectors(config):
        tensor_headers[name] = _tensor("BF16", 2, size)
    return tensor_headers


def _tensor(dtype: str, element_bytes: int, *shape: int) -> TensorHeader:
    size = element_bytes
    for length in shape:
        size *= length
    return TensorHeader(dtype=dtype, shape=shape, data_offsets=(0, size))


def _matrices(config: DenseConfig) -> Iterator[tuple[str, int, int]]:
    """Yield name, rows and columns of each quantized matrix."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield "model.embed_tokens", config.vocab_size, hidden
    if not config.tie_word_embeddings:
        yield "lm_head", config.vocab_size, hidden
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj", queries, hidden
        yield f"{at}.self_attn.k_proj", keys, hidden
        yield f"{at}.self_attn.v_proj", keys, hidden
        yield f"{at}.self_attn.o_proj", hidden, queries
        yield f"{at}.mlp.gate_proj", ffn, hidden
        yield f"{at}.mlp.up_proj", ffn, hidden
        yield f"{at}.mlp.down_proj", hidden, ffn


def _vectors(config: DenseConfig) -> Iterator[tuple[str, int]]:
    """Yield name and length of each vector: norms, and the biases of qwen2."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield "model.norm.weight", config.hidden_size
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", config.hidden_size
        yield f"{at}.post_attention_layernorm.weight", config.hidden_size
        if config.model_type == "qwen3":
            yield f"{at}.self_attn.q_norm.weight", config.head_dim
            yield f"{at}.self_attn.k_norm.weight", config.head_dim
        if config.model_type == "qwen2":
            yield f"{at}.self_attn.q_proj.bias", queries
            yield f"{at}.self_attn.k_proj.bias", keys
            yield f"{at}.self_attn.v_proj.bias", keys
