"""Encoders: which folders are embedding models and cross-encoders of BERT's kind, their limits and memory. Pure."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from models.hf_config import ModelConfig

EncoderTask: TypeAlias = Literal["Embed", "Rerank"]

FAMILIES: Final = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert")
"""Values of `model_type` that engine/encoder/transformer.py computes."""

BATCH_TOKENS: Final = 4096
"""Tokens, padding included, that are computed at once; more only for one text of a model with a longer limit."""
SCORE_BYTES: Final = 64 << 20
"""Attention scores that are computed at once where no fused kernel avoids them (engine/encoder/transformer.py)."""

# Arrays of a token's width, and of its feed-forward part, that are alive at once in a layer; and copies of the scores.
_HIDDEN_COPIES, _FFN_COPIES, _SCORE_COPIES = 8, 4, 4
_DEFAULT_TOKENS: Final = 512
_POSITIONS_BEFORE_TEXT: Final = ("roberta", "xlm-roberta")
_GATED: Final = ("modernbert", "nomic_bert")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """Facts of an encoder for the engine and the memory proof."""

    task: EncoderTask
    max_tokens: int
    """Tokens of the longest text that the model can read."""
    work_bytes: int
    """Bytes of temporary arrays of one batch; there is one at a time."""

    @property
    def batch_tokens(self) -> int:
        """Return the tokens of a batch, padding included."""
        return max(BATCH_TOKENS, self.max_tokens)


def encoder_shape(config: ModelConfig) -> EncoderShape | None:
    """Return the shape of an encoder; None for any other model."""
    if config.model_type not in FAMILIES:
        return None
    names = config.architectures or ()
    is_classifier = any(name.endswith("ForSequenceClassification") for name in names)
    max_tokens = _max_tokens(config)
    width = config.hidden_size or config.n_embd or 1024
    ffn = config.intermediate_size or config.n_inner or 4 * width
    ffn_arrays = 2 if config.model_type in _GATED else 1
    numbers = _HIDDEN_COPIES * width + _FFN_COPIES * ffn * ffn_arrays
    tokens = max(BATCH_TOKENS, max_tokens)
    # Counted with 4 bytes a number, and with the mask of a sliding window.
    work = 4 * tokens * numbers + _SCORE_COPIES * SCORE_BYTES + tokens * max_tokens
    return EncoderShape(
        task="Rerank" if is_classifier else "Embed", max_tokens=max_tokens, work_bytes=work
    )


def position_offset(config: ModelConfig) -> int:
    """Return the position of a text's first token: RoBERTa's positions begin after that of padding."""
    if config.model_type not in _POSITIONS_BEFORE_TEXT:
        return 0
    return 1 + (1 if config.pad_token_id is None else config.pad_token_id)


def _max_tokens(config: ModelConfig) -> int:
    # Nomic's model scales its positions beyond those that it was trained with; this is not done here.
    positions = config.max_trained_positions or config.max_position_embeddings or config.n_positions
    return max(1, (positions or _DEFAULT_TOKENS) - position_offset(config))
