"""Layouts of multi-token prediction (MTP) heads in checkpoints, by the mlx-lm module that builds the model. No MLX.

A head guesses the token after the next one from the model's last hidden state and the next token. mlx-lm 0.32.2 drops
its weights when it loads these models.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout:
    """The names of a head's tensors."""

    prefix: str
    """`{layers}` stands for the number of the model's layers."""
    layer: str = ""
    """Beginning, after the prefix, of the tensors of a layer of the model; "" if they are all the others."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    puts_embedding_first: bool
    """True if the token's embedding is the first half of what is projected, and the hidden state the second."""
    copies: tuple[str, ...] = ()
    """Copies of the model's embeddings and output head, which are not loaded."""
    may_lack_one: bool = False
    """True if weights of norms may be stored as differences from 1."""

    def prefix_of(self, layers: int) -> str:
        """Return the beginning of the names of the first head's tensors in a model of so many layers."""
        return self.prefix.format(layers=layers)


_DEEPSEEK: Final = MtpLayout(
    prefix="model.layers.{layers}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    puts_embedding_first=True,
    copies=("embed_tokens.", "shared_head.head."),
)
_MIMO: Final = MtpLayout(
    prefix="model.mtp_layers.0.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    puts_embedding_first=False,
)
_QWEN: Final = MtpLayout(
    prefix="mtp.",
    layer="layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
    puts_embedding_first=True,
    may_lack_one=True,
)
LAYOUTS: Final[Mapping[str, MtpLayout]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "mimo": _MIMO,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
}
"""The layout of each architecture whose heads are used."""


_PROJECTIONS: Final = re.compile(
    r"model\.layers\.\d+\.eh_proj\.weight|model\.mtp_layers\.0\.input_proj\.weight|(language_model\.)?mtp\.fc\.weight"
)


def has_head(names: Iterable[str]) -> bool:
    """Return whether tensors of these names contain a head.

    The config is not asked: many converted checkpoints promise heads there, and have none.
    """
    return any(_PROJECTIONS.fullmatch(name) for name in names)
